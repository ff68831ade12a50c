"""Dropout's keep decision for a tile of scores: a pure function of the element, the same as the kernels'.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with key = seed and counter =
(i without bit 3, j without bit 3, query head, batch); element (i, j) takes word ``2 * bit3(i) + bit3(j)``, so the four
elements {i, i^8} x {j, j^8} share one call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Four random words, as uint64 below 2^32, for uint64 counters that broadcast together."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _HALF) ^ c1 ^ np.uint64(key0)
        c2 = (product0 >> _HALF) ^ c3 ^ np.uint64(key1)
        c1, c3 = product1 & _LOW, product0 & _LOW
        key0, key1 = (key0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (key1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_tile(
    seed: int, dropout_p: float, batch: int, heads: tuple[int, int], rows: tuple[int, int], keys: tuple[int, int]
) -> NDArray[np.bool_]:
    """Which elements of the tile ``heads x rows x keys`` (half-open ranges) of batch index `batch` are kept.

    Returns
    -------
    bool array (heads, keys, rows)
    """
    # Whole groups of 16 on both axes hold all four elements of each call.
    first_row, first_key = rows[0] // 16 * 16, keys[0] // 16 * 16
    row_groups, key_groups = -(-(rows[1] - first_row) // 16), -(-(keys[1] - first_key) // 16)
    c0 = _without_bit_3(first_row, row_groups).reshape(1, 1, -1)
    c1 = _without_bit_3(first_key, key_groups).reshape(1, -1, 1)
    c2 = np.arange(*heads, dtype=np.uint64).reshape(-1, 1, 1)
    words = philox4x32((c0, c1, c2, np.uint64(batch)), seed)

    num_heads = heads[1] - heads[0]
    keep = np.empty((num_heads, key_groups, 2, 8, row_groups, 2, 8), bool)
    threshold = np.uint64(int(dropout_p * 2.0**32))
    for index, word in enumerate(words):
        row_bit, key_bit = divmod(index, 2)
        keep[:, :, key_bit, :, :, row_bit, :] = (word >= threshold).reshape(num_heads, key_groups, 8, row_groups, 8)
    whole = keep.reshape(num_heads, key_groups * 16, row_groups * 16)
    return whole[:, keys[0] - first_key : keys[1] - first_key, rows[0] - first_row : rows[1] - first_row]


def _without_bit_3(first: int, groups: int) -> NDArray[np.uint64]:
    """The positions from `first`, a multiple of 16, whose bit 3 is 0."""
    return (first + 16 * np.arange(groups)[:, None] + np.arange(8)).astype(np.uint64)
