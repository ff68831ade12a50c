"""One call: arguments of any library in, a checked problem and its arrays inside, results of the caller's kind out."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.overlap import check_target
from cuflash.problem import (
    OPTION_NAMES,
    Array,
    AttentionProblem,
    Options,
    check_grads,
    check_like,
    make_operands,
    make_problem,
    to_full_rank,
    with_contiguous_rows,
)

Gradients = tuple[Any, ...]

_ARRAY_OPTIONS = ("bias", "mask", "alibi_slopes", "sink", "q_lengths", "kv_lengths")

# A problem depends on metadata only, so the checks run once for each combination of shapes, dtypes and options.
# The bound keeps a program with ever new shapes from growing without end.
_MAX_PROBLEMS = 4096
_problems: dict[Any, AttentionProblem] = {}


class Call:
    """The checked arguments of one call, and the two things to be done with them.

    Parameters
    ----------
    q, k, v : array
        Of any library.
    keywords : dict
        The options of `problem.Options` that were given.
    cu_seqlens : (array, array), optional
        cu_seqlens_q and cu_seqlens_k of packed sequences.
    """

    def __init__(
        self, q: Array, k: Array, v: Array, keywords: Any, cu_seqlens: tuple[Array, Array] | None = None
    ) -> None:
        unknown = keywords.keys() - OPTION_NAMES
        if unknown:
            raise TypeError(f"{unknown.pop()}: no such option; expected one of {', '.join(OPTION_NAMES)}")
        options = Options(**keywords)
        self.library = interop.library_of("q", q)
        arrays = {"q": q, "k": k, "v": v}
        if cu_seqlens is not None:
            for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True):
                if x is None:
                    raise TypeError(f"{name}: expected an int32 array (batch + 1,), got None")
                arrays[name] = x
        seed_is_array = hasattr(options.dropout_seed, "__dlpack__") or hasattr(
            options.dropout_seed, "__cuda_array_interface__"
        )
        for name in (*_ARRAY_OPTIONS, "dropout_seed") if seed_is_array else _ARRAY_OPTIONS:
            x = getattr(options, name)
            if x is not None:
                arrays[name] = x
        adopted = interop.adopt_all(self.library, arrays)
        for name in adopted.keys() - ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
            setattr(options, name, adopted[name])
        inputs = (adopted["q"], adopted["k"], adopted["v"])
        cu_seqlens = (adopted.get("cu_seqlens_q"), adopted.get("cu_seqlens_k"))
        self.problem = _problem_of(inputs, options, cu_seqlens)
        self.operands = make_operands(*inputs, options, *cu_seqlens)
        self.adopted = adopted

    def adopt(self, name: str, x: Any) -> Array | None:
        """A further argument of this call, checked to be of the same library and device."""
        if x is None:
            if name == "dlse":
                return None
            raise TypeError(f"{name}: expected an array, got None")
        return interop.adopt_all(self.library, {name: x}, beside=self.operands.q)[name]

    def release(self, x: Array) -> Any:
        """`x` as an array of the caller's library."""
        return self.library.release(x)

    def forward(self, out: Any = None) -> tuple[Any, Array]:
        """The result as the caller's kind of array (`out` itself if given), and lse."""
        problem, q = self.problem, self.operands.q
        with interop.on_stream_of(self.library, q):
            if out is None:
                target = self._empty(problem.out_shape, q.dtype)
            else:
                target = self._target("out", out, problem.out_shape, self.adopted)
            lse = self._empty(problem.lse_shape, problem.accum_dtype)
            self._backend.forward(problem, self.operands, target, lse)
            return (self.release(target) if out is None else out), lse

    def backward(
        self,
        dout: Array | None,
        forward_out: Array | None,
        lse: Array | None,
        dlse: Array | None,
        out: Sequence[Any] | None,
        grads: Sequence[str] | None,
    ) -> Gradients:
        """The gradients in the order of ``(q, k, v, *extras)``, None where not wanted."""
        problem, operands = self.problem, self.operands
        for name, x in (("dout", dout), ("out", forward_out)):
            check_like(name, x, problem.out_shape, problem.dtype, "as the forward result")
        for name, x in (("lse", lse), ("dlse", dlse)):
            if x is not None:
                check_like(name, x, problem.lse_shape, problem.accum_dtype, "as the forward pass returns lse")
        wanted = check_grads(grads, problem)
        names = ("q", "k", "v", *problem.extra_grads)
        given = _check_outs(out, names)
        inputs = {**self.adopted, "dout": dout, "out": forward_out, "lse": lse, "dlse": dlse}
        with interop.on_stream_of(self.library, operands.q):
            targets: dict[str, Array] = {}
            for name in names:
                if name not in wanted:
                    continue
                like = self.adopted[name]
                if given[name] is None:
                    targets[name] = self._empty(like.shape, like.dtype)
                else:
                    targets[name] = self._target(f"out, d{name}", given[name], like.shape, inputs, like.dtype.name)
                    inputs[f"d{name}"] = targets[name]
            self._backend.backward(
                problem,
                operands,
                with_contiguous_rows(dout),
                with_contiguous_rows(forward_out),
                lse,
                dlse,
                {name: to_full_rank(name, x) for name, x in targets.items()},
            )
            return tuple(
                None if name not in targets else self.release(targets[name]) if given[name] is None else given[name]
                for name in names
            )

    @property
    def _backend(self) -> ModuleType:
        """The module that computes on this call's arrays; the one for GPUs is imported when first needed."""
        if isinstance(self.operands.q, np.ndarray):
            from cuflash import numpy_backend

            return numpy_backend
        from cuflash import gpu_backend

        return gpu_backend

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if isinstance(self.operands.q, np.ndarray):
            return np.empty(shape, dtype)
        import cupy

        return cupy.empty(shape, dtype)

    def _target(
        self, name: str, out: Any, shape: tuple[int, ...], inputs: dict[str, Array | None], dtype: str | None = None
    ) -> Array:
        target = self.adopt(name, out)
        check_like(name, target, shape, dtype or self.problem.dtype, "as the result")
        check_target(name, target, inputs)
        return target


def _problem_of(
    inputs: tuple[Array, Array, Array], options: Options, cu_seqlens: tuple[Array | None, Array | None]
) -> AttentionProblem:
    """`make_problem`, remembered by everything that it looks at."""
    arrays = (*inputs, *cu_seqlens, *(getattr(options, name) for name in _ARRAY_OPTIONS))
    o = options
    key = (
        tuple(None if x is None else (x.shape, x.dtype) for x in arrays),
        o.causal,
        # 1.0 == True and 1.0 == 1 as keys: text and type keep a wrong kind from passing as a checked one.
        repr(o.window),
        (type(o.softmax_scale), o.softmax_scale),
        (type(o.softcap), o.softcap),
        (type(o.dropout_p), o.dropout_p),
        (type(o.block_mask), getattr(o.block_mask, "shape", None)),
        o.deterministic,
        o.precision,
    )
    try:
        problem = _problems.get(key)
    except TypeError:  # an unhashable option: the checks say what is wrong with it
        return make_problem(*inputs, options, *cu_seqlens)
    if problem is None:
        problem = make_problem(*inputs, options, *cu_seqlens)
        if len(_problems) >= _MAX_PROBLEMS:
            _problems.clear()
        _problems[key] = problem
    return problem


def _check_outs(out: Sequence[Any] | None, names: tuple[str, ...]) -> dict[str, Any]:
    """The given targets by name, None where one is to be allocated."""
    if out is None:
        return dict.fromkeys(names)
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out: expected a tuple (dq, dk, dv), got {type(out).__name__}")
    if len(out) not in (3, len(names)):
        wanted = " or ".join(dict.fromkeys(("(dq, dk, dv)", f"({', '.join(f'd{name}' for name in names)})")))
        raise ValueError(f"out: expected {wanted}, got {len(out)} entries")
    return dict.fromkeys(names) | dict(zip(names, out, strict=False))
