"""Helpers of the tests of block masks: sizes to draw, and masks written out."""

from __future__ import annotations

from typing import Any

import numpy as np
from devices import Device
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuflash import BlockMask
from cuflash.masks import store

Dense = NDArray[np.bool_]

LENGTHS = st.one_of(st.integers(0, 10), st.sampled_from([15, 63, 64, 65, 100, 127, 128, 129, 200]))
BLOCK_SIZES = st.one_of(
    st.sampled_from([(1, 1), (16, 16), (64, 64), (128, 128), (64, 16), (48, 80), (1000, 1000)]),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
)
SEEDS = st.integers(0, 2**32 - 1)


def grid(seqlen_q: int, seqlen_k: int) -> tuple[Any, Any]:
    """Return index arrays i (seqlen_q, 1) and j (1, seqlen_k)."""
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    return i, j


def dense_of(bm: BlockMask) -> Dense:
    """Return the mask as a host array, after a check of all that goes without saying."""
    dense = np.asarray(bm.to_dense())
    assert dense.dtype == bool
    assert dense.shape == bm.shape
    assert bm.density == (dense.mean() if dense.size else 0.0)
    return dense


def expect(bm: BlockMask, dense: Dense, heads: int, block_size: tuple[int, int], causal: bool) -> None:
    """Assert that `bm` is a pattern that is `dense`, and causal if so, in every head."""
    seqlen_q, seqlen_k = dense.shape[-2:]
    i, j = grid(seqlen_q, seqlen_k)
    if causal:
        dense = dense & (j <= i + seqlen_k - seqlen_q)
    assert bm.block_size == block_size
    np.testing.assert_array_equal(dense_of(bm), np.broadcast_to(dense, (1, heads, seqlen_q, seqlen_k)))


def random_dense(rng: np.random.Generator, shape: tuple[int, ...]) -> Dense:
    """Draw bools in which 64 x 64 blocks of each kind occur: hidden, visible and partial."""
    coarse = rng.choice([0.0, 1.0, 0.5], (*shape[:-2], *(store.num_blocks(size) for size in shape[-2:])))
    fine = np.repeat(np.repeat(coarse, 64, axis=-2), 64, axis=-1)[..., : shape[-2], : shape[-1]]
    return rng.random(shape) < fine


def check_store(device: Device, bm: BlockMask, dense: Dense) -> None:
    """Assert that slots and bits show, element by element, what the modules agree on."""
    for xp in {np, device.xp}:
        slots, bits = (device.get(x) if xp is device.xp else x for x in bm.arrays(xp))
        assert (slots.dtype, bits.dtype) == (np.int32, np.uint32)
        assert bits.shape[1:] == (64, 2)
        assert slots.shape == (*dense.shape[:2], -(-dense.shape[2] // 64), -(-dense.shape[3] // 64))
        for b, h, bi, bj in np.ndindex(slots.shape):
            block = dense[b, h, bi * 64 : bi * 64 + 64, bj * 64 : bj * 64 + 64]
            slot = slots[b, h, bi, bj]
            if not block.any() or block.all():
                assert slot == (-2 if block.all() else -1)
                continue
            i, j = np.ogrid[:64, :64]
            unpacked = bits[slot][i, j // 32] >> (j % 32).astype(np.uint32) & 1 == 1
            whole = np.zeros((64, 64), bool)
            whole[: block.shape[0], : block.shape[1]] = block
            np.testing.assert_array_equal(unpacked, whole)
