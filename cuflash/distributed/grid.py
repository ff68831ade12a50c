"""Attention over a grid of ranks: groups of neighbouring ranks deal heads, and rings join the groups.

Of world = rings * heads ranks, ranks g * heads to (g + 1) * heads - 1 are group g. Among them each gets all the group's
tokens of some heads (`dealing`), with which it goes around the ring of those that have the same place in the other
groups (`ring`). So the messages around a ring have a part of the heads, and heads need not be as many as ranks (Fang
and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cuflash.distributed.call import Call
from cuflash.distributed.communicators import Group
from cuflash.distributed.dealing import Arrays, Dealing
from cuflash.distributed.order import Stretch, stretches_of
from cuflash.distributed.ring_passes import Ring
from cuflash.distributed.steps import Steps
from cuflash.problem.heads import Heads

Array = Any


def rows_of_group(seqlen: int, group: int, rings: int, heads: int, order: str) -> tuple[Stretch, ...]:
    """Return the tokens of a group in the order in which its ranks hold them together.

    Neighbouring ranks have neighbouring chunks, so that a group has the tokens of one rank of a smaller world. Of the
    striped order it has a stretch for each of its ranks.
    """
    if order != "striped":
        return stretches_of(seqlen, group, rings, order)
    stretches, begin = [], 0
    for rank in range(group * heads, (group + 1) * heads):
        for stretch in stretches_of(seqlen, rank, rings * heads, order):
            stretches.append(stretch._replace(begin=begin))
            begin += stretch.length
    return tuple(stretches)


def places_in_group(own: Sequence[Stretch], group: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """Return where a rank's rows lie among those of its group: stretches whose tokens are the group's rows."""
    places = []
    for stretch in own:
        if not stretch.length:
            places.append(Stretch(stretch.begin, 0, 0, 1))
            continue
        for whole in group:
            within = whole.within(stretch.first, stretch.first + 1)
            if within.length:
                places.append(Stretch(stretch.begin, stretch.length, within.begin, 1))
    return tuple(places)


class _Grid:
    """One rank's place in the grid."""

    def __init__(self, call: Call) -> None:
        comm, heads = call.comm, call.heads
        rings = comm.world // heads
        group, place = divmod(comm.rank, heads)
        ranks = range(group * heads, (group + 1) * heads)
        self._rows = tuple([rows_of_group(call.seqlen, g, rings, heads, call.order) for g in range(rings)])
        own = self._rows[group]
        places = [places_in_group(call.stretches(rank), own) for rank in ranks]
        num_rows = sum(stretch.length for stretch in own)
        self.dealing = Dealing(call, Group(comm, ranks), places, num_rows)
        self._ring = Group(comm, range(place, comm.world, heads))

    def forward(self) -> Steps[tuple[Array, Array]]:
        """Return (out in q's dtype, lse) of this rank's tokens."""

        def compute(whole: dict[str, Array], heads: Heads) -> Steps[Arrays]:
            out, lse = yield from self._around(whole, heads).forward()
            return {"out": out, "lse": lse}

        return (yield from self.dealing.forward(compute))

    def backward(self, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> Steps[list[Array | None]]:
        """Return the gradients of this rank's inputs, None where they are not wanted."""

        def compute(whole: dict[str, Array], heads: Heads) -> Steps[Arrays]:
            return (yield from self._around(whole, heads).sums({name: whole.get(name) for name in residuals}, wanted))

        return (yield from self.dealing.backward(residuals, wanted, compute))

    def _around(self, whole: Arrays, heads: Heads) -> Ring:
        """Return the ring of this rank's heads, whose ranks are groups."""
        call = replace(
            self.dealing.call,
            comm=self._ring,
            q=whole["q"],
            k=whole["k"],
            v=whole["v"],
            options=self.dealing.options_of(heads),
            rows_by_rank=self._rows,
            first_head=heads.first,
        )
        return Ring(call)


def forward(call: Call) -> Steps[tuple[Array, Array]]:
    """Return (out, lse) of a call whose `heads` are more than one."""
    return (yield from _Grid(call).forward())


def backward(call: Call, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> Steps[list[Array | None]]:
    """Return the gradients of a call whose `heads` are more than one."""
    return (yield from _Grid(call).backward(residuals, wanted))
