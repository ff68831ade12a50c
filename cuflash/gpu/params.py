"""The parameter struct of a launch, AttentionParams: its members, and their values for a problem.

Nothing else describes the struct: `cuda.struct` makes the C++ members and the NumPy dtype from this module.
"""

from __future__ import annotations

import math

import numpy as np

from cuflash.cuda.struct import Member, Struct
from cuflash.kept import kept
from cuflash.plan.config import CPP_TYPES
from cuflash.problem.attention_problem import Array, AttentionProblem, Place, operand_name
from cuflash.problem.fp8 import SCALES
from cuflash.rules.form import NO_RULES, Rules
from cuflash.rules.to_cuda import type_of

Arrays = dict[str, Array]

# MOST_AXES is the number of folded axes that a part of an operand's gradient may have which one launch writes.
MOST_AXES = 8
# MOST_BYTES bounds a kernel's parameters; tensor maps are not counted.
MOST_BYTES = 4096

OPERAND_PARAMS = "operand_params"

# The two dtypes are Tensor and ScoreTensor of cuda_src/params.cuh; strides are in elements.
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


def _long(name: str, comment: str = "") -> Member:
    return Member(name, "i64", np.dtype("i8"), comment)


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
    _tensor("lse", "Accum", "(batch, num_heads_q, seqlen_q), the natural log-sum-exp of a row's scores"),
    _tensor("dlse", "const Accum", "like lse, or null"),
    _tensor("delta", "Accum", "like lse: rowsum(dout * out) - dlse"),
    _tensor(
        "dslope_rows",
        "Accum",
        "like lse: what each row adds to the slopes' gradient, or what each sum of a tile of keys does; or null",
    ),
    _tensor(
        "out_splits",
        "Accum",
        "(batch * splits, seqlen_q, num_heads_q, head_dim_v): results of each split of the keys, or null",
    ),
    _tensor("lse_splits", "Accum", "(batch * splits, num_heads_q, seqlen_q): their log-sum-exps"),
    _tensor("k_rows", "Element", "(batch, max_pages * page_size, num_heads_kv, head_dim): k's pages in a row, or null"),
    _tensor("v_rows", "Element", "likewise v's"),
    _tensor("dk_rows", "Element", "like k_rows: gradients that are summed to dk, of a pool's shape; or null"),
    _tensor("dv_rows", "Element", "likewise for dv"),
)
# The list of work stands behind all other members, so that those keep their offsets in kernels without a list.
_OF_WORK_LIST = (
    _pointer("work_entries", "int", "entries behind their number, in any order of tiles; or null: there is no list"),
    _pointer("cut_tiles", "int", "tiles whose keys several entries share"),
    _pointer("tile_keys", "int", "(num_tiles, 4): the keys of each tile slot"),
    _pointer("part_outs", "Accum", "(most_parts, num_heads_kv, BLOCK_M, HEAD_DIM_V): results of entries that share"),
    _pointer("part_lses", "Accum", "(most_parts, num_heads_kv, BLOCK_M): their log-sum-exps"),
    _integer("num_multiprocessors", "of the device"),
    _integer("steps_of_entry", "what a tile of queries costs besides its tiles of keys, as so many of these"),
)
# The scales stand behind all other members, so that those keep their offsets in kernels without scales.
_SCALES = tuple(
    _tensor(f"{name}_scale", "const float", f"(batch, seqlen, heads) of {name}'s e4m3 codes, or null: all are 1")
    for name in ("q", "k", "v")
)
_SCORE_TENSORS = (
    _score_tensor(
        "bias", "const BiasElement", "broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k), as the next two do"
    ),
    _score_tensor(
        "dbias", "BiasElement", "in the shape of the bias as the caller gave it: dbias_batches .. dbias_columns"
    ),
    _score_tensor("mask", "const u8", "nonzero where a query may see a key"),
)
_POINTERS = (
    _pointer(
        "dbias_splits",
        "Accum",
        "(splits, dbias_batches, dbias_heads, dbias_rows, dbias_columns) contiguous, or null with one split",
    ),
    _pointer("dsink", "Accum", "(num_heads_q,)"),
    _pointer("dalibi_slopes", "Accum", "(batch | 1, num_heads_q)"),
    _pointer("alibi_slopes", "const Accum", "(batch | 1, num_heads_q)"),
    _pointer("sink", "const Accum", "(num_heads_q,), or null"),
    _pointer("q_lengths", "const int", "(batch,), or null"),
    _pointer("kv_lengths", "const int", "(batch,), or null"),
    _pointer("cu_seqlens_q", "const int", "(batch + 1,), or null: not packed"),
    _pointer("cu_seqlens_k", "const int", "(batch + 1,), or null"),
    _pointer("block_table", "const int", "(batch, max_pages), or null: k and v are no pools of pages"),
    _pointer("first_keys", "int", "(batch + 1,): cu_seqlens_k to be written, or null: rows are not packed"),
    _pointer("dropout_seed", "const u64", "(1,), or null: then the seed is dropout_key"),
    _pointer(
        "block_list",
        "const int",
        "(batch | 1, num_heads_q | 1, num_lists, list_capacity): visited tiles, as (tile << 1) | partial",
    ),
    _pointer("block_count", "const int", "(batch | 1, num_heads_q | 1, num_lists): the lengths of these lists"),
    _pointer(
        "block_slots",
        "const int",
        "(batch | 1, num_heads_q | 1, slot_rows, slot_columns): HIDDEN, VISIBLE or a row of block_bits",
    ),
    _pointer("block_bits", "const u32", "(num_partial, 64, 2): two words for each row of a partial 64 x 64 block"),
    _pointer(
        "fragment_bits",
        "const u32",
        "(num_partial, 128): the same bits, one word for each thread's fragment of the block",
    ),
    _pointer(
        "tile_counter", "u32", "(2,): how many tiles persistent thread blocks have taken, or null; 0 between launches"
    ),
    _pointer("dq_sum", "Accum", "sums of dq, in the order in which fragments are added to it (sm*/gradient_rows.cuh)"),
    _pointer("work_space", "u8", "float32 operands as float16 parts (split/layout.cuh)"),
    _pointer("row_lse", "Accum", "(batch_heads, num_query_tiles, BLOCK_M): lse as the gradient kernels load it"),
    _pointer("row_delta", "Accum", "(batch_heads, num_query_tiles, BLOCK_M): delta as they load it"),
    _pointer(
        "dq_order", "int", "[0] counts the tiles taken; then come the orders of additions to each sum of dq; or null"
    ),
    _pointer(
        "rows_ready",
        "int",
        "(thread blocks,): tiles that each block which writes row_lse and row_delta has done; or null",
    ),
    _pointer("operand_sums", "Accum", "(operand_total,): sums of the gradients of a rule's operands, or null"),
    _pointer(
        "operand_words",
        "u64",
        "(3, operand_total): the largest terms of these, and their sums as integers (rules/fixed_point.cuh); or null",
    ),
    _pointer("doperand", "u8", "the gradient of one operand"),
)
_SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
PARAMS = Struct(
    "AttentionParams",
    [
        *_TENSORS,
        *_SCORE_TENSORS,
        *_POINTERS,
        Member("dropout_key", "u64", np.dtype("u8"), "the seed where dropout_seed is null"),
        Member(
            "block_batch_stride", "i64", np.dtype("i8"), "in whole grids of lists or of slots; 0 on a broadcast axis"
        ),
        Member("block_head_stride", "i64", np.dtype("i8"), "likewise"),
        Member("softmax_scale", "double", np.dtype("f8")),
        Member("softcap", "double", np.dtype("f8")),
        Member("dropout_rescale", "double", np.dtype("f8"), "the factor of kept weights: 65536 / (65536 - T)"),
        Member(
            "ds_unit",
            "double",
            np.dtype("f8"),
            "the unit in which Hopper's backward holds gradients of scores (sm90/backward/rows.cuh)",
        ),
        Member(
            "dropout_limits", "u32", np.dtype("u4"), "T = floor(p * 65536), in the low half and again in the high half"
        ),
        *map(_integer, _SIZES),
        _integer("window_left", "how many keys a query sees on either side of its diagonal"),
        _integer("window_right"),
        _integer("alibi_batch_stride", "in elements; 0 if all sequences share the slopes"),
        _integer("dalibi_batch_stride"),
        _integer("dbias_batches", "the shape of dbias"),
        _integer("dbias_heads"),
        _integer("dbias_rows"),
        _integer("dbias_columns"),
        _integer("num_lists", "the last two axes of block_list"),
        _integer("list_capacity"),
        _integer("slot_rows", "the last two axes of block_slots"),
        _integer("slot_columns"),
        _integer("num_pages", "pages of a pool (num_pages, page_size, num_heads_kv, head_dim)"),
        _integer("page_size"),
        _integer("max_pages"),
        _integer("table_stride", "of block_table's rows, in elements"),
        _integer("num_tiles", "the tiles of one batch_head; packed: the tile slots of one head (tile_slot)"),
        _integer("num_query_tiles", "the tiles of queries, where num_tiles counts tiles of keys"),
        _integer(
            "splits",
            "how many thread blocks share the loop behind one tile of dbias, or of queries, or of keys; "
            "how many sums of dslope_rows a tile of keys has",
        ),
        _integer("head_splits", "into how many of these the query heads of a group are dealt"),
        _integer(
            "num_grouped_heads",
            "the last heads, whose longest tiles come first (sm90/pipeline.cuh)",
        ),
        _integer("operand_bits", "bits of either word of a term (rules/fixed_point.cuh)"),
        *(_integer(f"place_{name}", "of a part in its whole (problem.Place)") for name in Place().numbers),
        _long("operand_total", "elements of all floating-point operands"),
        _long("doperand_begin", "the first element of doperand among these"),
        _long("doperand_size", "elements of doperand"),
        *(_long(f"doperand_size_{axis}") for axis in range(MOST_AXES)),
        *(_long(f"doperand_stride_{axis}", "in elements") for axis in range(MOST_AXES)),
        *_SCALES,
        *_OF_WORK_LIST,
    ],
)


@kept
def struct_of(rules: Rules) -> Struct:
    """Return the struct of a kernel with these rules: `PARAMS`, then the members that the rules read of each operand.

    Members that do not fit lie in device memory as an `operand_struct`, and the struct ends in a pointer to it.
    """
    if operand_struct(rules) is not None:
        return PARAMS.extended([_pointer(OPERAND_PARAMS, "const OperandParams", "what the rules read of each operand")])
    members = _operand_members(rules)
    return PARAMS.extended(members) if members else PARAMS


@kept
def operand_struct(rules: Rules) -> Struct | None:
    """Return the struct of all operands where its members do not fit a kernel's parameters; else None."""
    members = _operand_members(rules)
    fits = PARAMS.extended(members).dtype.itemsize <= MOST_BYTES
    return None if fits else Struct("OperandParams", members)


def _operand_members(rules: Rules) -> list[Member]:
    members = []
    for number, (dtype, rank) in enumerate(rules.operands):
        name = operand_name(number)
        members.append(_pointer(name, f"const {CPP_TYPES.get(dtype) or type_of(dtype)}", f"{rank} axes"))
        members += [_long(f"{name}_size_{axis}") for axis in range(rank)]
        members += [_long(f"{name}_stride_{axis}", "in elements") for axis in range(rank)]
        members.append(_long(f"{name}_begin", "the first element of its gradient in operand_sums"))
    return members


TENSORS = tuple(member.name for member in (*_TENSORS, *_SCALES))
SCORE_TENSORS = tuple(member.name for member in _SCORE_TENSORS)
POINTERS = tuple(member.name for member in (*_POINTERS, *_OF_WORK_LIST) if member.cpp_type.endswith("*"))

# _UNBOUNDED lies beyond every index, and an index can be added to it without overflow.
_UNBOUNDED = 1 << 30
_NO_LIMIT = (1 << 31) - 1
_BOTH_HALVES = 0x10001  # the factor that copies a half word into both halves of a word
_PER_ROW = ("lse", "dlse", "delta", "dslope_rows", "lse_splits")


def word_of(name: str, rules: Rules = NO_RULES) -> int:
    """Return the index in `launch.Words` of the pointer (or seed) `name` in the struct."""
    member = "doperand" if name.startswith("doperand_") else name
    return struct_of(rules).offset(member) // 8


def fixed_params(problem: AttentionProblem, arrays: Arrays, rules: Rules = NO_RULES) -> np.ndarray:
    """Return the struct of a launch of a kernel with `rules`, in which pointers and the seed are still 0."""
    params = np.zeros(1, struct_of(rules).dtype)
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
    if problem.pages is not None:
        p["num_pages"], p["page_size"], p["max_pages"] = problem.pages
        p["table_stride"] = _batch_stride(arrays["block_table"])
    _fill_operands(p, problem, arrays, rules)
    if "out_splits" in arrays:
        p["splits"] = num_key_splits(problem, arrays)
    if "block_list" in arrays:
        slots, lists = arrays["block_slots"], arrays["block_list"]
        p["slot_rows"], p["slot_columns"] = slots.shape[2:]
        p["num_lists"], p["list_capacity"] = lists.shape[2:]
        p["block_batch_stride"] = slots.shape[1] if slots.shape[0] > 1 else 0
        p["block_head_stride"] = 1 if slots.shape[1] > 1 else 0
    return params


def num_key_splits(problem: AttentionProblem, arrays: Arrays) -> int:
    """Return the number of splits of the keys, which are a leading axis of packed results where there are several."""
    x = arrays.get("out_splits")
    if x is None or (problem.packed and x.ndim == 3):
        return 1
    return len(x) if problem.packed else len(x) // problem.batch


def begins_of_operands(problem: AttentionProblem) -> tuple[dict[str, int], int]:
    """Return the first element of each operand's gradient among the sums of all operands, and the number of sums."""
    begins, total = {}, 0
    for name in problem.operand_grads:
        begins[name] = total
        total += math.prod(problem.operands[int(name.rpartition("_")[2])].shape)
    return begins, total


def folded_axes(x: Array) -> list[tuple[int, int]]:
    """Return (size, stride in bytes) of an array's axes, where neighbours that lie in memory as one axis are one."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(x.shape, x.strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = axes[-1][0] * size, stride
        else:
            axes.append((size, stride))
    return axes


def _fill_operands(p: np.void, problem: AttentionProblem, arrays: Arrays, rules: Rules) -> None:
    for name, value in problem.place.numbers.items():
        p[f"place_{name}"] = value
    begins, p["operand_total"] = begins_of_operands(problem)
    if operand_struct(rules) is None:
        describe_operands(p, problem, arrays, rules)
    for name in begins:
        if f"d{name}" in arrays:
            x = arrays[f"d{name}"]
            p["doperand_size"] = x.size
            axes = folded_axes(x)
            axes = [(1, 0)] * (MOST_AXES - len(axes)) + axes
            for axis, (size, stride) in enumerate(axes):
                p[f"doperand_size_{axis}"], p[f"doperand_stride_{axis}"] = size, stride // x.dtype.itemsize


def describe_operands(p: np.void, problem: AttentionProblem, arrays: Arrays, rules: Rules) -> None:
    """Fill in the members that rules read of each operand, except for the pointers."""
    begins, _ = begins_of_operands(problem)
    for number, (_, rank) in enumerate(rules.operands):
        name = operand_name(number)
        p[f"{name}_begin"] = begins.get(name, 0)
        if name in arrays:
            x = arrays[name]
            for axis in range(rank):
                p[f"{name}_size_{axis}"] = x.shape[axis]
                p[f"{name}_stride_{axis}"] = x.strides[axis] // x.dtype.itemsize


def num_splits(arrays: Arrays) -> int:
    """Return the number of splits whose partial sums make dbias."""
    return arrays["dbias_splits"].shape[0] if "dbias_splits" in arrays else 1


def _batch_stride(slopes: Array | None) -> int:
    return 0 if slopes is None or slopes.shape[0] == 1 else slopes.strides[0] // slopes.dtype.itemsize


def _tensor_strides(name: str, x: Array, packed: bool) -> tuple[int, int, int]:
    """Return the strides (batch, row, head) in elements; 0 on axes of size 1 of arrays whose strides tell no size."""
    is_read = name != "dslope_rows"
    strides = [0 if n == 1 and is_read else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
    if name in _PER_ROW:
        packed = packed and len(strides) < 3  # splits are an axis of their own
        return (0, strides[1], strides[0]) if packed else (strides[0], strides[2], strides[1])
    # The strides stand in this order here. Pools of pages have all four axes, and their scales the first three.
    packed = packed and len(strides) < (3 if name in SCALES else 4)
    return (0, strides[0], strides[1]) if packed else (strides[0], strides[1], strides[2])
