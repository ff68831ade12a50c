"""One rank's call: its arrays, adopted and checked, and what all ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.distributed.agreement import Described, agree, check_options, describe
from cuflash.distributed.checks import check_edges, check_problem, check_residuals
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.order import check_order, length_of
from cuflash.problem.gradients import check_grads
from cuflash.problem.options import Options

Array = Any
RESIDUALS = ("dout", "out", "lse", "dlse")


@dataclass
class Call:
    """One rank's call: checked arrays of NumPy or CuPy, with this rank's tokens."""

    library: interop.Library
    comm: Communicator
    order: str
    seqlen: int  # tokens of all ranks
    q: Array  # (batch, tokens, num_heads_q, head_dim), packed without batch
    k: Array  # (batch, tokens, num_heads_kv, head_dim)
    v: Array  # (batch, tokens, num_heads_kv, head_dim_v)
    options: Options
    edges: list[int] | None  # where packed sequences begin and end

    @property
    def accum(self) -> str:
        """The dtype of lse, and of partial results."""
        return "float64" if self.q.dtype == np.float64 else "float32"

    @property
    def extras(self) -> dict[str, Array]:
        """The differentiable options that were given, in the order of their gradients."""
        given = {name: getattr(self.options, name) for name in ("sink", "alibi_slopes")}
        return {name: x for name, x in given.items() if x is not None}


def prepared(
    what: str,
    arrays: dict[str, Array],
    comm: Communicator,
    order: str,
    cu_seqlens: Any,
    keywords: Mapping[str, Any],
    grads: Sequence[str] | None = None,
) -> tuple[Call, dict[str, Array | None], frozenset[str]]:
    """The call, checked on every rank, the residuals, and the gradients that are wanted."""

    def prepare() -> tuple[tuple[Call, dict[str, Array | None], frozenset[str]], Described]:
        options = check_options(keywords)
        library = interop.library_of("q", arrays["q"])
        extras = {
            name: getattr(options, name)
            for name in ("alibi_slopes", "sink", "dropout_seed")
            if hasattr(getattr(options, name), "shape")
        }
        given = {name: x for name, x in {**arrays, **extras}.items() if x is not None}
        adopted = interop.adopt_all(library, given)
        options = replace(options, **{name: adopted[name] for name in extras})
        edges = None if cu_seqlens is None else check_edges(cu_seqlens)
        q, k, v = (adopted[name] for name in ("q", "k", "v"))
        problem = check_problem(q, k, v, options, edges)
        wanted = check_grads(grads, problem)
        residuals = {name: adopted.get(name) for name in RESIDUALS}
        check_residuals(residuals, problem, edges is not None)
        call = Call(library, comm, check_order(order), 0, q, k, v, options, edges)
        described = (
            ("function", what),
            ("length", q.shape[-3]),
            ("order", order),
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
    call.seqlen = sum(lengths)
    for rank, length in enumerate(lengths):
        expected = length_of(call.seqlen, rank, comm.world, call.order)
        if length != expected:
            raise ValueError(
                f"q: expected {expected} of the {call.seqlen} tokens on rank {rank} by order {order!r}, got {length}"
            )
    if call.edges is not None:
        call.edges = np.maximum.accumulate(np.clip(call.edges, 0, call.seqlen)).tolist()
    return call, residuals, wanted
