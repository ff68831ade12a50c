"""The parameter struct of a launch, AttentionParams: its members, and their values for a problem.

This is its only description: `cuda.struct` makes the C++ members and the NumPy dtype from it.
"""

from __future__ import annotations

import numpy as np

from cuflash.cuda.struct import Member, Struct
from cuflash.problem.attention_problem import Array, AttentionProblem

Arrays = dict[str, Array]

# These are Tensor and ScoreTensor of cuda_src/params.cuh; strides are in elements.
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


def _tensor(name: str, element: str, comment: str) -> Member:
    return Member(name, f"Tensor<{element}>", _TENSOR, comment)


def _score_tensor(name: str, element: str, comment: str) -> Member:
    return Member(name, f"ScoreTensor<{element}>", _SCORE_TENSOR, comment)


def _pointer(name: str, element: str, comment: str) -> Member:
    return Member(name, f"{element}*", np.dtype("u8"), comment)


def _integer(name: str, comment: str = "") -> Member:
    return Member(name, "int", np.dtype("i4"), comment)


_TENSORS = (
    _tensor("q", "const Element", "(batch, seqlen_q, num_heads_q, head_dim)"),
    _tensor("k", "const Element", "(batch, seqlen_k, num_heads_kv, head_dim)"),
    _tensor("v", "const Element", "(batch, seqlen_k, num_heads_kv, head_dim_v)"),
    _tensor("out", "Element", "(batch, seqlen_q, num_heads_q, head_dim_v)"),
    _tensor("dout", "const Element", "like out"),
    _tensor("dq", "Element", "like q"),
    _tensor("dk", "Element", "like k"),
    _tensor("dv", "Element", "like v"),
    _tensor("lse", "Accum", "(batch, num_heads_q, seqlen_q), natural logarithm"),
    _tensor("dlse", "const Accum", "like lse, or null"),
    _tensor("delta", "Accum", "like lse: rowsum(dout * out) - dlse"),
    _tensor("dslope_rows", "Accum", "like lse: each row's part of the slopes' gradient, or null"),
    _tensor("out_parts", "Accum", "(batch * splits, ..) like out: results over splits of the keys, or null"),
    _tensor("lse_parts", "Accum", "like lse, for them"),
)
_SCORE_TENSORS = (
    _score_tensor("bias", "const BiasElement", "broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k), or null"),
    _score_tensor("dbias", "BiasElement", "like bias"),
    _score_tensor("mask", "const u8", "like bias; 0 hides"),
)
_POINTERS = (
    _pointer("dbias_parts", "Accum", "(splits, *dbias) contiguous, or null with one split"),
    _pointer("dsink", "Accum", "(num_heads_q,)"),
    _pointer("dalibi_slopes", "Accum", "(batch | 1, num_heads_q)"),
    _pointer("alibi_slopes", "const Accum", "(batch | 1, num_heads_q)"),
    _pointer("sink", "const Accum", "(num_heads_q,), or null"),
    _pointer("q_lengths", "const int", "(batch,), or null"),
    _pointer("kv_lengths", "const int", "(batch,), or null"),
    _pointer("cu_seqlens_q", "const int", "(batch + 1,), or null: not packed"),
    _pointer("cu_seqlens_k", "const int", "(batch + 1,), or null"),
    _pointer("dropout_seed", "const u64", "one element, or null: dropout_key"),
    _pointer("block_list", "const int", "visited tiles of each row or column of tiles: (.., num_lists, list_capacity)"),
    _pointer("block_count", "const int", "(.., num_lists)"),
    _pointer("block_slots", "const int", "(.., seqlen_q / 64, seqlen_k / 64): HIDDEN, VISIBLE or a row of block_bits"),
    _pointer("block_bits", "const u32", "(num_partial, 64, 2)"),
    _pointer("fragment_bits", "const u32", "(num_partial, 128): the same in the order of fragments"),
    _pointer("tile_counter", "u32", "tiles that persistent thread blocks took, or null; 0 between launches"),
    _pointer("dq_sum", "Accum", "dq in the order of its additions (sm*/gradient_rows.cuh)"),
    _pointer("work_space", "u8", "float32 operands in float16 parts (split/layout.cuh)"),
    _pointer("row_lse", "Accum", "(.., num_query_tiles, BLOCK_M)"),
    _pointer("row_delta", "Accum", "(.., num_query_tiles, BLOCK_M)"),
    _pointer("dq_turns", "int", "tiles taken, then the additions to each sum of dq, in order; or null"),
    _pointer("rows_done", "int", "by each thread block of the kernel that writes row_lse and row_delta; or null"),
)
_SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
PARAMS = Struct(
    "AttentionParams",
    [
        *_TENSORS,
        *_SCORE_TENSORS,
        *_POINTERS,
        Member("dropout_key", "u64", np.dtype("u8"), "the seed where dropout_seed is null"),
        Member("block_batch_stride", "i64", np.dtype("i8"), "in grids of lists or slots; 0 on a broadcast axis"),
        Member("block_head_stride", "i64", np.dtype("i8"), "likewise"),
        Member("softmax_scale", "double", np.dtype("f8")),
        Member("softcap", "double", np.dtype("f8")),
        Member("dropout_rescale", "double", np.dtype("f8"), "the factor of kept weights: 65536 / (65536 - T)"),
        Member("ds_unit", "double", np.dtype("f8"), "in which Hopper's backward has gradients of scores"),
        Member("dropout_limits", "u32", np.dtype("u4"), "T = floor(p * 65536) in either half"),
        *map(_integer, _SIZES),
        _integer("window_left"),
        _integer("window_right"),
        _integer("alibi_batch_stride", "0 if all sequences share the slopes"),
        _integer("dalibi_batch_stride"),
        _integer("dbias_batches", "the shape of dbias"),
        _integer("dbias_heads"),
        _integer("dbias_rows"),
        _integer("dbias_columns"),
        _integer("num_lists", "the shape of block_list"),
        _integer("list_capacity"),
        _integer("slot_rows", "the shape of block_slots"),
        _integer("slot_columns"),
        _integer("num_tiles", "tiles (packed: tile slots) of one head"),
        _integer("num_query_tiles", "the same of queries where num_tiles are of keys"),
        _integer("splits", "of the loop behind one tile of dbias, or of the keys"),
        _integer(
            "heads_together",
            "the last heads, whose longest tiles come first (sm90/pipeline.cuh)",
        ),
    ],
)
TENSORS = tuple(member.name for member in _TENSORS)
SCORE_TENSORS = tuple(member.name for member in _SCORE_TENSORS)
POINTERS = tuple(member.name for member in _POINTERS)

# A bound beyond every index, to which an index can be added without overflow.
_UNBOUNDED = 1 << 30
_NO_LIMIT = (1 << 31) - 1
_BOTH_HALVES = 0x10001  # the factor that copies a half word into both halves of a word
_PER_ROW = ("lse", "dlse", "delta", "dslope_rows", "lse_parts")


def word_of(name: str) -> int:
    """The index in `launch.Words` of the pointer (or seed) `name` in the struct."""
    return PARAMS.offset(name) // 8


def fixed_params(problem: AttentionProblem, arrays: Arrays) -> np.ndarray:
    """The struct of a launch, in which pointers and the seed are still 0."""
    params = np.zeros(1, PARAMS.dtype)
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
    # The kernel doubles a kept weight, which costs no selection, so that the unit is half of the factor.
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
    """The number of splits whose partial sums make dbias."""
    return arrays["dbias_parts"].shape[0] if "dbias_parts" in arrays else 1


def _batch_stride(slopes: Array | None) -> int:
    return 0 if slopes is None or slopes.shape[0] == 1 else slopes.strides[0] // slopes.dtype.itemsize


def _tensor_strides(name: str, x: Array, packed: bool) -> tuple[int, int, int]:
    """Strides (batch, row, head) in elements; 0 on axes of size 1."""
    strides = [0 if n == 1 else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
    if name in _PER_ROW:
        return (0, strides[1], strides[0]) if packed else (strides[0], strides[2], strides[1])
    return (0, strides[0], strides[1]) if packed else (strides[0], strides[1], strides[2])
