"""Of a plan's candidates the first is taken whose kernels keep to their registers, which only the compiler tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from cuflash.cuda.device import Device
from cuflash.kept import Kept


class Compiled(Protocol):
    """What a kernel says of its registers once it is compiled."""

    def spilled_bytes(self, device: Device) -> int:
        """Return the bytes of registers that it spills to local memory."""


K = TypeVar("K", bound=Compiled)
_chosen: Kept[Any, int] = Kept()  # places of the kernels that were taken, by device and candidates


def choose(device: Device, candidates: Sequence[tuple[K, ...]]) -> tuple[K, ...]:
    """Return the first of some passes whose kernels spill no registers; no kernels where there are no candidates.

    Where all spill it is the one that spills least, the first among equals. Candidates behind the one that is taken are
    not compiled. What is taken depends on their sources and the compiler alone, so that bits repeat.
    """
    if len(candidates) < 2 or not device.compiler:
        return candidates[0] if candidates else ()
    key = device, tuple(candidates)
    place = _chosen.get(key)
    if place is None:
        place = _chosen[key] = _first(device, candidates)
    return candidates[place]


def _first(device: Device, candidates: Sequence[tuple[Compiled, ...]]) -> int:
    spilled = []
    for kernels in candidates:
        spilled.append(max(kernel.spilled_bytes(device) for kernel in kernels))
        if not spilled[-1]:
            break
    return spilled.index(min(spilled))
