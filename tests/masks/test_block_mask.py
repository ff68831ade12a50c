"""Every constructor of BlockMask agrees with its literal definition, as does the store that the kernels read."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import Device
from hypothesis import given
from hypothesis import strategies as st
from mask_cases import BLOCK_SIZES, LENGTHS, SEEDS, Dense, check_store, dense_of, grid, random_dense
from strategies import examples

import cuflash
from cuflash import BlockMask
from cuflash.masks import block_mask, store


@examples(200)
@given(
    data=st.data(),
    leading=st.sampled_from([(), (2,), (1, 1), (2, 3), (2, 1), (0, 2)]),
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    block_size=BLOCK_SIZES,
    seed=SEEDS,
    layout=st.sampled_from(["plain", "transposed", "reversed", "sliced", "broadcast"]),
)
def test_from_dense_round_trip(
    device: Device,
    data: st.DataObject,
    leading: tuple[int, ...],
    seqlen_q: int,
    seqlen_k: int,
    block_size: tuple[int, int],
    seed: int,
    layout: str,
) -> None:
    mask = random_dense(np.random.default_rng(seed), (*leading, seqlen_q, seqlen_k))
    if layout == "transposed":
        mask = np.ascontiguousarray(mask.swapaxes(-1, -2)).swapaxes(-1, -2)
    elif layout == "reversed":
        mask = mask[..., ::-1, ::-1]
    elif layout == "sliced":
        mask = np.repeat(mask, 3, axis=-1)[..., 1::3]
    elif layout == "broadcast":
        mask = np.broadcast_to(mask[..., :1, :], mask.shape)
    bm = BlockMask.from_dense(device.put(mask), block_size=block_size)
    assert bm.block_size == block_size
    assert bm.shape == (1,) * (4 - mask.ndim) + mask.shape
    dense = device.get(bm.to_dense())
    np.testing.assert_array_equal(dense[(0,) * (4 - mask.ndim)], mask)
    check_store(device, bm, dense)
    i0, j0 = data.draw(st.integers(0, seqlen_q)), data.draw(st.integers(0, seqlen_k))
    check_tile(bm, dense, i0, data.draw(st.integers(i0, seqlen_q)), j0, data.draw(st.integers(j0, seqlen_k)))


def check_tile(bm: BlockMask, dense: Dense, i0: int, i1: int, j0: int, j1: int) -> None:
    batch, heads = bm.shape[:2]
    for b, h in np.ndindex(batch, heads):
        tile = dense[b, h, i0:i1, j0:j1]
        # A mask of one head or batch entry serves every one.
        got = bm.tile_visible(b if batch > 1 else 7, h if heads > 1 else 7, i0, i1, j0, j1)
        if tile.size == 0:
            continue
        if not tile.any():
            assert got is None
        elif tile.all():
            assert got is True
        else:
            assert isinstance(got, np.ndarray)
            np.testing.assert_array_equal(got, tile, strict=True)


@examples(200)
@given(
    leading=st.sampled_from([(), (2,), (1, 1), (2, 3)]),
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    block_size=BLOCK_SIZES,
    seed=SEEDS,
)
def test_from_blocks(
    device: Device, leading: tuple[int, ...], seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], seed: int
) -> None:
    rows, columns = block_size
    counts = (-(-seqlen_q // rows), -(-seqlen_k // columns))
    blocks = np.random.default_rng(seed).random((*leading, *counts)) < 0.5
    bm = BlockMask.from_blocks(device.put(blocks), seqlen_q, seqlen_k, block_size=block_size)
    i, j = grid(seqlen_q, seqlen_k)
    expected = blocks[..., i // rows, j // columns]
    dense = device.get(bm.to_dense())
    np.testing.assert_array_equal(dense[(0,) * (4 - blocks.ndim)], expected)
    check_store(device, bm, dense)


@examples(100)
@given(seqlen_q=LENGTHS, seqlen_k=LENGTHS, batch=st.integers(0, 2), heads=st.integers(1, 2), block_size=BLOCK_SIZES)
def test_from_function(seqlen_q: int, seqlen_k: int, batch: int, heads: int, block_size: tuple[int, int]) -> None:
    tables = np.random.default_rng(0).random((2, 2, 200, 200)) < 0.5
    rules: list[Callable[[Any, Any, Any, Any], Any]] = [
        lambda b, h, i, j: tables[b, h, i, j],
        lambda b, h, i, j: (i >= j) & ~(h == 1) | (j % 3 == b),
        lambda b, h, i, j: j < 70,
        lambda b, h, i, j: i < 70,
        lambda b, h, i, j: h == 1,
        lambda b, h, i, j: True,
        lambda b, h, i, j: [False, True][h],
    ]
    b, h, i, j = np.ogrid[:batch, :heads, :seqlen_q, :seqlen_k]
    for rule in rules[:-1]:
        bm = BlockMask.from_function(rule, seqlen_q, seqlen_k, batch, heads, block_size)
        expected = np.broadcast_to(rule(b, h, i, j), (batch, heads, seqlen_q, seqlen_k))
        np.testing.assert_array_equal(dense_of(bm), expected)
    # The head is also an index of Python's lists.
    bm = BlockMask.from_function(rules[-1], seqlen_q, seqlen_k, batch=None, heads=heads)
    assert (dense_of(bm) == (np.arange(heads) == 1)[:, None, None]).all()


def test_strips_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> list[Dense]:
        masks = [
            BlockMask.from_function(lambda b, h, i, j: (i * 7 + j * 3) % 11 < 5, 300, 700),
            BlockMask.bigbird(700, 3, 1, 2, 3, heads=2, block_size=(48, 80)),
            BlockMask.random(300, 700, 0.2, 3, heads=2, block_size=(100, 30)),
            BlockMask.strided(500, 30, 70),
            BlockMask.longformer(500, 31, [3, 400]),
        ]
        return [dense_of(bm) for bm in masks]

    whole = make()
    monkeypatch.setattr(store, "ELEMENTS_AT_ONCE", 1)
    monkeypatch.setattr(block_mask, "FUNCTION_ELEMENTS", 1)
    for strips, at_once in zip(make(), whole, strict=True):
        np.testing.assert_array_equal(strips, at_once)


def test_a_mask_keeps_what_it_was_made_from() -> None:
    mask = np.tri(100, dtype=bool)
    bm = BlockMask.from_dense(mask)
    mask[...] = False
    bm.to_dense()[...] = True
    np.testing.assert_array_equal(bm.to_dense()[0, 0], np.tri(100, dtype=bool))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda bm: pickle.loads(pickle.dumps(bm))])
def test_copies_are_masks_of_their_own(copied: Callable[[BlockMask], BlockMask]) -> None:
    """A process to which a mask is sent may have made masks of its own, which a copy must not be taken for."""
    bm = BlockMask.from_dense(np.tri(100, 90, 7, dtype=bool), block_size=(16, 32))
    other = copied(bm)
    assert other.serial != bm.serial
    assert (other.shape, other.block_size) == (bm.shape, bm.block_size)
    np.testing.assert_array_equal(other.to_dense(), bm.to_dense())


@pytest.mark.parametrize("beside", [{}, {"causal": True}, {"window": (20, None), "dropout_p": 0.3, "dropout_seed": 4}])
def test_a_window_as_a_block_mask_is_that_window(device: Device, beside: dict[str, Any]) -> None:
    """Both give the same bits in both passes; lengths, which move a window, leave the mask where it is."""
    rng = np.random.default_rng(0)
    sizes = {"q": (2, 90, 2, 16), "k": (2, 150, 2, 16), "v": (2, 150, 2, 16), "dout": (2, 90, 2, 16)}
    x = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    bm = BlockMask.sliding_window(90, 150, 30, 7)
    window = {"window": (20, 7) if "window" in beside else (30, 0 if beside else 7)}
    lengths = {"q_lengths": np.array([70, 90], np.int32), "kv_lengths": np.array([150, 100], np.int32)}

    def results(**options: Any) -> list[Any]:
        arrays = device.put({**x, **options})
        dout, q, k, v = (arrays.pop(name) for name in ("dout", "q", "k", "v"))
        out, backward = cuflash.attention_vjp(q, k, v, **arrays)
        return [device.get(y) for y in (out, *backward(dout))]

    for ours, same in zip(results(**beside, block_mask=bm), results(**{**beside, **window}), strict=True):
        np.testing.assert_array_equal(ours, same)
    bm = copy.copy(bm)
    moved = results(**beside, **lengths, block_mask=bm)
    assert bm._window is None  # nobody looked for it
    for ours, same in zip(moved, results(**beside, **lengths, mask=bm.to_dense()), strict=True):
        np.testing.assert_allclose(ours, same, rtol=1e-5, atol=1e-5)


def test_heads_of_equal_patterns_share_their_bits() -> None:
    one, many = (BlockMask.strided(1000, 10, 7, heads=heads) for heads in (1, 32))
    assert many.arrays(np)[1].nbytes == one.arrays(np)[1].nbytes


SEQLEN = 8192
LARGE: dict[str, Callable[[], BlockMask]] = {
    "sliding_window": lambda: BlockMask.sliding_window(SEQLEN, SEQLEN, 1000, 10),
    "strided": lambda: BlockMask.strided(SEQLEN, 100, 100, causal=True),
    "fixed": lambda: BlockMask.fixed(SEQLEN, 128, 8),
    "longformer": lambda: BlockMask.longformer(SEQLEN, 512, 4),
    "bigbird": lambda: BlockMask.bigbird(SEQLEN, 3, 2, 3, 0, heads=2),
    "bigbird elements": lambda: BlockMask.bigbird(SEQLEN, 3, 2, 3, 0, block_size=(1, 1)),
    "random": lambda: BlockMask.random(SEQLEN, SEQLEN, 0.1, 0, heads=2),
    "random elements": lambda: BlockMask.random(SEQLEN, SEQLEN, 0.1, 0, block_size=(1, 1)),
    "from_blocks": lambda: BlockMask.from_blocks(np.eye(64, dtype=bool), SEQLEN, SEQLEN),
    "from_function": lambda: BlockMask.from_function(lambda b, h, i, j: (i - j) % 3 == 0, SEQLEN, SEQLEN),
    "and": lambda: BlockMask.strided(SEQLEN, 100, 100) & BlockMask.fixed(SEQLEN, 128, 8),
    "or": lambda: BlockMask.strided(SEQLEN, 100, 100) | BlockMask.fixed(SEQLEN, 128, 8),
    "not": lambda: ~BlockMask.strided(SEQLEN, 100, 100),
}


@pytest.mark.parametrize("name", LARGE)
def test_no_dense_array_is_made(name: str) -> None:
    LARGE[name]()  # imports and caches do not count
    tracemalloc.start()
    try:
        bm = LARGE[name]()
        bm.density  # noqa: B018
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The bits of every element, the most that a mask keeps, take an eighth of the dense bools; a few copies are made.
    assert peak < SEQLEN * SEQLEN / 2


def test_long_sequences() -> None:
    seqlen = 1 << 17
    bm = BlockMask.sliding_window(seqlen, seqlen, 1000, 0)
    assert bm.density == pytest.approx((1001 * seqlen - 1000 * 1001 / 2) / seqlen**2, rel=1e-12)
    last = seqlen - 1
    np.testing.assert_array_equal(
        bm.tile_visible(0, 0, last, seqlen, last - 1010, seqlen), [[False] * 10 + [True] * 1001]
    )


def test_repr_says_what_the_mask_is() -> None:
    bm = BlockMask.sliding_window(100, 200, 9, 0, heads=4, block_size=(32, 64))
    text = repr(bm)
    assert text == ("BlockMask(batch=1, heads=4, seqlen_q=100, seqlen_k=200, block_size=(32, 64), density=0.05)")


def test_density_of_nothing_is_zero() -> None:
    assert BlockMask.sliding_window(0, 5, None, None).density == 0.0


def test_torch_and_jax_masks_come_back_as_such() -> None:
    mask = random_dense(np.random.default_rng(0), (2, 70, 130))
    torch = pytest.importorskip("torch")
    bm = BlockMask.from_dense(torch.from_numpy(mask))
    dense: Any = bm.to_dense()
    assert isinstance(dense, torch.Tensor)
    np.testing.assert_array_equal(dense[0].numpy(), mask)
    rule = BlockMask.from_function(lambda b, h, i, j: torch.from_numpy(mask)[h, i, j], 70, 130, heads=2)
    np.testing.assert_array_equal(rule.to_dense()[0], mask)
    jax = pytest.importorskip("jax")
    bm = BlockMask.from_blocks(jax.numpy.asarray(mask), 700, 1300, block_size=(10, 10))
    assert isinstance(bm.to_dense(), jax.Array)
    np.testing.assert_array_equal(np.asarray(bm.to_dense())[0, :, ::10, ::10], mask)


def test_gpu_masks_stay_on_their_device(device: Device) -> None:
    mask = random_dense(np.random.default_rng(0), (2, 100, 300))
    bm = BlockMask.from_dense(device.put(mask))
    assert isinstance(bm.to_dense(), device.xp.ndarray)
    assert isinstance((bm & bm).to_dense(), device.xp.ndarray)
    assert cuflash.BlockMask is BlockMask
