"""Ranks deal heads: each gets all their tokens of some heads, computes, and sends the rows back to their owners.

The heads of a rank are dealt in rounds, so that those of the next round travel while one round is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.distributed.call import Call
from cuflash.distributed.communicators import Communicator, Pending
from cuflash.distributed.order import Stretch
from cuflash.distributed.steps import Steps
from cuflash.problem.heads import Heads
from cuflash.problem.options import Options
from cuflash.problem.own_rules import is_operand

Array = Any
Arrays = Mapping[str, Array]
# A GPU is busy with so many rows of all heads of a round (tiles of some 128 rows on some 132 multiprocessors).
LEAST_ROWS_OF_ROUND = 1 << 15
MOST_ROUNDS = 4
_ROWS_LAST = ("lse", "dlse")
_ALL = slice(None)
# It gets all tokens of some heads by name, and these heads, and finds results by name.
Compute = Callable[[dict[str, Array], Heads], Steps[Arrays]]


def shares_of(num_heads_q: int, num_heads_kv: int, world: int) -> list[Heads]:
    """Return the heads of every rank, as even as whole KV heads allow.

    KV heads fewer than ranks are replicated: their query heads are dealt to several ranks. A rank may get no head.
    """
    group = num_heads_q // num_heads_kv
    if num_heads_kv >= world:
        bounds = [num_heads_kv * rank // world for rank in range(world + 1)]
        return [Heads(a * group, b * group, a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    shares = []
    for kv in range(num_heads_kv):
        ranks = world * (kv + 1) // num_heads_kv - world * kv // num_heads_kv
        for i in range(ranks):
            first, stop = kv * group + group * i // ranks, kv * group + group * (i + 1) // ranks
            shares.append(Heads(first, stop, kv, kv + (stop > first)))
    return shares


def rounds_of(shares: Sequence[Heads], num_rounds: int) -> list[list[Heads]]:
    """Return the heads of every rank in each round; several rounds have whole KV heads with their query heads."""
    if num_rounds == 1:
        return [list(shares)]
    rounds = []
    for number in range(num_rounds):
        heads = []
        for share in shares:
            count = share.stop_kv - share.first_kv
            group = (share.stop - share.first) // max(1, count)
            begin, end = count * number // num_rounds, count * (number + 1) // num_rounds
            heads.append(
                Heads(
                    share.first + begin * group,
                    share.first + end * group,
                    share.first_kv + begin,
                    share.first_kv + end,
                )
            )
        rounds.append(heads)
    return rounds


def num_rounds_of(shares: Sequence[Heads], num_rows: int) -> int:
    """Return in how many rounds heads are dealt so that every rank has whole KV heads, and enough work, in each."""
    fewest = min((share.stop_kv - share.first_kv for share in shares), default=0)
    rows = min((share.stop - share.first for share in shares), default=0) * num_rows
    return max(1, min(fewest, rows // LEAST_ROWS_OF_ROUND, MOST_ROUNDS))


@dataclass(frozen=True)
class Dealing:
    """Ranks that deal the heads of their tokens among them."""

    call: Call  # of this rank, with all heads of its tokens
    comm: Communicator  # of the ranks among which heads are dealt
    places: Sequence[Sequence[Stretch]]  # the rows of each rank, and where they lie among the rows of all
    num_rows: int  # of all these ranks
    may_have_rounds: bool = False  # where what computes a round needs nothing of another round

    @cached_property
    def shares(self) -> list[Heads]:
        """The heads of each rank."""
        return shares_of(self.call.q.shape[-2], self.call.k.shape[-2], self.comm.world)

    @cached_property
    def rounds(self) -> list[list[Heads]]:
        """The heads of each rank in each round."""
        overlaps = self.may_have_rounds and not isinstance(self.call.q, np.ndarray)
        batch_rows = self.num_rows * math.prod(self.call.q.shape[:-3])
        return rounds_of(self.shares, num_rounds_of(self.shares, batch_rows) if overlaps else 1)

    def options_of(self, heads: Heads) -> Options:
        """Return the call's options for some heads alone."""
        options, query = self.call.options, heads.query
        if options.sink is not None:
            options = replace(options, sink=options.sink[query])
        if options.alibi_slopes is not None:
            options = replace(options, alibi_slopes=options.alibi_slopes[..., query])
        return options

    def forward(self, compute: Compute) -> Steps[tuple[Array, Array]]:
        """Return (out in q's dtype, lse) of this rank's tokens; `compute` gives those of some heads."""
        call, xp = self.call, interop.namespace_of(self.call.q)
        results = {
            "out": xp.empty((*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype),
            "lse": xp.empty((*call.q.shape[:-3], call.q.shape[-2], call.q.shape[-3]), call.accum),
        }
        own = _Owned(self, results, self.comm.now())
        arriving = yield from self._all_tokens({"q": call.q, "k": call.k, "v": call.v})
        for number, whole in enumerate(arriving):
            heads = self.rounds[number][self.comm.rank]
            if heads.first != heads.stop:
                found = yield from compute(whole.get(), heads)
                own.send(number, found)
                yield True
        yield from own.receive()
        return results["out"], results["lse"]

    def backward(
        self, residuals: Mapping[str, Array | None], wanted: frozenset[str], compute: Compute
    ) -> Steps[list[Array | None]]:
        """Return the gradients of this rank's inputs, None where they are not wanted.

        `compute` gives those of some heads by name, from q, k, v and the residuals.
        """
        call, xp = self.call, interop.namespace_of(self.call.q)
        inputs = {"q": call.q, "k": call.k, "v": call.v}
        results = {name: xp.zeros(x.shape, x.dtype) for name, x in inputs.items() if name in wanted}
        extras = {name: xp.zeros(x.shape, call.accum) for name, x in call.extras.items() if name in wanted}
        own = _Owned(self, results, self.comm.now())
        arriving = yield from self._all_tokens(inputs | {n: x for n, x in residuals.items() if x is not None})
        for number, whole in enumerate(arriving):
            heads = self.rounds[number][self.comm.rank]
            if heads.first != heads.stop:
                found = yield from compute(whole.get(), heads)
                own.send(number, found)
                for name, total in extras.items():
                    if is_operand(name):
                        total += found[name]
                    else:
                        total[..., heads.query] = found[name].reshape(total[..., heads.query].shape)
                yield True
        yield from own.receive()
        for name, x in call.extras.items():
            if name in extras:
                total = yield from self.comm.summing(extras[name])
                results[name] = total.astype(x.dtype, copy=False)
        return [results.get(name) for name in (*inputs, *call.extras)]

    def heads_of(self, name: str, heads: Heads) -> slice:
        """Return the heads of one array, which are KV heads of k and v."""
        return heads.kv if name in ("k", "v") else heads.query

    def _all_tokens(self, named: Arrays) -> Steps[list[_Whole]]:
        """Have all tokens of this rank's heads arrive, in the order of the rows of all, for each round."""
        comm, ready = self.comm, self.comm.now()
        for number, shares in enumerate(self.rounds):
            for to in others_of(comm):
                self._send(named, self.places[comm.rank], shares[to], to, number, ready)
        xp, rounds = interop.namespace_of(self.call.q), []
        for shares in self.rounds:
            whole = {}
            for name, x in named.items():
                own = self.heads_of(name, shares[comm.rank])
                count, rows = own.stop - own.start, self.num_rows
                of_lse = (*x.shape[:-2], count, rows)
                whole[name] = xp.empty(
                    of_lse if name in _ROWS_LAST else (*x.shape[:-3], rows, count, x.shape[-1]), x.dtype
                )
            rounds.append(_Whole(whole, []))
        ready = comm.now()
        for number, (shares, arriving) in enumerate(zip(self.rounds, rounds, strict=True)):
            heads = shares[comm.rank]
            if heads.first == heads.stop:
                continue
            for source in others_of(comm):
                into = [
                    piece(name, x, stretch.tokens)
                    for name, x in arriving.arrays.items()
                    for stretch in self.places[source]
                ]
                arriving.pending.append((yield from comm.arriving(source, number, into, ready)))
            for name, x in named.items():
                own = self.heads_of(name, heads)
                for stretch in self.places[comm.rank]:
                    piece(name, arriving.arrays[name], stretch.tokens)[...] = piece(name, x, stretch.rows, own)
        return rounds

    def _send(self, named: Arrays, places: Sequence[Stretch], heads: Heads, to: int, number: int, ready: Any) -> None:
        """Send a rank its heads of this rank's tokens."""
        if heads.first != heads.stop:
            pieces = [
                piece(name, x, stretch.rows, self.heads_of(name, heads))
                for name, x in named.items()
                for stretch in places
            ]
            self.comm.send(pieces, to, number, ready)


@dataclass(frozen=True)
class _Whole:
    """All tokens of some heads, which arrive."""

    arrays: dict[str, Array]
    pending: list[Pending]

    def get(self) -> dict[str, Array]:
        """Wait for them."""
        for pending in self.pending:
            pending.get()
        return self.arrays


class _Owned:
    """Results that go from the ranks that computed them to the ranks that have the tokens."""

    def __init__(self, dealing: Dealing, results: Mapping[str, Array], ready: Any) -> None:
        self._dealing, self._results, self._ready = dealing, results, ready
        self._comm = dealing.comm
        # A KV head that several ranks have read gets a share of its gradient from each, in the accumulation's dtype.
        is_shared = dealing.call.k.shape[-2] < dealing.comm.world
        self._shares: dict[str, dict[int, Array]] = {name: {} for name in results if name in ("k", "v") and is_shared}

    def send(self, number: int, found: Arrays) -> None:
        """Send what was found for the heads of a round."""
        dealing, comm = self._dealing, self._comm
        dtypes = {name: dealing.call.accum if name in self._shares else x.dtype for name, x in self._results.items()}
        found = {name: found[name].astype(dtype, copy=False) for name, dtype in dtypes.items()}
        for to in others_of(comm):
            places = dealing.places[to]
            comm.send([piece(name, x, s.tokens) for name, x in found.items() for s in places], to, MOST_ROUNDS + number)
        targets = self._targets(comm.rank, dealing.rounds[number][comm.rank])
        own = [piece(name, x, s.tokens) for name, x in found.items() for s in dealing.places[comm.rank]]
        for target, x in zip(targets, own, strict=True):
            target[...] = x

    def receive(self) -> Steps[None]:
        """Have what the others found arrive."""
        dealing, comm = self._dealing, self._comm
        arriving: list[Pending] = []
        for number, shares in enumerate(dealing.rounds):
            for source in others_of(comm):
                if shares[source].first != shares[source].stop:
                    targets = self._targets(source, shares[source])
                    ready = None if self._shares else self._ready
                    arriving.append((yield from comm.arriving(source, MOST_ROUNDS + number, targets, ready)))
        for pending in arriving:
            pending.get()
        for name, by_rank in self._shares.items():
            result = self._results[name]
            total = interop.namespace_of(result).zeros(result.shape, dealing.call.accum)
            for rank in sorted(by_rank):
                total[..., dealing.shares[rank].kv, :] += by_rank[rank]
            result[...] = total.astype(result.dtype, copy=False)

    def _targets(self, rank: int, heads: Heads) -> list[Array]:
        """Return this rank's rows of what another rank, or this one, found for some heads."""
        targets = []
        for name, result in self._results.items():
            of_name = self._dealing.heads_of(name, heads)
            if name in self._shares:
                shape = (*result.shape[:-2], of_name.stop - of_name.start, result.shape[-1])
                result = interop.namespace_of(result).empty(shape, self._dealing.call.accum)
                self._shares[name][rank] = result
                of_name = slice(None)
            places = self._dealing.places[self._comm.rank]
            targets += [piece(name, result, stretch.rows, of_name) for stretch in places]
        return targets


def others_of(comm: Communicator) -> list[int]:
    """Return the other ranks, in such an order that no two ranks begin with the same one."""
    return [(comm.rank + distance) % comm.world for distance in range(1, comm.world)]


def piece(name: str, x: Array, rows: slice, heads: slice = _ALL) -> Array:
    """View some rows of some heads of an array, whose last axis are rows where it is of lse's kind."""
    return x[..., heads, rows] if name in _ROWS_LAST else x[..., rows, heads, :]
