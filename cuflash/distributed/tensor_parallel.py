"""Attention whose heads are spread over ranks, with the projection behind it, whose results are summed over them.

The queries are cut into blocks: while a block's rows are exchanged and projected (`projected_blocks`), the next block's
attention is computed. A rank needs nothing of the others in the backward pass: ``y = sum over ranks of
out @ w_out``, so that ``dy`` gives the gradients of its own heads (Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import hints, interop
from cuflash.distributed.agreement import Described, Proposal, agree, propose, telling
from cuflash.distributed.communicators import Communicator, check_communicator
from cuflash.distributed.products import product
from cuflash.distributed.projected_blocks import ProjectedBlocks
from cuflash.distributed.projected_call import VJP, ProjectedCall, proposed
from cuflash.distributed.steps import Steps
from cuflash.frontend.call import Gradients
from cuflash.problem.gradients import check_like
from cuflash.problem.own_rules import is_operand
from cuflash.typing import ArrayT

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.problem.options import OptionKeywords

Array = Any
# A call is cut into so many blocks: the first block's attention and the last one's messages hide behind nothing.
MOST_BLOCKS = 4
# On an H200 32k tokens of 16 heads of 128 columns take 5.8 ms at once, 6.1 ms in two blocks and 6.6 ms in four; their
# messages take some .6 ms over NVLink. From four times the work of these on (rows of queries and keys, times heads and
# columns) there are two blocks.
LEAST_WORK_OF_BLOCK = 1 << 42
# Fewer rows (of all sequences together) than these leave a GPU idle, and a link waiting for the latency of messages.
LEAST_ROWS = 1024
# Blocks of one sequence end where tiles of the kernels do.
_ROWS_OF_TILES = 128


@hints.with_hints(hints.OPTIONS)
def attention_allreduce(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    w_out: ArrayT,
    comm: Communicator,
    *,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    **options: Unpack[OptionKeywords],
) -> ArrayT:
    """Compute attention of this rank's heads, projected and summed over all ranks.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q : array (batch, seqlen_q, this rank's query heads, head_dim), packed without batch
        All tokens; ranks may have different numbers of heads, and rank 0 has the first ones.
    k, v : array (batch, seqlen_k, this rank's KV heads, head_dim or head_dim_v), packed without batch
    w_out : array (this rank's query heads, head_dim_v, model)
        Its rows of the projection, of q's dtype.
    comm : Communicator
        This rank's.
    cu_seqlens : NumPy int32 array (num_sequences + 1,), optional
        Where packed sequences begin and end.
    **options
        causal, window, softmax_scale, softcap, alibi_slopes, sink, dropout_p, dropout_seed, deterministic, precision,
        score_mod, mask_mod and operands, as of `attention`. Slopes and sinks are those of this rank's heads; rules
        number the heads of all ranks, and every rank has the same operands.

    Returns
    -------
    y : array (batch, seqlen_q, model), packed without batch
        ``sum over ranks of out @ w_out`` in q's dtype, with the same bits on every rank.

    Raises
    ------
    TypeError, ValueError
        As `attention`; ValueError on every rank where arguments differ over the ranks, or some find them invalid.
    NotImplementedError
        For bias, mask, q_lengths, kv_lengths and block_mask.
    TimeoutError
        Where another rank does not come within the communicator's time limit.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> w_out = np.ones((2, 8, 5), np.float32)
    >>> def rank(comm):
    ...     own = slice(comm.rank, comm.rank + 1)  # one of the two heads
    ...     x = q[:, :, own]
    ...     return cuflash.distributed.attention_allreduce(x, x, x, w_out[own], comm).shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 8, 5), (1, 8, 5)]
    """
    y, _ = _forward("attention_allreduce", (q, k, v, w_out), comm, cu_seqlens, options)
    return y


@hints.with_hints(hints.OPTIONS)
def attention_allreduce_vjp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    w_out: ArrayT,
    comm: Communicator,
    *,
    cu_seqlens: np.ndarray[Any, Any] | None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ArrayT, Callable[[ArrayT], tuple[ArrayT, ...]]]:
    """`attention_allreduce` and its gradient function.

    See the page "Semantics" (docs/semantics.md).

    Parameters
    ----------
    q, k, v, w_out, comm, cu_seqlens, **options
        As of `attention_allreduce`.

    Returns
    -------
    y : array
    backward : callable
        ``backward(dy)`` returns dq, dk, dv and dw_out of this rank's heads, then dsink and dalibi_slopes where those
        were given, and the operands' gradients, summed over all ranks; `dy` is the same on every rank. Every rank calls
        it as often as the others do.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, TimeoutError
        As `attention_allreduce`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> w_out = np.ones((2, 8, 5), np.float32)
    >>> def rank(comm):
    ...     own = slice(comm.rank, comm.rank + 1)  # one of the two heads
    ...     x = q[:, :, own]
    ...     y, backward = cuflash.distributed.attention_allreduce_vjp(x, x, x, w_out[own], comm)
    ...     dq, dk, dv, dw_out = backward(y)
    ...     return dw_out.shape
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [(1, 8, 5), (1, 8, 5)]
    """
    y, residuals = _forward(VJP, (q, k, v, w_out), comm, cu_seqlens, options)

    def backward(dy: ArrayT) -> tuple[ArrayT, ...]:
        """Return the gradients of this rank's inputs."""
        return _backward(residuals, dy)

    backward.__qualname__ = "backward"  # as messages of Python call it
    return y, backward


def blocks_of(num_rows: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut units with so many rows each into ranges of units of about as many rows, at most `most` of them."""
    step = max(LEAST_ROWS, -(-sum(num_rows) // most))
    blocks, first, rows = [], 0, 0
    for number, own in enumerate(num_rows):
        rows += own
        if rows >= step or number + 1 == len(num_rows):
            blocks.append((first, number + 1))
            first, rows = number + 1, 0
    return blocks


def _blocks(call: ProjectedCall) -> list[tuple[int, int]]:
    """Return ranges of queries, or of packed sequences."""
    # ALiBi and dropout depend on a part's place, which the portable kernels alone take (`has_place` of their HANDLES).
    # On a GPU all rows are therefore computed at once: the kernels for tensor cores run unless the heads themselves
    # have a place, as those of dropout on every rank but the first do.
    needs_place = call.problem.alibi is not None or call.problem.dropout_p
    if needs_place and not isinstance(call.q, np.ndarray):
        count = call.problem.seqlen_q if call.edges is None else len(call.edges) - 1
        return [(0, count)] if count else []
    most = MOST_BLOCKS
    if not isinstance(call.q, np.ndarray):
        work = math.prod(call.q.shape) * call.problem.seqlen_k
        most = max(1, min(most, work // LEAST_WORK_OF_BLOCK))
    if call.edges is not None:
        return blocks_of(np.diff(call.edges).tolist(), most)
    seqlen, batch = call.problem.seqlen_q, call.problem.batch
    starts = range(0, seqlen, _ROWS_OF_TILES)
    tiles = [min(_ROWS_OF_TILES, seqlen - start) * batch for start in starts]
    return [(a * _ROWS_OF_TILES, min(b * _ROWS_OF_TILES, seqlen)) for a, b in blocks_of(tiles, most)]


def _forward(
    what: str, arrays: tuple[Any, Any, Any, Any], comm: Communicator, cu_seqlens: Any, keywords: Mapping[str, Any]
) -> tuple[Any, tuple[ProjectedCall, Array, Array]]:
    check_communicator(comm)
    proposal = proposed(what, arrays, comm, cu_seqlens, keywords)
    home: AbstractContextManager[Any] = nullcontext()
    if proposal.prepared is not None:
        home = interop.on_stream_of(proposal.prepared.library, proposal.prepared.q)
    with home:
        call, y, out, lse = comm.run(_steps_forward(comm, proposal, keeps_residuals=what == VJP))
        return call.library.release(y), (call, out, lse)


def _steps_forward(
    comm: Communicator, proposal: Proposal[ProjectedCall], *, keeps_residuals: bool
) -> Steps[tuple[ProjectedCall, Array, Array, Array]]:
    """Return the call, y, and out and lse of this rank's heads, which hold nothing unless they are kept."""
    call, heads = yield from agree(comm, proposal)
    call = replace(call, first_head=sum(heads[: comm.rank]))
    with telling(comm):
        xp, q, model = interop.namespace_of(call.q), call.q, call.w_out.shape[-1]
        packed = call.edges is not None
        # The blocks of a padded batch lie one behind the other, each with its queries of all sequences.
        by_block = xp.zeros((int(np.prod(q.shape[:-2])), model), q.dtype)
        rows_kept = q.shape[-3] if keeps_residuals else 0
        out = xp.zeros((*q.shape[:-3], rows_kept, q.shape[-2], call.v.shape[-1]), q.dtype)
        lse = xp.full((*q.shape[:-3], q.shape[-2], rows_kept), -np.inf, call.problem.accum_dtype)
        lead = call.edges[0] if call.edges is not None else 0
        projected = ProjectedBlocks(comm, heads, xp.ascontiguousarray(call.w_out), by_block[lead:])
        yield from projected.begin()
        blocks = _blocks(call)
        for first, stop in blocks:
            rows = slice(call.edges[first], call.edges[stop]) if call.edges is not None else slice(first, stop)
            found = call.forward_of(first, stop)
            own_out = found["out"]
            if keeps_residuals:
                out[..., rows, :, :], lse[..., rows] = own_out, found["lse"]
            yield from projected.add(own_out.reshape(-1, *own_out.shape[-2:]))
        yield from projected.finish()
        y = by_block if packed else _in_sequences(by_block, blocks, *q.shape[:2])
        yield from comm.finishing()
    return call, y, out, lse


def _in_sequences(by_block: Array, blocks: Sequence[tuple[int, int]], batch: int, seqlen: int) -> Array:
    """Bring rows in the order (block, batch, query) into the order (batch, query)."""
    if len(blocks) <= 1 or batch == 1:
        return by_block.reshape(batch, seqlen, by_block.shape[-1])
    pieces, row = [], 0
    for first, stop in blocks:
        rows = batch * (stop - first)
        pieces.append(by_block[row : row + rows].reshape(batch, stop - first, by_block.shape[-1]))
        row += rows
    return interop.namespace_of(by_block).concatenate(pieces, axis=1)


def _backward(residuals: tuple[ProjectedCall, Array, Array], dy: Any) -> Gradients:
    call, out, lse = residuals

    def prepare() -> tuple[Array, Described]:
        adopted = interop.adopt_all(call.library, {"dy": dy}, reference=call.q)["dy"]
        shape = (*call.q.shape[:-2], call.w_out.shape[-1])
        check_like("dy", adopted, shape, call.q.dtype.name, "as the forward result")
        return adopted, (("function", "backward of attention_allreduce"), ("length", 0), ("dy", tuple(adopted.shape)))

    proposal = propose(call.comm, prepare)
    with interop.on_stream_of(call.library, call.q):
        results = call.comm.run(_steps_backward(call, out, lse, proposal))
        return tuple(call.library.release(x) for x in results)


def _steps_backward(call: ProjectedCall, out: Array, lse: Array, proposal: Proposal[Array]) -> Steps[tuple[Array, ...]]:
    adopted, _ = yield from agree(call.comm, proposal)
    with telling(call.comm):
        found, dw_out = _of_heads(call, out, lse, adopted)
        for name in found:
            if is_operand(name):  # which every rank has
                found[name] = yield from call.comm.summing(found[name].astype(call.problem.accum_dtype, copy=False))
        extras = [found[name].reshape(x.shape).astype(x.dtype, copy=False) for name, x in call.extras.items()]
        yield from call.comm.finishing()
    return found["q"], found["k"], found["v"], dw_out.reshape(call.w_out.shape), *extras


def _of_heads(call: ProjectedCall, out: Array, lse: Array, adopted: Array) -> tuple[dict[str, Array], Array]:
    """Return the gradients of this rank's heads, and of its rows of the projection."""
    with np.errstate(all="ignore"):
        xp, projection = interop.namespace_of(call.q), call.projection
        of_rows = xp.ascontiguousarray(adopted).reshape(-1, projection.shape[-1])
        flat_out = out.reshape(-1, len(projection))
        if call.edges is not None:  # rows of no sequence count nowhere, whatever dy holds there
            rows = slice(call.edges[0], call.edges[-1])
            flat_out, of_rows = flat_out[rows], of_rows[rows]
        dw_out = product(flat_out, of_rows, transposed="a")
        dout = product(of_rows, projection, transposed="b")
        return _gradients_of_heads(call, dout, out, lse), dw_out


def _gradients_of_heads(call: ProjectedCall, dout: Array, out: Array, lse: Array) -> dict[str, Array]:
    """Return the gradients of all queries, computed at once, because nothing waits for a block of them."""
    wanted = frozenset(("q", "k", "v", *call.extras))
    if call.edges is None:
        whole = call.part(0, call.problem.seqlen_q)
        return whole.backward(dout.reshape(out.shape), out, lse, None, wanted, rounded=True)
    xp, rows = interop.namespace_of(call.q), slice(call.edges[0], call.edges[-1])
    whole = call.part(0, len(call.edges) - 1)
    own_out, own_lse = out[rows], xp.ascontiguousarray(lse[:, rows])
    found = whole.backward(dout.reshape(own_out.shape), own_out, own_lse, None, wanted, rounded=True)
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        grad = xp.zeros(x.shape, x.dtype)
        grad[rows] = found[name]
        found[name] = grad
    return found
