"""One call of the CPU path cut into tiles, and the scores of a tile.

A tile is (a few query heads) x (a block of query rows) x (a block of keys) of one sequence. Its arrays have the shape
(KV heads, query heads of each * rows, keys): the query heads that share a KV head lie below each other, so that one
matrix product serves them all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.numpy_threads import Workspace
from cuflash.philox import keep_tile
from cuflash.problem import AttentionProblem, Operands

Array = NDArray[Any]

# A tile of scores is 512 KB in float32: with its operands it stays in a core's second-level cache, and it is large
# enough that NumPy's cost per call (a microsecond) does not show. Found by examples/benchmarks/cpu.py.
BLOCK_ROWS = 256
BLOCK_KEYS = 512
# With a block mask tiles follow the mask's own blocks.
MASK_BLOCK = 64
# Short sequences share a tile with other heads, unless that leaves fewer tasks than this for the cores.
MIN_TASKS = 32
# Fewer scores than this take less time than starting a thread (a tenth of a millisecond).
MIN_PARALLEL_SCORES = 1 << 16


class Sequence(NamedTuple):
    """One sequence: its rows in the arrays, and how many of them are real."""

    batch: int
    first_row: int
    first_key: int
    rows: int
    keys: int

    @property
    def diagonal(self) -> int:
        """Row i is aligned to key ``i + diagonal``."""
        return self.keys - self.rows


class Heads(NamedTuple):
    """A range of query heads: whole groups, or a part of one."""

    first: int
    stop: int
    first_kv: int
    stop_kv: int


class Block(NamedTuple):
    """A block of query rows of some heads."""

    sequence: Sequence
    heads: Heads
    row: int
    row_stop: int


class Scores(NamedTuple):
    """The scores of a tile and what their gradient needs; arrays are (query heads, rows, keys)."""

    scores: Array
    visible: Array | None  # bool, heads axis may be 1; None if everything is
    tanh: Array | None
    distance: Array | None  # (rows, keys)


def widen(x: Array) -> Array:
    """16-bit numbers as float32, others as they are (possibly a view)."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def zero_hidden(x: Array, visible: Array) -> None:
    """Replace hidden elements, NaN and inf too, by 0, in place."""
    # On the bits, since NumPy's own selections branch on every element and take ten times as long.
    bits = x.view(f"i{x.dtype.itemsize}")
    np.multiply(bits, visible, out=bits)


def hide(scores: Array, visible: Array) -> None:
    """Replace hidden elements, NaN and inf too, by -inf, in place."""
    zero_hidden(scores, visible)
    bits = scores.view(f"i{scores.dtype.itemsize}")
    infinite = np.array(-np.inf, scores.dtype).view(bits.dtype)
    hidden = visible.astype(bits.dtype)
    hidden -= 1  # all bits set where hidden
    hidden &= infinite
    bits |= hidden


def without_rows(x: Array, keep: Any) -> Array:
    """A copy of x (..., rows, dim) whose rows are 0 where `keep` is False; x itself if none is."""
    if keep.all():
        return x
    x = x.copy()
    x[~np.broadcast_to(keep, x.shape[:-1])] = 0
    return x


@dataclass(frozen=True)
class Tiling:
    """A problem with its arrays, and the order in which its tiles are visited."""

    problem: AttentionProblem
    operands: Operands

    @functools.cached_property
    def sequences(self) -> list[Sequence]:
        """Every sequence of the batch, clamped to the arrays."""
        p, o = self.problem, self.operands
        if p.packed:
            starts_q, sizes_q = _packed(o.cu_seqlens_q, p.seqlen_q)
            starts_k, sizes_k = _packed(o.cu_seqlens_k, p.seqlen_k)
        else:
            starts_q = starts_k = [0] * p.batch
            sizes_q, sizes_k = [p.seqlen_q] * p.batch, [p.seqlen_k] * p.batch
        rows, keys = _used(o.q_lengths, sizes_q), _used(o.kv_lengths, sizes_k)
        return [Sequence(*fields) for fields in zip(range(p.batch), starts_q, starts_k, rows, keys, strict=True)]

    @functools.cached_property
    def seed(self) -> int:
        """Dropout's seed."""
        return int(np.asarray(self.operands.dropout_seed).reshape(()))

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return MASK_BLOCK if self.problem.block_mask else BLOCK_ROWS

    def blocks_per_sequence(self) -> int:
        """Row blocks of the longest sequence; packed: of all sequences, had they one length."""
        return max(1, -(-self.problem.seqlen_q // self.block_rows))

    def head_blocks(self) -> list[Heads]:
        """The heads that are computed together."""
        p = self.problem
        sequences = 1 if p.packed else max(p.batch, 1)
        rows = p.seqlen_q // max(p.batch, 1) if p.packed else p.seqlen_q
        keys = p.seqlen_k // max(p.batch, 1) if p.packed else p.seqlen_k
        score_limit = BLOCK_ROWS * BLOCK_KEYS // (max(1, min(rows, BLOCK_ROWS)) * max(1, min(keys, BLOCK_KEYS)))
        task_limit = sequences * p.num_heads_q * self.blocks_per_sequence() // MIN_TASKS
        size = max(1, min(score_limit, task_limit))
        if p.block_mask and self.operands.block_mask is not None and self.operands.block_mask.shape[1] > 1:
            size = 1
        group = p.group_size
        if size >= group:
            groups = size // group
            firsts = range(0, p.num_heads_kv, groups)
            spans = [(kv, min(kv + groups, p.num_heads_kv)) for kv in firsts]
            return [Heads(kv * group, stop * group, kv, stop) for kv, stop in spans]
        return [
            Heads(first, min(first + size, (kv + 1) * group), kv, kv + 1)
            for kv in range(p.num_heads_kv)
            for first in range(kv * group, (kv + 1) * group, size)
        ]

    def blocks(self) -> list[Block]:
        """Every block of real rows; the last rows, which see most keys when causal, come first."""
        return [
            Block(sequence, heads, row, min(row + self.block_rows, sequence.rows))
            for sequence in self.sequences
            for heads in self.head_blocks()
            for row in reversed(range(0, sequence.rows, self.block_rows))
        ]

    @property
    def is_large(self) -> bool:
        """Whether the work is worth starting threads for."""
        p = self.problem
        return p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k >= MIN_PARALLEL_SCORES

    def of_sequence(self, x: Array, sequence: Sequence, rows: bool) -> Array:
        """The rows (or keys) of one sequence, used or not, of an array like q (or k): (seqlen, heads, dim)."""
        if not self.problem.packed:
            return x[sequence.batch]
        return x[sequence.first_row :] if rows else x[sequence.first_key :]

    def lse_of_sequence(self, lse: Array, sequence: Sequence) -> Array:
        """(heads, seqlen) of one sequence."""
        return lse[:, sequence.first_row :] if self.problem.packed else lse[sequence.batch]

    def load_rows(self, x: Array, block: Block) -> Array:
        """The block's rows of an array like q, wide, as (KV heads, query heads of each * rows, dim)."""
        own = self.of_sequence(x, block.sequence, rows=True)[
            block.row : block.row_stop, block.heads.first : block.heads.stop
        ]
        wide = np.ascontiguousarray(widen(own).swapaxes(0, 1))
        return self.by_kv_head(wide, block.heads)

    def load_keys(self, x: Array, block: Block, key: int, key_stop: int) -> Array:
        """Some rows of k or v for the block's heads, wide, as (KV heads, keys, dim); possibly a view."""
        heads = block.heads
        own = self.of_sequence(x, block.sequence, rows=False)[key:key_stop, heads.first_kv : heads.stop_kv]
        return widen(own).swapaxes(0, 1)

    @staticmethod
    def by_kv_head(x: Array, heads: Heads) -> Array:
        """(query heads, rows, ...) as (KV heads, query heads of each * rows, ...), a view."""
        kv_heads = heads.stop_kv - heads.first_kv
        return x.reshape(kv_heads, x.shape[0] // kv_heads * x.shape[1], *x.shape[2:])

    @staticmethod
    def by_query_head(x: Array, heads: Heads) -> Array:
        """The inverse of `by_kv_head`."""
        query_heads = heads.stop - heads.first
        return x.reshape(query_heads, x.shape[0] * x.shape[1] // query_heads, *x.shape[2:])

    def tiles(self, block: Block) -> Iterator[tuple[int, int, bool]]:
        """The key ranges that a block visits, ascending, and whether positions hide some element there."""
        p, sequence = self.problem, block.sequence
        diagonal, last_row = sequence.diagonal, block.row_stop - 1
        left, right = p.window_left, p.window_right
        start, stop = 0, sequence.keys
        full_start, full_stop = start, stop
        if left is not None:
            start, full_start = max(0, block.row + diagonal - left), max(0, last_row + diagonal - left)
        if right is not None:
            stop = min(stop, last_row + diagonal + right + 1)
            full_stop = min(full_stop, block.row + diagonal + right + 1)
        if full_start >= full_stop:
            edges = [(start, stop, True)]
        else:
            edges = [(start, full_start, True), (full_start, full_stop, False), (full_stop, stop, True)]
        for edge_start, edge_stop, cut in edges:
            for run_start, run_stop in self._unmasked_runs(block, edge_start, edge_stop):
                for key in range(run_start, run_stop, BLOCK_KEYS):
                    yield key, min(key + BLOCK_KEYS, run_stop), cut

    def _unmasked_runs(self, block: Block, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of a key range that the block mask does not hide from the whole block."""
        if start >= stop:
            return
        block_mask = self.operands.block_mask
        if block_mask is None:
            yield start, stop
            return
        slots = block_mask.arrays(np)[0]
        own = slots[block.sequence.batch if len(slots) > 1 else 0, block.heads.first if slots.shape[1] > 1 else 0]
        used = own[block.row // MASK_BLOCK, start // MASK_BLOCK : -(-stop // MASK_BLOCK)] != -1
        edges = np.flatnonzero(np.diff(used, prepend=False, append=False)) + start // MASK_BLOCK
        for first, last in edges.reshape(-1, 2).tolist():
            yield max(start, first * MASK_BLOCK), min(stop, last * MASK_BLOCK)

    def extra(self, x: Array, block: Block, key: int, key_stop: int) -> Array:
        """The tile's part of an array like bias: each axis the tile's or 1."""
        return x[self.extra_index(x.shape, block, key, key_stop)]

    @staticmethod
    def extra_index(shape: tuple[int, ...], block: Block, key: int, key_stop: int) -> tuple[Any, ...]:
        """The index of a tile in an array of shape (batch | 1, query heads | 1, rows | 1, keys | 1)."""
        return (
            block.sequence.batch if shape[0] > 1 else 0,
            slice(block.heads.first, block.heads.stop) if shape[1] > 1 else slice(None),
            slice(block.row, block.row_stop) if shape[2] > 1 else slice(None),
            slice(key, key_stop) if shape[3] > 1 else slice(None),
        )

    def _visible(
        self, block: Block, key: int, key_stop: int, cut: bool, bias: Array | None
    ) -> Array | Literal[True] | None:
        """(query heads | 1, rows, keys), or True if all of the tile is visible, None if nothing is."""
        p, o, sequence = self.problem, self.operands, block.sequence
        parts: list[Array] = []
        if cut:
            aligned = np.arange(block.row, block.row_stop, dtype=np.int64)[:, None] + sequence.diagonal
            keys = np.arange(key, key_stop)
            if p.window_left is not None:
                parts.append((keys >= aligned - p.window_left)[None])
            if p.window_right is not None:
                parts.append((keys <= aligned + p.window_right)[None])
        if o.mask is not None:
            parts.append(self.extra(o.mask, block, key, key_stop))
        if bias is not None:
            shown = bias != -np.inf
            if not shown.all():
                parts.append(shown)
        if o.block_mask is not None:
            rows = block.row, block.row_stop
            tile = o.block_mask.tile_visible(sequence.batch, block.heads.first, *rows, key, key_stop)
            if tile is None:
                return None
            if isinstance(tile, np.ndarray):
                parts.append(tile[None])
        if not parts:
            return True
        visible = functools.reduce(np.logical_and, parts)
        if visible.all():
            return True
        if not visible.any():
            return None
        return np.broadcast_to(visible, (len(visible), block.row_stop - block.row, key_stop - key))

    def score_tile(
        self, block: Block, key: int, key_stop: int, cut: bool, q: Array, k: Array, workspace: Workspace
    ) -> Scores | None:
        """Scores of a tile from scaled q and k, in scratch memory; None if all are hidden, which else hold anything."""
        p, o = self.problem, self.operands
        dtype = p.accum_dtype
        bias = None if o.bias is None else self.extra(o.bias, block, key, key_stop)
        visible = self._visible(block, key, key_stop, cut, bias)
        if visible is None:
            return None
        products = workspace.array("scores", (*q.shape[:2], k.shape[1]), dtype)
        np.matmul(q, k.swapaxes(1, 2), out=products)
        scores = self.by_query_head(products, block.heads)
        tanh: Array | None = None
        distance: Array | None = None
        if p.softcap:
            tanh = workspace.array("tanh", scores.shape, dtype)
            np.multiply(scores, 1 / p.softcap, out=tanh)
            np.tanh(tanh, out=tanh)
            np.multiply(tanh, p.softcap, out=scores)
        if bias is not None:
            scores += widen(bias)
        if o.alibi_slopes is not None:
            distance = workspace.array("distance", scores.shape[1:], dtype)
            aligned = np.arange(block.row, block.row_stop)[:, None] + block.sequence.diagonal
            np.subtract(aligned, np.arange(key, key_stop), out=distance)
            np.abs(distance, out=distance)
            penalty = workspace.array("penalty", scores.shape, dtype)
            np.multiply(self.slopes(block)[:, None, None], distance, out=penalty)
            scores -= penalty
        return Scores(scores, None if visible is True else visible, tanh, distance)

    def slopes(self, block: Block) -> Array:
        """ALiBi slopes of the block's heads."""
        slopes: Any = self.operands.alibi_slopes
        own: Array = slopes[block.sequence.batch if len(slopes) > 1 else 0, block.heads.first : block.heads.stop]
        return own

    def sink_rows(self, block: Block) -> Array:
        """The sink of each row's head, (KV heads, query heads of each * rows)."""
        sink: Any = self.operands.sink
        heads = block.heads
        rows = np.repeat(sink[heads.first : heads.stop, None], block.row_stop - block.row, axis=1)
        return self.by_kv_head(rows, heads)

    def dropout_keep(self, block: Block, key: int, key_stop: int) -> Array:
        """Which probabilities of a tile are kept, bool (query heads, rows, keys)."""
        heads = block.heads.first, block.heads.stop
        rows = block.row, block.row_stop
        return keep_tile(self.seed, self.problem.dropout_p, block.sequence.batch, heads, rows, (key, key_stop))


def _packed(cu_seqlens: Any, total: int) -> tuple[list[int], list[int]]:
    """Starts and sizes of packed sequences, clamped to the array."""
    edges = np.clip(cu_seqlens.astype(np.int64), 0, total)
    return edges[:-1].tolist(), np.maximum(np.diff(edges), 0).tolist()


def _used(lengths: Array | None, sizes: list[int]) -> list[int]:
    return sizes if lengths is None else np.clip(lengths, 0, sizes).tolist()
