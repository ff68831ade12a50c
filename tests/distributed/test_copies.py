"""Copies of rows between arrays of any strides move every element to its place, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cuflash.distributed import copies

Array = NDArray[Any]


def view_of(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> Array:
    """Draw a view of a shape into a larger array, with its axes in some order, of which some elements are skipped."""
    order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
    larger = [shape[axis] * draw(st.sampled_from((1, 1, 2))) + draw(st.integers(0, 2)) for axis in order]
    whole = np.zeros(larger, dtype)
    steps = [
        draw(st.sampled_from((1, 1, length // max(1, shape[axis])))) or 1
        for axis, length in zip(order, larger, strict=True)
    ]
    cut = whole[tuple([slice(0, shape[axis] * step, step) for axis, step in zip(order, steps, strict=True)])]
    return cut.transpose(np.argsort(order))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Array, Array]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3))) + (draw(st.sampled_from((1, 16, 64, 130))),)
    dtype = draw(st.sampled_from(("float16", "float64", "uint8")))
    return view_of(draw, shape, dtype), view_of(draw, shape, dtype)


def bytes_of(x: Array) -> tuple[Array, int]:
    """Return the bytes of the whole array that x is a view of, and where x begins."""
    root = x
    while root.base is not None:
        root = root.base
    begin = x.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return root.reshape(-1).view(np.uint8), begin


@given(pairs())
def test_every_element_arrives_and_nothing_else_is_written(pair: tuple[Array, Array]) -> None:
    target, source = pair
    source[...] = np.random.default_rng(0).integers(1, 100, source.shape)
    rows = copies.rows_of(target.shape, target.itemsize, target.strides, source.strides)
    if rows is None:
        assert not (target.flags.c_contiguous and source.flags.c_contiguous)
        return
    (to, first), (origin, begin) = bytes_of(target), bytes_of(source)
    for row in rows:
        for line in range(row.height):
            a, b = first + row.target + line * row.target_pitch, begin + row.source + line * row.source_pitch
            to[a : a + row.width] = origin[b : b + row.width]
    np.testing.assert_array_equal(target, source)
    target[...] = 0
    assert not to.any()


def test_heads_of_tokens_are_one_copy() -> None:
    """A rank's tokens of some heads are rows at a pitch on both sides; a batch is a copy for each sequence."""
    whole, part = np.zeros((1, 64, 8, 32), np.float16), np.zeros((1, 32, 16, 32), np.float16)
    target, source = whole[:, 32:], part[:, :, 8:]
    assert copies.rows_of(target.shape, 2, target.strides, source.strides) == [copies.Rows(0, 0, 512, 32, 512, 1024)]
    batch = np.zeros((3, 40, 16, 32), np.float16)[:, 8:, 8:]
    found = copies.rows_of(batch.shape, 2, copies.contiguous_strides(batch.shape, 2), batch.strides)
    assert found is not None
    assert [row.source for row in found] == [0, 40960, 81920]


@pytest.mark.parametrize("step", [2, 3])
def test_narrow_rows_are_no_copies(step: int) -> None:
    x = np.zeros((100 * step,), np.float32)[::step]
    assert not copies.has_wide_rows(x.shape, x.itemsize, x.strides)
    y = np.zeros((5, 3), np.float32)
    assert copies.has_wide_rows(y.shape, y.itemsize, y.strides)
