"""The parameter struct of the attention kernels as one NumPy dtype: AttentionParams of cuda_src/params.cuh."""

from __future__ import annotations

import numpy as np

_TENSOR = np.dtype([("data", "u8"), ("batch_stride", "i8"), ("row_stride", "i8"), ("head_stride", "i8")])
_SCORE_TENSOR = np.dtype(
    [
        ("data", "u8"),
        ("batch_stride", "i8"),
        ("head_stride", "i8"),
        ("row_stride", "i8"),
        ("column_stride", "i8"),
        ("num_rows", "i8"),
        ("num_columns", "i8"),
    ]
)

TENSORS = (
    "q",
    "k",
    "v",
    "out",
    "dout",
    "dq",
    "dk",
    "dv",
    "lse",
    "dlse",
    "delta",
    "dslope_rows",
    "out_parts",
    "lse_parts",
)
SCORE_TENSORS = ("bias", "dbias", "mask")
POINTERS = (
    "dbias_parts",
    "dsink",
    "dalibi_slopes",
    "alibi_slopes",
    "sink",
    "q_lengths",
    "kv_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "dropout_seed",
    "block_list",
    "block_count",
    "block_slots",
    "block_bits",
    "block_key_bits",
    "tile_counter",
    "dq_sum",
    "work_space",
    "row_lse",
    "row_delta",
    "dq_turns",
)
INTEGERS = (
    "batch",
    "seqlen_q",
    "seqlen_k",
    "num_heads_q",
    "num_heads_kv",
    "head_dim",
    "head_dim_v",
    "window_left",
    "window_right",
    "alibi_batch_stride",
    "dalibi_batch_stride",
    "dbias_batches",
    "dbias_heads",
    "dbias_rows",
    "dbias_columns",
    "num_lists",
    "list_capacity",
    "slot_rows",
    "slot_columns",
    "num_tiles",
    "num_query_tiles",
    "splits",
    "heads_together",
)

PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in TENSORS),
        *((name, _SCORE_TENSOR) for name in SCORE_TENSORS),
        *((name, "u8") for name in POINTERS),
        ("dropout_key", "u8"),
        ("block_batch_stride", "i8"),
        ("block_head_stride", "i8"),
        ("softmax_scale", "f8"),
        ("softcap", "f8"),
        ("dropout_rescale", "f8"),
        ("dropout_threshold", "u4"),
        *((name, "i4") for name in INTEGERS),
    ],
    align=True,
)


def word_of(name: str) -> int:
    """Where the pointer (or seed) `name` stands in the struct, in words of 8 bytes."""
    assert PARAMS.fields is not None
    return int(PARAMS.fields[name][1]) // 8


def layout_asserts() -> str:
    """C++ that fails to compile unless the device's struct has this very layout."""
    assert PARAMS.names is not None
    assert PARAMS.fields is not None
    lines = [
        f'static_assert(OFFSET_OF(AttentionParams, {name}) == {PARAMS.fields[name][1]}, "{name}");'
        for name in PARAMS.names
    ]
    lines.append(f'static_assert(sizeof(AttentionParams) == {PARAMS.itemsize}, "AttentionParams");')
    return "\n".join(lines)
