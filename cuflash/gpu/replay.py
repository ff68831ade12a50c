"""A call's launches on a GPU are recorded, so that later calls with the same metadata repeat them.

`launch.Work` records, `frontend.metadata` keeps the repetitions by metadata.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from cuflash.cuda.device import Device
from cuflash.gpu.capture import Block, give_back, take
from cuflash.hardware import ALIGNMENT
from cuflash.problem.operands import Addresses, Metadata
from cuflash.problem.overlap import Distances

if TYPE_CHECKING:
    from cuflash.masks.block_mask import BlockMask

Array = Any


class Launch(Protocol):
    """The part of a kernel's launch that does not change from call to call."""

    pointer_words: tuple[int, ...]  # places of the arrays' pointers in the parameter struct, in words

    def enqueue(self, addresses: Addresses, places: Iterable[tuple[int, int]], seed: int | None, stream: int) -> None:
        """Enqueue the kernel; `places` are pairs (word of the parameters, index of the pointer in `addresses`)."""


class Recorded(NamedTuple):
    """The steps of a repetition, in which an array is an index in the list of all addresses.

    The list has the arguments' addresses, then those of new results, of the block mask's store and lists, and of
    scratch memory.
    """

    # A result is the (shape, dtype) of a new array, the index of a target, or None where it is not wanted.
    results: tuple[tuple[tuple[int, ...], Any] | int | None, ...]
    tiles: tuple[tuple[int, int, bool | None], ...]  # tiles of the block mask's lists: block_m, block_n, order of bits
    scratch_sizes: tuple[int, ...]  # bytes of each piece of scratch memory
    steps: tuple[tuple[Launch, tuple[tuple[int, int], ...]], ...]
    apart: tuple[tuple[int, int, Distances], ...]  # targets, and the arrays whose memory they must not share


class Repeat(NamedTuple):
    """A call that repeats recorded launches, with new results and scratch memory."""

    device: Device
    recorded: Recorded

    def __call__(self, metadata: Metadata) -> list[Array | None] | None:
        """Return the results; None, with nothing done, where other kernels may be needed."""
        device, (wanted, tiles, scratch_sizes, steps, apart) = self
        if not device.is_current():
            return None
        addresses = metadata.addresses
        for target, other, distances in apart:
            if not distances.allow(addresses[target] - addresses[other]):
                return None
        results: list[Array | None] = []
        for result in wanted:
            if result is None:
                results.append(None)
            elif isinstance(result, int):
                results.append(metadata.targets[result])
            else:
                x = device.empty(*result)
                results.append(x)
                addresses.append(device.pointer(x))
        if not are_aligned(addresses):
            return None
        if tiles:
            addresses += cast("BlockMask", metadata.block_mask).addresses(tiles, device)
        stream = device.stream()
        # Scratch memory is taken piece by piece as recorded, as the pool gives in a capture only what it gave before.
        scratch = []
        captured = scratch_sizes and device.capture(stream)
        for size in scratch_sizes:
            if captured:
                block = take(captured, stream, size, device.lasting)
                addresses.append(block.address)
                scratch.append(block)
            else:
                address, memory = device.scratch(size)
                addresses.append(address)
                scratch.append(memory)
        for launch, places in steps:
            launch.enqueue(addresses, places, metadata.seed, stream)
        if captured:
            give_back(captured, stream, scratch)
        return results


def are_aligned(addresses: Iterable[int]) -> bool:
    """Return True if all addresses are multiples of `ALIGNMENT`, by which kernels are chosen."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT == 0


# These members of the parameter struct may be results under another name.
_ALIASES = {"out_splits": "out", "lse_splits": "lse"}


class Recording:
    """The launches of a call so far; `arrays` are the call's arrays by their names in the parameter struct."""

    def __init__(self, device: Device, arrays: dict[str, Array], stream: int) -> None:
        self._device = device
        self._stream = stream
        self._arrays = arrays
        self._capture = device.capture(stream)
        self._blocks: list[Block] = []
        self._scratch: list[Array] = []
        self._steps: list[tuple[Launch, dict[str, Array]]] = []
        self._tiles: list[tuple[int, int, bool | None]] = []
        self._of_mask: list[tuple[int, Array]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate scratch memory of the call, which is uninitialised in each repetition, too."""
        if self._capture:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self._blocks.append(take(self._capture, self._stream, size, self._device.lasting))
            scratch = self._device.empty(shape, dtype, self._blocks[-1].memory)
        else:
            scratch = self._device.empty(shape, dtype)
        self._scratch.append(scratch)
        return scratch

    def end(self) -> None:
        """Note that every launch is enqueued, so that other calls may take the scratch memory."""
        if self._capture:
            give_back(self._capture, self._stream, self._blocks)

    def use_lists(self, tile: tuple[int, int, bool | None], store: Sequence[Array], lists: Sequence[Array]) -> None:
        """Note that a launch reads a block mask's store and its lists for a tile."""
        if tile not in self._tiles:
            self._tiles.append(tile)
        begin = len(store) + len(lists) * self._tiles.index(tile)
        self._of_mask += (*enumerate(store), *enumerate(lists, begin))

    def add(self, launch: Launch, arrays: dict[str, Array]) -> None:
        """Note a launch."""
        self._steps.append((launch, arrays))

    def repeat(
        self,
        arguments: Mapping[str, Array],
        results: Mapping[str, Array | None],
        targets: Mapping[str, Array | None],
    ) -> Repeat | None:
        """Return the call for other arrays; None if something about its launches is particular to it.

        `arguments` are the arrays whose addresses the metadata of such a call has, in their order.
        """
        new = [name for name, x in results.items() if x is not None and targets.get(name) is None]
        order = [*arguments, *new]
        # Arrays are found by name first, as two names may be one array in this call and two in the next one.
        places = {(name, id(self._arrays[name])): i for i, name in enumerate(order) if name in self._arrays}
        for alias, name in _ALIASES.items():  # the only split of the keys writes results
            places |= {(alias, own): i for (of, own), i in tuple(places.items()) if of == name}
        begin = len(order) + len(dict(self._of_mask))
        others = {id(x): len(order) + i for i, x in self._of_mask} | {
            id(x): i for i, x in enumerate(self._scratch, begin)
        }
        steps = []
        for launch, arrays in self._steps:
            found = [places.get((name, id(x)), others.get(id(x), -1)) for name, x in arrays.items()]
            if -1 in found:
                return None
            steps.append((launch, tuple(zip(launch.pointer_words, found, strict=True))))
        if not are_aligned([self._device.pointer(x) for x in self._arrays.values()]):
            return None
        written = {name: i for i, name in enumerate(targets) if results[name] is not None and name not in new}
        wanted = [None if x is None else written.get(name, (x.shape, x.dtype)) for name, x in results.items()]
        scratch_sizes = [x.nbytes for x in self._scratch]
        apart = _pairs_apart(arguments, tuple(written))
        recorded = Recorded(tuple(wanted), tuple(self._tiles), tuple(scratch_sizes), tuple(steps), tuple(apart))
        return Repeat(self._device, recorded)


def _pairs_apart(arguments: Mapping[str, Array], written: Sequence[str]) -> Iterator[tuple[int, int, Distances]]:
    places = {name: place for place, (name, x) in enumerate(arguments.items()) if x.size}
    for target in filter(places.__contains__, written):
        place = places.pop(target)
        for other, other_place in places.items():
            yield place, other_place, Distances.between(arguments[target], arguments[other])
