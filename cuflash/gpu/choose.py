"""A plan's first candidate whose kernels keep to their registers is taken, which only the compiler tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from cuflash.cuda.device import Device
from cuflash.kept import Kept


class Compiled(Protocol):
    """A compiled kernel says how many bytes of registers it spills."""

    def spilled_bytes(self, device: Device) -> int:
        """Return the bytes of registers that it spills to local memory."""


K = TypeVar("K", bound=Compiled)
# Places of the first kernels that spill least, and the bytes that they spill, by device and candidates.
_chosen: Kept[Any, tuple[int, int]] = Kept()


def choose(device: Device, candidates: Sequence[tuple[K, ...]], others_serve: bool = False) -> tuple[K, ...]:
    """Return the first of some passes whose kernels spill no registers; no kernels where there are no candidates.

    Where all spill it is the one that spills least, the first among equals; there are no kernels then if others serve
    as well (`others_serve`). Candidates behind the one that is taken are not compiled. What is taken depends on their
    sources and the compiler alone, so that bits repeat.
    """
    if not device.compiler or len(candidates) < (1 if others_serve else 2):
        return candidates[0] if candidates else ()
    key = device, tuple(candidates)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _first(device, candidates)
    place, spilled_bytes = found
    return () if others_serve and spilled_bytes else candidates[place]


def _first(device: Device, candidates: Sequence[tuple[Compiled, ...]]) -> tuple[int, int]:
    spilled = []
    for kernels in candidates:
        spilled.append(max(kernel.spilled_bytes(device) for kernel in kernels))
        if not spilled[-1]:
            break
    return spilled.index(min(spilled)), min(spilled)
