"""Attention over a sequence that is spread over ranks, by heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

Queries, keys and values are exchanged so that each rank has all tokens of some heads, computes ordinary attention, and
sends the results back to the ranks that hold the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cuflash import interop
from cuflash.distributed.call import Call, Scheme
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.order import put_part, take_part
from cuflash.frontend.partial import Part
from cuflash.problem.attention_problem import Place
from cuflash.problem.heads import Heads
from cuflash.typing import ArrayT, RankBackward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

Array = Any


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


@overload
def ulysses_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT: ...
@overload
def ulysses_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def ulysses_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def ulysses_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Attention of this rank's queries over the keys of all ranks, computed by heads.

    Heads that the number of ranks does not divide are dealt unevenly, and KV heads fewer than ranks are replicated.

    Parameters
    ----------
    q, k, v, comm, order, cu_seqlens, return_lse, **options
        As of `ring_attention`.

    Returns
    -------
    out : array like q, with v's head_dim_v, or (out, lse) if `return_lse`

    Raises
    ------
    TypeError, ValueError, NotImplementedError, TimeoutError
        As `ring_attention`.
    """
    return BY_HEADS.attention(q, k, v, comm, order, cu_seqlens, return_lse, options)


@overload
def ulysses_attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    dlse: ArrayT | None = None,
    grads: None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ...]: ...
@overload
def ulysses_attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    dlse: ArrayT | None = None,
    grads: Sequence[str],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]: ...
def ulysses_attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    dlse: ArrayT | None = None,
    grads: Sequence[str] | None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]:
    """Gradients of `ulysses_attention`.

    Parameters
    ----------
    dout, q, k, v, out, lse, comm, order, cu_seqlens, dlse, grads, **options
        As of `ring_attention_backward`.

    Returns
    -------
    tuple of arrays
        As from `ring_attention_backward`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, TimeoutError
        As `ring_attention`.
    """
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    return BY_HEADS.gradients(arrays, comm, order, cu_seqlens, grads, options)


@overload
def ulysses_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, RankBackward[ArrayT]]: ...
@overload
def ulysses_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[tuple[ArrayT, ArrayT], RankBackward[ArrayT]]: ...
@overload
def ulysses_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | tuple[ArrayT, ArrayT], RankBackward[ArrayT]]: ...
def ulysses_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "plain",
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, RankBackward[ArrayT]]:
    """`ulysses_attention` and its gradient function.

    Parameters
    ----------
    q, k, v, comm, order, cu_seqlens, return_lse, **options
        As of `ring_attention`.

    Returns
    -------
    out : array, or (out, lse) if `return_lse`
    backward : callable
        As from `ring_attention_vjp`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, TimeoutError
        As `ring_attention`.
    """
    return BY_HEADS.vjp(q, k, v, comm, order, cu_seqlens, return_lse, options)


def _forward(call: Call) -> tuple[Array, Array]:
    shares = shares_of(call.q.shape[-2], call.k.shape[-2], call.comm.world)
    q, k, v = _all_tokens(call, shares, {"q": call.q, "k": call.k, "v": call.v}).values()
    xp, accum = interop.namespace_of(q), call.accum
    if q.shape[-2]:
        out, lse = _part(call, shares[call.comm.rank], q, k, v).forward()
    else:
        out = xp.empty((*q.shape[:-1], v.shape[-1]), accum)
        lse = xp.empty((*q.shape[:-3], 0, q.shape[-3]), accum)
    by_tokens = _to_owners(call, out.astype(call.q.dtype, copy=False), axis=-3)
    lse_by_tokens = _to_owners(call, lse, axis=-1)
    return xp.concatenate(by_tokens, axis=-2), xp.concatenate(lse_by_tokens, axis=-2)


def _backward(call: Call, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> list[Array | None]:
    shares = shares_of(call.q.shape[-2], call.k.shape[-2], call.comm.world)
    own = shares[call.comm.rank]
    named = {"q": call.q, "k": call.k, "v": call.v, **{name: x for name, x in residuals.items() if x is not None}}
    whole = _all_tokens(call, shares, named)
    xp, accum = interop.namespace_of(call.q), call.accum
    q, k, v = whole["q"], whole["k"], whole["v"]
    found: dict[str, Array] = {}
    if q.shape[-2]:
        part = _part(call, own, q, k, v)
        found = part.backward(whole["dout"], whole["out"], whole["lse"], whole.get("dlse"), wanted)
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
            results.append(call.comm.sum(total).astype(x.dtype, copy=False))
            continue
        heads = own.query if name == "q" else own.kv
        grad = found.get(name, xp.zeros((*whole[name].shape[:-2], heads.stop - heads.start, x.shape[-1]), accum))
        total = xp.zeros(x.shape, accum)
        # A KV head that several ranks have read gets a share of its gradient from each.
        for share, received in zip(shares, _to_owners(call, grad, axis=-3), strict=True):
            total[..., share.query if name == "q" else share.kv, :] += received
        results.append(total.astype(x.dtype, copy=False))
    return results


def _part(call: Call, share: Heads, q: Array, k: Array, v: Array) -> Part:
    """Make the part of the problem that a rank's heads are."""
    options = call.options
    if options.sink is not None:
        options = replace(options, sink=options.sink[share.query])
    if options.alibi_slopes is not None:
        options = replace(options, alibi_slopes=options.alibi_slopes[..., share.query])
    xp = interop.namespace_of(q)
    cu_seqlens = None if call.edges is None else xp.asarray(call.edges, np.int32)
    return Part(q, k, v, options, Place(first_head=share.first), cu_seqlens)


def _all_tokens(call: Call, shares: list[Heads], named: dict[str, Array]) -> dict[str, Array]:
    """Gather all tokens of this rank's heads of each array, in the order of the sequence."""
    comm = call.comm
    messages = []
    for share in shares:
        of_rank = []
        for name, x in named.items():
            heads = share.kv if name in ("k", "v") else share.query
            of_rank.append(x[..., heads, :])  # heads are the last axis but one of lse, too
        messages.append(of_rank)
    received = comm.exchange(messages)
    own = shares[comm.rank]
    xp = interop.namespace_of(call.q)
    whole = {}
    for index, (name, x) in enumerate(named.items()):
        heads = own.kv if name in ("k", "v") else own.query
        is_lse = name in ("lse", "dlse")
        count = heads.stop - heads.start
        shape = (*x.shape[:-2], count, call.seqlen) if is_lse else (*x.shape[:-3], call.seqlen, count, x.shape[-1])
        array = whole[name] = xp.empty(shape, x.dtype)
        for rank, of_rank in enumerate(received):
            put_part(array, of_rank[index], call.stretches(rank), axis=-1 if is_lse else -3)
    return whole


def _to_owners(call: Call, x: Array, axis: int) -> list[Array]:
    """Send the rows of all tokens to the ranks that hold them; return what each rank sent here, in their order."""
    ranks = range(call.comm.world)
    return call.comm.exchange([take_part(x, call.stretches(rank), axis) for rank in ranks])


BY_HEADS = Scheme("ulysses_attention", _forward, _backward)
