"""Dropout keeps the probabilities that Philox chooses, as the contract says it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int, rounds: int = 7) -> Array:
    """Compute Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Parameters
    ----------
    counter : four arrays or ints that broadcast together, each in [0, 2^32)
    seed : int in [0, 2^64), the key: its low 32 bits first
    rounds : int

    Returns
    -------
    uint32 array (4, *broadcast shape), the four random words.
    """
    low32 = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.broadcast_arrays(*[np.asarray(c, np.uint64) for c in counter])
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(rounds):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(key0),
            product1 & low32,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(key1),
            product0 & low32,
        )
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def dropout_threshold(dropout_p: float) -> int:
    """Return the least of the 65536 values of a weight's random half word that keeps the weight."""
    return int(np.floor(dropout_p * 65536))


def dropout_rescale(dropout_p: float) -> float:
    """Return the factor of the weights that are kept."""
    return 65536 / (65536 - dropout_threshold(dropout_p))


def dropout_keep(
    batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int, dropout_p: float, seed: Any, first_batch: int = 0
) -> Array:
    """Decide whether each probability is kept, as bool ``(batch, num_heads_q, seqlen_q, seqlen_k)``.

    Elements {i, i^8} x {j, j^1, j^8, j^9} share one Philox call and take half of one of its four words each.
    """
    seed = int(np.asarray(seed, np.uint64).reshape(()))
    b = np.arange(first_batch, first_batch + batch).reshape(-1, 1, 1, 1)
    h = np.arange(num_heads_q).reshape(-1, 1, 1)
    i = np.arange(seqlen_q).reshape(-1, 1)
    j = np.arange(seqlen_k)
    words = philox4x32((i & ~8, j & ~9, h, b), seed)
    choice = 2 * (i >> 3 & 1) + (j >> 3 & 1)
    word = np.take_along_axis(words, np.broadcast_to(choice, words.shape[1:])[None], axis=0)[0]
    half = np.where(j & 1 == 0, word & 0xFFFF, word >> 16)
    return half >= dropout_threshold(dropout_p)
