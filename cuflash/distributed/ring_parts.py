"""The parts of the score matrix that a rank's steps in a ring compute, each by one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuflash import interop
from cuflash.distributed.call import Call
from cuflash.distributed.launches import launches_of
from cuflash.distributed.regions import Region, keys_seen, regions_of
from cuflash.frontend.partial import Part
from cuflash.problem.checks import check_window

Array = Any


# So many partial results, or shares of a gradient, are kept until they become one.
MOST_PARTS = 16


class Step(NamedTuple):
    """One rank's keys and values, which this rank holds for a while."""

    source: int  # the rank whose keys these are
    regions: tuple[Region, ...]
    kv: tuple[Array, Array]  # the keys and values that the regions see
    keys: slice  # their rows on their rank

    @property
    def layout(self) -> tuple[Any, ...]:
        """The keys' source and strides, which tell launches apart: other ranks' arrays may lie in any way."""
        k, v = self.kv
        return self.source, k.strides, v.strides


class RingParts:
    """One rank's queries, and the parts of a call that they make with the keys of a step."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.comm, self.options, self.seqlen = call.comm, call.options, call.seqlen
        self.edges = None if call.edges is None else tuple(call.edges)
        self.q, self.k, self.v, self.accum = call.q, call.k, call.v, call.accum
        self.sink: Any = call.options.sink
        o = self.options
        by_rule = o.score_mod is not None or o.mask_mod is not None
        self._needs_places = o.alibi_slopes is not None or bool(o.dropout_p) or by_rule
        self.window = check_window(self.options.causal, self.options.window)
        kind = None if call.key is None else (call.key, call.seqlen, call.comm.rank, call.first_head)
        self.launches = launches_of(kind)

    def regions(self, rank: int, source: int) -> tuple[Region, ...]:
        """Return the regions of a rank's queries over the keys of `source`."""
        own, others = self.call.stretches(rank), self.call.stretches(source)
        return regions_of(own, others, rank == source, self.window, self.edges, self._needs_places)

    def own_step(self) -> Step:
        """Return the step over this rank's own keys."""
        regions = self.regions(self.comm.rank, self.comm.rank)
        keys = keys_seen(regions)
        return Step(self.comm.rank, regions, rows_of((self.k, self.v), keys), keys)

    def forward_of(self, region: Region, step: Step) -> Sequence[Array]:
        """Return (out, lse) of a region."""
        kind = "forward", region, step.layout
        found = self.launches.forward(kind, self.arrays_of(step), lambda: self.part(region, step))
        return found["out"], found["lse"]

    def part(self, region: Region, step: Step) -> Part:
        """Return the part that a region is; the sink is added at the end."""
        options = replace(self.options, sink=None)
        if region.sees_all:
            options = replace(options, causal=False, window=None)
        slopes = self.options.alibi_slopes
        if self.edges is not None and slopes is not None and slopes.ndim == 2 and len(slopes) > 1:
            options = replace(options, alibi_slopes=slopes[region.sequence : region.sequence + 1])
        k, v = rows_of(step.kv, region.keys_from(step.keys.start))
        q = self.q[..., region.queries.rows, :, :]
        place = region.place._replace(first_head=self.call.first_head)
        if region.edges is not None:
            return Part(q, k, v, options, place, self.launches.edges(interop.namespace_of(q), region.edges))
        q, k, v = (self.with_batch(region, x) for x in (q, k, v))
        return Part(q, k, v, options, place)

    def arrays_of(self, step: Step) -> dict[str, Array]:
        """Return the arrays by name of which a region takes rows."""
        arrays = {"q": self.q, "k": step.kv[0], "v": step.kv[1]}
        if self.options.alibi_slopes is not None:
            arrays["alibi_slopes"] = self.options.alibi_slopes
        return arrays

    def with_batch(self, region: Region, x: Array) -> Array:
        """Return an array as the region's call takes it: one sequence of packed arrays is a batch of one."""
        return x if self.edges is None or region.edges is not None else x[None]

    def without_batch(self, region: Region, x: Array) -> Array:
        """Undo `with_batch`."""
        return x if self.edges is None or region.edges is not None else x[0]

    def in_sequences(self) -> Array:
        """Return a bool (this rank's tokens,) that tells which lie in a sequence."""
        xp = interop.namespace_of(self.q)
        inside = np.zeros(self.q.shape[-3], bool)
        start, stop = (0, self.seqlen) if self.edges is None else (self.edges[0], self.edges[-1])
        for stretch in self.call.stretches(self.comm.rank):
            inside[stretch.within(start, stop).rows] = True
        return xp.asarray(inside)


def rows_of(kv: tuple[Array, Array], rows: slice) -> tuple[Array, Array]:
    """View some rows of keys and values."""
    k, v = kv
    return k[..., rows, :, :], v[..., rows, :, :]
