"""Operations on whole stores of block masks. They cost time by the blocks and the different pairs of blocks alone."""

from __future__ import annotations

import numpy as np

from cuflash.masks.store import CANONICAL, HIDDEN, ONES, VISIBLE, Store, Words, make_store, num_blocks, words_below

_BLOCKS_AT_ONCE = 1 << 10  # their bits stay in a core's cache


def everything(seqlen_q: int, seqlen_k: int) -> Store:
    """Return the store of one batch entry and head whose elements are all visible."""
    return make_store(np.full((1, 1, num_blocks(seqlen_q), num_blocks(seqlen_k)), VISIBLE, np.int32), [])


def combine(operation: np.ufunc, a: Store, b: Store, seqlen_q: int, seqlen_k: int) -> Store:
    """Return the store of ``operation(a, b)``, a ufunc of bits; batch and heads broadcast.

    Each pair of blocks that occurs is computed once for each of the places where it occurs: inside of the array, and at
    its lower and right edges, where a block is visible as a whole if its elements in the array are.
    """
    rows_a, rows_b = (store.slots % np.int64(len(store.table)) for store in (a, b))
    at_bottom = np.arange(rows_a.shape[2]) == rows_a.shape[2] - 1
    at_right = np.arange(rows_a.shape[3]) == rows_a.shape[3] - 1
    place = 2 * at_bottom[:, None] + at_right
    inside = _in_array(seqlen_q, seqlen_k)
    keys, where = np.unique((rows_a * len(b.table) + rows_b) * 4 + place, return_inverse=True)
    slot = np.empty(len(keys), np.int32)
    table = np.empty((len(keys) + 2, CANONICAL), np.uint64)  # its pages take no memory before they are written
    num_partial = 0
    for first in range(0, len(keys), _BLOCKS_AT_ONCE):
        some = keys[first : first + _BLOCKS_AT_ONCE]
        in_array = inside[some % 4]
        bits = operation(a.table[some // 4 // len(b.table)], b.table[some // 4 % len(b.table)]) & in_array
        is_visible = (bits == in_array).all(axis=1)
        is_partial = bits.any(axis=1) & ~is_visible
        count = int(np.count_nonzero(is_partial))
        here = slot[first : first + len(some)]
        here[...] = np.where(is_visible, VISIBLE, HIDDEN)
        here[is_partial] = np.arange(num_partial, num_partial + count)
        table[num_partial : num_partial + count] = bits[is_partial]
        num_partial += count
    table.resize((num_partial + 2, CANONICAL), refcheck=False)
    table[VISIBLE], table[HIDDEN] = ONES, 0
    return Store(slot[where.reshape(np.broadcast_shapes(rows_a.shape, rows_b.shape))], table)


def _in_array(seqlen_q: int, seqlen_k: int) -> Words:
    """Return the elements in the array of a block inside, at the right edge, at the lower edge, and in the corner."""
    last_row, last_column = ((seqlen - 1) % CANONICAL + 1 for seqlen in (seqlen_q, seqlen_k))
    words = np.zeros((4, CANONICAL), np.uint64)
    for place, (rows, columns) in enumerate((r, c) for r in (CANONICAL, last_row) for c in (CANONICAL, last_column)):
        words[place, :rows] = words_below(np.array([columns]), CANONICAL)
    return words


def is_same(a: Store, b: Store) -> bool:
    """Return True if two stores of one shape have the same visible elements."""
    if a is b:
        return True
    is_partial = a.slots >= 0
    if not (np.minimum(a.slots, 0) == np.minimum(b.slots, 0)).all():
        return False
    pairs = np.unique(a.slots[is_partial] * np.int64(len(b.table)) + b.slots[is_partial])
    return bool((a.table[pairs // len(b.table)] == b.table[pairs % len(b.table)]).all())
