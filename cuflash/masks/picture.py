"""A block mask as a small picture in plain text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cuflash.masks.store import CANONICAL, VISIBLE, Store, num_blocks

Counts = NDArray[np.int64]
# A cell with no visible element, with at most a tenth of its elements, with at most half, with more, with all.
_SHADES = np.array(list(".-+*#"))
_BLOCKS_AT_ONCE = 1 << 10  # their bits, one byte each, stay in a core's cache


def draw(store: Store, size: tuple[int, int], batch: int, head: int, limits: tuple[int, int]) -> str:
    """The picture of a mask of `size` (seqlen_q, seqlen_k), with at most `limits` (lines, characters a line)."""
    cell = tuple(_cell(seqlen, limit) for seqlen, limit in zip(size, limits, strict=True))
    legend = ". none, # all" if cell == (1, 1) else ". none, - to 10%, + to 50%, * more, # all"
    title = f"{size[0]} queries (down) x {size[1]} keys (across), {cell[0]} x {cell[1]} elements a character: {legend}"
    if 0 in size:
        return title
    visible = _count(store, size, batch, head, (cell[0], cell[1]))
    elements = np.outer(*(_sizes(seqlen, step) for seqlen, step in zip(size, cell, strict=True)))
    shade = sum((visible > 0, 10 * visible > elements, 2 * visible > elements, visible == elements), np.intp(0))
    return "\n".join([title, *("".join(line) for line in _SHADES[shade].tolist())])


def _cell(seqlen: int, limit: int) -> int:
    """The least size of a cell that divides a block of the store, or is several whole ones."""
    least = max(1, num_blocks(seqlen, limit))
    return 1 << (least - 1).bit_length() if least <= CANONICAL else num_blocks(least) * CANONICAL


def _sizes(seqlen: int, step: int) -> Counts:
    """The number of positions in each stretch of `step`; the last may be ragged."""
    return np.minimum(seqlen - step * np.arange(num_blocks(seqlen, step)), step)


def _count(store: Store, size: tuple[int, int], batch: int, head: int, cell: tuple[int, int]) -> Counts:
    """The number of visible elements in each cell."""
    slots = store.slots[batch, head]
    rows, columns = (min(step, CANONICAL) for step in cell)  # of the part of a cell in one block
    parts = CANONICAL // rows, CANONICAL // columns
    used, where = np.unique(slots, return_inverse=True)
    counts = np.empty((len(used), *parts), np.int64)
    for first in range(0, len(used), _BLOCKS_AT_ONCE):
        words = store.table[used[first : first + _BLOCKS_AT_ONCE]]
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        counts[first : first + len(words)] = bits.reshape(len(words), parts[0], rows, parts[1], columns).sum(
            axis=(2, 4), dtype=np.int64
        )
    found = counts[where.reshape(slots.shape)].transpose(0, 2, 1, 3).reshape(-1, slots.shape[1] * parts[1])
    found = found[: num_blocks(size[0], rows), : num_blocks(size[1], columns)]
    # A block that is visible as a whole may reach beyond the array.
    is_whole = np.repeat(np.repeat(slots == VISIBLE, parts[0], axis=0), parts[1], axis=1)
    area = np.outer(_sizes(size[0], rows), _sizes(size[1], columns))
    found = np.where(is_whole[: found.shape[0], : found.shape[1]], area, found)
    for axis, (step, part) in enumerate(zip(cell, (rows, columns), strict=True)):
        found = np.add.reduceat(found, np.arange(0, found.shape[axis], step // part), axis=axis)
    return found
