"""One rank's call of attention with a projection behind it, as the rank finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.distributed.agreement import Described, Proposal, check_options, describe, propose
from cuflash.distributed.call import adopt, key_of, without_arrays
from cuflash.distributed.checks import check_edges, check_problem
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.launches import Launches, launches_of
from cuflash.frontend.partial import Part
from cuflash.kept import Kept
from cuflash.problem import checks
from cuflash.problem.attention_problem import AttentionProblem, Place
from cuflash.problem.fp8 import refuse_gradients
from cuflash.problem.gradients import extras_of
from cuflash.problem.make import make_problem
from cuflash.problem.options import Options

Array = Any
VJP = "attention_allreduce_vjp"


@dataclass(frozen=True)
class ProjectedCall:
    """One rank's call, whose checked arrays of NumPy or CuPy have this rank's heads."""

    library: interop.Library
    comm: Communicator
    q: Array
    k: Array
    v: Array
    w_out: Array
    options: Options
    problem: AttentionProblem
    edges: list[int] | None  # where packed sequences begin and end, within the arrays
    first_head: int = 0  # of all ranks' query heads
    key: Any = None  # by which calls of one kind are known again; None where they cannot be

    @property
    def extras(self) -> dict[str, Array]:
        """The differentiable options that were given, in the order of their gradients."""
        return extras_of(self.options)

    @property
    def _knows_heads(self) -> bool:
        """Dropout and rules of users' own depend on which of all ranks' heads, and which sequences, these are."""
        options = self.options
        return bool(options.dropout_p) or options.score_mod is not None or options.mask_mod is not None

    @property
    def projection(self) -> Array:
        """w_out as a contiguous matrix (heads * head_dim_v, model)."""
        xp = interop.namespace_of(self.w_out)
        return xp.ascontiguousarray(self.w_out).reshape(-1, self.w_out.shape[-1])

    @cached_property
    def launches(self) -> Launches:
        """The launches of parts of calls of this kind."""
        return launches_of(None if self.key is None else (self.key, self.first_head))

    def forward_of(self, first: int, stop: int) -> dict[str, Array]:
        """Return out, rounded, and lse of a part."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, **self.extras}
        return self.launches.forward((first, stop), arrays, lambda: self.part(first, stop), rounded=True)

    def part(self, first: int, stop: int) -> Part:
        """Return the part of some queries of all sequences of a padded batch, or of some packed sequences."""
        if self.edges is not None:
            return self._packed_part(first, stop)
        seqlen_q, seqlen_k = self.problem.seqlen_q, self.problem.seqlen_k
        first_head = self.first_head if self._knows_heads else 0
        place = Place(first_q=first, first_head=first_head, diagonal=seqlen_k - seqlen_q)
        return Part(self.q[:, first:stop], self.k, self.v, self.options, place)

    def _packed_part(self, first: int, stop: int) -> Part:
        assert self.edges is not None
        edges = self.edges[first : stop + 1]
        rows = slice(edges[0], edges[-1])
        slopes, options = self.options.alibi_slopes, self.options
        if slopes is not None and slopes.ndim == 2 and len(slopes) > 1:
            options = replace(options, alibi_slopes=slopes[first:stop])
        ends = tuple([edge - edges[0] for edge in edges])
        cu_seqlens = self.launches.edges(interop.namespace_of(self.q), ends)
        place = Place(first_head=self.first_head, first_batch=first) if self._knows_heads else Place()
        return Part(self.q[rows], self.k[rows], self.v[rows], options, place, cu_seqlens)


_kinds: Kept[Any, tuple[ProjectedCall, Described, str]] = Kept()


def proposed(
    what: str, arrays: tuple[Any, Any, Any, Any], comm: Communicator, cu_seqlens: Any, keywords: Mapping[str, Any]
) -> Proposal[ProjectedCall]:
    """Return the call as this rank finds it; calls of one kind are checked once."""
    named = dict(zip(("q", "k", "v", "w_out"), arrays, strict=True))
    key = key_of(what, named, comm, "", cu_seqlens, keywords, None, 1)
    known = None if key is None else _kinds.get(key)
    if known is not None:
        call, described, digest = known
        own = {name: x for name, x in keywords.items() if hasattr(x, "shape")}
        options = replace(call.options, **own) if own else call.options
        return Proposal(replace(call, comm=comm, options=options, **named), described, None, digest)
    proposal = propose(comm, lambda: _prepared(what, arrays, comm, cu_seqlens, keywords))
    call_made = proposal.prepared
    if key is None or call_made is None:
        return proposal
    is_same = all(getattr(call_made, name) is x for name, x in named.items())
    if not is_same or any(getattr(call_made.options, n) is not x for n, x in keywords.items() if hasattr(x, "shape")):
        return proposal
    call_made = replace(call_made, key=key)
    _kinds[key] = _without_arrays(call_made), proposal.described, proposal.digest
    return replace(proposal, prepared=call_made)


def _without_arrays(call: ProjectedCall) -> ProjectedCall:
    """Return a call that keeps no memory of arrays, nor a communicator."""
    empty: dict[str, Any] = dict.fromkeys(("q", "k", "v", "w_out", "comm"))
    return replace(call, options=without_arrays(call.options), **empty)


def _prepared(
    what: str, arrays: tuple[Any, Any, Any, Any], comm: Communicator, cu_seqlens: Any, keywords: Mapping[str, Any]
) -> tuple[ProjectedCall, Described]:
    """Return the call as this rank finds it, and what ranks compare of it."""
    options = check_options(keywords)
    library = interop.library_of("q", arrays[0])
    given = dict(zip(("q", "k", "v", "w_out"), arrays, strict=True))
    adopted, options = adopt(library, given, options)
    edges = None if cu_seqlens is None else check_edges(cu_seqlens)
    q, k, v, w_out = (adopted[name] for name in given)
    if what == VJP:
        refuse_gradients(q, k, v)
    if edges is None:
        problem = make_problem({"q": q, "k": k, "v": v}, options)
        checks.check_seed(options.dropout_seed, problem.dropout_p)
    else:
        problem = check_problem(q, k, v, options, edges)
    _check_projection(w_out, problem)
    own = None if edges is None else np.maximum.accumulate(np.clip(edges, 0, q.shape[0])).tolist()
    described = (
        ("function", what),
        ("length", problem.num_heads_q),
        ("cu_seqlens", edges),
        ("q", (q.dtype.name, q.shape[:-2], q.shape[-1])),
        ("k", (k.shape[:-2], k.shape[-1])),
        ("v", v.shape[-1]),
        ("w_out", w_out.shape[1:]),
        *(_describe(f.name, getattr(options, f.name)) for f in fields(options)),
    )
    return ProjectedCall(library, comm, q, k, v, w_out, options, problem, own), described


def _describe(name: str, value: Any) -> tuple[str, Any]:
    """Describe an option; slopes and sinks of the ranks may differ in the number of heads, their last axis."""
    if name in ("alibi_slopes", "sink") and hasattr(value, "shape"):
        return name, (tuple(value.shape[:-1]), str(value.dtype))
    return describe(name, value)


def _check_projection(w_out: Array, problem: AttentionProblem) -> None:
    if w_out.dtype.name != problem.dtype:
        raise TypeError(f"w_out: expected q's dtype {problem.dtype}, got {w_out.dtype.name}")
    expected = problem.num_heads_q, problem.head_dim_v
    if w_out.ndim != 3 or tuple(w_out.shape[:2]) != expected:
        raise ValueError(
            f"w_out: expected (heads of this rank, head_dim_v, model) = ({expected[0]}, {expected[1]}, *), "
            f"got {tuple(w_out.shape)}"
        )
