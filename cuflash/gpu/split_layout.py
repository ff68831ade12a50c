"""The structs of cuda_src/split/layout.cuh describe float32 operands as float16 parts in work space."""

from __future__ import annotations

import numpy as np

from cuflash.cuda.struct import Member, Struct

_I8, _I4 = np.dtype("i8"), np.dtype("i4")

# Factors are copied in units of 16 bytes, so that every packed sequence begins at a multiple of this many rows.
ROW_ALIGNMENT = 4

TENSOR = Struct(
    "SplitTensor",
    [
        Member("halves", "i64", _I8, "where they begin in work space, in bytes"),
        Member("factors", "i64", _I8, "likewise"),
        Member("rows", "int", _I4),
        Member("factor_rows", "int", _I4),
        Member("panels", "int", _I4),
        Member("parts", "int", _I4),
    ],
)
OPERANDS = Struct(
    "SplitOperands",
    [
        *(Member(name, TENSOR.name, TENSOR.dtype) for name in ("q", "k", "v")),
        Member("dout", TENSOR.name, TENSOR.dtype, "dout, lse and delta are of the backward pass alone"),
        Member("lse", "i64", _I8, "where it begins, in bytes"),
        Member("delta", "i64", _I8, "likewise"),
        Member("key_channels", "i64", _I8, "where the factors of channels of q and k begin; 0 if channels have none"),
        Member("value_channels", "i64", _I8, "likewise of v and dout"),
        Member("channel_columns", "i64", _I8, "channels of a head that have factors"),
    ],
)
