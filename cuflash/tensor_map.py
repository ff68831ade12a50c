"""Tensor maps: what TMA, the copy engine of Hopper, has to know of an array in global memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

# Bytes of a swizzled row in shared memory, and what addresses and strides are multiples of.
SWIZZLE_BYTES = 128
ALIGNMENT = 16

# Of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion in cuda.h.
_DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLE_128B = 3
_L2_256B = 3
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64


def whole_rows(size: int) -> int:
    """`size` bytes, up to a multiple of `SWIZZLE_BYTES`."""
    return -(-size // SWIZZLE_BYTES) * SWIZZLE_BYTES


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's own library."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def encode(
    address: int, dtype: str, extents: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> np.ndarray[Any, Any]:
    """A map of an array, elements out of whose bounds are read as zeros.

    Parameters
    ----------
    address : int
        Of the first element.
    dtype : str
    extents, box : sequence of int
        Elements of the array and of one copy, innermost axis first; a row of a copy has `SWIZZLE_BYTES`.
    strides : sequence of int
        Bytes from one element to the next along each axis but the innermost.

    Returns
    -------
    array of one ``V128``
        The map, to be passed to a kernel by value.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    rank = len(extents)
    buffer = np.zeros(_MAP_BYTES + _MAP_ALIGNMENT, np.uint8)
    encoded = buffer[-buffer.ctypes.data % _MAP_ALIGNMENT :][:_MAP_BYTES]
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*extents),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLE_128B,
        _L2_256B,
        0,  # zeros out of bounds
    )
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {status} for {dtype}, {extents=}, {strides=}, {box=}, {address=:#x}"
        )
    return encoded.view(f"V{_MAP_BYTES}")
