"""The canonical store of a block mask: 64 x 64 blocks, each hidden, visible, or partial with its bits.

It depends on neither the user's block size nor a kernel's tiles. On the way in, visibility travels as *words*: uint64
(rows, ceil(seqlen_k / 64)), where bit j % 64 of word j // 64 stands for column j.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = Any
CANONICAL = 64
HIDDEN = -1
VISIBLE = -2

Words = NDArray[np.uint64]
WordsOf = Callable[[int, int, int, int], Words]  # (batch, head, first row, row after the last) -> words
Shape = tuple[int, int, int, int]

ELEMENTS_AT_ONCE = 1 << 22  # looked at in one go: their words stay in a core's cache

_BELOW = np.array([(1 << count) - 1 for count in range(CANONICAL + 1)], np.uint64)
ONES = np.uint64(2**64 - 1)
CONSTANTS = {
    "CANONICAL": CANONICAL,
    "HIDDEN": HIDDEN,
    "VISIBLE": VISIBLE,
}  # constants of every kernel that reads a store


class Store(NamedTuple):
    """The data of a mask on the host.

    `slots` is int32 (batch, heads, blocks of rows, blocks of columns): `HIDDEN`, `VISIBLE` or the row of `table` with
    the block's bits, one uint64 per row. Its last two rows are ones and zeros, for `VISIBLE` and `HIDDEN`.
    """

    slots: NDArray[np.int32]
    table: Words

    @property
    def bits(self) -> NDArray[np.uint32]:
        """The partial blocks' bits, (num_partial, 64, 2)."""
        return self.table[:VISIBLE].view(np.uint32).reshape(-1, CANONICAL, 2)


def num_blocks(seqlen: int, size: int = CANONICAL) -> int:
    """The number of blocks of `size` that cover `seqlen`."""
    return -(-seqlen // size)


def make_store(slots: NDArray[np.int32], partial: list[Words]) -> Store:
    """A store out of slots and the bits of the partial blocks, in pieces (blocks, 64)."""
    constants = np.zeros((2, CANONICAL), np.uint64)
    constants[VISIBLE] = ONES
    return Store(slots, np.concatenate([*partial, constants]))


def pack(shape: Shape, words_of: WordsOf) -> Store:
    """Sort every block into hidden, visible and partial, some rows at a time."""
    batch, heads, seqlen_q, seqlen_k = shape
    columns = num_blocks(seqlen_k)
    slots = np.full((batch, heads, num_blocks(seqlen_q), columns), HIDDEN, np.int32)
    if slots.size == 0:
        return make_store(slots, [])
    in_array = words_below(np.array([seqlen_k]), seqlen_k)
    partial: list[Words] = []
    count = 0
    step = _rows_at_once(seqlen_k)
    for b, h, first in product(range(batch), range(heads), range(0, seqlen_q, step)):
        last = min(first + step, seqlen_q)
        blocks = np.zeros((num_blocks(last - first), CANONICAL, columns), np.uint64)
        rows = blocks.reshape(-1, columns)
        np.bitwise_and(words_of(b, h, first, last), in_array, out=rows[: last - first])
        whole = np.zeros_like(blocks)
        whole.reshape(-1, columns)[: last - first] = in_array
        is_visible = (blocks == whole).all(axis=1)
        is_partial = blocks.any(axis=1) & ~is_visible
        found = int(np.count_nonzero(is_partial))
        here = slots[b, h, first // CANONICAL :][: len(blocks)]
        here[is_visible] = VISIBLE
        here[is_partial] = np.arange(count, count + found)
        partial.append(blocks.transpose(0, 2, 1)[is_partial])
        count += found
    return make_store(slots, partial)


def count_visible(store: Store, seqlen_q: int, seqlen_k: int) -> int:
    """The number of visible elements of a store."""
    rows, columns = (
        np.minimum(seqlen - CANONICAL * np.arange(num_blocks(seqlen)), CANONICAL) for seqlen in (seqlen_q, seqlen_k)
    )
    is_visible = store.slots == VISIBLE
    whole = int((is_visible.sum(axis=(0, 1)) * np.outer(rows, columns)).sum())
    in_block = np.bitwise_count(store.table).sum(axis=1, dtype=np.int64)
    return whole + int(in_block[store.slots[~is_visible]].sum())


def to_dense(xp: Any, slots: Any, bits: Any, shape: Shape) -> Any:
    """The bool array of `shape`, in the namespace of slots and bits."""
    batch, heads, _, seqlen_k = shape
    dense = xp.empty(shape, bool)
    if dense.size == 0:
        return dense
    constants = xp.zeros((2, CANONICAL), xp.uint64)
    constants[VISIBLE] = ONES
    table = xp.concatenate([bits.reshape(len(bits), 2 * CANONICAL).view(xp.uint64), constants])
    step = _rows_at_once(seqlen_k) // CANONICAL
    for b, h, block in product(range(batch), range(heads), range(0, slots.shape[2], step)):
        words = xp.ascontiguousarray(table[slots[b, h, block : block + step]].transpose(0, 2, 1))
        rows = xp.unpackbits(words.view(xp.uint8).ravel(), bitorder="little").reshape(-1, slots.shape[3] * CANONICAL)
        here = dense[b, h, block * CANONICAL :][: len(rows)]
        here[...] = rows[: len(here), :seqlen_k]
    return dense


def _rows_at_once(seqlen_k: int) -> int:
    """The number of rows, whole blocks of them, that are read in one go."""
    return CANONICAL * max(1, ELEMENTS_AT_ONCE // (CANONICAL * max(seqlen_k, 1)))


def words_from_bools(visible: NDArray[np.bool_]) -> Words:
    """The words of bool (rows, columns)."""
    rows, columns = visible.shape
    packed = np.zeros((rows, num_blocks(columns) * (CANONICAL // 8)), np.uint8)
    packed[:, : num_blocks(columns, 8)] = np.packbits(visible, axis=1, bitorder="little")
    return packed.view(np.uint64)


def words_below(stop: NDArray[np.int64], columns: int) -> Words:
    """Words of which row r sees column j iff ``j < stop[r]``."""
    counts = stop[:, None] - CANONICAL * np.arange(num_blocks(columns))
    return _BELOW[np.clip(counts, 0, CANONICAL)]


def words_between(start: NDArray[np.int64], stop: NDArray[np.int64], columns: int) -> Words:
    """Words of which row r sees column j iff ``start[r] <= j < stop[r]``."""
    return words_below(stop, columns) & ~words_below(start, columns)


def words_of_window(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> WordsOf:
    """The words of ``window=(left, right)``."""

    def words_of(b: int, h: int, first: int, last: int) -> Words:
        center = np.arange(first, last) + (seqlen_k - seqlen_q)
        start = np.zeros_like(center) if left is None else center - left
        stop = np.full_like(center, seqlen_k) if right is None else center + right + 1
        return words_between(start, stop, seqlen_k)

    return words_of


def find_window(store: Store, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None] | None:
    """The `window` that shows the same for every batch entry and head, if there is one."""
    slots, table = store
    if slots.size == 0 or (np.count_nonzero(np.diff(slots[0, 0] != HIDDEN), axis=1) > 2).any():
        return None  # random blocks, say: told at once

    def seen(row: int) -> NDArray[np.intp]:
        words = table[slots[0, 0, row // CANONICAL], row % CANONICAL]
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), count=seqlen_k, bitorder="little"))

    first, last = seen(0), seen(seqlen_q - 1)
    if not first.size or not last.size or first[-1] < seqlen_k - seqlen_q:
        return None
    left = seqlen_k - 1 - int(last[0]) if last[0] > 0 else None
    right = int(first[-1]) - (seqlen_k - seqlen_q) if first[-1] < seqlen_k - 1 else None
    expected = pack((1, 1, seqlen_q, seqlen_k), words_of_window(seqlen_q, seqlen_k, left, right))
    partial = expected.slots[0, 0] >= 0
    same = (np.minimum(slots, 0) == np.minimum(expected.slots, 0)).all() and (
        table[slots[..., partial]] == expected.table[expected.slots[..., partial]]
    ).all()
    return (left, right) if same else None


def words_from_block_rows(
    rows_of: Callable[[int, int, int, int], NDArray[np.bool_]], block_size: tuple[int, int], seqlen_k: int
) -> WordsOf:
    """Words out of blocks of any size; ``rows_of(b, h, r0, r1)`` gives rows r0 to r1 of blocks as bools."""
    rows_per, columns_per = block_size[0], min(block_size[1], max(seqlen_k, 1))

    def words_of(b: int, h: int, first: int, last: int) -> Words:
        top = first // rows_per
        blocks = rows_of(b, h, top, num_blocks(last, rows_per))
        if columns_per > 1:
            blocks = np.repeat(blocks, columns_per, axis=1)[:, :seqlen_k]
        words = words_from_bools(blocks)
        return words if rows_per == 1 else words[np.arange(first, last) // rows_per - top]

    return words_of
