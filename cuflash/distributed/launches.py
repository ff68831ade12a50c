"""The launches of a rank's regions are known again by the kind of its call, so that a step costs the host little.

A region's rows begin at the same distance from the first row of each array in every call of a kind. So the addresses
that its launches take are sums, and neither views nor checks are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cuflash.frontend.metadata import Repeat, address_of
from cuflash.frontend.partial import Part
from cuflash.kept import Kept
from cuflash.problem.operands import Metadata

Array = Any


class _Launch(NamedTuple):
    repeat: Repeat
    places: tuple[tuple[str, int], ...]  # names of arrays, "" for a lasting one, and bytes from their first elements
    names: tuple[str, ...]  # of the results


class Launches:
    """The launches of the regions of calls of one kind."""

    def __init__(self) -> None:
        self._known: dict[Any, _Launch] = {}
        self._edges: dict[tuple[int, ...], Array] = {}

    def results(
        self,
        region: Any,
        arrays: Mapping[str, Array],
        make: Callable[[], Part],
        compute: Callable[[Part], dict[str, Array]],
    ) -> dict[str, Array]:
        """Return a region's results by name: by launches that are known, else by what `compute` does with its part."""
        found = self._again(region, arrays)
        if found is None:
            part = make()
            found = compute(part)
            self._note(region, part, arrays, found)
        return found

    def forward(
        self, region: Any, arrays: Mapping[str, Array], make: Callable[[], Part], *, rounded: bool = False
    ) -> dict[str, Array]:
        """Return out and lse of a region; the parameters are those of `results` and of `Part.forward`."""

        def compute(part: Part) -> dict[str, Array]:
            out, lse = part.forward(rounded=rounded)
            return {"out": out, "lse": lse}

        return self.results(region, arrays, make, compute)

    def edges(self, xp: Any, edges: tuple[int, ...]) -> Array:
        """Return the ends of packed sequences as an array, which all calls of a kind share."""
        if edges not in self._edges:
            self._edges[edges] = xp.asarray(edges, np.int32)
        return self._edges[edges]

    def _again(self, region: Any, arrays: Mapping[str, Array]) -> dict[str, Array] | None:
        """Repeat a region's launches for new arrays, and return their results; None if they are not known."""
        launch = self._known.get(region)
        if launch is None:
            return None
        addresses = [address_of(arrays[name]) + distance if name else distance for name, distance in launch.places]
        results = launch.repeat(Metadata((), addresses, (), None, None))
        return None if results is None else dict(zip(launch.names, results, strict=True))

    def _note(self, region: Any, part: Part, arrays: Mapping[str, Array], names: Iterable[str]) -> None:
        """Note the launches of a part, which gives results of these names, if other arrays can take their place."""
        if part.repeat is None:
            return
        places: list[tuple[str, int]] = []
        for name, x in part.addressed.items():
            if name in arrays:
                places.append((name, address_of(x) - address_of(arrays[name])))
            elif any(x is lasting for lasting in self._edges.values()):
                places.append(("", address_of(x)))
            else:
                return
        self._known[region] = _Launch(part.repeat, tuple(places), tuple(names))


_launches: Kept[Any, Launches] = Kept()


def launches_of(kind: Any) -> Launches:
    """Return the launches of calls of a kind; new ones for a call that is of no kind."""
    if kind is None:
        return Launches()
    found = _launches.get(kind)
    if found is None:
        found = _launches[kind] = Launches()
    return found
