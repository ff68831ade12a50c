"""What launches pass to kernels: AttentionParams of cuda_src/params.cuh, its layout and values, and maps for TMA."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from cuflash.problem import Array, AttentionProblem

Arrays = dict[str, Array]
# Bytes of a swizzled row, and what addresses and strides are multiples of.
SWIZZLE_BYTES = 128
ALIGNMENT = 16

# Of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion in cuda.h.
_DATA_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3
_L2_128B, _L2_256B = 2, 3
TENSOR_MAP = np.dtype("V128")
_MAP_ALIGNMENT = 64

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
    "fragment_bits",
    "tile_counter",
    "dq_sum",
    "work_space",
    "row_lse",
    "row_delta",
    "dq_turns",
    "rows_done",
)
_SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
INTEGERS = (
    *_SIZES,
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
        ("ds_unit", "f8"),
        ("dropout_limits", "u4"),
        *((name, "i4") for name in INTEGERS),
    ],
    align=True,
)
# Beyond every index; adding one does not overflow.
_UNBOUNDED = 1 << 30
_NO_LIMIT = (1 << 31) - 1
_BOTH_HALVES = 0x10001  # times a half word: that in either half of a word
_PER_ROW = ("lse", "dlse", "delta", "dslope_rows", "lse_parts")


def word_of(name: str) -> int:
    """Where the pointer (or seed) `name` stands in the struct, in `launch.Words`."""
    assert PARAMS.fields is not None
    return int(PARAMS.fields[name][1]) // 8


def layout_asserts() -> str:
    """C++ that asserts this layout."""
    assert PARAMS.names is not None
    assert PARAMS.fields is not None
    lines = [
        f'static_assert(OFFSET_OF(AttentionParams, {name}) == {PARAMS.fields[name][1]}, "{name}");'
        for name in PARAMS.names
    ]
    lines.append(f'static_assert(sizeof(AttentionParams) == {PARAMS.itemsize}, "AttentionParams");')
    return "\n".join(lines)


def fixed_params(problem: AttentionProblem, arrays: Arrays) -> np.ndarray:
    """The struct of a launch, without pointers and seed."""
    params = np.zeros(1, PARAMS)
    p = params[0]
    for name in TENSORS:
        if name in arrays:
            p[name] = (0, *_tensor_strides(name, arrays[name], problem.packed))
    for name in SCORE_TENSORS:
        if name in arrays:
            x = arrays[name]
            strides = [0 if n == 1 else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
            p[name] = (0, *strides, *(_NO_LIMIT if n == 1 else n for n in x.shape[2:]))
    left, right = problem.window_left, problem.window_right
    p["window_left"] = _UNBOUNDED if left is None else min(left, _UNBOUNDED)
    p["window_right"] = _UNBOUNDED if right is None else min(right, _UNBOUNDED)
    p["softmax_scale"], p["softcap"] = problem.softmax_scale, problem.softcap
    p["dropout_rescale"] = problem.dropout_rescale
    # A thread has a kept weight twice, which costs no selection.
    p["ds_unit"] = problem.dropout_rescale / 2 if problem.dropout_p else 1.0
    p["dropout_limits"] = problem.dropout_threshold * _BOTH_HALVES
    for name in _SIZES:
        p[name] = getattr(problem, name)
    if problem.alibi is not None:
        p["alibi_batch_stride"] = _batch_stride(arrays.get("alibi_slopes"))
        p["dalibi_batch_stride"] = _batch_stride(arrays.get("dalibi_slopes"))
    if "dbias" in arrays:
        p["dbias_batches"], p["dbias_heads"], p["dbias_rows"], p["dbias_columns"] = arrays["dbias"].shape
        p["splits"] = num_splits(arrays)
    if "out_parts" in arrays:
        p["splits"] = len(arrays["out_parts"]) // problem.batch
    if "block_list" in arrays:
        slots, lists = arrays["block_slots"], arrays["block_list"]
        p["slot_rows"], p["slot_columns"] = slots.shape[2:]
        p["num_lists"], p["list_capacity"] = lists.shape[2:]
        p["block_batch_stride"] = slots.shape[1] if slots.shape[0] > 1 else 0
        p["block_head_stride"] = 1 if slots.shape[1] > 1 else 0
    return params


def num_splits(arrays: Arrays) -> int:
    """Parts of each sum of dbias."""
    return arrays["dbias_parts"].shape[0] if "dbias_parts" in arrays else 1


def _batch_stride(slopes: Array | None) -> int:
    return 0 if slopes is None or slopes.shape[0] == 1 else slopes.strides[0] // slopes.dtype.itemsize


def _tensor_strides(name: str, x: Array, packed: bool) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements; 0 on axes of size 1."""
    strides = [0 if n == 1 else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
    if name in _PER_ROW:
        return (0, strides[1], strides[0]) if packed else (strides[0], strides[2], strides[1])
    return (0, strides[0], strides[1]) if packed else (strides[0], strides[1], strides[2])


def whole_rows(size: int) -> int:
    """`size` bytes, up to a multiple of `SWIZZLE_BYTES`."""
    return -(-size // SWIZZLE_BYTES) * SWIZZLE_BYTES


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's own library."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def encode_tensor_map(
    address: int,
    dtype: str,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    once: bool = False,
) -> np.ndarray[Any, Any]:
    """A map of an array, to be passed to a kernel by value; elements out of bounds are read as zeros.

    `extents` and `box` are of the array and of one copy, innermost axis first, `strides` in bytes without it. Boxes of
    bytes have a swizzle if they are as wide. Of what is read `once` L2 fetches no more than it is asked for.
    """
    rank = len(extents)
    buffer = np.zeros(TENSOR_MAP.itemsize + _MAP_ALIGNMENT, np.uint8)
    encoded = buffer[-buffer.ctypes.data % _MAP_ALIGNMENT :][: TENSOR_MAP.itemsize]
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
        _SWIZZLE_128B if dtype != "uint8" or box[0] == SWIZZLE_BYTES else _NO_SWIZZLE,
        _L2_128B if once else _L2_256B,
        0,  # zeros out of bounds
    )
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {status} for {dtype}, {extents=}, {strides=}, {box=}, {address=:#x}"
        )
    return encoded.view(TENSOR_MAP)
