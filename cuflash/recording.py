"""The launches of a call on a GPU, kept so that a later call with the same metadata repeats them on its own arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cuflash import capture
from cuflash.config import MOST_KEPT
from cuflash.tensor_map import ALIGNMENT

if TYPE_CHECKING:
    from cuflash.kernels import Device

Array = Any
Addresses = list[int]
# Where the GPU path runs on NumPy arrays: the tests' device.
host_device: Device | None = None
_VALUES = (bool, int, float, str, type(None))


class Launch(Protocol):
    """A kernel with all of its launch that does not change from call to call."""

    pointer_words: tuple[int, ...]

    def enqueue(self, addresses: Addresses, places: Iterable[tuple[int, int]], seed: int | None, stream: int) -> None:
        """Enqueue it; `places` are pairs: where a pointer stands among the parameters, and in `addresses`."""


class Metadata(NamedTuple):
    """A call's arguments: all that the checks look at as a dictionary key, and where its arrays are."""

    key: tuple[Any, ...]
    addresses: Addresses


def metadata(what: Any, arrays: Iterable[Array | None], keywords: Mapping[str, Any]) -> Metadata | None:
    """The metadata of a call of kind `what` on CuPy arrays; None if it cannot be repeated by addresses alone."""
    key, addresses = [what], []
    for x in arrays:
        if x is None:
            key.append(None)
        elif type(x).__module__ == "cupy":
            memory = x.data
            key.append((x.shape, x.strides, x.dtype, memory.device_id))
            addresses.append(memory.ptr)
        elif host_device is not None and type(x) is np.ndarray:
            key.append((x.shape, x.strides, x.dtype))
            addresses.append(host_device.pointer(x))
        else:
            return None
    for name, x in keywords.items():
        kind = type(x)
        if kind in _VALUES or isinstance(x, np.generic):
            key += (name, kind, x)  # the kind tells apart what compares equal, such as True and 1
        elif kind is tuple:
            key += (name, repr(x))
        else:
            found = metadata(name, (x,), {})
            if found is None:
                return None
            key.append(found.key)
            addresses += found.addresses
    return Metadata(tuple(key), addresses)


class Repeat:
    """Launches on arrays that are given by their addresses, with results and scratch memory of their own.

    Parameters
    ----------
    device : Device
    results : sequence of (shape, dtype)
        Of the call, whose addresses follow those of the arguments; None for one that was not wanted.
    scratch_sizes : sequence of int
        Bytes of the scratch memory, whose addresses follow.
    steps : sequence of (Launch, pairs)
        See `Launch`.
    """

    __slots__ = ("_device", "_results", "_scratch_sizes", "_steps")

    def __init__(
        self,
        device: Device,
        results: Sequence[tuple[tuple[int, ...], Any] | None],
        scratch_sizes: Sequence[int],
        steps: Sequence[tuple[Launch, tuple[tuple[int, int], ...]]],
    ) -> None:
        self._device = device
        self._results = tuple(results)
        self._scratch_sizes = tuple(scratch_sizes)
        self._steps = tuple(steps)

    def __call__(self, addresses: Addresses) -> list[Array | None] | None:
        """The results; None, and nothing is done, if the current device or these addresses may need other kernels."""
        device = self._device
        if not device.is_current():
            return None
        results: list[Array | None] = []
        for wanted in self._results:
            if wanted is None:
                results.append(None)
            else:
                x = device.empty(*wanted)
                results.append(x)
                addresses.append(device.pointer(x))
        if not are_aligned(addresses):
            return None
        stream = device.stream()
        # One by one, as the recorded call had it: under graph capture the pool can only give what it has given before.
        scratch = []
        captured = self._scratch_sizes and device.capture(stream)
        for size in self._scratch_sizes:
            if captured:
                block = capture.take(captured, stream, size, device.lasting)
                addresses.append(block.address)
                scratch.append(block)
            else:
                address, memory = device.scratch(size)
                addresses.append(address)
                scratch.append(memory)
        for launch, places in self._steps:
            launch.enqueue(addresses, places, None, stream)
        # Later work of the same stream may have the scratch memory from here on.
        if captured:
            capture.give_back(captured, stream, scratch)
        return results


_repeats: dict[tuple[Any, ...], Repeat] = {}


def repeated(call: Metadata | None) -> list[Array | None] | None:
    """The results of a call, if one with its metadata has been recorded."""
    if call is None:
        return None
    known = _repeats.get(call.key)
    return None if known is None else known(call.addresses)


def are_aligned(addresses: Iterable[int]) -> bool:
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
        self._capture = device.capture(stream)
        self._blocks: list[capture.Block] = []
        self._scratch: list[Array] = []
        self._steps: list[tuple[Launch, dict[str, Array]]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory of the call; like any other it holds anything at first, at each repetition too."""
        if self._capture:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self._blocks.append(capture.take(self._capture, self._stream, size, self._device.lasting))
            scratch = self._device.empty(shape, dtype, self._blocks[-1].memory)
        else:
            scratch = self._device.empty(shape, dtype)
        self._scratch.append(scratch)
        return scratch

    def end(self) -> None:
        """Every launch is enqueued: others may have the scratch memory."""
        if self._capture:
            capture.give_back(self._capture, self._stream, self._blocks)

    def add(self, launch: Launch, arrays: dict[str, Array]) -> None:
        """Note a launch."""
        self._steps.append((launch, arrays))

    def keep(self, call: Metadata, arguments: Sequence[str], results: Mapping[str, Array | None]) -> None:
        """Let `repeated` know the call, unless something about its launches is particular to it.

        Parameters
        ----------
        call : Metadata
        arguments : sequence of str
            Names of the arrays whose addresses `call` has, in their order.
        results : dict
            What it returns, None where that is not wanted.
        """
        order = [*arguments, *(name for name, x in results.items() if x is not None)]
        # By name first: two arrays of this call may be one, and of the next not.
        places = {(name, id(self._arrays[name])): i for i, name in enumerate(order) if name in self._arrays}
        scratch = {id(x): len(order) + i for i, x in enumerate(self._scratch)}
        steps = []
        for launch, arrays in self._steps:
            found = [places.get((name, id(x)), scratch.get(id(x), -1)) for name, x in arrays.items()]
            if -1 in found:
                return
            steps.append((launch, tuple(zip(launch.pointer_words, found, strict=True))))
        if not are_aligned([self._device.pointer(x) for x in self._arrays.values()]):
            return
        if len(_repeats) >= MOST_KEPT:
            _repeats.clear()
        wanted = [None if x is None else (x.shape, x.dtype) for x in results.values()]
        _repeats[call.key] = Repeat(self._device, wanted, [x.nbytes for x in self._scratch], steps)
