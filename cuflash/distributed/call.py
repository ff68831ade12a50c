"""One rank's call, with its arrays adopted and checked, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cuflash import interop
from cuflash.distributed.agreement import (
    Described,
    Proposal,
    agree,
    check_options,
    describe,
    digest_of,
    propose,
    telling,
)
from cuflash.distributed.checks import check_edges, check_heads, check_problem, check_residuals
from cuflash.distributed.communicators import Communicator, check_communicator
from cuflash.distributed.order import Stretch, check_order, length_of, stretches_of
from cuflash.distributed.steps import Steps
from cuflash.frontend.call import Backward, Gradients, signature
from cuflash.kept import Kept
from cuflash.problem.attention_problem import accum_of
from cuflash.problem.checks import check_bool
from cuflash.problem.gradients import check_grads, extras_of
from cuflash.problem.options import Options
from cuflash.problem.own_rules import check_operands

Array = Any
RESIDUALS = ("dout", "out", "lse", "dlse")
# A call, its residuals, and the gradients that are wanted of it.
_Prepared: TypeAlias = "tuple[Call, dict[str, Array | None], frozenset[str]]"


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
    key: Any = None  # by which calls of one kind are known again; None where they cannot be

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
    forward: Callable[[Call], Steps[tuple[Array, Array]]]  # (out, lse)
    # dq, dk, dv and the gradients of the extras, None where not wanted
    backward: Callable[[Call, Mapping[str, Array | None], frozenset[str]], Steps[list[Array | None]]]

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
        proposal = _proposed(self.name, {"q": q, "k": k, "v": v}, comm, order, cu_seqlens, options, None, heads)
        with _at_home(proposal):
            library, (out, lse) = comm.run(self._steps_forward(comm, proposal))
            result = library.release(out)
            return (result, library.release(lse)) if return_lse else result

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
        proposal = _proposed(f"{self.name}_backward", arrays, comm, order, cu_seqlens, options, grads, heads)
        with _at_home(proposal):
            library, results = comm.run(self._steps_backward(comm, proposal))
            return tuple(None if x is None else library.release(x) for x in results)

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

    def _steps_forward(
        self, comm: Communicator, proposal: Proposal[_Prepared]
    ) -> Steps[tuple[interop.Library, tuple[Array, Array]]]:
        call, *_ = yield from _agreed(comm, proposal)
        with telling(comm):
            results = yield from self.forward(call)
            yield from comm.finishing()
        return call.library, results

    def _steps_backward(
        self, comm: Communicator, proposal: Proposal[_Prepared]
    ) -> Steps[tuple[interop.Library, list[Array | None]]]:
        call, residuals, wanted = yield from _agreed(comm, proposal)
        with telling(comm):
            results = yield from self.backward(call, residuals, wanted)
            yield from comm.finishing()
        return call.library, results


def _at_home(proposal: Proposal[_Prepared]) -> AbstractContextManager[Any]:
    """Return the context in which the caller's GPU and stream are the current ones."""
    if proposal.prepared is None:
        return nullcontext()
    call, *_ = proposal.prepared
    return interop.on_stream_of(call.library, call.q)


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


def without_arrays(options: Options) -> Options:
    """Return options that keep no memory of arrays."""
    nothing: dict[str, Any] = {f.name: None for f in fields(options) if hasattr(getattr(options, f.name), "shape")}
    return replace(options, **nothing)


class _Kind(NamedTuple):
    """A kind of calls, all of which are checked by their first one."""

    library: interop.Library
    options: Options  # None for those that are arrays
    arrays_of_options: tuple[str, ...]
    edges: list[int] | None
    wanted: frozenset[str]
    described: Described
    digest: str


_kinds: Kept[Any, _Kind] = Kept()


def _proposed(
    what: str,
    arrays: dict[str, Array],
    comm: Communicator,
    order: str,
    cu_seqlens: Any,
    keywords: Mapping[str, Any],
    grads: Sequence[str] | None = None,
    heads: int = 1,
) -> Proposal[_Prepared]:
    """Return the call as this rank finds it, with the residuals and the gradients that are wanted."""
    key = key_of(what, arrays, comm, order, cu_seqlens, keywords, grads, heads)
    kind = None if key is None else _kinds.get(key)
    if kind is not None:
        own = {name: keywords[name] for name in kind.arrays_of_options}
        options = replace(kind.options, **own) if own else kind.options
        q, k, v = arrays["q"], arrays["k"], arrays["v"]
        call = Call(kind.library, comm, order, q, k, v, options, kind.edges, heads=heads, key=key)
        residuals = {name: arrays.get(name) for name in RESIDUALS}
        return Proposal((call, residuals, kind.wanted), kind.described, None, kind.digest)

    def prepare() -> tuple[_Prepared, Described]:
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
        is_same = all(adopted[name] is x for name, x in given.items()) and all(
            getattr(options, name) is x for name, x in keywords.items() if hasattr(x, "shape")
        )
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
        if is_same and key is not None:
            of_options = tuple([name for name, x in keywords.items() if hasattr(x, "shape")])
            plain = without_arrays(options)
            digest = digest_of(described) if comm.check else ""
            _kinds[key] = _Kind(library, plain, of_options, edges, wanted, described, digest)
            call = replace(call, key=key)
        return (call, residuals, wanted), described

    return propose(comm, prepare)


# Values of these types are compared by value; arrays by what their checks look at.
_PLAIN = (bool, int, float, str, type(None))


def key_of(
    what: str,
    arrays: Mapping[str, Array | None],
    comm: Communicator,
    order: Any,
    cu_seqlens: Any,
    keywords: Mapping[str, Any],
    grads: Any,
    heads: Any,
) -> Any:
    """Return by what calls of one kind are known again; None where they cannot be."""
    key: list[Any] = [what, comm.rank, comm.world, comm.check]
    names = () if grads is None else grads
    if not isinstance(names, (tuple, list)):
        return None
    for x in (order, heads, *names):
        if type(x) not in _PLAIN:
            return None
        key += (type(x), x)
    key.append(None if grads is None else len(names))
    for name, x in keywords.items():
        kind = type(x)
        if name == "dropout_seed" and x is not None:
            return None  # a seed is another one in every step, and launches with seeds are not repeated
        if kind in _PLAIN:
            key += (name, kind, x)
        elif kind is tuple and name == "window":
            key += (name, repr(x))
        elif name in ("sink", "alibi_slopes") and (kind is np.ndarray or kind.__module__ == "cupy"):
            key += (name, signature(x))
        else:
            return None
    if cu_seqlens is not None:
        if type(cu_seqlens) is not np.ndarray:
            return None
        key += (cu_seqlens.dtype, cu_seqlens.shape, cu_seqlens.tobytes())
    for name, x in arrays.items():
        if x is not None and type(x) is not np.ndarray and type(x).__module__ != "cupy":
            return None
        key += (name, None if x is None else signature(x))
    return tuple(key)


def _agreed(comm: Communicator, proposal: Proposal[_Prepared]) -> Steps[_Prepared]:
    """Return the call on which all ranks agree, with the tokens of all of them."""
    (call, residuals, wanted), lengths = yield from agree(comm, proposal)
    seqlen = sum(lengths)
    for rank, length in enumerate(lengths):
        expected = length_of(seqlen, rank, comm.world, call.order)
        if length != expected:
            raise ValueError(
                f"q: expected {expected} of the {seqlen} tokens on rank {rank} by order {call.order!r}, got {length}"
            )
    edges = call.edges
    if edges is not None:
        edges = np.maximum.accumulate(np.clip(edges, 0, seqlen)).tolist()
    return replace(call, seqlen=seqlen, edges=edges), residuals, wanted
