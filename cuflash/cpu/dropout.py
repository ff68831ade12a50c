"""Dropout decides on the CPU by Philox4x32-7, of which one call serves eight weights (Salmon et al. 2011)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.tiles import Tile, Tiling

Array = Any

# Philox4x32-7 has these constants (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_LOW_HALF, _HALF_WORD = np.uint64(0xFFFF), np.uint64(16)
_ROUNDS = 7


def dropout_keep(tiling: Tiling, tile: Tile) -> Array:
    """Return the decisions as bools in the order of `split_heads`."""
    block, place, threshold = tile.block, tiling.problem.place, tiling.problem.dropout_threshold
    heads = place.first_head + block.heads.first, place.first_head + block.heads.stop
    rows = place.first_q + place.stride * block.row, place.first_q + place.stride * (block.row_stop - 1) + 1
    keys = place.first_k + place.stride * tile.key, place.first_k + place.stride * (tile.key_stop - 1) + 1
    first_batch = place.first_batch + block.sequence.batch
    seed = int(np.asarray(tiling.operands.dropout_seed).reshape(()))
    batches = range(first_batch, first_batch + block.sequence.alike)
    keep = np.stack([_keep_strided(seed, threshold, batch, heads, rows, keys, place.stride) for batch in batches])
    return keep.reshape(-1, block.heads.counts[1], *keep.shape[2:]).swapaxes(1, 2)


def _keep_strided(
    seed: int,
    threshold: int,
    batch: int,
    heads: tuple[int, int],
    rows: tuple[int, int],
    keys: tuple[int, int],
    stride: int,
) -> NDArray[np.bool_]:
    """Decide as `keep_tile` does for every `stride`-th row and key."""
    if stride == 1:
        return keep_tile(seed, threshold, batch, heads, rows, keys)
    i, j = np.arange(*rows, stride, dtype=np.uint64), np.arange(*keys, stride, dtype=np.uint64)[:, None]
    head = np.arange(*heads, dtype=np.uint64)[:, None, None]
    words = philox4x32((i & ~np.uint64(8), j & ~np.uint64(9), head, np.uint64(batch)), seed)
    word = 2 * (i >> np.uint64(3) & np.uint64(1)) + (j >> np.uint64(3) & np.uint64(1))
    own = np.choose(word.astype(np.intp), words)
    half = np.where(j & np.uint64(1), own >> _HALF_WORD, own & _LOW_HALF)
    return half >= np.uint64(threshold)


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Return four random words, as uint64 below 2^32, for uint64 counters that broadcast together."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _WORD) ^ c1 ^ np.uint64(key0)
        c2 = (product0 >> _WORD) ^ c3 ^ np.uint64(key1)
        c1, c3 = product1 & _LOW, product0 & _LOW
        key0, key1 = (key0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (key1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_tile(
    seed: int, threshold: int, batch: int, heads: tuple[int, int], rows: tuple[int, int], keys: tuple[int, int]
) -> NDArray[np.bool_]:
    """Return bools that tell which of (heads, keys, rows), half-open ranges, of batch index `batch` dropout keeps.

    With key = seed and counter = (i without bit 3, j without bits 0 and 3, query head, batch) element (i, j) takes
    word ``2 * bit3(i) + bit3(j)``, of it the low half where j is even, else the high half, and is kept if that reaches
    the threshold.
    """
    # Whole groups of 16 on both axes hold all eight elements of each call.
    first_row, first_key = rows[0] // 16 * 16, keys[0] // 16 * 16
    row_groups, key_groups = -(-(rows[1] - first_row) // 16), -(-(keys[1] - first_key) // 16)
    c0 = _first_of_calls(first_row, row_groups, 1).reshape(1, 1, -1)
    c1 = _first_of_calls(first_key, key_groups, 2).reshape(1, -1, 1)
    c2 = np.arange(*heads, dtype=np.uint64).reshape(-1, 1, 1)
    words = philox4x32((c0, c1, c2, np.uint64(batch)), seed)

    num_heads = heads[1] - heads[0]
    keep = np.empty((num_heads, key_groups, 2, 4, 2, row_groups, 2, 8), bool)
    reached = np.uint64(threshold)
    for index, word in enumerate(words):
        row_bit, key_bit = divmod(index, 2)
        for parity, half in enumerate((word & _LOW_HALF, word >> _HALF_WORD)):
            of_calls = (half >= reached).reshape(num_heads, key_groups, 4, row_groups, 8)
            keep[:, :, key_bit, :, parity, :, row_bit, :] = of_calls
    whole = keep.reshape(num_heads, key_groups * 16, row_groups * 16)
    return whole[:, keys[0] - first_key : keys[1] - first_key, rows[0] - first_row : rows[1] - first_row]


def _first_of_calls(first: int, groups: int, step: int) -> NDArray[np.uint64]:
    """Return every `step`-th index with bit 3 clear, from `first`, a multiple of 16, on."""
    return (first + 16 * np.arange(groups)[:, None] + np.arange(0, 8, step)).astype(np.uint64)
