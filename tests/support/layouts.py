"""Ways for an array to lie in memory that the library promises to take as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

# The storage around an array holds this byte, which turns results that read it into NaN, and bools into True.
POISON_BYTE = 0xFF


@dataclass(frozen=True)
class Layout:
    """The places of the elements of an array with a given number of axes in their storage.

    Attributes
    ----------
    order : all axes, in the order in which the storage nests them (outermost first)
    before, after : unused elements of the storage at either end of each axis; they give odd offsets and odd strides
    step : one element of the array for so many elements of the storage, per axis
    flip : axes that run backwards
    broadcast : axes of stride 0, all of whose entries are the first one
    unit_stride : bytes between the entries of axes of size 1, which mean nothing, or None for the natural ones
    """

    order: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    step: tuple[int, ...]
    flip: tuple[bool, ...]
    broadcast: tuple[bool, ...]
    unit_stride: int | None

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return an array of the same values (but for axes of stride 0) that lies in memory by this layout."""
        if values.size == 0:
            return values.copy()
        shape, itemsize = values.shape, values.dtype.itemsize
        axes = range(values.ndim)
        kept = [1 if self.broadcast[a] else shape[a] for a in axes]
        room = [self.before[a] + (kept[a] - 1) * self.step[a] + 1 + self.after[a] for a in axes]
        strides, offset, size = [0] * values.ndim, 0, itemsize
        for a in reversed(self.order):
            strides[a] = self.step[a] * size
            offset += self.before[a] * size
            size *= room[a]
        for a in axes:
            if self.flip[a]:
                offset += (kept[a] - 1) * strides[a]
                strides[a] = -strides[a]
            if self.broadcast[a]:
                strides[a] = 0
            if shape[a] == 1 and self.unit_stride is not None:
                strides[a] = self.unit_stride
        storage = np.full(size, POISON_BYTE, np.uint8)
        view: NDArray[Any] = np.ndarray(shape, values.dtype, storage, offset, tuple(strides))
        first = tuple(slice(0, 1) if self.broadcast[a] else slice(None) for a in axes)
        view[first] = values[first]
        return view


def plain(ndim: int) -> Layout:
    """Return C order without gaps."""
    zeros, no = (0,) * ndim, (False,) * ndim
    return Layout(tuple(range(ndim)), zeros, zeros, (1,) * ndim, no, no, None)


@st.composite
def layouts(draw: st.DrawFn, ndim: int, *, contiguous_rows: bool = False, writable: bool = False) -> Layout:
    """Draw layouts of an array with `ndim` axes, half of them plain.

    `contiguous_rows` keeps the last axis contiguous (as ``out=`` needs it), `writable` leaves out axes of stride 0.
    """
    if ndim == 0 or draw(st.booleans()):
        return plain(ndim)
    last = ndim - 1

    scattered_rows = not contiguous_rows and draw(st.integers(0, 4)) == 0
    order = draw(st.permutations(range(ndim if scattered_rows else last)))
    slack = st.tuples(*[st.sampled_from([0, 0, 0, 1, 3])] * ndim)
    step = list(draw(st.tuples(*[st.sampled_from([1, 1, 1, 2])] * ndim)))
    flip = list(draw(st.tuples(*[st.sampled_from([False, False, False, True])] * ndim)))
    broadcast = list(draw(st.tuples(*[st.sampled_from([False] * 6 + [True])] * ndim)))
    if not scattered_rows:
        order = [*order, last]
        step[last], flip[last], broadcast[last] = 1, False, False
    if writable:
        broadcast = [False] * ndim
    return Layout(
        order=tuple(order),
        before=draw(slack),
        after=draw(slack),
        step=tuple(step),
        flip=tuple(flip),
        broadcast=tuple(broadcast),
        unit_stride=draw(st.sampled_from([None, None, 0, 1, -7, 2**40])),
    )
