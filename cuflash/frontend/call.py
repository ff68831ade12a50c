"""One call, which takes arguments of any library, checks them and returns results of the caller's kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash import forks, interop
from cuflash.frontend import own_rules
from cuflash.frontend.metadata import Repeat, remember
from cuflash.kept import Kept
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.fp8 import SCALES, refuse_gradients
from cuflash.problem.gradients import check_grads, check_like
from cuflash.problem.make import make_problem
from cuflash.problem.operands import Metadata, make_operands, to_full_rank, with_contiguous_rows
from cuflash.problem.options import Options, check_names
from cuflash.problem.overlap import check_target
from cuflash.problem.own_rules import is_operand, label_of
from cuflash.problem.pages import check_cu_seqlens_k

Gradients = tuple[Any, ...]
Backward = Callable[..., Gradients]

ARRAY_OPTIONS = ("bias", "mask", "alibi_slopes", "sink", "q_lengths", "kv_lengths", "block_table", *SCALES)
_ARRAY_OPTION_SET = frozenset((*ARRAY_OPTIONS, "dropout_seed", "operands"))


class _Checked(NamedTuple):
    """The result of the checks for one combination of metadata."""

    problem: AttentionProblem
    library: interop.Library
    is_repeatable: bool  # by the arguments' addresses alone


# The checks read metadata alone, so that a repeated call costs one look-up.
_checked: Kept[Any, _Checked] = Kept()


class Call:
    """The checked arguments of one call; `keywords` are the options of `problem.Options` that were given."""

    __slots__ = ("_is_repeatable", "_options", "_own", "inputs", "library", "operands", "problem")

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        keywords: Mapping[str, Any],
        cu_seqlens: tuple[Array, Array | None] | None = None,
    ) -> None:
        inputs = {"q": q, "k": k, "v": v}
        library = None
        if cu_seqlens is not None:
            inputs |= _packing(*cu_seqlens, keywords.get("block_table"))
        self.inputs = _arrays(inputs, keywords)
        if not interop.are_own(self.inputs.values()):
            library, self.inputs = _adopt(self.inputs)
            inputs = {name: self.inputs[name] for name in inputs}
            keywords = {name: self.inputs.get(name, x) for name, x in keywords.items()}
            keywords = own_rules.with_adopted(keywords, self.inputs)
        if keywords.get("out_dtype") is not None:
            keywords = {**keywords, "out_dtype": interop.dtype_name(keywords["out_dtype"])}
        key = (
            tuple([signature(x) for x in inputs.values()]),
            tuple([(name, signature(x) if name != "dropout_seed" else type(x)) for name, x in keywords.items()]),
            own_rules.of_call(self.inputs["q"], keywords),
        )
        checked = _checked.get(key)
        if checked is None:
            checked = _check(inputs, keywords)
            _checked[key] = checked
        self.problem = checked.problem
        self.library = library or checked.library
        self.operands = make_operands(checked.problem, self.inputs, Options(**keywords))
        self._is_repeatable = checked.is_repeatable
        self._own = inputs
        self._options = own_rules.arrays_in_order(keywords, self.inputs)

    def adopt(self, name: str, x: Any) -> Array | None:
        """Return a further argument, checked to be of the same library and device."""
        if x is None:
            if name == "dlse":
                return None
            raise TypeError(f"{name}: expected an array, got None")
        if interop.is_adopted(self.library, x, self.inputs["q"]):
            return x
        return interop.adopt_all(self.library, {name: x}, reference=self.inputs["q"])[name]

    def release(self, x: Array) -> Any:
        """Return `x` as an array of the caller's library."""
        return self.library.release(x)

    def refuse_gradients(self) -> None:
        """Raise NotImplementedError where an input is FP8."""
        refuse_gradients(*(self.inputs[name] for name in ("q", "k", "v")))

    def forward(
        self, out: Any = None, with_lse: bool = True, metadata: Metadata | None = None
    ) -> tuple[Any, Array | None]:
        """Return the result as the caller's kind of array, and lse if it is wanted; `metadata` tells a repetition."""
        problem, q = self.problem, self.inputs["q"]
        with interop.on_stream_of(self.library, q):
            if out is None:
                dtype = q.dtype if problem.out_dtype is None else interop.dtype_of(problem.out_dtype)
                target = self._empty(problem.out_shape, dtype)
            else:
                target = self._target("out", out, problem.out_shape, self.inputs)
            lse = self._empty(problem.lse_shape, problem.accum_dtype) if with_lse else None
            recording = backend_of(isinstance(q, np.ndarray)).forward(problem, self.operands, target, lse)
            if metadata is not None and self._is_repeatable and recording is not None:
                given = {} if out is None else {"out": target}
                arguments = {**self._own, **given, **self._options}
                remember_repeat(metadata, recording.repeat(arguments, {"out": target, "lse": lse}, given))
            return (self.release(target) if out is None else out), lse

    def backward(
        self,
        dout: Array | None,
        forward_out: Array | None,
        lse: Array | None,
        dlse: Array | None,
        out: Sequence[Any] | None,
        grads: Sequence[str] | None,
        metadata: Metadata | None = None,
    ) -> Gradients:
        """Return the gradients of ``(q, k, v, *extras)``, None where not wanted; `metadata` is as in `forward`."""
        self.refuse_gradients()
        problem = self.problem.unsplit
        for name, x in (("dout", dout), ("out", forward_out)):
            check_like(name, x, problem.out_shape, problem.result_dtype, "as the forward result")
        for name, x in (("lse", lse), ("dlse", dlse)):
            if x is not None:
                check_like(name, x, problem.lse_shape, problem.accum_dtype, "as the forward pass returns lse")
        wanted = check_grads(grads, problem)
        names = problem.grad_names
        given = check_outs(out, names, wanted)
        inputs = {**self.inputs, "dout": dout, "out": forward_out, "lse": lse, "dlse": dlse}
        with interop.on_stream_of(self.library, self.inputs["q"]):
            targets: dict[str, Array] = {}
            for name in names:
                if name not in wanted:
                    continue
                like = self.inputs[name]
                if given[name] is None:
                    targets[name] = self._empty(like.shape, like.dtype)
                else:
                    grad = f"d{label_of(name)}"
                    targets[name] = self._target(f"out, {grad}", given[name], like.shape, inputs, like.dtype.name)
                    inputs[grad] = targets[name]
            rows = with_contiguous_rows(dout), with_contiguous_rows(forward_out)
            full = {name: to_full_rank(name, x) for name, x in targets.items()}
            recording = backend_of(isinstance(self.inputs["q"], np.ndarray)).backward(
                problem, self.operands, *rows, lse, dlse, full
            )
            are_as_given = rows[0] is dout and rows[1] is forward_out
            if metadata is not None and self._is_repeatable and are_as_given and recording is not None:
                asked = {f"d{name}": x for name, x in given.items()}
                arguments = {"dout": dout, "out": forward_out, "lse": lse, "dlse": dlse, **self._own, **asked}
                arguments = {name: x for name, x in arguments.items() if x is not None} | self._options
                results = {f"d{name}": targets.get(name) for name in names}
                remember_repeat(metadata, recording.repeat(arguments, results, asked))
            return tuple(
                None if name not in targets else self.release(targets[name]) if given[name] is None else given[name]
                for name in names
            )

    def gradients_of(self, out: Any, lse: Array | None) -> Backward:
        """Return the gradient function of the forward pass that gave `out`, as the caller got it, and lse."""
        residual = self.adopt("out", out)
        if lse is not None:
            with interop.on_stream_of(self.library, self.inputs["q"]):
                backend = backend_of(isinstance(self.inputs["q"], np.ndarray))
                backend.expect_gradients(self.problem, self.operands, residual, lse)

        def compute(dout: Any, dlse: Any, outs: Sequence[Any] | None, grads: Sequence[str] | None) -> Gradients:
            return self.backward(self.adopt("dout", dout), residual, lse, self.adopt("dlse", dlse), outs, grads)

        return gradient_function(compute)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return interop.namespace_of(self.inputs["q"]).empty(shape, dtype)

    def _target(
        self, name: str, out: Any, shape: tuple[int, ...], inputs: dict[str, Array | None], dtype: str | None = None
    ) -> Array:
        if self.library.name == "jax":  # CuPy would write them
            raise ValueError(f"{name}: expected None, as JAX's arrays are immutable, got an array")
        target = self.adopt(name, out)
        check_like(name, target, shape, dtype or self.problem.result_dtype, "as the result")
        check_target(name, target, inputs)
        return target


def gradient_function(
    compute: Callable[[Array, Array | None, Sequence[Array | None] | None, Sequence[str] | None], Gradients],
) -> Backward:
    """Return the function that a vjp gives to its caller; `compute(dout, dlse, out, grads)` holds the residuals."""

    def backward(
        dout: Array,
        dlse: Array | None = None,
        *,
        out: Sequence[Array | None] | None = None,
        grads: Sequence[str] | None = None,
    ) -> Gradients:
        """Return the gradients of the inputs; see `cuflash.attention_backward`."""
        return compute(dout, dlse, out, grads)

    backward.__qualname__ = "backward"  # as messages of Python call it
    return backward


def remember_repeat(metadata: Metadata, repeat: Repeat | None) -> None:
    """Let a call be known again, if its launches can be repeated."""
    if repeat is not None:
        remember(metadata, repeat)


@cache
def backend_of(on_cpu: bool) -> ModuleType:
    """Import the module that computes for NumPy's arrays, or for CuPy's."""
    with forks.LOCK:  # a child cannot end an import that another thread of its parent began
        return import_module("cuflash.cpu.backend" if on_cpu else "cuflash.gpu.backend")


def _packing(cu_seqlens_q: Array, cu_seqlens_k: Array | None, block_table: Array | None) -> dict[str, Array]:
    """Return the cu_seqlens that a packed call has."""
    check_cu_seqlens_k(cu_seqlens_k, block_table)
    of_keys = {} if cu_seqlens_k is None else {"cu_seqlens_k": cu_seqlens_k}
    return {"cu_seqlens_q": cu_seqlens_q, **of_keys}


def _arrays(inputs: dict[str, Array], keywords: Mapping[str, Any]) -> dict[str, Array]:
    if _ARRAY_OPTION_SET.isdisjoint(keywords):
        return inputs
    inputs = inputs | own_rules.arrays_of(keywords)
    arrays = inputs | {name: keywords[name] for name in ARRAY_OPTIONS if keywords.get(name) is not None}
    seed = keywords.get("dropout_seed")
    if hasattr(seed, "__dlpack__") or hasattr(seed, "__cuda_array_interface__"):
        arrays["dropout_seed"] = seed
    return arrays


def _adopt(arrays: dict[str, Array]) -> tuple[interop.Library, dict[str, Array]]:
    if "cu_seqlens_q" in arrays and arrays["cu_seqlens_q"] is None:
        raise TypeError("cu_seqlens_q: expected an int32 array (batch + 1,), got None")
    library = interop.library_of("q", arrays["q"])
    adopted = interop.adopt_all(library, {label_of(name): x for name, x in arrays.items()})
    return library, dict(zip(arrays, adopted.values(), strict=True))


def signature(x: Any) -> tuple[Any, ...]:
    """Return everything about an argument that the checks look at, as a dictionary key."""
    kind = type(x)
    if isinstance(x, np.ndarray):
        return kind, x.shape, x.strides, x.dtype
    if kind.__module__ == "cupy":
        return kind, x.shape, x.strides, x.dtype, x.data.device_id
    if kind is bool or kind is float or x is None:
        return kind, x
    if hasattr(x, "serial"):  # a BlockMask
        return kind, x.serial
    if callable(x):  # a rule: what was traced stands in the key
        return (kind,)
    if kind is tuple or kind is list:
        return kind, tuple([signature(item) for item in x])
    # The text tells (1, 0) from (1.0, False).
    return kind, getattr(x, "shape", None) or repr(x)


def _check(inputs: dict[str, Array], keywords: Mapping[str, Any]) -> _Checked:
    check_names(keywords)
    library, arrays = _adopt(_arrays(inputs, keywords))
    problem = make_problem(arrays, Options(**own_rules.with_adopted(keywords, arrays)))
    # An array that has to be copied makes the call its own: its address does not suffice to repeat it.
    are_as_given = {"bias", "mask", "dropout_seed", *SCALES}
    is_repeatable = all(
        name in are_as_given or is_operand(name) or with_contiguous_rows(x) is x for name, x in arrays.items()
    )
    return _Checked(problem, library, is_repeatable)


def check_outs(out: Sequence[Any] | None, names: tuple[str, ...], wanted: frozenset[str]) -> dict[str, Any]:
    """Return the given targets by name, None where one is to be allocated."""
    if out is None:
        return dict.fromkeys(names)
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out: expected a tuple (dq, dk, dv), got {type(out).__name__}")
    if len(out) not in (3, len(names)):
        labels = ", ".join(f"d{label_of(name)}" for name in names)
        forms = " or ".join(dict.fromkeys(("(dq, dk, dv)", f"({labels})")))
        raise ValueError(f"out: expected {forms}, got {len(out)} entries")
    given = dict.fromkeys(names) | dict(zip(names, out, strict=False))
    for name, x in given.items():
        if x is not None and name not in wanted:
            label, wanted_as = label_of(name), "operands" if is_operand(name) else name
            raise ValueError(
                f"out, d{label}: expected None, as grads does not name {wanted_as}, got {type(x).__name__}"
            )
    return given
