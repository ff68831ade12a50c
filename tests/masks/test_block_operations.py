"""Operators of BlockMask against those of dense bools, equality, hashes, pictures, and what tab completion offers."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import Device
from hypothesis import given
from hypothesis import strategies as st
from mask_cases import LENGTHS, SEEDS, Dense, check_store, random_dense
from strategies import examples

from cuflash import BlockMask

OPERATIONS: list[Callable[[Any, Any], Any]] = [operator.and_, operator.or_, operator.xor, lambda a, b: a & ~b]


def related(rng: np.random.Generator, a: Dense, shape: tuple[int, ...]) -> Dense:
    """Bools of a shape, near those of `a` or their opposite, so that unions and differences make whole blocks."""
    kind = rng.choice(4)
    if kind == 0:
        return random_dense(rng, shape)
    own = np.broadcast_to(a.any(axis=tuple(range(a.ndim - 2))), shape)
    return own.copy() if kind == 1 else ~own if kind == 2 else ~own | random_dense(rng, shape)


@examples(200)
@given(
    shapes=st.sampled_from([((), ()), ((2,), ()), ((2, 3), (3,)), ((2, 1), (1, 3)), ((1, 1), (0, 2))]),
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    seed=SEEDS,
)
def test_operators_are_those_of_the_bools(
    device: Device, shapes: tuple[tuple[int, ...], tuple[int, ...]], seqlen_q: int, seqlen_k: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = random_dense(rng, (*shapes[0], seqlen_q, seqlen_k))
    b = related(rng, a, (*shapes[1], seqlen_q, seqlen_k))
    one, other = BlockMask.from_dense(device.put(a), (64, 48)), BlockMask.from_dense(device.put(b), (16, 72))
    for operation in OPERATIONS:
        expected = operation(a, b)
        bm = operation(one, other)
        assert bm.block_size == (16, 24)
        assert bm.shape == (1,) * (4 - expected.ndim) + expected.shape
        dense = device.get(bm.to_dense())
        np.testing.assert_array_equal(dense[(0,) * (4 - expected.ndim)], expected)
        check_store(device, bm, dense)
        assert bm.density == (expected.mean() if expected.size else 0)
        same = BlockMask.from_dense(expected, (7, 5))
        assert bm == same and hash(bm) == hash(same)
        assert (one == bm) == (one.shape == bm.shape and np.array_equal(np.broadcast_to(a, expected.shape), expected))
    assert (~one).block_size == one.block_size
    np.testing.assert_array_equal(device.get((~one).to_dense()), ~device.get(one.to_dense()))
    check_store(device, ~one, device.get((~one).to_dense()))
    assert ~~one == one


def test_operators_of_a_host_and_a_device_mask(device: Device) -> None:
    dense = random_dense(np.random.default_rng(0), (150, 200))
    window, on_host = BlockMask.sliding_window(150, 200, 20, 20), BlockMask.from_dense(dense)
    on_device = BlockMask.from_dense(device.put(dense))
    assert on_device == on_host and len({on_device, on_host}) == 1
    for operation in OPERATIONS:
        assert operation(window, on_device) == operation(window, on_host)
        assert operation(on_device, window) == operation(on_host, window)
        assert isinstance(operation(on_device, window).to_dense(), device.xp.ndarray)


def test_a_difference_of_one_element_anywhere_makes_masks_differ() -> None:
    rng = np.random.default_rng(0)
    dense = random_dense(rng, (2, 130, 70))
    bm = BlockMask.from_dense(dense)
    for _ in range(50):
        changed = dense.copy()
        place = tuple(rng.integers(dense.shape))
        changed[place] ^= True
        assert bm != BlockMask.from_dense(changed)


def test_equality_is_of_what_is_seen() -> None:
    """Block sizes, copies, and how a mask was made do not count; shapes do."""
    window = BlockMask.sliding_window(300, 200, 10, 3)
    as_rule = BlockMask.from_function(lambda b, h, i, j: abs(2 * (j - i + 100) + 7) <= 13, 300, 200, block_size=(1, 9))
    assert (window == as_rule) == np.array_equal(window.to_dense(), as_rule.to_dense())
    for same in (copy.deepcopy(window), pickle.loads(pickle.dumps(window)), window | window, window & ~(~window)):
        assert same == window and hash(same) == hash(window) and same is not window
    assert window != BlockMask.sliding_window(300, 200, 10, 3, heads=2)
    assert window != BlockMask.sliding_window(300, 200, 10, 4)
    assert window != window.to_dense() and window != 3 and window is not None
    assert BlockMask.strided(0, 1, 2) == BlockMask.fixed(0, 1, 1)


@examples(100)
@given(
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    seed=SEEDS,
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
)
def test_a_picture_shades_every_element(seqlen_q: int, seqlen_k: int, seed: int, rows: int, columns: int) -> None:
    """Each character against its rectangle of the dense mask, whose size the first line tells."""
    dense = random_dense(np.random.default_rng(seed), (2, 2, seqlen_q, seqlen_k))
    picture = BlockMask.from_dense(dense).draw(1, 0, rows=rows, columns=columns)
    title, *lines = picture.split("\n")
    words = title.split()
    height, width = int(words[words.index("elements") - 3]), int(words[words.index("elements") - 1])
    assert (int(words[0]), int(words[4])) == (seqlen_q, seqlen_k)
    if dense.size == 0:
        assert not lines
        return
    assert len(lines) == -(-seqlen_q // height) <= rows and {len(line) for line in lines} == {-(-seqlen_k // width)}
    assert len(lines[0]) <= columns
    for row, line in enumerate(lines):
        for column, shade in enumerate(line):
            share = dense[1, 0, row * height :, column * width :][:height, :width].mean()
            assert shade == (
                "." if share == 0 else "#" if share == 1 else "-" if share <= 0.1 else "+" if share <= 0.5 else "*"
            )


def test_a_picture_of_a_long_mask() -> None:
    """It is drawn from the blocks: the elements, 16 GiB of bools, would take seconds."""
    seqlen = 1 << 17
    lines = BlockMask.sliding_window(seqlen, seqlen, None, 0).draw().split("\n")
    assert lines[0].startswith("131072 queries (down) x 131072 keys (across), 4096 x 2048 elements a character")
    for row, line in enumerate(lines[1:]):
        assert line == "#" * 2 * row + "*+" + "." * (62 - 2 * row)


def test_tab_completion_offers_what_is_for_users() -> None:
    bm = BlockMask.strided(10, 1, 2)
    assert {name for name in dir(bm) if not name.startswith("__")} == {
        *("shape", "block_size", "density", "window", "to_dense", "draw"),
        *("from_dense", "from_blocks", "from_function"),
        *("sliding_window", "strided", "fixed", "longformer", "bigbird", "random"),
    }
    assert "__and__" in dir(bm)
    assert all(hasattr(bm, name) for name in dir(bm))


@pytest.mark.parametrize("name", ["BlockMask", "draw"])
def test_examples_of_the_docstrings(name: str) -> None:
    import doctest

    found = doctest.DocTestFinder().find(BlockMask, globs={"BlockMask": BlockMask, "np": np})
    tests = [test for test in found if test.name.endswith(name) and test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0
