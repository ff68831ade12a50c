"""The launch of append_kv: one kernel writes k and v into the caches and rotates q."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cuflash.cuda import device as cuda_device
from cuflash.cuda.struct import Member, Struct
from cuflash.gpu.arguments import BoundLaunch
from cuflash.gpu.params import PARAMS
from cuflash.hardware import ALIGNMENT
from cuflash.kept import Kept
from cuflash.plan.config import CPP_TYPES
from cuflash.problem.append import AppendProblem
from cuflash.problem.attention_problem import Array

Arrays = dict[str, Array]

_THREADS = 256
_CELLS = ("data", "outer_stride", "row_stride", "head_stride", "column_stride")
_TENSOR, _TABLE = ("data", "batch_stride", "row_stride", "head_stride"), ("data", "row_stride", "column_stride")
_NEW_ROWS, _CACHES = ("k", "v", "q", "q_out"), ("k_cache", "v_cache")


def _member(name: str, cpp_type: str, fields: Iterable[str], comment: str) -> Member:
    dtype = np.dtype([(field, "u8" if field == "data" else "i8") for field in fields])
    return Member(name, cpp_type, dtype, comment)


def _integer(name: str, comment: str = "") -> Member:
    return Member(name, "int", np.dtype("i4"), comment)


APPEND = Struct(
    "AppendParams",
    [
        _member("k", "Cells<const Element>", _CELLS, "(batch, seqlen, num_heads_kv, head_dim)"),
        _member("v", "Cells<const Element>", _CELLS, "(batch, seqlen, num_heads_kv, head_dim_v)"),
        _member("q", "Cells<const Element>", _CELLS, "(batch, seqlen, num_heads_q, head_dim)"),
        _member("q_out", "Cells<Element>", _CELLS, "like q: receives it rotated"),
        _member("k_cache", "Cells<CacheElement>", _CELLS, "(num_pages, page_size, num_heads_kv, head_dim)"),
        _member("v_cache", "Cells<CacheElement>", _CELLS, "(num_pages, page_size, num_heads_kv, head_dim_v)"),
        _member("k_scale", "Tensor<const float>", _TENSOR, "(batch, seqlen, num_heads_kv), or null"),
        _member("v_scale", "Tensor<const float>", _TENSOR, "likewise"),
        _member("cos", "Table<const CosElement>", _TABLE, "(num_positions, rotary_dim / 2)"),
        _member("sin", "Table<const SinElement>", _TABLE, "likewise"),
        _member("block_table", "Table<const int>", _TABLE, "(batch, max_pages)"),
        _member("kv_lengths", "Table<const int>", _TABLE, "(batch,): positions in use before"),
        _member("cu_seqlens", "Table<const int>", _TABLE, "(batch + 1,) of packed rows"),
        Member("rows", "i64", np.dtype("i8"), "new rows of all sequences"),
        Member("capacity", "i64", np.dtype("i8"), "positions of a sequence"),
        _integer("batch"),
        _integer("seqlen", "new rows of a sequence; packed: of all"),
        _integer("num_heads_kv"),
        _integer("head_dim"),
        _integer("head_dim_v"),
        _integer("num_pages"),
        _integer("page_size"),
        _integer("rotary_dim"),
        _integer("num_positions"),
        _integer("units_of_head", "what threads copy of one head of k or q"),
        _integer("units_of_head_v", "of one head of v"),
        _integer("units_of_row", "of all heads of k, v and q"),
    ],
)
_HEADERS = {**PARAMS.headers, **APPEND.headers}
_SIZES = ("rows", "capacity", "batch", "seqlen", "num_heads_kv", "head_dim", "head_dim_v", "num_pages", "page_size")
_ARRAYS = (*_NEW_ROWS, *_CACHES, "k_scale", "v_scale", "cos", "sin", "block_table", "kv_lengths", "cu_seqlens")


def constants_of(
    dtype: str, accum: str, to_fp8: bool, table_dtypes: tuple[str, str], widths: tuple[int, int]
) -> dict[str, bool | int | str]:
    """Return the constants of the kernel's source but for its flags; `_widths` gives `widths`."""
    return {
        "element": CPP_TYPES[dtype],
        "accum": CPP_TYPES[accum],
        "bias_element": CPP_TYPES[dtype],
        "cache_element": "unsigned char" if to_fp8 else CPP_TYPES[dtype],
        "cos_element": CPP_TYPES[table_dtypes[0]],
        "sin_element": CPP_TYPES[table_dtypes[1]],
        "threads": _THREADS,
        "width": widths[0],
        "table_width": widths[1],
    }


class _Launch(BoundLaunch):
    """The kernel for one layout of the arguments."""

    def __init__(
        self, problem: AppendProblem, arrays: Arrays, device: cuda_device.Device, widths: tuple[int, int]
    ) -> None:
        self.widths = widths  # one access takes so many elements of rows, and of the rotary table
        width, _ = widths
        params = np.zeros(1, APPEND.dtype)
        p = params[0]
        for name in arrays:
            p[name] = (0, *_strides(problem, name, arrays[name]))
        for name in (*_SIZES, "rotary_dim", "num_positions"):
            p[name] = getattr(problem, name)
        of_head, of_head_v = (math.ceil(dim / (2 * width)) for dim in (problem.head_dim, problem.head_dim_v))
        num_heads = problem.num_heads_kv + problem.num_heads_q
        units = num_heads * of_head + problem.num_heads_kv * of_head_v
        p["units_of_head"], p["units_of_head_v"], p["units_of_row"] = of_head, of_head_v, units
        blocks = math.ceil(problem.rows * units / _THREADS)
        constants = constants_of(problem.dtype, problem.accum_dtype, problem.to_fp8, problem.table_dtypes, widths)
        constants |= {
            "packed": problem.packed,
            "paged": problem.max_pages is not None,
            "interleaved": problem.interleaved,
        }
        launch = None
        if blocks:
            kernel = cuda_device.get("around/append", "append_kv", constants, device, 0, _HEADERS)
            launch = kernel.bound((blocks,), (_THREADS,), [params.nbytes], 0)
        super().__init__((params,), [APPEND.offset(name) // 8 for name in arrays], launch)


_launches: Kept[Any, _Launch] = Kept()


def append(problem: AppendProblem, arrays: Arrays, q_out: Array | None) -> None:
    """Write the new rows into the caches, and the rotated q into `q_out`."""
    if q_out is not None:
        arrays = arrays | {"q_out": q_out}
    arrays = {name: arrays[name] for name in _ARRAYS if name in arrays}
    device = cuda_device.device_of(arrays["k_cache"])
    addresses = [device.pointer(x) for x in arrays.values()]
    alignments = tuple([address % ALIGNMENT for address in addresses])
    layout = tuple(arrays), tuple([(x.shape, x.strides) for x in arrays.values()])
    key = problem, device, layout, alignments
    launch = _launches.get(key)
    if launch is None:
        offsets = dict(zip(arrays, alignments, strict=True))
        launch = _launches[key] = _Launch(problem, arrays, device, _widths(problem, arrays, offsets))
    launch.enqueue_in_order(addresses, None, device.stream())


def _widths(problem: AppendProblem, arrays: Arrays, offsets: dict[str, int]) -> tuple[int, int]:
    """Return how many elements of the rows, and of the rotary table, one access takes."""
    rows = [name for name in (*_NEW_ROWS, *_CACHES) if name in arrays]
    dims = (problem.head_dim, problem.head_dim_v, problem.rotary_dim // 2)
    width = ALIGNMENT // arrays["k"].dtype.itemsize
    while width > 1 and not (
        all(dim % width == 0 for dim in dims) and all(_takes(arrays[name], offsets[name], width) for name in rows)
    ):
        width //= 2
    table_width = width
    tables = [name for name in ("cos", "sin") if name in arrays]
    while table_width > 1 and not all(
        table_width * arrays[name].dtype.itemsize <= ALIGNMENT and _takes(arrays[name], offsets[name], table_width)
        for name in tables
    ):
        table_width //= 2
    return width, table_width


def _takes(x: Array, offset: int, width: int) -> bool:
    """Return True if every row of an array `offset` bytes behind an aligned address consists of whole accesses."""
    size = width * x.dtype.itemsize
    outer = zip(x.shape[:-1], x.strides[:-1], strict=True)
    return (
        offset % size == 0
        and (x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize)
        and all(n <= 1 or stride % size == 0 for n, stride in outer)
    )


def _strides(problem: AppendProblem, name: str, x: Array) -> tuple[int, ...]:
    """Return the strides of a member of the struct in elements; 0 on axes of size 1 and for a missing axis."""
    strides = tuple(0 if n == 1 else stride // x.dtype.itemsize for n, stride in zip(x.shape, x.strides, strict=True))
    if problem.packed and name in (*_NEW_ROWS, "k_scale", "v_scale"):
        return (0, *strides)
    return (*strides, 0) if name in ("kv_lengths", "cu_seqlens") else strides
