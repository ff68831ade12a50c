"""Checks that an output shares no byte with an input or with another output."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash.problem.checks import Array
from cuflash.problem.own_rules import label_of

# The exact test takes at most so many steps; slices of a fused qkv take a few hundred.
_MAX_WORK: Any = 1_000_000


def check_target(name: str, target: Array, inputs: dict[str, Array | None]) -> None:
    """Raise ValueError unless the target can be written and shares no memory with `inputs`, other targets included."""
    _check_writable(name, target)
    if target.size and target.shape and target.shape[-1] > 1 and target.strides[-1] != target.dtype.itemsize:
        raise ValueError(
            f"{name}: expected a contiguous last axis (stride {target.dtype.itemsize}), got strides {target.strides}"
        )
    check_written(name, target, inputs)


def check_written(name: str, target: Array, inputs: dict[str, Array | None]) -> None:
    """Check as `check_target` does, but let the last axis have any stride."""
    _check_writable(name, target)
    if target.size == 0:
        return
    extent = target.dtype.itemsize
    for stride, size in sorted((abs(stride), size) for size, stride in zip(target.shape, target.strides, strict=True)):
        if size > 1 and stride < extent:
            raise ValueError(
                f"{name}: expected distinct elements, got a broadcast or overlapping ones with strides {target.strides}"
            )
        extent += (size - 1) * stride
    for other, x in inputs.items():
        if x is not None and share_memory(target, x):
            raise ValueError(
                f"{name}: expected no overlap with an input or another output, got memory shared with {label_of(other)}"
            )


def _check_writable(name: str, target: Array) -> None:
    if isinstance(target, np.ndarray) and not target.flags.writeable:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")


def share_memory(a: Array, b: Array) -> bool:
    """Return True if two arrays have a byte in common; interleaved slices of one buffer have none."""
    first, second = _phantom(a), _phantom(b)
    if not np.may_share_memory(first, second):
        return False
    try:
        return bool(np.shares_memory(first, second, max_work=_MAX_WORK))
    except (np.exceptions.TooHardError, OverflowError):
        return True


class _Addresses:
    """A device array for NumPy to reason about; nothing reads it."""

    def __init__(self, x: Array) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.dtype.itemsize}",
            "data": (x.data.ptr, True),
        }


def _phantom(x: Array) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.asarray(_Addresses(x))


class Distances(NamedTuple):
    """Distances from one array's address to another's at which two arrays of their metadata share no byte."""

    before: int  # at this distance or less the first array ends where the second begins
    behind: int  # at this distance or more it begins where the second ends
    known: int  # lies between the two and is known to be right, as of slices of one buffer

    @classmethod
    def between(cls, target: Array, other: Array) -> Distances:
        """The distances of two arrays that have no byte in common."""
        (low, high), (other_low, other_high) = _extent(target), _extent(other)
        return cls(other_low - high, other_high - low, _address(target) - _address(other))

    def allow(self, distance: int) -> bool:
        """Arrays at this distance are known to have none."""
        return distance >= self.behind or distance <= self.before or distance == self.known


def _extent(x: Array) -> tuple[int, int]:
    reaches = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    return sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches) + x.dtype.itemsize


def _address(x: Array) -> int:
    return int(_phantom(x).__array_interface__["data"][0])
