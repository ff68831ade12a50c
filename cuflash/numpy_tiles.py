"""One call of the CPU path cut into tiles, whatever the number of cores."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.block_store import CANONICAL, HIDDEN
from cuflash.problem import AttentionProblem, Operands

Array = NDArray[Any]

# A tile of scores stays in the last cache, and threads seldom wait for the lock. Powers of 2 would share cache sets.
BLOCK_ROWS = 768
BLOCK_KEYS = 768
# Of tiles that causal or a window cuts: they take only rows that see some of their keys.
CUT_KEYS = 192
# Short sequences share a tile with other heads, unless that leaves fewer tasks than this.
MIN_TASKS = 32
# Fewer scores than this take less time than starting a thread.
MIN_PARALLEL_SCORES = 1 << 16


class Sequence(NamedTuple):
    """One sequence: its place in the arrays, and how many rows and keys are real."""

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
    """Query heads, whole groups or a part of one, and the KV heads that they read."""

    first: int
    stop: int
    first_kv: int
    stop_kv: int

    @property
    def query(self) -> slice:
        """The query heads."""
        return slice(self.first, self.stop)

    @property
    def kv(self) -> slice:
        """The KV heads."""
        return slice(self.first_kv, self.stop_kv)

    @property
    def counts(self) -> tuple[int, int]:
        """KV heads, and query heads of each."""
        kv_heads = self.stop_kv - self.first_kv
        return kv_heads, (self.stop - self.first) // kv_heads


class Block(NamedTuple):
    """A block of query rows of some heads."""

    sequence: Sequence
    heads: Heads
    row: int
    row_stop: int

    @property
    def rows(self) -> slice:
        """The rows, local to the sequence."""
        return slice(self.row, self.row_stop)


class Tile(NamedTuple):
    """Keys, and the rows of a block that may see them."""

    block: Block
    key: int
    key_stop: int
    is_cut: bool  # whether causal or a window hides some element

    @property
    def keys(self) -> slice:
        """The keys, local to the sequence."""
        return slice(self.key, self.key_stop)

    def rows_within(self, whole: Block) -> slice:
        """Where the tile's rows are among those of the block that it was cut from."""
        if self.block is whole:
            return slice(None)  # with several heads the rows of each follow each other
        return slice(self.block.row - whole.row, self.block.row_stop - whole.row)

    def place_in(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Its index in an array of shape (batch | 1, query heads | 1, rows | 1, keys | 1)."""
        own = self.block.sequence.batch, self.block.heads.query, self.block.rows, self.keys
        whole = 0, slice(None), slice(None), slice(None)
        return tuple(own[axis] if size > 1 else whole[axis] for axis, size in enumerate(shape))


class Tiling:
    """The tiles of a problem."""

    def __init__(self, problem: AttentionProblem, operands: Operands) -> None:
        self.problem = problem
        self.operands = operands
        self.sequences = self._sequences()
        self.block_rows = self._block_rows()
        self.head_blocks = self._head_blocks()

    def _sequences(self) -> list[Sequence]:
        """Every sequence of the batch, clamped to the arrays."""
        p, o = self.problem, self.operands
        if p.packed:
            starts_q, sizes_q = _packed(o.cu_seqlens_q, p.seqlen_q)
            starts_k, sizes_k = _packed(o.cu_seqlens_k, p.seqlen_k)
        else:
            starts_q = starts_k = [0] * p.batch
            sizes_q, sizes_k = [p.seqlen_q] * p.batch, [p.seqlen_k] * p.batch
        rows, keys = _used(o.q_lengths, sizes_q), _used(o.kv_lengths, sizes_k)
        if p.packed:
            self._check_cover(max(rows, default=0), max(keys, default=0))
        return [Sequence(*fields) for fields in zip(range(p.batch), starts_q, starts_k, rows, keys, strict=True)]

    def _check_cover(self, rows: int, keys: int) -> None:
        extras = {name: getattr(self.operands, name) for name in ("bias", "mask", "block_mask")}
        for name, x in extras.items():
            broadcast = 0 if name == "block_mask" else 1  # a size that fits any sequence
            if x is not None and any(broadcast != x.shape[2 + i] < need for i, need in enumerate((rows, keys))):
                raise ValueError(
                    f"{name}: expected (..., rows, columns) of at least ({rows}, {keys}), or 1 where it broadcasts, "
                    f"to cover the longest sequence, got {tuple(x.shape)}"
                )

    @property
    def is_large(self) -> bool:
        """Whether the work is worth starting threads for."""
        return sum(sequence.rows * sequence.keys for sequence in self.sequences) * self.problem.num_heads_q >= (
            MIN_PARALLEL_SCORES
        )

    def _block_rows(self) -> int:
        """Fewer where that gives the cores enough tasks."""
        if self.problem.block_mask:
            return CANONICAL  # tiles follow the mask's own blocks
        blocks = sum(-(-sequence.rows // BLOCK_ROWS) for sequence in self.sequences)
        return BLOCK_ROWS if blocks * self.problem.num_heads_q >= MIN_TASKS else BLOCK_ROWS // 2

    def _head_blocks(self) -> list[Heads]:
        """The heads that are computed together."""
        p = self.problem
        rows = max((sequence.rows for sequence in self.sequences), default=0)
        keys = max((sequence.keys for sequence in self.sequences), default=0)
        size = BLOCK_ROWS * BLOCK_KEYS // (max(1, min(rows, BLOCK_ROWS)) * max(1, min(keys, BLOCK_KEYS)))
        row_blocks = sum(-(-sequence.rows // self.block_rows) for sequence in self.sequences)
        size = max(1, min(size, row_blocks * p.num_heads_q // MIN_TASKS))
        if self.operands.block_mask is not None and self.operands.block_mask.shape[1] > 1:
            size = 1  # every head has its own tiles
        group = p.group_size
        if size >= group:
            groups = size // group
            starts = range(0, p.num_heads_kv, groups)
            spans = [(kv, min(kv + groups, p.num_heads_kv)) for kv in starts]
            return [Heads(kv * group, stop * group, kv, stop) for kv, stop in spans]
        return [
            Heads(first, min(first + size, (kv + 1) * group), kv, kv + 1)
            for kv in range(p.num_heads_kv)
            for first in range(kv * group, (kv + 1) * group, size)
        ]

    def blocks(self) -> list[Block]:
        """Blocks of real rows; the last, which see most keys when causal, come first."""
        return [
            Block(sequence, heads, row, min(row + self.block_rows, sequence.rows))
            for sequence in self.sequences
            for heads in self.head_blocks
            for row in reversed(range(0, sequence.rows, self.block_rows))
        ]

    def tiles(self, block: Block) -> Iterator[Tile]:
        """The tiles that a block visits, by ascending keys."""
        p, sequence = self.problem, block.sequence
        first, last = block.row + sequence.diagonal, block.row_stop - 1 + sequence.diagonal
        start, stop = 0, sequence.keys
        # Between these every row sees every key.
        full_start, full_stop = start, stop
        if p.window_left is not None:
            start, full_start = max(0, first - p.window_left), max(0, last - p.window_left)
        if p.window_right is not None:
            stop, full_stop = min(stop, last + p.window_right + 1), min(stop, first + p.window_right + 1)
        if full_stop - full_start < CUT_KEYS:
            spans = [(start, stop, True)]
        else:
            spans = [(start, full_start, True), (full_start, full_stop, False), (full_stop, stop, True)]
        for span_start, span_stop, is_cut in spans:
            step = CUT_KEYS if is_cut else BLOCK_KEYS
            for run_start, run_stop in self._unmasked_runs(block, span_start, span_stop):
                for key in range(run_start, run_stop, step):
                    key_stop = min(key + step, run_stop)
                    yield Tile(self._seeing_rows(block, key, key_stop) if is_cut else block, key, key_stop, is_cut)

    def _seeing_rows(self, block: Block, key: int, key_stop: int) -> Block:
        if block.heads.stop - block.heads.first > 1:
            return block
        p, diagonal = self.problem, block.sequence.diagonal
        row, row_stop = block.row, block.row_stop
        if p.window_right is not None:
            row = max(row, key - p.window_right - diagonal)
        if p.window_left is not None:
            row_stop = min(row_stop, key_stop + p.window_left - diagonal)
        return block if (row, row_stop) == (block.row, block.row_stop) else block._replace(row=row, row_stop=row_stop)

    def _unmasked_runs(self, block: Block, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of a key range that the block mask does not hide from the whole block."""
        if start >= stop:
            return
        block_mask = self.operands.block_mask
        if block_mask is None:
            yield start, stop
            return
        slots = block_mask.arrays(np)[0]
        batch = block.sequence.batch if slots.shape[0] > 1 else 0
        head = block.heads.first if slots.shape[1] > 1 else 0
        first = start // CANONICAL
        is_used = slots[batch, head, block.row // CANONICAL, first : -(-stop // CANONICAL)] != HIDDEN
        edges = np.flatnonzero(np.diff(is_used, prepend=False, append=False)) + first
        for run_first, run_stop in edges.reshape(-1, 2).tolist():
            yield max(start, run_first * CANONICAL), min(stop, run_stop * CANONICAL)

    def of_sequence(self, x: Array, sequence: Sequence, is_kv: bool = False) -> Array:
        """An array like q (or k) from a sequence's first row (or key) on: (rows, heads, dim)."""
        if not self.problem.packed:
            return x[sequence.batch]
        return x[sequence.first_key :] if is_kv else x[sequence.first_row :]

    def lse_of_sequence(self, lse: Array, sequence: Sequence) -> Array:
        """An array like lse from a sequence's first row on: (heads, rows)."""
        return lse[:, sequence.first_row :] if self.problem.packed else lse[sequence.batch]


def _packed(cu_seqlens: Any, total: int) -> tuple[list[int], list[int]]:
    edges = np.clip(cu_seqlens.astype(np.int64), 0, total)
    return edges[:-1].tolist(), np.maximum(np.diff(edges), 0).tolist()


def _used(lengths: Array | None, sizes: list[int]) -> list[int]:
    return sizes if lengths is None else np.clip(lengths, 0, sizes).tolist()
