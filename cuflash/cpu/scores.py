"""The scores of a tile on the CPU: products, softcap, bias, ALiBi, what is visible, and what dropout keeps.

Scores lie in memory as (KV heads, keys, query heads of each * rows): one matrix product for each KV head. Everything
per head, row or key broadcasts against `split_heads` of them. Sequences that are computed together have their KV heads
(and query heads) one behind the other.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.own_rules import ScoreRule, visible_by_rule
from cuflash.cpu.pages import gather, places
from cuflash.cpu.threads import Workspace
from cuflash.cpu.tiles import Block, Tile, Tiling
from cuflash.e4m3 import decode
from cuflash.problem.attention_problem import WHOLE, AttentionProblem
from cuflash.problem.heads import Heads

if TYPE_CHECKING:
    from cuflash.masks.block_mask import BlockMask

Array = NDArray[Any]
# NumPy's loops begin anew for every key, so several keys are taken at once where rows of scores are shorter than this.
WIDTH = 64
# No score but -inf is less than this finite number.
LOWEST = {dtype: np.finfo(dtype).min for dtype in ("float32", "float64")}

# Bools that fit `split_heads` tell the visible part of a tile; True stands for the whole tile, None for nothing.
Visible = Array | Literal[True] | None


class Cut(NamedTuple):
    """The part of a tile that causal and a window leave."""

    visible: Visible  # (1, keys, 1, rows)
    rows: slice  # the rows in which something is hidden
    keep: Array  # integers of the scores' size for these rows, with all bits set where an element is visible
    fill: Array  # such integers with the bits of -inf where an element is hidden


class Scores(NamedTuple):
    """The scores of a tile and what their gradient needs, in scratch memory."""

    scores: Array  # (KV heads, keys, query heads of each * rows)
    visible: Array | None  # bool, broadcasts to the view `split_heads`; None if everything is
    cut: Cut | None  # where `visible` comes from, if from causal and the window alone
    tanh: Array | None  # like scores
    distance: Array | None  # (keys, 1, rows)
    rule: ScoreRule | None  # the user's own, applied to the scores


def widen(x: Array) -> Array:
    """Return 16-bit numbers as float32 and others as they are, possibly as a view."""
    if x.dtype == np.float16:
        return _widen_float16(x)
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _widen_float16(x: Array) -> Array:
    """Do ``x.astype(float32)`` in half the time."""
    bits = x.view(np.int16).astype(np.int32)  # the sign bit fills the upper half
    bits <<= 13  # exponent and mantissa are in place, the sign still is
    bits &= np.uint32(0x8FFFE000).view(np.int32)
    wide = bits.view(np.float32)
    wide *= np.float32(2.0 ** (127 - 15))  # between the exponents' biases; subnormals come out right
    # Only inf and NaN have the exponent of 2^16, so that larger numbers tell of these.
    is_finite = wide.size == 0 or (wide.max() < 2.0**16 and wide.min() > -(2.0**16))
    return wide if is_finite else x.astype(np.float32)


def _wide_rows(x: Array, scale: Array | None) -> Array:
    """Widen as `widen` does; e4m3 codes become numbers times their rows' scales."""
    if x.dtype != np.uint8:
        return widen(x)
    numbers = decode(x)
    if scale is not None:
        numbers *= scale[..., None]
    return numbers


def split_heads(x: Array, heads: Heads) -> Array:
    """View (KV heads, keys, query heads of each * rows) as (KV heads, keys, query heads of each, rows)."""
    group = heads.counts[1]
    return x.reshape(*x.shape[:2], group, x.shape[2] // group)


def by_kv_head(x: Array, heads: Heads) -> Array:
    """Bring (query heads, rows, ...) to (KV heads, query heads of each * rows, ...)."""
    group = heads.counts[1]
    return x.reshape(len(x) // group, group * x.shape[1], *x.shape[2:])


def by_query_head(x: Array, heads: Heads) -> Array:
    """Undo `by_kv_head`."""
    group = heads.counts[1]
    return x.reshape(len(x) * group, x.shape[1] // group, *x.shape[2:])


def like_scores(x: Array, tile: Tile) -> Array:
    """Bring (sequences | 1, query heads | 1, rows | 1, keys | 1) into the order of `split_heads`."""
    kv_heads, group = tile.block.heads.counts
    count = tile.block.sequence.alike
    if x.shape[:2] == (1, 1):
        count = kv_heads = group = 1
    elif count > 1:
        x = np.broadcast_to(x, (count, kv_heads * group, *x.shape[2:]))
    elif x.shape[1] == 1:
        kv_heads = group = 1
    return np.ascontiguousarray(x).reshape(count * kv_heads, group, *x.shape[2:]).transpose(0, 3, 1, 2)


def like_bias(x: Array, heads: Heads) -> Array:
    """Bring scores to (query heads, rows, keys)."""
    view = split_heads(x, heads).transpose(0, 2, 3, 1)
    return view.reshape(-1, *view.shape[2:])


def column_sums(scores: Array) -> Array:
    """Sum (KV heads, keys, query heads of each * rows) over keys."""
    # A product is faster, and more exact, than NumPy's sum over this axis.
    return np.matmul(ones(scores.shape[1], scores.dtype)[None], scores)[:, 0]


@functools.lru_cache(maxsize=16)
def ones(count: int, dtype: str | np.dtype[Any]) -> Array:
    """Return so many ones, which sum a matrix by a product."""
    return np.ones(count, dtype)


def column_tops(scores: Array) -> Array:
    """Find the largest of (KV heads, keys, query heads of each * rows) over keys."""
    heads, keys, columns = scores.shape
    if columns == 1 or columns >= WIDTH or heads * keys < WIDTH:
        return np.maximum.reduce(scores, axis=1)
    tops = scores if keys > 1 else scores.copy()
    keys_per_row = WIDTH // columns
    if keys >= 2 * keys_per_row:
        whole = keys // keys_per_row * keys_per_row
        # So many keys are one row of a view.
        tops = np.maximum.reduce(scores[:, :whole].reshape(heads, -1, keys_per_row * columns), axis=1)
        tops = tops.reshape(heads, keys_per_row, columns)
        np.maximum(tops, scores[:, keys - keys_per_row :], out=tops)
    while (keys := tops.shape[1]) > 1:
        half = -(-keys // 2)
        tops = np.maximum(tops[:, :half], tops[:, keys - half :])
    return tops[:, 0]


def subtract_tops(scores: Array, tops: Array) -> None:
    """Subtract (KV heads, columns) from the scores of every key, in place."""
    heads, keys, columns = scores.shape
    keys_per_row = WIDTH // columns
    if columns > 1 and keys >= 8 * keys_per_row > 8:
        whole = keys // keys_per_row * keys_per_row
        wide = scores[:, :whole].reshape(heads, -1, keys_per_row * columns)
        wide -= np.tile(tops, (1, keys_per_row))[:, None]
        scores = scores[:, whole:]
    scores -= tops[:, None]


def zero_hidden(scores: Array, visible: Array, heads: Heads) -> None:
    """Replace hidden elements, NaN and inf too, by 0, in place."""
    # The bits are masked, as NumPy's selections take ten times as long.
    bits = split_heads(scores, heads).view(f"i{scores.dtype.itemsize}")
    np.multiply(bits, visible, out=bits)


def hide(scores: Array, visible: Array, heads: Heads) -> None:
    """Replace hidden elements, NaN and inf too, by -inf, in place."""
    zero_hidden(scores, visible, heads)
    bits = split_heads(scores, heads).view(f"i{scores.dtype.itemsize}")
    bits |= _infinities(visible, scores.dtype)


def hide_cut(scores: Array, cut: Cut, heads: Heads) -> None:
    """Do as `hide` does where causal and a window alone hide elements."""
    bits = split_heads(scores, heads)[..., cut.rows].view(cut.keep.dtype)
    bits &= cut.keep
    bits |= cut.fill


def _infinities(visible: Array, dtype: np.dtype[Any]) -> Array:
    """Return the bits of -inf where hidden, else 0."""
    hidden = visible.astype(f"i{dtype.itemsize}")
    hidden -= 1  # all bits set where hidden
    hidden &= np.array(-np.inf, dtype).view(hidden.dtype)
    return hidden


def without_rows(x: Array, keep: Any) -> Array:
    """Return x (..., rows, dim) with 0 in rows where `keep` is False; a copy if there are any."""
    if keep.all():
        return x
    x = x.copy()
    x[~np.broadcast_to(keep, x.shape[:-1])] = 0
    return x


def overflows(p: AttentionProblem, acc: Array) -> bool:
    """Return True if a sum is inf or NaN; float32 holds the sum of any number of float16's values."""
    numbers = acc.reshape(-1)
    # A finite sum of squares tells at once that all are finite; large ones make it inf, so that these are looked at.
    can = p.dtype != "float16" or p.has_fp8_keys
    return can and not math.isfinite(np.dot(numbers, numbers)) and not np.isfinite(numbers).all()


def load_rows(tiling: Tiling, x: Array, block: Block) -> Array:
    """Widen the block's rows of an array like q, as (KV heads, query heads of each * rows, dim)."""
    own = tiling.of_sequence(x, block.sequence)[:, block.rows, block.heads.query]
    rows = np.ascontiguousarray(widen(own).swapaxes(1, 2))
    return by_kv_head(rows.reshape(-1, *rows.shape[2:]), block.heads)


def load_columns(tiling: Tiling, x: Array, block: Block, scale: Array | None = None) -> Array:
    """Widen and transpose the block's rows of an array like q: (KV heads, dim, query heads of each * rows).

    The result may be a view, and then has sequences before KV heads as in `load_keys`.
    """

    def part(array: Array) -> Array:
        return tiling.of_sequence(array, block.sequence)[:, block.rows, block.heads.query]

    own = _wide_rows(part(x), None if scale is None else part(scale))
    alike, rows, heads, dim = own.shape
    group = block.heads.counts[1]
    by_head = own.reshape(alike, rows, heads // group, group, dim).transpose(0, 2, 3, 1, 4)
    columns = by_head.reshape(alike, heads // group, group * rows, dim).swapaxes(2, 3)
    if group * rows >= WIDTH:  # a copy of few costs more than it gains
        columns = np.ascontiguousarray(columns)
    return columns[0] if alike == 1 else columns


def load_keys(tiling: Tiling, x: Array, tile: Tile, scale: Array | None = None) -> Array:
    """Widen the tile's rows of k or v, as (KV heads, keys, dim); the result may be a view.

    Sequences that are computed together need not have such a view; theirs is (sequences, KV heads, keys, dim).
    """
    own_scale = None if scale is None else _own_keys(tiling, scale, tile)
    keys = _wide_rows(_own_keys(tiling, x, tile), own_scale).swapaxes(1, 2)
    return keys[0] if len(keys) == 1 else keys


def _own_keys(tiling: Tiling, x: Array, tile: Tile) -> Array:
    """Return the tile's rows of k or v: (sequences, keys, KV heads, dim)."""
    heads, pages = tile.block.heads.kv, tiling.problem.pages
    if pages is None:
        return tiling.of_sequence(x, tile.block.sequence, is_kv=True)[:, tile.keys, heads]
    return gather(x, places(pages, tiling.operands, tile.block.sequence.batch, tile.key, tile.key_stop), heads)


def like_keys(x: Array, keys: Array) -> Array:
    """View (KV heads, ...) with the leading axes that `load_keys` gives."""
    return x if keys.ndim == 3 else x.reshape(*keys.shape[:2], *x.shape[1:])


def sink_rows(tiling: Tiling, block: Block) -> Array:
    """Return the sink of each row's head, (KV heads, query heads of each * rows)."""
    sink: Any = tiling.operands.sink
    of_heads = np.tile(sink[block.heads.query], block.sequence.alike)
    return by_kv_head(np.repeat(of_heads[:, None], block.row_stop - block.row, axis=1), block.heads)


def compute_scores(tiling: Tiling, tile: Tile, q: Array, k: Array, workspace: Workspace) -> Scores | None:
    """Compute the scores of a tile, of which hidden ones hold anything; None if all are hidden.

    `load_keys` gives k, and `load_columns` gives q, which may be (KV heads, head_dim, query heads of each * rows), too.
    """
    p, o, heads = tiling.problem, tiling.operands, tile.block.heads
    bias = None if o.bias is None else o.bias[tile.place_in(o.bias.shape)]
    visible, cut = _visible(tiling, tile, bias, workspace)
    if visible is None:
        return None
    num_keys = k.shape[-2]
    scores = workspace.array("scores", (*k.shape[:-1], q.shape[-1]), p.accum_dtype)
    np.matmul(k, q, out=scores)
    scores = scores.reshape(-1, *scores.shape[-2:])
    scores *= p.softmax_scale
    tanh: Array | None = None
    distance: Array | None = None
    if p.softcap:
        tanh = workspace.array("tanh", scores.shape, p.accum_dtype)
        np.multiply(scores, 1 / p.softcap, out=tanh)
        np.tanh(tanh, out=tanh)
        np.multiply(tanh, p.softcap, out=scores)
    if bias is not None:
        view = split_heads(scores, heads)
        view += like_scores(widen(bias), tile)
    if o.alibi_slopes is not None:
        view = split_heads(scores, heads)
        distance = workspace.array("distance", (num_keys, 1, view.shape[3]), p.accum_dtype)
        aligned, keys = aligned_positions(p, tile)
        np.subtract(aligned, keys[:, None, None], out=distance)
        np.abs(distance, out=distance)
        sequence = tile.block.sequence
        slopes = o.alibi_slopes[sequence.batches if len(o.alibi_slopes) > 1 else slice(None), heads.query]
        if len(slopes) < sequence.alike:
            slopes = np.tile(slopes, (sequence.alike, 1))
        penalty = workspace.array("penalty", view.shape, p.accum_dtype)
        np.multiply(slopes.reshape(len(view), 1, -1, 1), distance, out=penalty)
        view -= penalty
    rule: ScoreRule | None = None
    if p.rules.score is not None:
        view = split_heads(scores, heads)
        rule = ScoreRule(tiling, tile, view)
        is_score = rule.apply(view)
        if is_score is not None:
            visible, cut = is_score if visible is True else is_score & visible, None
            if not visible.any():
                return None
    return Scores(scores, None if visible is True else visible, cut, tanh, distance, rule)


def aligned_positions(p: AttentionProblem, tile: Tile) -> tuple[Array, Array]:
    """Return the positions of a tile's rows, each that of the key on its diagonal, and of its keys."""
    rows, keys = np.arange(tile.block.row, tile.block.row_stop), np.arange(tile.key, tile.key_stop)
    if p.place == WHOLE:
        return rows + tile.block.sequence.diagonal, keys
    first_q, first_k, stride, *_ = p.place
    return first_q + p.place.diagonal + stride * rows, first_k + stride * keys


def _cut(tiling: Tiling, tile: Tile, workspace: Workspace) -> Cut:
    left, right = tiling.problem.window_left, tiling.problem.window_right
    num_keys, num_rows = tile.key_stop - tile.key, tile.block.row_stop - tile.block.row
    offset = tile.block.row + tile.block.sequence.diagonal - tile.key

    def make() -> Cut:
        aligned, keys = np.arange(num_rows) + offset, np.arange(num_keys)[:, None]
        visible = np.ones((num_keys, num_rows), bool)
        reach = abs(offset) + num_rows + num_keys  # a wider window hides nothing here, but may overflow an int64
        if left is not None:
            visible &= keys >= aligned - min(left, reach)
        if right is not None:
            visible &= keys <= aligned + min(right, reach)
        cut_rows = np.flatnonzero(~visible.all(axis=0))
        rows = slice(int(cut_rows[0]), int(cut_rows[-1]) + 1) if len(cut_rows) else slice(0, 0)
        visible = visible[None, :, None]
        own = visible[..., rows]
        fill = _infinities(own, np.dtype(tiling.problem.accum_dtype))
        shown: Visible = True if visible.all() else visible if visible.any() else None
        return Cut(shown, rows, -own.astype(fill.dtype), fill)

    return workspace.remember((offset, num_keys, num_rows), make)


def _visible(tiling: Tiling, tile: Tile, bias: Array | None, workspace: Workspace) -> tuple[Visible, Cut | None]:
    o, heads = tiling.operands, tile.block.heads
    cut = _cut(tiling, tile, workspace) if tile.is_cut else None
    if cut is not None and cut.visible is None:
        return None, None
    parts: list[Array] = []
    if o.mask is not None:
        parts.append(like_scores(o.mask[tile.place_in(o.mask.shape)], tile))
    if bias is not None:
        is_score = bias != -np.inf
        if not is_score.all():
            parts.append(like_scores(is_score, tile))
    if o.block_mask is not None:
        rows = tile.block.row, tile.block.row_stop
        block_mask = cast("BlockMask", o.block_mask)
        shown = block_mask.tile_visible(tile.block.sequence.batch, heads.first, *rows, tile.key, tile.key_stop)
        if shown is None:
            return None, None
        if isinstance(shown, np.ndarray):
            parts.append(like_scores(shown[None, None], tile))
    shown_by_rule = visible_by_rule(tiling, tile)
    if shown_by_rule is not None:
        parts.append(shown_by_rule)
    if not parts:
        return (True, None) if cut is None else (cut.visible, cut)
    if cut is not None and isinstance(cut.visible, np.ndarray):
        parts.append(cut.visible)
    visible = np.ascontiguousarray(functools.reduce(np.logical_and, parts))
    if visible.all():
        return True, None
    return visible if visible.any() else None, None
