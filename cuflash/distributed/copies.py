"""Copy engines carry arrays of any strides as rows of bytes, all of one width, at a pitch on either side.

So a rank's tokens of some heads go from the array that has all heads into the one that has all tokens, and no kernel
makes them contiguous in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cuflash.kept import kept

# Narrower rows than this are slow, bytes of which most are not wanted.
LEAST_WIDTH = 128


class Rows(NamedTuple):
    """One copy, in bytes from the first element of either array."""

    target: int
    source: int
    width: int
    height: int
    target_pitch: int
    source_pitch: int


def rows_of(
    shape: Sequence[int], itemsize: int, target_strides: Sequence[int], source_strides: Sequence[int]
) -> list[Rows] | None:
    """Return the copies between two arrays of one shape; None where they have no rows that are wide enough."""
    axes: list[tuple[int, int, int]] = []  # (length, stride in the target, stride in the source), the last axis first
    for length, *strides in reversed(list(zip(shape, target_strides, source_strides, strict=True))):
        if not length:
            return []
        if length == 1:
            continue
        if axes and all(stride == axes[-1][0] * inner for stride, inner in zip(strides, axes[-1][1:], strict=True)):
            axes[-1] = (axes[-1][0] * length, *axes[-1][1:])
        else:
            axes.append((length, strides[0], strides[1]))
    width = itemsize
    if axes and axes[0][1:] == (itemsize, itemsize):
        width *= axes.pop(0)[0]
    if (axes and width < LEAST_WIDTH) or any(min(strides) < width for _, *strides in axes):
        return None
    height, *pitches = axes.pop(0) if axes else (1, width, width)
    copies = [Rows(0, 0, width, height, *pitches)]
    for length, *strides in axes:
        copies = [
            rows._replace(target=rows.target + n * strides[0], source=rows.source + n * strides[1])
            for n in range(length)
            for rows in copies
        ]
    return copies


@kept
def has_wide_rows(shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...]) -> bool:
    """Return True if an array can be copied as it lies into a contiguous one."""
    return rows_of(shape, itemsize, contiguous_strides(shape, itemsize), strides) is not None


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides)) if shape else ()


def enqueue(copies: Sequence[Rows], target: int, source: int, stream: int) -> None:
    """Enqueue copies between addresses of GPUs, of which either may be another GPU's."""
    from cupy.cuda import runtime

    for to, origin, width, height, to_pitch, from_pitch in copies:
        if height == 1 or to_pitch == from_pitch == width:
            runtime.memcpyAsync(target + to, source + origin, width * height, runtime.memcpyDefault, stream)
        else:
            runtime.memcpy2DAsync(
                target + to, to_pitch, source + origin, from_pitch, width, height, runtime.memcpyDefault, stream
            )
