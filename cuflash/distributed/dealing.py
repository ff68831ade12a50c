"""Ranks deal heads: each gets all their tokens of some heads, computes, and sends the rows back to their owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuflash import interop
from cuflash.distributed.call import Call
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.order import Stretch, put_part, take_part
from cuflash.problem.heads import Heads
from cuflash.problem.options import Options

Array = Any
Arrays = Mapping[str, Array]


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


@dataclass(frozen=True)
class Dealing:
    """Ranks that deal the heads of their tokens among them."""

    call: Call  # of this rank, with all heads of its tokens
    comm: Communicator  # of the ranks among which heads are dealt
    places: Sequence[Sequence[Stretch]]  # the rows of each rank, and where they lie among the rows of all
    num_rows: int  # of all these ranks

    @property
    def shares(self) -> list[Heads]:
        """The heads of each rank."""
        return shares_of(self.call.q.shape[-2], self.call.k.shape[-2], self.comm.world)

    @property
    def own(self) -> Heads:
        """This rank's heads."""
        return self.shares[self.comm.rank]

    @property
    def options(self) -> Options:
        """The call's options for this rank's heads alone."""
        options, heads = self.call.options, self.own.query
        if options.sink is not None:
            options = replace(options, sink=options.sink[heads])
        if options.alibi_slopes is not None:
            options = replace(options, alibi_slopes=options.alibi_slopes[..., heads])
        return options

    def forward(self, compute: Callable[[Array, Array, Array], tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return (out in q's dtype, lse) of this rank's tokens; `compute(q, k, v)` gives those of its heads."""
        call = self.call
        q, k, v = self._all_tokens({"q": call.q, "k": call.k, "v": call.v}).values()
        xp = interop.namespace_of(q)
        if q.shape[-2]:
            out, lse = compute(q, k, v)
        else:
            out = xp.empty((*q.shape[:-1], v.shape[-1]), call.q.dtype)
            lse = xp.empty((*q.shape[:-3], 0, q.shape[-3]), call.accum)
        by_tokens = self._to_owners(out.astype(call.q.dtype, copy=False), axis=-3)
        lse_by_tokens = self._to_owners(lse, axis=-1)
        return xp.concatenate(by_tokens, axis=-2), xp.concatenate(lse_by_tokens, axis=-2)

    def backward(
        self, residuals: Mapping[str, Array | None], wanted: frozenset[str], compute: Callable[[Arrays], Arrays]
    ) -> list[Array | None]:
        """Return the gradients of this rank's inputs, None where they are not wanted.

        `compute` gives those of its heads by name in the accumulation's dtype, from q, k, v and the residuals.
        """
        call, own = self.call, self.own
        named = {"q": call.q, "k": call.k, "v": call.v, **{name: x for name, x in residuals.items() if x is not None}}
        whole = self._all_tokens(named)
        xp, accum = interop.namespace_of(call.q), call.accum
        found = compute(whole) if whole["q"].shape[-2] else {}
        like = {"q": call.q, "k": call.k, "v": call.v, **call.extras}
        results: list[Array | None] = []
        for name, x in like.items():
            if name not in wanted:
                results.append(None)
                continue
            if name in call.extras:
                total = xp.zeros(x.shape, accum)
                if name in found and name.startswith("operand_"):
                    total[...] = found[name]
                elif name in found:
                    total[..., own.query] = found[name].reshape(total[..., own.query].shape)
                results.append(self.comm.sum(total).astype(x.dtype, copy=False))
                continue
            heads = own.query if name == "q" else own.kv
            grad = found.get(name, xp.zeros((*whole[name].shape[:-2], heads.stop - heads.start, x.shape[-1]), accum))
            total = xp.zeros(x.shape, accum)
            # A KV head that several ranks have read gets a share of its gradient from each.
            for share, received in zip(self.shares, self._to_owners(grad, axis=-3), strict=True):
                total[..., share.query if name == "q" else share.kv, :] += received
            results.append(total.astype(x.dtype, copy=False))
        return results

    def _all_tokens(self, named: Arrays) -> dict[str, Array]:
        """Gather all tokens of this rank's heads of each array, in the order of the rows of all."""
        messages = []
        for share in self.shares:
            of_rank = []
            for name, x in named.items():
                heads = share.kv if name in ("k", "v") else share.query
                of_rank.append(x[..., heads, :])  # heads are the last axis but one of lse, too
            messages.append(of_rank)
        received = self.comm.exchange(messages)
        xp = interop.namespace_of(self.call.q)
        whole = {}
        for index, (name, x) in enumerate(named.items()):
            heads = self.own.kv if name in ("k", "v") else self.own.query
            is_lse = name in ("lse", "dlse")
            count, rows = heads.stop - heads.start, self.num_rows
            shape = (*x.shape[:-2], count, rows) if is_lse else (*x.shape[:-3], rows, count, x.shape[-1])
            array = whole[name] = xp.empty(shape, x.dtype)
            for places, of_rank in zip(self.places, received, strict=True):
                put_part(array, of_rank[index], places, axis=-1 if is_lse else -3)
        return whole

    def _to_owners(self, x: Array, axis: int) -> list[Array]:
        """Send the rows of all tokens to the ranks that hold them; return what each rank sent here, in their order."""
        return self.comm.exchange([take_part(x, places, axis) for places in self.places])
