"""The gradients that a rank's steps in a ring add to: of what stays with the rank, and of its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuflash import interop
from cuflash.distributed.call import RESIDUALS
from cuflash.distributed.regions import Region
from cuflash.distributed.ring_parts import RingParts, Step
from cuflash.distributed.steps import Steps
from cuflash.frontend.combine import gradient_of_sink
from cuflash.frontend.partial import sum_parts
from cuflash.problem.attention_problem import PartialResult

Array = Any

# So many shares are kept until they are added up.
_MOST_SHARES = 16


class RingGradients:
    """The gradients of one rank's call."""

    def __init__(self, ring: RingParts, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> None:
        self._ring, self._residuals, self._wanted = ring, residuals, wanted
        self._xp, call = interop.namespace_of(ring.q), ring.call
        self._here = {name: self._xp.zeros(x.shape, call.accum) for name, x in call.extras.items()}
        if "sink" in wanted:
            dout, out, lse, dlse = (residuals[name] for name in RESIDUALS)
            self._here["sink"] = gradient_of_sink(call.options.sink, ring.in_sequences(), (dout, out, lse, dlse))
        if "q" in wanted:
            self._here["q"] = self._xp.zeros(ring.q.shape, call.accum)
        self.of_keys: list[str] = [name for name in ("k", "v") if name in wanted]
        self._shares: dict[str, list[PartialResult]] = {name: [] for name in self.of_keys}

    def zeros_of_keys(self, keys: slice) -> dict[str, Array]:
        """Return zeros for the shares of the gradients of some of a rank's keys."""
        return {name: self._zeros(name, keys.stop - keys.start) for name in self.of_keys}

    def add(self, step: Step, of_keys: Mapping[str, Array]) -> None:
        """Add a step's shares to the gradients of what stays here, and to those of the keys."""
        for region in step.regions:
            self._add_region(region, step, of_keys)

    def keep(self, first: int, given: Sequence[Array]) -> None:
        """Keep shares of the keys' gradients, which begin at this rank's row `first`."""
        for name, x in zip(self._shares, given, strict=True):
            self._shares[name].append(PartialResult(x, None, first))
            if len(self._shares[name]) == _MOST_SHARES:
                total = self._zeros(name, getattr(self._ring, name).shape[-3])
                sum_parts(self._shares[name], total)
                self._shares[name] = [PartialResult(total, None, 0)]

    def total(self, is_rounded: bool) -> Steps[dict[str, Array]]:
        """Return the wanted gradients by name."""
        ring, found = self._ring, self._here
        for name in ring.call.extras:
            if name in self._wanted:
                found[name] = yield from ring.comm.summing(found[name])
        for name in self.of_keys:
            like = getattr(ring, name)
            found[name] = self._xp.empty(like.shape, like.dtype if is_rounded else ring.call.accum)
            sum_parts(self._shares[name], found[name])
        return {name: x for name, x in found.items() if name in self._wanted}

    def _zeros(self, name: str, rows: int) -> Array:
        like = getattr(self._ring, name)
        return self._xp.zeros((*like.shape[:-3], rows, *like.shape[-2:]), self._ring.call.accum)

    def _add_region(self, region: Region, step: Step, of_keys: Mapping[str, Array]) -> None:
        """Add a region's shares, by launches that an earlier call has made where there are such."""
        ring, wanted = self._ring, self._wanted - {"sink"}
        residuals = {name: x for name, x in self._residuals.items() if x is not None}
        into = {**({"q": self._here["q"]} if "q" in wanted else {}), **of_keys}
        arrays = {**ring.arrays_of(step), **residuals, **{f"d{name}": x for name, x in into.items()}}
        kind = "backward", step.source, region, tuple(sorted(wanted)), "dlse" in residuals
        if ring.launches.again(kind, arrays) is not None:
            return
        part = ring.part(region, step)
        found = part.backward(*self._rows_of(region), wanted, self._targets_of(region, step, into))
        others = found.keys() - into.keys()
        if not others:
            ring.launches.note(kind, part, arrays)
        for name in others:
            share, total = found[name], self._here[name]
            is_by_sequence = name == "alibi_slopes" and ring.edges is not None and total.ndim == 2
            if is_by_sequence and len(total) > 1:
                total[region.sequence] += share[0]
            else:
                total += share.reshape(total.shape)

    def _rows_of(self, region: Region) -> tuple[Array, Array, Array, Array | None]:
        """Return a region's rows of dout, out, lse and dlse."""
        ring, rows = self._ring, region.queries.rows
        dout, out, lse, dlse = (self._residuals[name] for name in RESIDUALS)
        assert dout is not None and out is not None
        dout, out = (ring.with_batch(region, x[..., rows, :, :]) for x in (dout, out))
        lse, dlse = (None if x is None else ring.with_batch(region, x[..., rows]) for x in (lse, dlse))
        return dout, out, lse, dlse

    def _targets_of(self, region: Region, step: Step, into: Mapping[str, Array]) -> dict[str, Array]:
        """Return a region's rows of the gradients that it is added to."""
        keys = region.keys_from(step.keys.start)
        rows = {"q": region.queries.rows, "k": keys, "v": keys}
        return {name: self._ring.with_batch(region, x[..., rows[name], :, :]) for name, x in into.items()}
