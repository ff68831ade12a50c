"""The launches of a call, kept so that a later call with the same metadata repeats them on its own arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cuflash.kernels import Device
from cuflash.tensor_map import ALIGNMENT

Array = Any
# A launch takes the addresses of the arrays that it was made for, in their order, a seed, and a stream.
Launch = Callable[[list[int], Any, int], None]
# Scratch memory of captured calls: a graph may run at any later time.
_captured: list[Any] = []


class Step(NamedTuple):
    """A launch, and where its addresses stand among those of the call and its scratch memory."""

    launch: Launch
    places: tuple[int, ...]


class Repeat:
    """Launches on arrays that are given by their addresses, with scratch memory of their own."""

    __slots__ = ("_device", "_scratch_sizes", "_steps")

    def __init__(self, device: Device, scratch_sizes: list[int], steps: list[Step]) -> None:
        self._device = device
        self._scratch_sizes = scratch_sizes
        self._steps = steps

    def __call__(self, addresses: list[int]) -> bool:
        """False, and nothing is done, if these addresses may need other kernels."""
        if not are_aligned(addresses):
            return False
        device = self._device
        stream = device.stream()
        # One by one, as the recorded call had it: under graph capture the pool can only give what it has given before.
        scratch = [device.scratch(size) for size in self._scratch_sizes]
        if scratch and device.is_capturing(stream):
            _captured.append(scratch)
        addresses += [address for address, _ in scratch]
        for launch, places in self._steps:
            launch([addresses[i] for i in places], None, stream)
        # Later work of the same stream may have the scratch memory from here on.
        return True


# For one combination of metadata; a device has one entry.
Memo = dict[Device, Repeat]


def are_aligned(addresses: list[int]) -> bool:
    """Whether all are multiples of `ALIGNMENT`: the one thing beside metadata that the choice of kernels depends on."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT == 0


class Recording:
    """Watches the launches of a call.

    Parameters
    ----------
    device : Device
    arrays : dict
        The call's arrays by the names that launches know them by.
    stream : int
        Where they go.
    """

    def __init__(self, device: Device, arrays: dict[str, Array], stream: int) -> None:
        self._device = device
        self._stream = stream
        self._arrays = arrays
        self._places = {name: i for i, name in enumerate(arrays)}
        self._scratch: list[Array] = []
        self._steps: list[Step] = []
        self._is_complete = True

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory of the call; like any other it holds anything at first, at each repetition too."""
        scratch = self._device.empty(shape, dtype)
        if self._device.is_capturing(self._stream):
            _captured.append(scratch)
        self._scratch.append(scratch)
        return scratch

    def add(self, launch: Launch, arrays: dict[str, Array]) -> None:
        """Note a launch; one with an array that is neither the call's nor its scratch memory cannot be repeated."""
        places = [self._place(name, x) for name, x in arrays.items()]
        self._is_complete &= None not in places
        self._steps.append(Step(launch, tuple([place for place in places if place is not None])))

    def _place(self, name: str, x: Array) -> int | None:
        # By name first: two arrays of this call may be one, and of the next not.
        if self._arrays.get(name) is x:
            return self._places[name]
        return next((len(self._arrays) + i for i, scratch in enumerate(self._scratch) if scratch is x), None)

    def keep(self, memo: Memo) -> None:
        """Enter the launches into `memo`, if nothing about them is particular to this call."""
        if self._is_complete and are_aligned([self._device.pointer(x) for x in self._arrays.values()]):
            memo[self._device] = Repeat(self._device, [x.nbytes for x in self._scratch], self._steps)
