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
from cuflash.distributed.pieces import ROWS_LAST, Pieces, as_rows, copy_here, rows_of_heads
from cuflash.distributed.steps import Steps
from cuflash.problem.heads import Heads
from cuflash.problem.options import Options
from cuflash.problem.own_rules import is_operand

Array = Any
Arrays = Mapping[str, Array]
# A round costs the host some tenths of a millisecond. In this time a GPU multiplies some 1e11 pairs of numbers, so that
# a round of less work (rows of queries and keys, heads and columns) would wait for the host.
LEAST_WORK_OF_ROUND = 1 << 39
MOST_ROUNDS = 4
# A computation gets all tokens of some heads by name, and these heads, and finds results by name.
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


def num_rounds_of(shares: Sequence[Heads], work_of_head: int) -> int:
    """Return in how many rounds heads are dealt so that every rank has whole KV heads, and enough work, in each."""
    fewest = min((share.stop_kv - share.first_kv for share in shares), default=0)
    work = min((share.stop - share.first for share in shares), default=0) * work_of_head
    return max(1, min(fewest, work // LEAST_WORK_OF_ROUND, MOST_ROUNDS))


@dataclass(frozen=True)
class Dealing:
    """Ranks that deal the heads of their tokens among them."""

    call: Call  # of this rank, with all heads of its tokens
    comm: Communicator  # of the ranks among which heads are dealt
    places: Sequence[tuple[Stretch, ...]]  # the rows of each rank, and where they lie among the rows of all
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
        work_of_head = self.num_rows**2 * math.prod(self.call.q.shape[:-3]) * self.call.q.shape[-1]
        return rounds_of(self.shares, num_rounds_of(self.shares, work_of_head) if overlaps else 1)

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
            heads = self.own_heads(number)
            if has_heads(heads):
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
            heads = self.own_heads(number)
            if has_heads(heads):
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

    def own_heads(self, number: int) -> Heads:
        """Return the heads of this rank in a round."""
        return self.rounds[number][self.comm.rank]

    @cached_property
    def own_rows(self) -> tuple[Stretch, ...]:
        """The rows of this rank's own arrays."""
        return as_rows(self.places[self.comm.rank])

    def _all_tokens(self, named: Arrays) -> Steps[list[_Whole]]:
        """Have all tokens of this rank's heads arrive, in the order of the rows of all, for each round."""
        comm, made = self.comm, self.comm.now()
        names, arrays = tuple(named), tuple(named.values())
        for number, shares in enumerate(self.rounds):
            for to in comm.others:
                if has_heads(shares[to]):
                    comm.send(Pieces(arrays, rows_of_heads(names, self.own_rows, shares[to])), to, number, made)
        rounds = [_Whole(self._empty(named, number), []) for number in range(len(self.rounds))]
        ready = comm.now()
        for number, whole in enumerate(rounds):
            heads = self.own_heads(number)
            if not has_heads(heads):
                continue
            targets = tuple(whole.arrays.values())
            for source in comm.others:
                into = Pieces(targets, rows_of_heads(names, self.places[source], None))
                whole.pending.append((yield from comm.arriving(source, number, into, ready)))
            own = Pieces(arrays, rows_of_heads(names, self.own_rows, heads))
            into = Pieces(targets, rows_of_heads(names, self.places[comm.rank], None))
            copy_here(own, into)
        return rounds

    def _empty(self, named: Arrays, number: int) -> dict[str, Array]:
        """Allocate arrays for all tokens of this rank's heads in a round."""
        xp, heads = interop.namespace_of(self.call.q), self.own_heads(number)
        whole = {}
        for name, x in named.items():
            own = heads.kv if name in ("k", "v") else heads.query
            count, rows = own.stop - own.start, self.num_rows
            is_lse = name in ROWS_LAST
            shape = (*x.shape[:-2], count, rows) if is_lse else (*x.shape[:-3], rows, count, x.shape[-1])
            whole[name] = xp.empty(shape, x.dtype)
        return whole


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
        self._arriving: list[Pending] = []
        # A KV head that several ranks have read gets a share of its gradient from each, in the accumulation's dtype.
        is_shared = dealing.call.k.shape[-2] < dealing.comm.world
        self._shares: dict[str, dict[int, Array]] = {name: {} for name in results if name in ("k", "v") and is_shared}

    def send(self, number: int, found: Arrays) -> None:
        """Send what was found for the heads of a round."""
        dealing, comm, names = self._dealing, self._comm, tuple(self._results)
        dtypes = {name: dealing.call.accum if name in self._shares else x.dtype for name, x in self._results.items()}
        arrays = tuple([found[name].astype(dtype, copy=False) for name, dtype in dtypes.items()])
        made = comm.now()
        for to in comm.others:
            comm.send(Pieces(arrays, rows_of_heads(names, dealing.places[to], None)), to, MOST_ROUNDS + number, made)
        own = Pieces(arrays, rows_of_heads(names, dealing.places[comm.rank], None))
        copy_here(own, self._targets(comm.rank, dealing.own_heads(number)))

    def receive(self) -> Steps[None]:
        """Have what the others found arrive."""
        dealing, comm = self._dealing, self._comm
        for number, shares in enumerate(dealing.rounds):
            for source in comm.others:
                if has_heads(shares[source]):
                    targets, ready = self._targets(source, shares[source]), self._ready_now()
                    self._arriving.append((yield from comm.arriving(source, MOST_ROUNDS + number, targets, ready)))
        for pending in self._arriving:
            pending.get()
        for name, by_rank in self._shares.items():
            result = self._results[name]
            total = interop.namespace_of(result).zeros(result.shape, dealing.call.accum)
            for rank in sorted(by_rank):
                total[..., dealing.shares[rank].kv, :] += by_rank[rank]
            result[...] = total.astype(result.dtype, copy=False)

    def _ready_now(self) -> Any:
        """Return from when on the targets may be written: shares have new memory."""
        return self._comm.now() if self._shares else self._ready

    def _targets(self, rank: int, heads: Heads) -> Pieces:
        """Return this rank's rows of what another rank, or this one, found for some heads."""
        arrays = []
        for name, result in self._results.items():
            if name in self._shares:
                shape = (*result.shape[:-2], heads.stop_kv - heads.first_kv, result.shape[-1])
                result = interop.namespace_of(result).empty(shape, self._dealing.call.accum)
                self._shares[name][rank] = result
            arrays.append(result)
        cuts = rows_of_heads(tuple(self._results), self._dealing.own_rows, heads, tuple(self._shares))
        return Pieces(tuple(arrays), cuts)


def has_heads(heads: Heads) -> bool:
    """Return True if there are query heads among some heads."""
    return heads.stop > heads.first
