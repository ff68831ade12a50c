"""Attention over a sequence that is spread over ranks, by heads (Jacobs et al., "DeepSpeed Ulysses", 2023).

Queries, keys and values are exchanged so that each rank has all tokens of some heads, computes ordinary attention, and
sends the results back to the ranks that hold the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cuflash import hints, interop
from cuflash.distributed.call import Call, Scheme
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.dealing import Arrays, Dealing
from cuflash.distributed.launches import Launches, launches_of
from cuflash.distributed.steps import Steps
from cuflash.frontend.partial import Part
from cuflash.problem.attention_problem import Place
from cuflash.problem.heads import Heads
from cuflash.typing import ArrayT, RankBackward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

Array = Any


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
@hints.with_hints(hints.OPTIONS)
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

    See the page "Semantics" (docs/semantics.md).

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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> def rank(comm):
    ...     part = cuflash.distributed.shard(q, comm, order="plain")
    ...     return cuflash.distributed.ulysses_attention(part, part, part, comm, causal=True).shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 4, 2, 8), (1, 4, 2, 8)]
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
@hints.with_hints(hints.OPTIONS)
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

    See the page "Semantics" (docs/semantics.md).

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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> def rank(comm):
    ...     x = cuflash.distributed.shard(q, comm, order="plain")
    ...     out, lse = cuflash.distributed.ulysses_attention(x, x, x, comm, return_lse=True)
    ...     dq, dk, dv = cuflash.distributed.ulysses_attention_backward(out, x, x, x, out, lse, comm)
    ...     return dk.shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 4, 2, 8), (1, 4, 2, 8)]
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
@hints.with_hints(hints.OPTIONS)
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

    See the page "Semantics" (docs/semantics.md).

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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> def rank(comm):
    ...     part = cuflash.distributed.shard(q, comm, order="plain")
    ...     out, backward = cuflash.distributed.ulysses_attention_vjp(part, part, part, comm)
    ...     return backward(out)[0].shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 4, 2, 8), (1, 4, 2, 8)]
    """
    return BY_HEADS.vjp(q, k, v, comm, order, cu_seqlens, return_lse, options)


def _dealing(call: Call) -> Dealing:
    places = [call.stretches(rank) for rank in range(call.comm.world)]
    return Dealing(call, call.comm, places, call.seqlen, may_have_rounds=True)


def _forward(call: Call) -> Steps[tuple[Array, Array]]:
    dealing = _dealing(call)
    launches = _launches(call)

    def compute(whole: dict[str, Array], heads: Heads) -> Steps[Arrays]:
        yield from ()
        make = partial(_part, dealing, launches, whole, heads)
        return launches.forward(heads, whole | call.extras, make, rounded=True)

    return (yield from dealing.forward(compute))


def _backward(call: Call, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> Steps[list[Array | None]]:
    dealing = _dealing(call)
    launches = _launches(call)
    # Shares of a KV head that several ranks have read are added before they are rounded.
    is_rounded = call.k.shape[-2] >= call.comm.world

    def compute(whole: dict[str, Array], heads: Heads) -> Steps[Arrays]:
        yield from ()
        given = whole["dout"], whole["out"], whole["lse"], whole.get("dlse")
        return launches.results(
            heads,
            whole | call.extras,
            partial(_part, dealing, launches, whole, heads),
            lambda part: part.backward(*given, wanted, rounded=is_rounded),
        )

    return (yield from dealing.backward(residuals, wanted, compute))


def _launches(call: Call) -> Launches:
    return launches_of(None if call.key is None else (call.key, call.seqlen))


def _part(dealing: Dealing, launches: Launches, whole: Mapping[str, Array], heads: Heads) -> Part:
    """Make the part of the problem that some heads are."""
    edges = dealing.call.edges
    cu_seqlens = None if edges is None else launches.edges(interop.namespace_of(whole["q"]), tuple(edges))
    options, place = dealing.options_of(heads), Place(first_head=heads.first)
    return Part(whole["q"], whole["k"], whole["v"], options, place, cu_seqlens)


BY_HEADS = Scheme("ulysses_attention", _forward, _backward)
