"""The CPU path cuts a call into tiles, whatever the number of cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cuflash.masks.store import CANONICAL, HIDDEN
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.heads import Heads
from cuflash.problem.operands import Operands

if TYPE_CHECKING:
    from cuflash.masks.block_mask import BlockMask

Array = NDArray[Any]

# A tile of scores stays in the last cache, and threads seldom wait for the lock. Powers of 2 would share cache sets.
BLOCK_ROWS = 768
BLOCK_KEYS = 768
# Few queries make room for more keys in a tile. Its keys (or values) are then at most so many numbers; the second bound
# is that of 16-bit ones, which are copied to be widened.
TILE_NUMBERS, TILE_COPIED_NUMBERS = 1 << 20, 1 << 18
MOST_SCORES = BLOCK_ROWS * BLOCK_KEYS // 2  # of few queries
# A tile that causal or a window cuts has so many keys, and only the rows that see some of these.
CUT_KEYS = 192
# Short sequences share a tile with other heads and sequences, unless that leaves fewer tasks than this ...
MIN_TASKS = 32
# ... or each with less to do than so many multiply-adds: about a millisecond, in which a thread has paid for its start.
TASK_WORK = 1 << 25
# A number of k or v takes as long to come from memory as a product with so many queries.
READ_WORK = 12
# A product with fewer columns of scores takes as long as one with so many.
FEW_COLUMNS = 32
# So many layouts of calls are kept, by their problems.
_MOST_LAYOUTS = 64


class Sequence(NamedTuple):
    """One sequence, with its place in the arrays and its numbers of real rows and keys.

    Several that are alike, one behind the other in the batch, may be one: their heads are computed together.
    """

    batch: int
    first_row: int
    first_key: int
    rows: int
    keys: int
    alike: int = 1  # how many these are

    @property
    def batches(self) -> slice:
        """The place of all these sequences in the batch."""
        return slice(self.batch, self.batch + self.alike)

    @property
    def diagonal(self) -> int:
        """The key that row 0 is aligned to; row i is aligned to key ``i + diagonal``."""
        return self.keys - self.rows


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

    @property
    def size(self) -> int:
        """The number of its scores."""
        rows, heads = self.block.row_stop - self.block.row, self.block.heads.stop - self.block.heads.first
        return rows * (self.key_stop - self.key) * heads * self.block.sequence.alike

    def rows_within(self, whole: Block) -> slice:
        """Return the place of the tile's rows among those of the block that it was cut from."""
        if self.block is whole:
            return slice(None)  # the rows of several heads follow each other
        return slice(self.block.row - whole.row, self.block.row_stop - whole.row)

    def place_in(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the tile's index in an array of shape (batch | 1, query heads | 1, rows | 1, keys | 1)."""
        own = self.block.sequence.batches, self.block.heads.query, self.block.rows, self.keys
        return tuple([index if size > 1 else slice(None) for index, size in zip(own, shape, strict=True)])


class Layout(NamedTuple):
    """The cut of a call into blocks, by its sizes alone, so that bits do not depend on the number of cores."""

    sequences: list[Sequence]
    num_tasks: int  # as many tasks as pay
    block_rows: int
    head_blocks: list[Heads]  # the heads that are computed together


def _lay_out(
    problem: AttentionProblem, sequences: list[Sequence], heads_differ: bool = False, together: bool = False
) -> Layout:
    """Lay out sequences that may share blocks (`together`) or not; heads with own tiles share none."""
    p = problem
    rows = max((sequence.rows for sequence in sequences), default=0)
    keys = max(1, max((sequence.keys for sequence in sequences), default=0))
    num_tasks = _num_tasks(p, sequences)
    if p.split_size is not None:
        return _lay_out_fixed(p, sequences, num_tasks, heads_differ)
    block_rows = BLOCK_ROWS
    if p.block_mask:
        block_rows = CANONICAL  # tiles follow the mask's own blocks
    elif sum(-(-sequence.rows // BLOCK_ROWS) for sequence in sequences) * p.num_heads_q < MIN_TASKS:
        block_rows = BLOCK_ROWS // 2
    columns = max(1, min(rows, BLOCK_ROWS))
    keys = min(keys, _most_keys(p, columns, 1))
    fitting = min(BLOCK_ROWS * BLOCK_KEYS // (columns * keys), p.group_size * max(1, _most_rows(p) // keys))
    if rows > CUT_KEYS and (p.window_left is not None or p.window_right is not None):
        fitting = 1  # only a head by itself leaves out of a cut tile the rows that see nothing of it
    row_blocks = sum(-(-sequence.rows // block_rows) for sequence in sequences)
    # A group of few columns stays whole, so that its keys are read once.
    least = max(1, min(p.group_size, -(-FEW_COLUMNS // columns), fitting))
    share = 1 if heads_differ else max(least, min(fitting, row_blocks * p.num_heads_q // num_tasks))
    head_blocks = _head_blocks(p, share)
    if together and len(head_blocks) == 1 and rows <= block_rows:
        count = share // p.num_heads_q
        firsts = sequences[::count]
        sequences = [first._replace(alike=min(count, p.batch - first.batch)) for first in firsts]
    return Layout(sequences, num_tasks, block_rows, head_blocks)


def _lay_out_fixed(p: AttentionProblem, sequences: list[Sequence], num_tasks: int, heads_differ: bool) -> Layout:
    """Make a layout in which the shapes of a sequence's products depend on its own rows and keys alone."""
    share = 1 if heads_differ else p.group_size
    block_rows = CANONICAL if p.block_mask else max(1, BLOCK_ROWS // share)
    return Layout(sequences, num_tasks, block_rows, _head_blocks(p, share))


def _num_tasks(p: AttentionProblem, sequences: list[Sequence]) -> int:
    scores = sum(sequence.rows * sequence.keys for sequence in sequences)
    return _tasks_that_pay(p, scores, sum(sequence.keys for sequence in sequences))


def _tasks_that_pay(p: AttentionProblem, scores: int, keys: int) -> int:
    """Return how many tasks have enough to do, with so many scores of a query head and keys of a KV head."""
    work = (scores * p.num_heads_q + READ_WORK * keys * p.num_heads_kv) * (p.head_dim + p.head_dim_v)
    return max(1, min(MIN_TASKS, work // TASK_WORK))


def num_tasks_of(p: AttentionProblem, keys: int) -> int:
    """Return how many tasks pay where all queries of sequences see so many keys in all."""
    return _tasks_that_pay(p, p.seqlen_q * keys, keys)


def most_numbers(p: AttentionProblem, is_copied: bool) -> int:
    """Return how many numbers of k or v a tile may have."""
    return TILE_COPIED_NUMBERS if is_copied or p.dtype != p.accum_dtype else TILE_NUMBERS


def _most_rows(p: AttentionProblem) -> int:
    """Return the rows of k or v that are as many numbers as a tile may have."""
    return max(1, most_numbers(p, is_copied=False) // max(p.head_dim, p.head_dim_v))


def most_keys_of_few(p: AttentionProblem) -> int:
    """Return the keys of a tile of one KV head, which all queries see."""
    return _most_keys(p, p.seqlen_q * p.group_size, 1)


def _most_keys(p: AttentionProblem, columns: int, kv_heads: int) -> int:
    """Return the keys of a tile with so many columns of scores, which are more than usual where queries are few."""
    return max(BLOCK_KEYS, min(MOST_SCORES // columns, _most_rows(p) // kv_heads))


def _head_blocks(p: AttentionProblem, size: int) -> list[Heads]:
    """Return whole groups or parts of one, of `size` query heads at most."""
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


@lru_cache(maxsize=_MOST_LAYOUTS)
def _layout_of_whole(problem: AttentionProblem, together: bool) -> Layout:
    """Lay out a problem that is not packed, in which every sequence is the whole of its array."""
    sequences = [Sequence(batch, 0, 0, problem.seqlen_q, problem.seqlen_k) for batch in range(problem.batch)]
    return _lay_out(problem, sequences, together=together)


def fits_one_tile(problem: AttentionProblem) -> bool:
    """Return True if a plain problem has one block of rows and one tile of keys, and is too small for two tasks."""
    sequences, num_tasks, block_rows, head_blocks = _layout_of_whole(problem, True)
    if num_tasks > 1 or len(sequences) > 1 or len(head_blocks) > 1 or problem.seqlen_q > block_rows:
        return False
    columns = problem.seqlen_q * problem.num_heads_q * problem.batch
    return problem.seqlen_k <= _most_keys(problem, columns, problem.num_heads_kv * problem.batch)


class Tiling:
    """The tiles of a problem; `together` lets sequences share blocks."""

    def __init__(self, problem: AttentionProblem, operands: Operands, together: bool = False) -> None:
        self.problem = problem
        self.operands = operands
        is_whole = not (problem.packed or problem.q_lengths or problem.kv_lengths or problem.block_mask)
        if not is_whole or problem.split_size is not None:
            mask = operands.block_mask
            layout = _lay_out(problem, self._sequences(), mask is not None and mask.shape[1] > 1)
        else:
            layout = _layout_of_whole(problem, together)
        self.sequences, self.num_tasks, self.block_rows, self.head_blocks = layout

    def _sequences(self) -> list[Sequence]:
        """Return every sequence of the batch, clamped to the arrays."""
        p, o = self.problem, self.operands
        if p.packed:
            starts_q, sizes_q = _packed(o.cu_seqlens_q, p.seqlen_q)
            starts_k, sizes_k = ([], []) if p.pages else _packed(o.cu_seqlens_k, p.seqlen_k)
        else:
            starts_q = starts_k = [0] * p.batch
            sizes_q, sizes_k = [p.seqlen_q] * p.batch, [p.seqlen_k] * p.batch
        if p.pages is not None:
            starts_k, sizes_k = [0] * p.batch, [p.pages.capacity] * p.batch
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

    def blocks(self) -> list[Block]:
        """Return blocks of real rows; the last, which see most keys when causal, come first."""
        return [
            Block(sequence, heads, row, min(row + self.block_rows, sequence.rows))
            for sequence in self.sequences
            for heads in self.head_blocks
            for row in reversed(range(0, sequence.rows, self.block_rows))
        ]

    def num_scores(self, blocks: Iterable[Block]) -> int:
        """The number of scores in all tiles of these blocks."""
        return sum(tile.size for block in blocks for tile in self.tiles(block))

    def tiles(self, block: Block) -> Iterator[Tile]:
        """Yield the tiles that a block visits, by ascending keys."""
        p, sequence = self.problem, block.sequence
        first, last = block.row + sequence.diagonal, block.row_stop - 1 + sequence.diagonal
        start, stop = 0, sequence.keys
        # Every row sees every key between these two.
        full_start, full_stop = start, stop
        if p.window_left is not None:
            start, full_start = max(0, first - p.window_left), max(0, last - p.window_left)
        if p.window_right is not None:
            stop, full_stop = min(stop, last + p.window_right + 1), min(stop, first + p.window_right + 1)
        if (start, stop) == (full_start, full_stop):
            spans = [(start, stop, False)]
        elif full_stop - full_start < CUT_KEYS:
            spans = [(start, stop, True)]
        else:
            spans = [(start, full_start, True), (full_start, full_stop, False), (full_stop, stop, True)]
        heads = block.heads
        columns = (block.row_stop - block.row) * (heads.stop - heads.first) * sequence.alike
        most_keys = _most_keys(p, columns, (heads.stop_kv - heads.first_kv) * sequence.alike)
        for span_start, span_stop, is_cut in spans:
            step = CUT_KEYS if is_cut else most_keys
            for run_start, run_stop in self._unmasked_runs(block, span_start, span_stop):
                for key, key_stop in self._steps(run_start, run_stop, step):
                    yield Tile(self._seeing_rows(block, key, key_stop) if is_cut else block, key, key_stop, is_cut)

    def _steps(self, start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of `step` keys, none of which lies in two splits."""
        split = self.problem.split_size or stop
        key = start
        while key < stop:
            key_stop = min(key + step, stop, (key // split + 1) * split)
            yield key, key_stop
            key = key_stop

    def _seeing_rows(self, block: Block, key: int, key_stop: int) -> Block:
        if (block.heads.stop - block.heads.first) * block.sequence.alike > 1:
            return block
        p, diagonal = self.problem, block.sequence.diagonal
        row, row_stop = block.row, block.row_stop
        if p.window_right is not None:
            row = max(row, key - p.window_right - diagonal)
        if p.window_left is not None:
            row_stop = min(row_stop, key_stop + p.window_left - diagonal)
        return block if (row, row_stop) == (block.row, block.row_stop) else block._replace(row=row, row_stop=row_stop)

    def _unmasked_runs(self, block: Block, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a key range that the block mask does not hide from the whole block."""
        if start >= stop:
            return
        block_mask = cast("BlockMask | None", self.operands.block_mask)
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
        """Return an array like q (or k) from a sequence's first row (or key) on: (sequences, rows, heads, dim)."""
        if not self.problem.packed:
            return x[sequence.batches]
        return x[None, sequence.first_key :] if is_kv else x[None, sequence.first_row :]

    def lse_of_sequence(self, lse: Array, sequence: Sequence) -> Array:
        """Return an array like lse from a sequence's first row on: (sequences, heads, rows)."""
        return lse[None, :, sequence.first_row :] if self.problem.packed else lse[sequence.batches]


def _packed(cu_seqlens: Any, total: int) -> tuple[list[int], list[int]]:
    edges = np.clip(cu_seqlens.astype(np.int64), 0, total)
    return edges[:-1].tolist(), np.maximum(np.diff(edges), 0).tolist()


def _used(lengths: Array | None, sizes: list[int]) -> list[int]:
    return sizes if lengths is None else np.clip(lengths, 0, sizes).tolist()
