"""NumPy writes new keys and values into caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash import e4m3
from cuflash.problem.append import AppendProblem

Array = NDArray[Any]
Arrays = dict[str, Array]


class _Rows(NamedTuple):
    """All new rows, those of padded arrays one sequence behind the other."""

    indices: tuple[Array, ...]  # the place of each in the arrays of new rows
    in_use: Array  # whether it belongs to a sequence
    positions: Array  # in its sequence
    pages: Array
    slots: Array  # in the page
    kept: Array  # whether the cache has a place for it


def append(problem: AppendProblem, arrays: Arrays, q_out: Array | None) -> None:
    """Write the new rows into the caches, and the rotated q into `q_out`."""
    rows = _rows_of(problem, arrays)
    with np.errstate(all="ignore"):
        kept = _Rows(tuple(axis[rows.kept] for axis in rows.indices), *(x[rows.kept] for x in rows[1:]))
        for name, rotates in (("k", True), ("v", False)):
            x = arrays[name][kept.indices]
            if (problem.rotary_dim and rotates) or problem.to_fp8:
                x = x.astype(problem.accum_dtype)
            if problem.rotary_dim and rotates:
                x = _rotated(problem, x, arrays, kept.positions)
            cache = arrays[f"{name}_cache"]
            if problem.to_fp8:
                x, cache = _codes(x, arrays, name, kept), cache.view(np.uint8)
            cache[kept.pages, kept.slots] = x.astype(cache.dtype)
        if q_out is not None:
            q_out[...] = arrays["q"]
            if problem.rotary_dim:
                used = tuple(axis[rows.in_use] for axis in rows.indices)
                q = arrays["q"][used].astype(problem.accum_dtype)
                q_out[used] = _rotated(problem, q, arrays, rows.positions[rows.in_use]).astype(q_out.dtype)


def _rows_of(problem: AppendProblem, arrays: Arrays) -> _Rows:
    lengths = arrays["kv_lengths"].astype(np.int64)
    if problem.packed:
        row = np.arange(problem.seqlen)
        index: tuple[Array, ...] = (row,)
        begins = np.clip(arrays["cu_seqlens"].astype(np.int64), 0, problem.seqlen)
        batch = np.searchsorted(begins, row, side="right") - 1
        in_use = (batch >= 0) & (batch < problem.batch)
        batch = np.where(in_use, batch, 0)
        row = row - begins[batch]
    else:
        shape = (problem.batch, problem.seqlen)
        batch, row = (axis.ravel() for axis in np.indices(shape))
        index = batch, row
        in_use = np.ones(batch.shape, bool)
    positions = (lengths[batch] if problem.batch else np.zeros_like(row)) + row
    kept = in_use & (positions >= 0) & (positions < problem.capacity)
    within = np.where(kept, positions, 0)
    pages, slots = batch, within
    if problem.max_pages is not None and kept.any():  # else the table may have no row to look into
        pages = arrays["block_table"].astype(np.int64)[batch, within // problem.page_size]
        slots = within % problem.page_size
        kept &= (pages >= 0) & (pages < problem.num_pages)
    return _Rows(index, in_use, positions, pages, slots, kept)


def _rotated(problem: AppendProblem, x: Array, arrays: Arrays, positions: Array) -> Array:
    """Rotate `x` (rows, heads, head_dim), of the arithmetic's dtype, by the angles of its positions."""
    dim, clamped = problem.rotary_dim, np.clip(positions, 0, problem.num_positions - 1)
    cos, sin = (arrays[name][clamped].astype(x.dtype)[:, None] for name in ("cos", "sin"))
    if problem.interleaved:
        firsts, seconds = slice(0, dim, 2), slice(1, dim, 2)
    else:
        firsts, seconds = slice(dim // 2), slice(dim // 2, dim)
    first, second, result = x[..., firsts], x[..., seconds], x.copy()
    result[..., firsts] = first * cos - second * sin
    result[..., seconds] = first * sin + second * cos
    return result


def _codes(x: Array, arrays: Arrays, name: str, rows: _Rows) -> Array:
    scale = arrays.get(f"{name}_scale")
    if scale is not None:
        scales = np.broadcast_to(scale, arrays[name].shape[:-1])[rows.indices]
        x = x / scales.astype(x.dtype)[..., None]
    return e4m3.encode(x)
