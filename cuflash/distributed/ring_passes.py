"""One rank's work in a ring, around which keys and values travel while the rank keeps its queries.

In each step it computes attention over the keys of one rank while the next ones are on their way. Backward, the shares
of dk and dv go to the keys' rank, which adds them up in the order of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuflash import interop
from cuflash.distributed.call import RESIDUALS, Call
from cuflash.distributed.communicators import Pending
from cuflash.distributed.regions import Region, keys_seen, regions_of
from cuflash.frontend.combine import gradient_of_sink
from cuflash.frontend.partial import Part, merge_parts, sum_parts
from cuflash.problem.attention_problem import PartialResult
from cuflash.problem.checks import check_window

Array = Any

# So many parts are kept until they are merged or added up.
_MOST_PARTS = 16
# Messages are of these two kinds, either of which may overtake the other.
_KEYS, _SHARES = 0, 1


class Step(NamedTuple):
    """One rank's keys and values, which this rank holds for a while."""

    source: int  # the rank whose keys these are
    regions: tuple[Region, ...]
    kv: tuple[Array, Array]  # the keys and values that the regions see
    keys: slice  # their rows on their rank


class Ring:
    """One rank's work in the ring: in step s it works on the keys of the rank that is s places before it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.comm, self.options, self.seqlen = call.comm, call.options, call.seqlen
        self.edges = None if call.edges is None else tuple(call.edges)
        self.q, self.k, self.v, self._accum = call.q, call.k, call.v, call.accum
        self._sink: Any = call.options.sink
        o = self.options
        by_rule = o.score_mod is not None or o.mask_mod is not None
        self._needs_places = o.alibi_slopes is not None or bool(o.dropout_p) or by_rule
        self._window = check_window(self.options.causal, self.options.window)
        self._masked = replace(self.options, sink=None)
        self._unmasked = replace(self._masked, causal=False, window=None)

    def forward(self) -> tuple[Array, Array]:
        """Return (out in q's dtype, lse)."""
        parts: list[PartialResult] = []
        for step in self._steps():
            for region in step.regions:
                x, lse = (self._without_batch(region, x) for x in self._part(region, step).forward())
                parts.append(PartialResult(x, lse, region.queries.begin))
                if len(parts) == _MOST_PARTS:
                    parts = [PartialResult(*self._merged(parts, self._accum), 0)]
            self.comm.pass_turn()
        if self._sink is None:
            return self._merged(parts, self.q.dtype)
        out, lse = self._merged(parts, self._accum)
        self._add_sink(out, lse)
        return out.astype(self.q.dtype, copy=False), lse

    def backward(self, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> list[Array | None]:
        """Return dq, dk, dv, then those of sink, slopes and operands where these were given; None where not wanted."""
        found = self.sums(residuals, wanted, is_rounded=True)
        like = {"q": self.q, "k": self.k, "v": self.v, **self.call.extras}
        return [found[name].astype(x.dtype, copy=False) if name in wanted else None for name, x in like.items()]

    def sums(
        self, residuals: Mapping[str, Array | None], wanted: frozenset[str], *, is_rounded: bool = False
    ) -> dict[str, Array]:
        """Return the wanted gradients by name, of q, k and v for this rank's tokens, in the accumulation's dtype.

        With `is_rounded` dk and dv have the dtypes of k and v.
        """
        xp, comm = interop.namespace_of(self.q), self.comm
        dout, out, lse, dlse = (residuals[name] for name in RESIDUALS)
        given = self.call.extras
        grads = {name: xp.zeros(x.shape, self._accum) for name, x in given.items()}
        if "sink" in wanted:
            grads["sink"] = gradient_of_sink(self._sink, self._in_sequences(), (dout, out, lse, dlse))
        if "q" in wanted:
            grads["q"] = xp.zeros(self.q.shape, self._accum)
        of_keys: list[str] = [name for name in ("k", "v") if name in wanted]
        shares: dict[str, list[PartialResult]] = {name: [] for name in of_keys}
        arriving: deque[tuple[int, Pending]] = deque()
        for number, step in enumerate(self._steps()):
            own = {name: self._zeros_of(name, step.keys) for name in of_keys}
            for region in step.regions:
                self._add_region(region, step, residuals, wanted - {"sink"}, grads, own)
            comm.pass_turn()
            if number == 0:
                self._keep(shares, step.keys.start, tuple(own.values()))
            elif step.regions and of_keys:
                comm.send(tuple(own.values()), step.source, _SHARES)
            # A step's shares travel while the next step is computed.
            other = (comm.rank + number) % comm.world
            if number and of_keys and (regions := self._regions(other, comm.rank)):
                arriving.append((keys_seen(regions).start, comm.receive_soon(other, _SHARES)))
            while len(arriving) > 1:
                first, pending = arriving.popleft()
                self._keep(shares, first, pending.get())
        for first, pending in arriving:
            self._keep(shares, first, pending.get())
        for name in given:
            if name in wanted:
                grads[name] = comm.sum(grads[name])
        for name in of_keys:
            like = getattr(self, name)
            grads[name] = xp.empty(like.shape, like.dtype if is_rounded else self._accum)
            sum_parts(shares[name], grads[name])
        return {name: x for name, x in grads.items() if name in wanted}

    def _regions(self, rank: int, source: int) -> tuple[Region, ...]:
        """Return the regions of a rank's queries over the keys of `source`."""
        own, others = self.call.stretches(rank), self.call.stretches(source)
        return regions_of(own, others, rank == source, self._window, self.edges, self._needs_places)

    def _steps(self) -> Iterator[Step]:
        """Yield the steps; a step without regions has no keys.

        A rank sends its own keys to each that sees some of them; those of the next step travel while one is computed.
        """
        comm = self.comm
        ranks = [(comm.rank - step) % comm.world for step in range(comm.world)]
        for reader in reversed(ranks[1:]):
            if regions := self._regions(reader, comm.rank):
                comm.send(_rows_of((self.k, self.v), keys_seen(regions)), reader, _KEYS)
        regions_by_rank = {rank: self._regions(comm.rank, rank) for rank in ranks}
        waiting = deque(rank for rank in ranks[1:] if regions_by_rank[rank])
        ahead = comm.receive_soon(waiting.popleft(), _KEYS) if waiting else None
        for rank in ranks:
            regions = regions_by_rank[rank]
            keys = keys_seen(regions)
            kv = _rows_of((self.k, self.v), keys)
            if rank != comm.rank and regions and ahead is not None:
                kv = ahead.get()
                ahead = comm.receive_soon(waiting.popleft(), _KEYS) if waiting else None
            yield Step(rank, regions, kv, keys)

    def _part(self, region: Region, step: Step) -> Part:
        """Return the part that a region is; the sink is added at the end."""
        options = self._unmasked if region.sees_all else self._masked
        slopes = self.options.alibi_slopes
        if self.edges is not None and slopes is not None and slopes.ndim == 2 and len(slopes) > 1:
            options = replace(options, alibi_slopes=slopes[region.sequence : region.sequence + 1])
        k, v = _rows_of(step.kv, region.keys_from(step.keys.start))
        q = self.q[..., region.queries.rows, :, :]
        place = region.place._replace(first_head=self.call.first_head)
        if region.edges is not None:
            edges = interop.namespace_of(q).asarray(region.edges, np.int32)
            return Part(q, k, v, options, place, edges)
        q, k, v = (self._with_batch(region, x) for x in (q, k, v))
        return Part(q, k, v, options, place)

    def _add_region(
        self,
        region: Region,
        step: Step,
        residuals: Mapping[str, Array],
        wanted: frozenset[str],
        grads: dict[str, Array],
        of_keys: dict[str, Array],
    ) -> None:
        """Add a region's shares to the gradients of what stays here, and to those of the keys."""
        rows, keys = region.queries.rows, region.keys_from(step.keys.start)
        into = {name: self._with_batch(region, x[..., keys, :, :]) for name, x in of_keys.items()}
        if "q" in grads:
            into["q"] = self._with_batch(region, grads["q"][..., rows, :, :])
        dout, out = (self._with_batch(region, residuals[name][..., rows, :, :]) for name in ("dout", "out"))
        lse, dlse = (None if (x := residuals[name]) is None else x[..., rows] for name in ("lse", "dlse"))
        lse, dlse = (None if x is None else self._with_batch(region, x) for x in (lse, dlse))
        found = self._part(region, step).backward(dout, out, lse, dlse, wanted, into)
        for name in found.keys() - into.keys():
            share = found[name]
            is_by_sequence = name == "alibi_slopes" and self.edges is not None and grads[name].ndim == 2
            if is_by_sequence and len(grads[name]) > 1:
                grads[name][region.sequence] += share[0]
            else:
                grads[name] += share.reshape(grads[name].shape)

    def _zeros_of(self, name: str, keys: slice) -> Array:
        """Return zeros for a share of the gradient of some of a rank's keys."""
        like = getattr(self, name)
        shape = (*like.shape[:-3], keys.stop - keys.start, *like.shape[-2:])
        return interop.namespace_of(like).zeros(shape, self._accum)

    def _keep(self, shares: dict[str, list[PartialResult]], first: int, given: Sequence[Array]) -> None:
        """Keep the shares of all names, which begin at this rank's row `first`."""
        for name, x in zip(shares, given, strict=True):
            shares[name].append(PartialResult(x, None, first))
            if len(shares[name]) == _MOST_PARTS:
                total = self._zeros_of(name, slice(0, getattr(self, name).shape[-3]))
                sum_parts(shares[name], total)
                shares[name] = [PartialResult(total, None, 0)]

    def _merged(self, parts: Sequence[PartialResult], dtype: Any) -> tuple[Array, Array]:
        q, xp = self.q, interop.namespace_of(self.q)
        out = xp.empty((*q.shape[:-1], self.v.shape[-1]), dtype)
        lse = xp.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), self._accum)
        merge_parts(parts, out, lse)
        return out, lse

    def _with_batch(self, region: Region, x: Array) -> Array:
        """Return an array as the region's call takes it: one sequence of packed arrays is a batch of one."""
        return x if self.edges is None or region.edges is not None else x[None]

    def _without_batch(self, region: Region, x: Array) -> Array:
        return x if self.edges is None or region.edges is not None else x[0]

    def _in_sequences(self) -> Array:
        """Return a bool (this rank's tokens,) that tells which lie in a sequence."""
        xp = interop.namespace_of(self.q)
        inside = np.zeros(self.q.shape[-3], bool)
        start, stop = (0, self.seqlen) if self.edges is None else (self.edges[0], self.edges[-1])
        for stretch in self.call.stretches(self.comm.rank):
            inside[stretch.within(start, stop).rows] = True
        return xp.asarray(inside)

    def _add_sink(self, out: Array, lse: Array) -> None:
        xp = interop.namespace_of(lse)
        with np.errstate(all="ignore"):
            total = xp.where(self._in_sequences(), xp.logaddexp(lse, self._sink[:, None]), -np.inf)
            weight = xp.where(lse == -np.inf, 0, xp.exp(lse - total))
        out *= weight.swapaxes(-1, -2)[..., None].astype(out.dtype)
        lse[...] = total


def _rows_of(kv: tuple[Array, Array], rows: slice) -> tuple[Array, Array]:
    k, v = kv
    return k[..., rows, :, :], v[..., rows, :, :]
