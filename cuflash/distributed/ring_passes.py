"""One rank's work in a ring, around which keys and values travel while the rank keeps its queries.

In each step it computes attention over the keys of one rank while the next ones are on their way. Backward, the shares
of dk and dv go to the keys' rank, which adds them up in the order of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.distributed.communicators import Communicator, Pending
from cuflash.distributed.order import Stretch
from cuflash.distributed.pieces import Pieces, rows_of_heads
from cuflash.distributed.regions import Region, halves_of, keys_seen
from cuflash.distributed.ring_gradients import RingGradients
from cuflash.distributed.ring_parts import MOST_PARTS, RingParts, Step
from cuflash.distributed.steps import Steps
from cuflash.frontend.partial import merge_parts
from cuflash.problem.attention_problem import PartialResult

Array = Any

# Messages are of these two kinds, either of which may overtake the other.
_KEYS, _SHARES = 0, 1


class Ring(RingParts):
    """One rank's work in the ring: in step s it works on the keys of the rank that is s places before it."""

    def forward(self) -> Steps[tuple[Array, Array]]:
        """Return (out in q's dtype, lse)."""
        ready = self.comm.now()
        parts = self._attend([], self.own_step())
        yield True  # other ranks' GPUs have nothing to do yet
        self._send_keys(ready)
        steps = self._arriving_steps()
        while (step := (yield from steps.next())) is not None:
            parts = self._attend(parts, step)
        if self.sink is None:
            return self._merged(parts, self.q.dtype)
        out, lse = self._merged(parts, self.accum)
        self._add_sink(out, lse)
        return out.astype(self.q.dtype, copy=False), lse

    def backward(self, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> Steps[list[Array | None]]:
        """Return dq, dk, dv, then those of sink, slopes and operands where these were given; None where not wanted."""
        found = yield from self.sums(residuals, wanted, is_rounded=True)
        like = {"q": self.q, "k": self.k, "v": self.v, **self.call.extras}
        return [found[name].astype(x.dtype, copy=False) if name in wanted else None for name, x in like.items()]

    def sums(
        self, residuals: Mapping[str, Array | None], wanted: frozenset[str], *, is_rounded: bool = False
    ) -> Steps[dict[str, Array]]:
        """Return the wanted gradients by name, of q, k and v for this rank's tokens, in the accumulation's dtype.

        With `is_rounded` dk and dv have the dtypes of k and v.
        """
        comm, ready = self.comm, self.comm.now()
        gradients = RingGradients(self, residuals, wanted)
        own = self.own_step()
        first, last = halves_of(own.regions, self.window[1] is not None and self.window[1] <= 0)
        gradients.add_own(own._replace(regions=first))
        yield True
        self._send_keys(ready)
        steps, arriving = self._arriving_steps(), self._arriving_shares(gradients)
        while (step := (yield from steps.next())) is not None:
            shares = gradients.shares_of_keys(step)
            if shares:
                comm.send(shares, step.source, _SHARES)
            yield True
            yield from arriving.until((comm.rank - step.source) % comm.world)
        # The own keys' shares need not travel, so that those of other ranks' keys do meanwhile.
        gradients.add_own(own._replace(regions=last))
        yield True
        yield from arriving.until(comm.world)
        return (yield from gradients.total(is_rounded))

    def _send_keys(self, ready: Any) -> None:
        """Send this rank's keys and values, which were complete at `ready`, to each rank that sees some of them."""
        comm = self.comm
        for reader in comm.others:
            if regions := self.regions(reader, comm.rank):
                keys = keys_seen(regions)
                places = (Stretch(0, keys.stop - keys.start, keys.start, 1),)
                comm.send(Pieces((self.k, self.v), rows_of_heads(("k", "v"), places, None)), reader, _KEYS, ready)

    def _arriving_steps(self) -> _Arriving:
        """Return the steps over other ranks' keys of which this rank's queries see some."""
        comm = self.comm
        ranks = [(comm.rank - distance) % comm.world for distance in range(1, comm.world)]
        return _Arriving(comm, [(rank, regions) for rank in ranks if (regions := self.regions(comm.rank, rank))])

    def _arriving_shares(self, gradients: RingGradients) -> _Shares:
        """Return what other ranks' queries give to the gradients of this rank's keys."""
        comm, first_rows = self.comm, {}
        for distance in range(1, comm.world if gradients.of_keys else 1):
            if regions := self.regions((comm.rank + distance) % comm.world, comm.rank):
                first_rows[distance] = keys_seen(regions).start
        return _Shares(comm, gradients, first_rows)

    def _attend(self, parts: list[PartialResult], step: Step) -> list[PartialResult]:
        """Add the step's partial results to those so far."""
        for region in step.regions:
            x, lse = (self.without_batch(region, x) for x in self.forward_of(region, step))
            parts.append(PartialResult(x, lse, region.queries.begin))
            if len(parts) == MOST_PARTS:
                parts = [PartialResult(*self._merged(parts, self.accum), 0)]
        return parts

    def _merged(self, parts: Sequence[PartialResult], dtype: Any) -> tuple[Array, Array]:
        q, xp = self.q, interop.namespace_of(self.q)
        out = xp.empty((*q.shape[:-1], self.v.shape[-1]), dtype)
        lse = xp.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), self.accum)
        merge_parts(parts, out, lse)
        return out, lse

    def _add_sink(self, out: Array, lse: Array) -> None:
        xp = interop.namespace_of(lse)
        with np.errstate(all="ignore"):
            total = xp.where(self.in_sequences(), xp.logaddexp(lse, self.sink[:, None]), -np.inf)
            weight = xp.where(lse == -np.inf, 0, xp.exp(lse - total))
        out *= weight.swapaxes(-1, -2)[..., None].astype(out.dtype)
        lse[...] = total


class _Arriving:
    """The steps over other ranks' keys; those of the next step travel while one is computed."""

    def __init__(self, comm: Communicator, waiting: Sequence[tuple[int, tuple[Region, ...]]]) -> None:
        self._comm, self._waiting = comm, deque(waiting)
        self._ahead: Pending | None = None

    def next(self) -> Steps[Step | None]:
        """Return the next step; None behind the last one."""
        if not self._waiting:
            return None
        source, regions = self._waiting.popleft()
        pending = self._ahead or (yield from self._comm.arriving(source, _KEYS))
        kv, self._ahead = pending.get(), None
        if self._waiting:
            self._ahead = yield from self._comm.arriving(self._waiting[0][0], _KEYS)
        return Step(source, regions, kv, keys_seen(regions))


class _Shares:
    """Shares of the gradients of a rank's keys, one of which travels while the one before is added."""

    def __init__(self, comm: Communicator, gradients: RingGradients, first_rows: Mapping[int, int]) -> None:
        self._comm, self._gradients = comm, gradients
        self._expected = deque(first_rows.items())  # by the distance of the rank that computes the share
        self._pending: deque[tuple[int, Pending]] = deque()

    def until(self, distance: int) -> Steps[None]:
        """Add the shares of ranks that are so far behind this one, but for the last until all are to be added."""
        while self._expected and self._expected[0][0] <= distance:
            behind, first = self._expected.popleft()
            other = (self._comm.rank + behind) % self._comm.world
            self._pending.append((first, (yield from self._comm.arriving(other, _SHARES))))
            self._add(most_left=1)
        if distance >= self._comm.world:
            self._add(most_left=0)

    def _add(self, most_left: int) -> None:
        while len(self._pending) > most_left:
            first, pending = self._pending.popleft()
            self._gradients.keep_shares(first, pending.get())
