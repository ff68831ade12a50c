"""One rank's call, with its arrays adopted and checked, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.distributed.agreement import Described, agree, check_options, describe, telling
from cuflash.distributed.checks import check_edges, check_heads, check_problem, check_residuals
from cuflash.distributed.communicators import Communicator, check_communicator
from cuflash.distributed.order import Stretch, check_order, length_of, stretches_of
from cuflash.frontend.call import Backward, Gradients
from cuflash.problem.attention_problem import accum_of
from cuflash.problem.checks import check_bool
from cuflash.problem.gradients import check_grads, extras_of
from cuflash.problem.options import Options
from cuflash.problem.own_rules import check_operands

Array = Any
RESIDUALS = ("dout", "out", "lse", "dlse")


@dataclass(frozen=True)
class Call:
    """One rank's call, whose checked arrays of NumPy or CuPy have this rank's tokens."""

    library: interop.Library
    comm: Communicator
    order: str
    q: Array  # (batch, tokens, num_heads_q, head_dim), packed without batch
    k: Array  # (batch, tokens, num_heads_kv, head_dim)
    v: Array  # (batch, tokens, num_heads_kv, head_dim_v)
    options: Options
    edges: list[int] | None  # where packed sequences begin and end
    seqlen: int = 0  # tokens of all ranks, once these have told theirs
    heads: int = 1  # neighbouring ranks that deal heads among them
    # These two describe a ring of groups, whose ranks hold the tokens of their group.
    rows_by_rank: tuple[tuple[Stretch, ...], ...] | None = None
    first_head: int = 0  # the whole's query head that is q's first

    def stretches(self, rank: int) -> tuple[Stretch, ...]:
        """Return the tokens of a rank."""
        if self.rows_by_rank is not None:
            return self.rows_by_rank[rank]
        return stretches_of(self.seqlen, rank, self.comm.world, self.order)

    @property
    def accum(self) -> str:
        """The dtype of lse, and of partial results."""
        return accum_of(self.q.dtype.name)

    @property
    def extras(self) -> dict[str, Array]:
        """The differentiable options that were given, in the order of their gradients."""
        return extras_of(self.options)


@dataclass(frozen=True)
class Scheme:
    """A way to compute attention over ranks, by its two passes, for its three public functions."""

    name: str  # of the public function of the forward pass
    forward: Callable[[Call], tuple[Array, Array]]  # (out, lse)
    # dq, dk, dv and the gradients of the extras, None where not wanted
    backward: Callable[[Call, Mapping[str, Array | None], frozenset[str]], list[Array | None]]

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        comm: Communicator,
        order: str,
        cu_seqlens: Any,
        return_lse: bool,
        options: Mapping[str, Any],
        heads: int = 1,
    ) -> Any:
        """Return out, or (out, lse), as the caller's kind of arrays."""
        check_communicator(comm)
        return_lse = check_bool("return_lse", return_lse)
        with comm.turn():
            call, *_ = _prepared(self.name, {"q": q, "k": k, "v": v}, comm, order, cu_seqlens, options, None, heads)
            with telling(comm), interop.on_stream_of(call.library, call.q):
                out, lse = self.forward(call)
                comm.barrier()
                result = call.library.release(out)
                return (result, call.library.release(lse)) if return_lse else result

    def gradients(
        self,
        arrays: dict[str, Array | None],
        comm: Communicator,
        order: str,
        cu_seqlens: Any,
        grads: Sequence[str] | None,
        options: Mapping[str, Any],
        heads: int = 1,
    ) -> Gradients:
        """Return the gradients as the caller's kind of arrays; `arrays` are q, k, v and the residuals by name."""
        check_communicator(comm)
        what = f"{self.name}_backward"
        with comm.turn():
            call, residuals, wanted = _prepared(what, arrays, comm, order, cu_seqlens, options, grads, heads)
            with telling(comm), interop.on_stream_of(call.library, call.q):
                results = self.backward(call, residuals, wanted)
                comm.barrier()
                return tuple(None if x is None else call.library.release(x) for x in results)

    def vjp(
        self,
        q: Array,
        k: Array,
        v: Array,
        comm: Communicator,
        order: str,
        cu_seqlens: Any,
        return_lse: bool,
        options: Mapping[str, Any],
        heads: int = 1,
    ) -> tuple[Any, Backward]:
        """Return the result and its gradient function."""
        return_lse = check_bool("return_lse", return_lse)
        out, lse = self.attention(q, k, v, comm, order, cu_seqlens, True, options, heads)

        def backward(dout: Array, dlse: Array | None = None, *, grads: Sequence[str] | None = None) -> Gradients:
            """Return the gradients of this rank's inputs; every rank calls it as often as the others do."""
            arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
            return self.gradients(arrays, comm, order, cu_seqlens, grads, options, heads)

        backward.__qualname__ = "backward"  # as messages of Python call it
        return ((out, lse) if return_lse else out), backward


def adopt(library: interop.Library, given: dict[str, Any], options: Options) -> tuple[dict[str, Array], Options]:
    """Return a call's arrays and its options, whose arrays are of the same library."""
    extras = {
        name: getattr(options, name)
        for name in ("alibi_slopes", "sink", "dropout_seed")
        if hasattr(getattr(options, name), "shape")
    }
    operands = {f"operands[{n}]": x for n, x in enumerate(check_operands(options.operands))}
    adopted = interop.adopt_all(library, {**given, **extras, **operands})
    its: dict[str, Any] = {name: adopted[name] for name in extras}
    its["operands"] = tuple([adopted[name] for name in operands])
    return adopted, replace(options, **its)


def _prepared(
    what: str,
    arrays: dict[str, Array],
    comm: Communicator,
    order: str,
    cu_seqlens: Any,
    keywords: Mapping[str, Any],
    grads: Sequence[str] | None = None,
    heads: int = 1,
) -> tuple[Call, dict[str, Array | None], frozenset[str]]:
    """Return the call, checked on every rank, the residuals, and the gradients that are wanted."""

    def prepare() -> tuple[tuple[Call, dict[str, Array | None], frozenset[str]], Described]:
        options = check_options(keywords)
        library = interop.library_of("q", arrays["q"])
        given = {name: x for name, x in arrays.items() if x is not None or name != "dlse"}
        adopted, options = adopt(library, given, options)
        edges = None if cu_seqlens is None else check_edges(cu_seqlens)
        q, k, v = (adopted[name] for name in ("q", "k", "v"))
        problem = check_problem(q, k, v, options, edges)
        wanted = check_grads(grads, problem)
        residuals = {name: adopted.get(name) for name in RESIDUALS}
        check_residuals(residuals, problem, edges is not None)
        call = Call(library, comm, check_order(order), q, k, v, options, edges, heads=check_heads(heads, comm.world))
        described = (
            ("function", what),
            ("length", q.shape[-3]),
            ("order", order),
            ("heads", heads),
            ("cu_seqlens", edges),
            ("q", (q.dtype.name, q.shape[:-3], q.shape[-2:])),
            ("k", (k.dtype.name, k.shape[-2:])),
            ("v", v.shape[-2:]),
            ("grads", grads if grads is None else sorted(wanted)),
            ("dlse", residuals["dlse"] is not None),
            *(describe(f.name, getattr(options, f.name)) for f in fields(options)),
        )
        return (call, residuals, wanted), described

    (call, residuals, wanted), lengths = agree(comm, prepare)
    seqlen = sum(lengths)
    for rank, length in enumerate(lengths):
        expected = length_of(seqlen, rank, comm.world, call.order)
        if length != expected:
            raise ValueError(
                f"q: expected {expected} of the {seqlen} tokens on rank {rank} by order {order!r}, got {length}"
            )
    edges = call.edges
    if edges is not None:
        edges = np.maximum.accumulate(np.clip(edges, 0, seqlen)).tolist()
    return replace(call, seqlen=seqlen, edges=edges), residuals, wanted
