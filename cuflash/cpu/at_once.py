"""Attention of few queries, such as one over a cache, whose scores are computed by two products, without tiles.

Tiles and tasks cost some 80 us a call and 40 us a block, which is more than the products of short caches take. Here all
heads and sequences that fit are one part, which costs some 20 us. A part has all keys of its rows, so that no sums are
carried on.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash import reporting
from cuflash.cpu.pages import gather_pages
from cuflash.cpu.scores import ones, widen
from cuflash.cpu.threads import BLAS_THREADS, Workspace, run_tasks
from cuflash.cpu.tiles import MOST_SCORES, fits_one_tile, most_keys_of_few, most_numbers, num_tasks_of
from cuflash.cpu.work import Work
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.operands import Operands

Array = NDArray[Any]
_MOST_PROBLEMS = 256
_MOST_LENGTHS = 8  # those of the layers of a step; thousands of sequences have thousands of parts
# More rows than these are computed so only where the whole call is one tile.
FEW_ROWS = 16
# Other threads wait for the interpreter's lock and for cores, so that these calls need more tasks to gain by them.
MIN_THREADED_TASKS = 4


class Part(NamedTuple):
    """Some heads of sequences that have the same keys."""

    batches: slice
    keys: slice
    query: slice  # heads
    kv: slice
    size: int  # the number of its scores
    is_whole: bool  # these are all sequences, heads and keys

    @property
    def first(self) -> int:
        """The first sequence."""
        first: int = self.batches.start
        return first


class Parts(NamedTuple):
    """The cut of a call, by its sizes and lengths alone."""

    parts: list[Part]
    parallel: bool
    empty: list[int]  # the sequences without keys


def cut(p: AttentionProblem, kv_lengths: Array | None) -> Parts | None:
    """Cut a problem into parts; None if it is not one for this module."""
    if not _is_known(p):
        return None
    if kv_lengths is None:
        return _parts_of_whole(p)
    return _parts_of_lengths(p, tuple(np.minimum(np.maximum(kv_lengths, 0), p.seqlen_k).tolist()))


@functools.lru_cache(maxsize=_MOST_PROBLEMS)
def _is_known(p: AttentionProblem) -> bool:
    """Return True if a problem has no option but a window, lengths of keys and pages, and has few queries."""
    if p.is_empty:
        return False
    sizes = p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q, p.num_heads_kv, p.head_dim, p.head_dim_v
    plain = AttentionProblem(*sizes, p.dtype, softmax_scale=p.softmax_scale)
    # The CPU path heeds none of the first ones. Each side of a window leaves each query a key.
    rest = replace(p, deterministic=None, precision=None, num_splits=None, out_dtype=None)
    if p.window_right is not None and p.window_right >= (0 if p.seqlen_q <= FEW_ROWS else p.seqlen_q - 1):
        rest = replace(rest, window_right=None)
    if p.window_left is not None and p.window_left >= (0 if p.seqlen_q <= FEW_ROWS else p.seqlen_k - 1):
        rest = replace(rest, window_left=None)
    if p.seqlen_q <= FEW_ROWS:
        return replace(rest, kv_lengths=False, pages=None) == plain
    return rest == plain and fits_one_tile(plain)


@functools.lru_cache(maxsize=_MOST_PROBLEMS)
def _parts_of_whole(p: AttentionProblem) -> Parts | None:
    return _parts_of_lengths(p, (p.seqlen_k,) * p.batch)


@functools.lru_cache(maxsize=_MOST_LENGTHS)
def _parts_of_lengths(p: AttentionProblem, lengths: tuple[int, ...]) -> Parts | None:
    seen = {length: _seen(p, length) for length in set(lengths) if length}
    if None in seen.values():
        return None
    keys_of = {length: keys for length, keys in seen.items() if keys is not None}
    tasks = num_tasks_of(p, sum(keys_of[length].stop - keys_of[length].start for length in lengths if length))
    parts: list[Part] = []
    batch = 0
    for length, alike in itertools.groupby(lengths):
        first, batch = batch, batch + len(list(alike))
        if length:
            parts += _parts_of_alike(p, range(first, batch), keys_of[length], tasks)
    empty = [number for number, length in enumerate(lengths) if not length]
    return Parts(parts, tasks >= MIN_THREADED_TASKS, empty)


def _seen(p: AttentionProblem, length: int) -> slice | None:
    """Return the keys that the rows of a sequence see; None if they are too many or some row may see none."""
    hides = p.window_left is not None or (p.window_right is not None and p.window_right < p.seqlen_q - 1)
    if hides and length < p.seqlen_q:
        return None
    first = 0 if p.window_left is None else max(0, length - p.seqlen_q - p.window_left)
    return slice(first, length) if length - first <= most_keys_of_few(p) else None


def _even(count: int, most: int) -> int:
    """Return the size of parts that are as even as can be."""
    return -(-count // -(-count // most))


def _parts_of_alike(p: AttentionProblem, batches: range, keys: slice, tasks: int) -> Iterator[Part]:
    """Cut sequences, one behind the other, that have the same keys."""
    count, group = keys.stop - keys.start, p.group_size
    numbers = most_numbers(p, is_copied=p.pages is not None) // (count * max(p.head_dim, p.head_dim_v))
    together = min(numbers, MOST_SCORES // (count * p.seqlen_q * group))  # KV heads
    if tasks >= MIN_THREADED_TASKS:
        together = min(together, p.batch * p.num_heads_kv // tasks)
    heads = _even(p.num_heads_kv, min(max(1, together), p.num_heads_kv))
    # Sequences in pages are gathered one by one.
    sequences = 1 if p.pages is not None else _even(len(batches), max(1, together // p.num_heads_kv))
    is_whole = (sequences, heads, keys) == (p.batch, p.num_heads_kv, slice(0, p.seqlen_k))
    for first in batches[::sequences]:
        stop = min(first + sequences, batches.stop)
        for kv in range(0, p.num_heads_kv, heads):
            kv_stop = min(kv + heads, p.num_heads_kv)
            size = (stop - first) * (kv_stop - kv) * group * p.seqlen_q * count
            query = slice(kv * group, kv_stop * group)
            yield Part(slice(first, stop), keys, query, slice(kv, kv_stop), size, is_whole)


def forward(p: AttentionProblem, o: Operands, whole: Parts, out: Array, lse: Array | None) -> Array | None:
    """Write out and, if wanted, lse; return which rows have extreme numbers, like lse, and None where none has.

    What such a row holds is not its result, which tiles have. No other row's bits depend on it.
    """
    parts = whole.parts
    found: list[tuple[Part, Array]] = []
    for batch in whole.empty:
        out[batch] = 0
        if lse is not None:
            lse[batch] = -np.inf
    if reporting.current() is None and not whole.parallel:
        with BLAS_THREADS:
            for part in parts:
                extreme = _forward_part(p, o, part, out, lse)
                if extreme is not None:
                    found.append((part, extreme))
    else:
        work = Work(lambda: sum(part.size for part in parts))

        def task(number: int, workspace: Workspace) -> None:
            for part in workspace.work.each((parts[number],)):
                extreme = _forward_part(p, o, part, out, lse)
                if extreme is not None:
                    found.append((part, extreme))

        run_tasks(len(parts), task, whole.parallel, work)
        work.end()
    if not found:
        return None
    rows = np.zeros(p.lse_shape, bool)
    for part, extreme in found:
        rows[part.batches, part.query] = extreme
    return rows


@np.errstate(all="ignore")  # as a decorator it costs half
def _forward_part(p: AttentionProblem, o: Operands, part: Part, out: Array, lse: Array | None) -> Array | None:
    """Write the results of a part, and return which of its rows have extreme numbers, (sequences, heads, rows)."""
    q, k, v = o.q, o.k, o.v
    if p.pages is not None:
        k, v = (gather_pages(p.pages, o, x, part.first, part.keys, part.kv)[None] for x in (k, v))
    elif not part.is_whole:
        k, v = k[part.batches, part.keys, part.kv], v[part.batches, part.keys, part.kv]
    if not part.is_whole:
        q, out = q[part.batches, :, part.query], out[part.batches, :, part.query]
    is_wide = p.dtype == p.accum_dtype
    if not is_wide:
        q, k, v = widen(q), widen(k), widen(v)
    q = q.swapaxes(1, 2)
    by_query_head = q.shape[:3]
    if p.num_heads_q != p.num_heads_kv:
        q = q.reshape(len(q), k.shape[2], -1, p.head_dim)
    # The product is that of the tiles, from which the backward pass finds the weights again: BLAS adds those of q and
    # k's transpose in another order, and large scores with lse of the one would give wrong weights by the other.
    columns = np.matmul(k.swapaxes(1, 2), np.ascontiguousarray(q.swapaxes(2, 3)))
    # Scores are (sequences, KV heads, query heads of each * queries, keys).
    scores = np.ascontiguousarray(columns.swapaxes(2, 3))
    scores *= p.softmax_scale
    if p.seqlen_q > 1 and not (p.window_left is None and p.window_right is None):
        _hide(p, part.keys, scores.reshape(*by_query_head, -1))
    top = np.maximum.reduce(scores, axis=3, keepdims=True)
    scores -= top  # a row of -inf alone becomes NaN, which is looked for below
    np.exp(scores, out=scores)
    total = np.matmul(scores, ones(scores.shape[3], scores.dtype)[:, None])  # half the time of NumPy's sum
    acc = np.matmul(scores, v.swapaxes(1, 2))
    extreme: Array | None = None
    # A finite sum of squares tells at once that all numbers are finite.
    if not math.isfinite(np.vdot(acc, acc)) and not (finite := np.isfinite(acc)).all():
        extreme = ~finite.all(axis=3).reshape(by_query_head)
    if p.num_heads_q != p.num_heads_kv:
        acc, total = acc.reshape(*by_query_head, -1), total.reshape(*by_query_head, 1)
    target = out.swapaxes(1, 2)
    if is_wide or p.out_dtype == acc.dtype:
        np.divide(acc, total, out=target)
    else:
        target[...] = np.divide(acc, total, out=acc)
    if lse is not None:
        np.log(total, out=total)
        total += top.reshape(total.shape)
        lse[part.batches, part.query] = total[..., 0]
    return extreme


def _hide(p: AttentionProblem, keys: slice, scores: Array) -> None:
    """Hide what the window leaves out, of scores (sequences, heads, rows, keys)."""
    left, right = p.window_left, p.window_right
    count = keys.stop - keys.start
    if right is not None and right < p.seqlen_q - 1:
        hidden = _corner(p.seqlen_q, p.seqlen_q - 1 - right, True, p.accum_dtype)
        own = scores[..., count - hidden.shape[1] :]
        own += hidden
    # The first row of all sees the first of these keys, unless the sequence begins there.
    if left is not None and (beyond := keys.stop - 1 - left - keys.start) > 0:
        hidden = _corner(p.seqlen_q, beyond, False, p.accum_dtype)
        own = scores[..., : hidden.shape[1]]
        own += hidden


@functools.lru_cache(maxsize=_MOST_PROBLEMS)
def _corner(rows: int, width: int, is_right: bool, dtype: str) -> Array:
    """Return (rows, width) of 0 and, in the first row's end or else the last row's beginning, -inf."""
    corner = np.ones((rows, width), bool)
    hidden = np.triu(corner) if is_right else np.tril(corner, width - rows)
    return np.where(hidden, np.array(-np.inf, dtype), np.array(0, dtype))
