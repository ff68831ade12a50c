"""The gradients that a rank's steps in a ring add to: of what stays with the rank, and of its keys.

Every region gives shares in new arrays of the accumulation's dtype, which are added up in one launch at the end, as
kernels that add to what is there wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuflash import interop
from cuflash.distributed.call import RESIDUALS
from cuflash.distributed.regions import Region
from cuflash.distributed.ring_parts import MOST_PARTS, RingParts, Step
from cuflash.distributed.steps import Steps
from cuflash.frontend.combine import gradient_of_sink
from cuflash.frontend.partial import sum_parts
from cuflash.problem.attention_problem import PartialResult

Array = Any


class RingGradients:
    """The gradients of one rank's call."""

    def __init__(self, ring: RingParts, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> None:
        self._ring, self._wanted = ring, wanted
        self._residuals = residuals
        self._xp, call = interop.namespace_of(ring.q), ring.call
        self._extras = {name: self._xp.zeros(x.shape, call.accum) for name, x in call.extras.items()}
        if "sink" in wanted:
            dout, out, lse, dlse = (residuals[name] for name in RESIDUALS)
            self._extras["sink"] = gradient_of_sink(call.options.sink, ring.in_sequences(), (dout, out, lse, dlse))
        self.of_keys: list[str] = [name for name in ("k", "v") if name in wanted]
        self._shares: dict[str, list[PartialResult]] = {name: [] for name in ("q", "k", "v") if name in wanted}

    def add_own(self, step: Step) -> None:
        """Add the shares of this rank's own keys."""
        for name, shares in self._shares_of(step).items():
            for share in shares:
                self._keep(name, share)

    def shares_of_keys(self, step: Step) -> list[Array]:
        """Return a step's shares of the gradients of another rank's keys, which begin with the first that is seen."""
        found = []
        for name, shares in self._shares_of(step).items():
            rows = step.keys.stop - step.keys.start
            if len(shares) == 1 and shares[0].x.shape[-3] == rows:
                found.append(shares[0].x)
                continue
            total = self._empty(name, rows, self._ring.call.accum)
            sum_parts([share._replace(first_row=share.first_row - step.keys.start) for share in shares], total)
            found.append(total)
        return found

    def keep_shares(self, first: int, given: Sequence[Array]) -> None:
        """Keep what another rank found for this rank's keys from row `first` on."""
        for name, x in zip(self.of_keys, given, strict=True):
            self._keep(name, PartialResult(x, None, first))

    def total(self, is_rounded: bool) -> Steps[dict[str, Array]]:
        """Return the wanted gradients by name; with `is_rounded` those of q, k and v have their dtypes."""
        ring, found = self._ring, self._extras
        for name in ring.call.extras:
            if name in self._wanted:
                found[name] = yield from ring.comm.summing(found[name])
        for name, shares in self._shares.items():
            like = getattr(ring, name)
            found[name] = self._empty(name, like.shape[-3], like.dtype if is_rounded else ring.call.accum)
            sum_parts(shares, found[name])
        return {name: x for name, x in found.items() if name in self._wanted}

    def _empty(self, name: str, rows: int, dtype: Any) -> Array:
        like = getattr(self._ring, name)
        return self._xp.empty((*like.shape[:-3], rows, *like.shape[-2:]), dtype)

    def _keep(self, name: str, share: PartialResult) -> None:
        shares = self._shares[name]
        shares.append(share)
        if len(shares) == MOST_PARTS:
            total = self._empty(name, getattr(self._ring, name).shape[-3], self._ring.call.accum)
            sum_parts(shares, total)
            self._shares[name] = [PartialResult(total, None, 0)]

    def _shares_of(self, step: Step) -> dict[str, list[PartialResult]]:
        """Add a step's shares to the gradients of what stays here; return those of the keys."""
        ring = self._ring
        of_keys: dict[str, list[PartialResult]] = {name: [] for name in self.of_keys}
        for region in step.regions:
            for name, x in self._found(region, step).items():
                if name == "q":
                    self._keep("q", PartialResult(ring.without_batch(region, x), None, region.queries.begin))
                elif name in of_keys:
                    of_keys[name].append(PartialResult(ring.without_batch(region, x), None, region.keys.begin))
                else:
                    self._add_extra(name, region, x)
        return of_keys

    def _add_extra(self, name: str, region: Region, share: Array) -> None:
        total = self._extras[name]
        is_by_sequence = name == "alibi_slopes" and self._ring.edges is not None and total.ndim == 2
        if is_by_sequence and len(total) > 1:
            total[region.sequence] += share[0]
        else:
            total += share.reshape(total.shape)

    def _found(self, region: Region, step: Step) -> dict[str, Array]:
        """Return a region's gradients, by launches that an earlier call has made where there are such."""
        ring, wanted = self._ring, self._wanted - {"sink"}
        residuals = {name: x for name, x in self._residuals.items() if x is not None}
        return ring.launches.results(
            ("backward", region, step.layout),
            ring.arrays_of(step) | residuals,
            lambda: ring.part(region, step),
            lambda part: part.backward(*self._rows_of(region), wanted),
        )

    def _rows_of(self, region: Region) -> tuple[Array, Array, Array, Array | None]:
        """Return a region's rows of dout, out, lse and dlse."""
        ring, rows = self._ring, region.queries.rows
        dout, out, lse, dlse = (self._residuals[name] for name in RESIDUALS)
        assert dout is not None and out is not None
        dout, out = (ring.with_batch(region, x[..., rows, :, :]) for x in (dout, out))
        lse, dlse = (None if x is None else ring.with_batch(region, x[..., rows]) for x in (lse, dlse))
        return dout, out, lse, dlse
