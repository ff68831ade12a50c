"""A trial runs a given candidate of a plan in place of the one that is chosen; `cuflash.tools.tune` alone makes any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cuflash.gpu.launch import K, Work


class Place(NamedTuple):
    """The place of a candidate in the answers that plans give to one pass over a problem."""

    number: int  # of the answer that has candidates, in the order in which a pass asks for them
    candidate: int  # in that answer
    launches: tuple[Any, int] | None = None  # Hopper's forward kernel and its splits, where the plan would take others


class Trial(Work):
    """Work that takes the candidate at a place, and what every call takes elsewhere."""

    def __init__(self, work: Work, place: Place) -> None:
        vars(self).update(vars(work))
        self.launches = place.launches
        self._place = place
        self._answers: list[int] = []  # numbers of candidates so far; parts of the work share the list

    def chosen_pass(self, candidates: Sequence[tuple[K, ...]], others_serve: bool = False) -> tuple[K, ...]:
        """Return the pass at the trial's place, whether or not it spills registers."""
        if candidates:
            self._answers.append(len(candidates))
            if len(self._answers) == self._place.number + 1:
                return candidates[self._place.candidate]
        return super().chosen_pass(candidates, others_serve)
