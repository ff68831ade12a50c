"""The named patterns of block masks agree with their literal definitions, each as its paper has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mask_cases import BLOCK_SIZES, LENGTHS, SEEDS, dense_of, expect, grid
from strategies import examples

from cuflash import BlockMask

SIDES = st.one_of(st.none(), st.integers(0, 210))
WINDOWS: dict[str, Any] = {"seqlen_q": LENGTHS, "seqlen_k": LENGTHS, "left": SIDES, "right": SIDES}
PATTERN_OPTIONS = {"heads": st.integers(1, 3), "block_size": BLOCK_SIZES, "causal": st.booleans()}


@examples(200)
@given(
    **WINDOWS,
    options=st.fixed_dictionaries(PATTERN_OPTIONS),
)
def test_sliding_window(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, options: dict[str, Any]
) -> None:
    i, j = grid(seqlen_q, seqlen_k)
    center = i + seqlen_k - seqlen_q
    dense = np.ones((seqlen_q, seqlen_k), bool)
    if left is not None:
        dense &= center - left <= j
    if right is not None:
        dense &= j <= center + right
    expect(BlockMask.sliding_window(seqlen_q, seqlen_k, left, right, **options), dense, **options)


@examples(200)
@given(
    **WINDOWS,
    heads=st.integers(1, 3),
    seed=SEEDS,
)
def test_a_window_is_found(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, heads: int, seed: int
) -> None:
    """A window is found whatever the mask was made from; a mask that differs in one element of one head is none."""
    dense = BlockMask.sliding_window(seqlen_q, seqlen_k, left, right, heads=heads).to_dense()
    window = BlockMask.from_dense(dense).window
    if not dense[..., :1, :].any() or not dense[..., -1:, :].any():
        assert window is None
        return
    assert window is not None
    np.testing.assert_array_equal(BlockMask.sliding_window(seqlen_q, seqlen_k, *window, heads=heads).to_dense(), dense)
    at = tuple(np.random.default_rng(seed).integers(0, dense.shape))
    dense[at] = not dense[at]
    other = BlockMask.from_dense(dense).window
    if other is not None:  # an element in a corner, and one head
        np.testing.assert_array_equal(
            BlockMask.sliding_window(seqlen_q, seqlen_k, *other).to_dense()[0, 0], dense[0, 0]
        )
        assert heads == 1


def test_other_masks_are_no_windows() -> None:
    n = 200
    others = {
        "shifted": BlockMask.from_function(lambda b, h, i, j: (i + 5 < j) & (j < i + 50) | (i == n - 1), n, n),
        "before the diagonal": BlockMask.from_function(lambda b, h, i, j: (j < i) | (i == 0) & (j == 0), n, n),
        "documents": BlockMask.fixed(n, 50, 0),
        "random": BlockMask.random(n, n, 0.5, 0, block_size=(16, 16)),
        "two bands": BlockMask.from_function(lambda b, h, i, j: abs(i - j) % 100 < 3, n, n),
        "nothing": BlockMask.from_blocks(np.zeros((2, 2), bool), n, n),
        "no queries": BlockMask.sliding_window(0, n, 5, 5),
    }
    assert {name: bm.window for name, bm in others.items()} == dict.fromkeys(others)


def test_sliding_window_of_any_size() -> None:
    wide, unbounded = (BlockMask.sliding_window(5, 7, left, 0).to_dense() for left in (2**70, None))
    assert np.array_equal(wide, unbounded)


@examples(200)
@given(
    seqlen=LENGTHS,
    local=st.integers(0, 210),
    stride=st.integers(1, 210),
    options=st.fixed_dictionaries(PATTERN_OPTIONS),
)
def test_strided(seqlen: int, local: int, stride: int, options: dict[str, Any]) -> None:
    i, j = grid(seqlen, seqlen)
    dense = (abs(i - j) <= local) | ((i - j) % stride == 0)
    expect(BlockMask.strided(seqlen, local, stride, **options), dense, **options)


@examples(200)
@given(
    seqlen=LENGTHS,
    lengths=st.integers(1, 210).flatmap(lambda local: st.tuples(st.just(local), st.integers(0, local))),
    options=st.fixed_dictionaries(PATTERN_OPTIONS),
)
def test_fixed(seqlen: int, lengths: tuple[int, int], options: dict[str, Any]) -> None:
    local, summary = lengths
    i, j = grid(seqlen, seqlen)
    dense = (i // local == j // local) | (j % local >= local - summary)
    expect(BlockMask.fixed(seqlen, local, summary, **options), dense, **options)


@examples(200)
@given(data=st.data(), seqlen=LENGTHS, window=st.integers(0, 210), options=st.fixed_dictionaries(PATTERN_OPTIONS))
def test_longformer(data: st.DataObject, seqlen: int, window: int, options: dict[str, Any]) -> None:
    positions = st.lists(st.integers(0, max(seqlen - 1, 0)), max_size=5 if seqlen else 0)
    tokens = data.draw(st.one_of(st.integers(0, 12), positions, positions.map(lambda x: np.array(x, np.int32))))
    is_global = np.zeros(seqlen, bool)
    is_global[slice(tokens) if isinstance(tokens, int) else np.asarray(tokens, int)] = True
    i, j = grid(seqlen, seqlen)
    dense = (abs(i - j) <= window // 2) | is_global[i] | is_global[j]
    expect(BlockMask.longformer(seqlen, window, tokens, **options), dense, **options)


@examples(200)
@given(
    seqlen=LENGTHS,
    size=st.sampled_from([1, 7, 16, 64, 128]),
    window=st.integers(0, 6),
    num_global=st.integers(0, 4),
    num_random=st.integers(0, 4),
    seed=SEEDS,
    heads=st.integers(1, 3),
    causal=st.booleans(),
)
def test_bigbird(
    seqlen: int, size: int, window: int, num_global: int, num_random: int, seed: int, heads: int, causal: bool
) -> None:
    arguments = (seqlen, window, num_global, num_random, seed)
    bm = BlockMask.bigbird(*arguments, heads=heads, block_size=(size, size))
    i, j = (index // size for index in grid(seqlen, seqlen))
    known = (abs(i - j) <= window // 2) | (i < num_global) | (j < num_global)
    dense = dense_of(bm)
    assert (dense | ~known).all()
    # The rest are whole blocks, as many in each row of blocks as were asked for or are left.
    blocks, rest = (x[..., ::size, ::size] for x in (dense & ~known, ~known))
    np.testing.assert_array_equal(dense & ~known, (blocks[..., i, j]) & ~known)
    expected = np.minimum(num_random, rest.sum(axis=-1))
    np.testing.assert_array_equal(blocks.sum(axis=-1), np.broadcast_to(expected, (1, heads, len(expected))))
    again = BlockMask.bigbird(*arguments, heads=heads, block_size=(size, size), causal=causal)
    expect(again, dense, heads, (size, size), causal)


def test_bigbird_rectangular_blocks_keep_the_diagonal_and_the_widths() -> None:
    bm = BlockMask.bigbird(90, 3, 1, 0, 0, block_size=(10, 15))
    i, j = grid(90, 90)
    rows, columns = i // 10, j // 15
    band = (columns >= rows * 10 // 15 - 1) & (columns <= (rows * 10 + 9) // 15 + 1)
    np.testing.assert_array_equal(dense_of(bm)[0, 0], band | (rows < 1) | (columns < 1))


@examples(200)
@given(
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    density=st.floats(0, 1),
    seed=SEEDS,
    options=st.fixed_dictionaries(PATTERN_OPTIONS),
)
def test_random(seqlen_q: int, seqlen_k: int, density: float, seed: int, options: dict[str, Any]) -> None:
    rows, columns = options["block_size"]
    heads, causal = options["heads"], options["causal"]
    bm = BlockMask.random(seqlen_q, seqlen_k, density, seed, **{**options, "causal": False})
    dense = dense_of(bm)
    blocks = dense[..., ::rows, ::columns]
    i, j = grid(seqlen_q, seqlen_k)
    np.testing.assert_array_equal(dense, blocks[..., i // rows, j // columns])
    assert (blocks.sum(axis=(0, 2, 3)) == round(density * blocks[0, 0].size)).all()
    if blocks.size:
        assert (np.ptp(blocks.sum(axis=-1), axis=-1) <= 1).all()
    expect(BlockMask.random(seqlen_q, seqlen_k, density, seed, **options), dense, heads, (rows, columns), causal)


def test_random_patterns_differ_by_head_and_seed_and_accept_a_generator() -> None:
    makers: list[Callable[[Any], BlockMask]] = [
        lambda seed: BlockMask.random(1024, 1024, 0.3, seed, heads=2, block_size=(32, 64)),
        lambda seed: BlockMask.bigbird(1024, 1, 1, 3, seed, heads=2, block_size=(32, 32)),
    ]
    for make in makers:
        dense = dense_of(make(5))
        assert (dense[0, 0] != dense[0, 1]).any()
        assert (dense != dense_of(make(6))).any()
        np.testing.assert_array_equal(dense, dense_of(make(np.random.default_rng(5))))


def test_random_blocks_are_uniform() -> None:
    heads = 400
    blocks = dense_of(BlockMask.random(10, 7, 0.3, 1, heads=heads, block_size=(1, 1)))[0]
    # Each block is a Bernoulli(0.3) over the heads, whose mean may be off by five standard deviations.
    assert abs(blocks.mean(axis=0) - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / heads)
    others = dense_of(BlockMask.bigbird(12, 1, 2, 3, 1, heads=heads, block_size=(1, 1)))[0, :, 6]
    chosen = np.delete(others.mean(axis=0), [0, 1, 6])
    assert abs(chosen - 3 / 9).max() < 5 * np.sqrt(2 / 9 / heads)


def test_numpy_integers_of_any_kind_are_sizes() -> None:
    # Unsigned numbers wrap below 0, and those of 8 bits soon at the top.
    kinds: tuple[Any, ...] = np.int8, np.uint8, np.uint64
    for kind in kinds:
        rule = BlockMask.from_function(lambda b, h, i, j: i <= j, kind(70), kind(90), kind(2), kind(3))
        want = BlockMask.from_function(lambda b, h, i, j: i <= j, 70, 90, 2, 3)
        assert rule.shape == want.shape
        assert (dense_of(rule) == dense_of(want)).all()
        blocks = BlockMask.bigbird(90, kind(3), kind(1), kind(2), 5, block_size=(1, 4))
        assert (dense_of(blocks) == dense_of(BlockMask.bigbird(90, 3, 1, 2, 5, block_size=(1, 4)))).all()
