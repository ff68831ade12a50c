"""Attention over a sequence that is spread over ranks, whose keys and values travel around a ring.

Each rank keeps its queries; in every step it holds the keys and values of one rank, and computes attention over them
while the next ones are on their way. The partial results stay in the accumulation's dtype and are merged at the end
(Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; the orders:
Brandon et al., "Striped Attention", 2023, and the zigzag order of Llama 3's context parallelism, 2024). Backward, the
shares of dk and dv go to the keys' rank, which adds them up in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cuflash import hints
from cuflash.distributed import grid
from cuflash.distributed.call import Call, Scheme
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.ring_passes import Ring
from cuflash.distributed.steps import Steps
from cuflash.typing import ArrayT, RankBackward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

Array = Any


@overload
def ring_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> ArrayT: ...
@overload
def ring_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def ring_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@hints.with_hints(hints.OPTIONS)
def ring_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> Any:
    """Compute attention of this rank's queries over the keys of all ranks.

    See the page "Semantics" (docs/semantics.md).

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
    heads : int
        A grid of ranks: `heads` neighbouring ranks deal heads among them, as in `ulysses_attention`, and rings of
        ``comm.world // heads`` ranks join such groups. 1 is one ring of all ranks. A divisor of comm.world, at best
        of the number of KV heads, too, and as many ranks as share a host.
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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> def rank(comm):
    ...     part = cuflash.distributed.shard(q, comm)
    ...     return cuflash.distributed.ring_attention(part, part, part, comm, causal=True).shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 4, 2, 8), (1, 4, 2, 8)]
    """
    return RING.attention(q, k, v, comm, order, cu_seqlens, return_lse, options, heads)


@overload
def ring_attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    dlse: ArrayT | None = None,
    grads: None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, ...]: ...
@overload
def ring_attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    dlse: ArrayT | None = None,
    grads: Sequence[str],
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]: ...
@hints.with_hints(hints.OPTIONS)
def ring_attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    out: ArrayT,
    lse: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    dlse: ArrayT | None = None,
    grads: Sequence[str] | None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | None, ...]:
    """Gradients of `ring_attention`.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    dout, out : array as `ring_attention` returns out
        Of this rank, as are all arrays.
    lse, dlse : array as `ring_attention` returns lse
    q, k, v, comm, order, heads, cu_seqlens, **options
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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> def rank(comm):
    ...     x = cuflash.distributed.shard(q, comm)
    ...     out, lse = cuflash.distributed.ring_attention(x, x, x, comm, causal=True, return_lse=True)
    ...     dq, dk, dv = cuflash.distributed.ring_attention_backward(out, x, x, x, out, lse, comm, causal=True)
    ...     return dk.shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 4, 2, 8), (1, 4, 2, 8)]
    """
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    return RING.gradients(arrays, comm, order, cu_seqlens, grads, options, heads)


@overload
def ring_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, RankBackward[ArrayT]]: ...
@overload
def ring_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywords],
) -> tuple[tuple[ArrayT, ArrayT], RankBackward[ArrayT]]: ...
@overload
def ring_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT | tuple[ArrayT, ArrayT], RankBackward[ArrayT]]: ...
@hints.with_hints(hints.OPTIONS)
def ring_attention_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    comm: Communicator,
    *,
    order: str = "zigzag",
    heads: int = 1,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    return_lse: bool = False,
    **options: Unpack[OptionKeywords],
) -> tuple[Any, RankBackward[ArrayT]]:
    """`ring_attention` and its gradient function.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, comm, order, heads, cu_seqlens, return_lse, **options
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

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> def rank(comm):
    ...     part = cuflash.distributed.shard(q, comm)
    ...     out, backward = cuflash.distributed.ring_attention_vjp(part, part, part, comm, causal=True)
    ...     return backward(out)[0].shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 4, 2, 8), (1, 4, 2, 8)]
    """
    return RING.vjp(q, k, v, comm, order, cu_seqlens, return_lse, options, heads)


def _forward(call: Call) -> Steps[tuple[Array, Array]]:
    return (yield from Ring(call).forward() if call.heads == 1 else grid.forward(call))


def _backward(call: Call, residuals: Mapping[str, Array | None], wanted: frozenset[str]) -> Steps[list[Array | None]]:
    if call.heads == 1:
        return (yield from Ring(call).backward(residuals, wanted))
    return (yield from grid.backward(call, residuals, wanted))


RING = Scheme("ring_attention", _forward, _backward)
