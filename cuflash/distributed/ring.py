"""Attention over a sequence that is spread over ranks, whose keys and values travel around a ring.

Each rank keeps its queries; in every step it holds the keys and values of one rank, computes attention over them while
the next ones are on their way, and merges the partial results, which stay in the accumulation's dtype (Liu, Zaharia and
Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; the orders: Brandon et al.,
"Striped Attention", 2023, and the zigzag order of Llama 3's context parallelism, 2024). Backward, dk and dv travel with
the keys that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cuflash import interop
from cuflash.distributed.call import RESIDUALS, Backward, Call, Gradients, Scheme
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.order import Stretch
from cuflash.frontend.partial import Part
from cuflash.problem.attention_problem import Place

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

Array = Any


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    comm: Communicator,
    *,
    order: str = "zigzag",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Attention of this rank's queries over the keys of all ranks.

    Parameters
    ----------
    q : array (batch, this rank's tokens, num_heads_q, head_dim), packed (this rank's tokens, num_heads_q, head_dim)
        This rank's part of the queries, as `shard` gives it.
    k, v : array (batch, this rank's tokens, num_heads_kv, head_dim or head_dim_v), packed without batch
        Its part of the keys and values.
    comm : Communicator
        This rank's.
    order : {"zigzag", "plain", "striped"}
        As given to `shard`.
    cu_seqlens : NumPy int32 array (num_sequences + 1,), optional
        Where the packed sequences of all ranks together begin and end.
    return_lse : bool
        Whether to return lse, too.
    **options
        causal, window, softmax_scale, softcap, alibi_slopes, sink, dropout_p, dropout_seed, deterministic and
        precision, as of `attention` on the whole arrays; slopes and sinks are the same on every rank.

    Returns
    -------
    out : array like q, with v's head_dim_v
        This rank's rows of what `attention` gives for the whole arrays.
    lse : array (batch, num_heads_q, this rank's tokens), packed (num_heads_q, this rank's tokens)
        Only if `return_lse`.

    Raises
    ------
    TypeError, ValueError
        As `attention`; ValueError on every rank where arguments differ over the ranks, or some find them invalid.
    NotImplementedError
        For options that index the whole score matrix: bias, mask, q_lengths, kv_lengths, block_mask, block_table.
    TimeoutError
        Where another rank does not come within the communicator's time limit.
    """
    return RING.attention(q, k, v, comm, order, cu_seqlens, return_lse, options)


def ring_attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    comm: Communicator,
    *,
    order: str = "zigzag",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    dlse: Array | None = None,
    grads: Sequence[str] | None = None,
    **options: Unpack[OptionKeywords],
) -> Gradients:
    """Gradients of `ring_attention`.

    Parameters
    ----------
    dout, out : array as `ring_attention` returns out
        Of this rank, as are all arrays.
    lse, dlse : array as `ring_attention` returns lse
    q, k, v, comm, order, cu_seqlens, **options
        As given to `ring_attention`.
    grads : sequence of str, optional
        Names of the gradients that are wanted, as of `attention_backward`; the others are None.

    Returns
    -------
    tuple of arrays
        dq, dk and dv of this rank's tokens, then dsink and dalibi_slopes where those were given, summed over all ranks.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, TimeoutError
        As `ring_attention`.
    """
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    return RING.gradients(arrays, comm, order, cu_seqlens, grads, options)


def ring_attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    comm: Communicator,
    *,
    order: str = "zigzag",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, Backward]:
    """`ring_attention` and its gradient function.

    Parameters
    ----------
    q, k, v, comm, order, cu_seqlens, return_lse, **options
        As of `ring_attention`.

    Returns
    -------
    out : array, or (out, lse) if `return_lse`
    backward : callable
        ``backward(dout, dlse=None, *, grads=None)`` returns what `ring_attention_backward` does. Every rank calls it as
        often as the others do.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, TimeoutError
        As `ring_attention`.
    """
    return RING.vjp(q, k, v, comm, order, cu_seqlens, return_lse, options)


class Visit(NamedTuple):
    """Some of this rank's queries, and some of the keys that it holds."""

    sequence: int  # of packed ones; 0 of padded arrays
    queries: Stretch
    keys: Stretch

    @property
    def place(self) -> Place:
        """Where the part stands in its sequence."""
        return Place(self.queries.first, self.keys.first, self.queries.stride, first_batch=self.sequence)


class _Ring:
    """One rank's way around the ring."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.comm, self.options, self.edges, self.seqlen = call.comm, call.options, call.edges, call.seqlen
        self.q, self.k, self.v, self._accum = call.q, call.k, call.v, call.accum
        self._sink: Any = call.options.sink

    def forward(self) -> tuple[Array, Array]:
        """(out in q's dtype, lse)."""
        q, xp = self.q, interop.namespace_of(self.q)
        out = xp.zeros((*q.shape[:-1], self.v.shape[-1]), self._accum)
        lse = xp.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -np.inf, self._accum)
        kv = self.k, self.v
        for step in range(self.comm.world):
            self._pass_on(step, kv)
            for visit in self._visits(step):
                part = self._part(visit, *kv)
                if part.sees_anything:
                    rows = visit.queries.rows
                    merge_into(out[..., rows, :, :], lse[..., rows], *map(self._without_batch, part.forward()))
            kv = self._next(step, kv)
        if self.options.sink is not None:
            self._add_sink(out, lse)
        return out.astype(q.dtype, copy=False), lse

    def backward(self, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> list[Array | None]:
        """dq, dk, dv, then dsink and dalibi_slopes where these were given; None where not wanted."""
        xp, world = interop.namespace_of(self.q), self.comm.world
        dout, out, lse, dlse = (residuals[name] for name in RESIDUALS)
        given = self.call.extras
        grads = {name: xp.zeros(getattr(self, name).shape, self._accum) for name in ("q", "k", "v")}
        grads |= {name: xp.zeros(x.shape, self._accum) for name, x in given.items()}
        if "sink" in wanted:
            grads["sink"] = self._gradient_of_sink(dout, out, lse, dlse)
        kv, sums = (self.k, self.v), (grads["k"], grads["v"])
        for step in range(world):
            self._pass_on(step, kv)
            shares = self._shares(step, kv, (dout, out, lse, dlse), wanted - {"sink"}, grads)
            # The sums of a rank's keys follow them around the ring.
            sums = sums if step == 0 else self.comm.receive((self.comm.rank - 1) % world)
            for total, keys, share in shares:
                sums[total][..., keys, :, :] += share
            if world > 1:
                self.comm.send(sums, (self.comm.rank + 1) % world)
            kv = self._next(step, kv)
        grads["k"], grads["v"] = sums if world == 1 else self.comm.receive((self.comm.rank - 1) % world)
        for name in given:
            if name in wanted:
                grads[name] = self.comm.sum(grads[name])
        like = {"q": self.q, "k": self.k, "v": self.v, **given}
        return [grads[name].astype(x.dtype, copy=False) if name in wanted else None for name, x in like.items()]

    def _pass_on(self, step: int, kv: tuple[Array, Array]) -> None:
        if step + 1 < self.comm.world:
            self.comm.send(kv, (self.comm.rank + 1) % self.comm.world)

    def _next(self, step: int, kv: tuple[Array, Array]) -> tuple[Array, Array]:
        if step + 1 < self.comm.world:
            received: tuple[Array, Array] = self.comm.receive((self.comm.rank - 1) % self.comm.world)
            return received
        return kv

    def _visits(self, step: int) -> Iterator[Visit]:
        """The parts of a step, in which this rank holds the keys of the one `step` places before it."""
        edges = [0, self.seqlen] if self.edges is None else self.edges
        source = (self.comm.rank - step) % self.comm.world
        for queries in self.call.stretches(self.comm.rank):
            for keys in self.call.stretches(source):
                for sequence, (start, stop) in enumerate(pairwise(edges)):
                    own, others = queries.within(start, stop), keys.within(start, stop)
                    if own.length and others.length:
                        yield Visit(
                            sequence, own._replace(first=own.first - start), others._replace(first=others.first - start)
                        )

    def _part(self, visit: Visit, k: Array, v: Array) -> Part:
        """A part of one sequence, or of all sequences of a padded batch; the sink is added at the end."""
        options = replace(self.options, sink=None)
        slopes = self.options.alibi_slopes
        if self.edges is not None and slopes is not None and slopes.ndim == 2 and len(slopes) > 1:
            options = replace(options, alibi_slopes=slopes[visit.sequence : visit.sequence + 1])
        q = self._with_batch(self.q[..., visit.queries.rows, :, :])
        k, v = (self._with_batch(x[..., visit.keys.rows, :, :]) for x in (k, v))
        return Part(q, k, v, options, visit.place)

    def _with_batch(self, x: Array) -> Array:
        return x if self.edges is None else x[None]

    def _without_batch(self, x: Array) -> Array:
        return x if self.edges is None else x[0]

    def _shares(
        self,
        step: int,
        kv: tuple[Array, Array],
        residuals: tuple[Array, Array, Array, Array | None],
        wanted: frozenset[str],
        grads: dict[str, Array],
    ) -> list[tuple[int, slice, Array]]:
        """Add this step's shares to the gradients of what stays here, and return those of k (0) and v (1)."""
        shares: list[tuple[int, slice, Array]] = []
        dout, out, lse, dlse = residuals
        for visit in self._visits(step):
            part = self._part(visit, *kv)
            if not part.sees_anything:
                continue
            rows = visit.queries.rows
            of_rows = [self._with_batch(x[..., rows, :, :]) for x in (dout, out)]
            of_lse = [None if x is None else self._with_batch(x[..., rows]) for x in (lse, dlse)]
            for name, share in part.backward(of_rows[0], of_rows[1], of_lse[0], of_lse[1], wanted).items():
                if name == "q":
                    grads["q"][..., rows, :, :] += self._without_batch(share)
                elif name in ("k", "v"):
                    shares.append((("k", "v").index(name), visit.keys.rows, self._without_batch(share)))
                elif self.edges is not None and grads[name].ndim == 2 and len(grads[name]) > 1:
                    grads[name][visit.sequence] += share[0]
                else:
                    grads[name] += share.reshape(grads[name].shape)
        return shares

    def _in_sequences(self) -> Array:
        """Bool (this rank's tokens,): which lie in a sequence."""
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

    def _gradient_of_sink(self, dout: Array, out: Array, lse: Array, dlse: Array | None) -> Array:
        """This rank's rows' share: the sink is a key whose value is 0."""
        xp = interop.namespace_of(lse)
        dout, out = dout.astype(self._accum), out.astype(self._accum)
        # No dout, NaN neither, counts of a row that sees nothing.
        delta = xp.where(out.any(axis=-1), (dout * out).sum(axis=-1), 0).swapaxes(-1, -2)
        if dlse is not None:
            delta = delta - dlse
        with np.errstate(all="ignore"):
            weight = xp.exp(self._sink[:, None] - lse)
            shares = xp.where(self._in_sequences() & (lse != -np.inf), -weight * delta, 0)
        axes = tuple(axis for axis in range(shares.ndim) if axis != shares.ndim - 2)
        return shares.sum(axis=axes).astype(self._accum)


def merge_into(out: Array, lse: Array, part_out: Array, part_lse: Array) -> None:
    """Merge results over further keys into those so far, in place: (.., rows, heads, dim) and (.., heads, rows)."""
    xp = interop.namespace_of(lse)
    with np.errstate(all="ignore"):
        total = xp.logaddexp(lse, part_lse)
        own, others = (xp.where(x == -np.inf, 0, xp.exp(x - total)) for x in (lse, part_lse))
    out *= own.swapaxes(-1, -2)[..., None]
    out += xp.where(part_lse == -np.inf, 0, others).swapaxes(-1, -2)[..., None] * part_out
    lse[...] = total


RING = Scheme("ring_attention", lambda call: _Ring(call).forward(), lambda call, *given: _Ring(call).backward(*given))
