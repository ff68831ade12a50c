"""One attention problem with its data, and the calls of the library and of the reference that a test makes with it.

Everything in a `Case` is a host array. Gradients are dicts by name, whoever computed them, results NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import tolerance
from devices import Device
from ml_dtypes import bfloat16
from noise import forward_magnitudes, gradient_magnitudes
from numpy.typing import NDArray

import cuflash
from cuflash import reference

Array = NDArray[Any]
Grads = dict[str, Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")
EXTRAS = ("bias", "sink", "alibi_slopes")


def np_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name, bfloat16 included."""
    return np.dtype(bfloat16) if name == "bfloat16" else np.dtype(name)


def accum_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of lse, sink and slopes that goes with inputs of `dtype`."""
    return np.dtype("float64" if np.dtype(dtype) == np.float64 else "float32")


def gaussian(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Array:
    """Draw normal random numbers, rounded to `dtype`."""
    return np.asarray(rng.standard_normal(shape) * scale, np_dtype(dtype) if isinstance(dtype, str) else dtype)


@dataclass
class Case:
    """Inputs of a forward and backward call.

    ``options`` holds the keyword arguments as the reference takes them: ``block_mask`` is a bool array there, of which
    the library gets a `BlockMask` with blocks of ``block_size``. Packed cases have ``cu_seqlens``, a pair.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    cu_seqlens: tuple[Array, Array] | None = None
    block_size: tuple[int, int] = (128, 128)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.q.dtype

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-3], self.q.shape[-2], self.q.shape[-3])

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def grad_names(self) -> tuple[str, ...]:
        """Names of the gradients in the order in which the library returns them."""
        floats = [n for n, x in enumerate(self.options.get("operands") or ()) if x.dtype.kind not in "biu"]
        extras = [name for name in EXTRAS if self.options.get(name) is not None]
        return ("q", "k", "v", *extras, *(f"operand_{n}" for n in floats))

    def input_of(self, name: str) -> Array:
        """Return the input that gradient `name` belongs to."""
        if name.startswith("operand_"):
            operand: Array = self.options["operands"][int(name.removeprefix("operand_"))]
            return operand
        array: Array = getattr(self, name) if name in ("q", "k", "v") else self.options[name]
        return array

    def with_options(self, **options: Any) -> Case:
        """Return the same data with other options; None takes one away."""
        merged = {name: value for name, value in {**self.options, **options}.items() if value is not None}
        return replace(self, options=merged)

    def with_inputs(self, **inputs: Array) -> Case:
        """Return the same problem with some of q, k, v, dout, dlse, bias, sink, alibi_slopes replaced."""
        own: dict[str, Any] = {name: inputs.pop(name) for name in tuple(inputs) if name not in EXTRAS}
        return replace(self, **own).with_options(**inputs)

    def library_options(self) -> dict[str, Any]:
        """Return the options as the library takes them, with a `BlockMask` in place of the bool array."""
        options = dict(self.options)
        if options.get("block_mask") is not None:
            options["block_mask"] = cuflash.BlockMask.from_dense(options["block_mask"], block_size=self.block_size)
        return options

    def function(self, kind: str) -> Callable[..., Any]:
        """Return `cuflash.attention` for kind "", or its "_backward" or "_vjp"; the packed form for a packed case."""
        function: Callable[..., Any] = getattr(cuflash, ("attention_varlen" if self.packed else "attention") + kind)
        return function

    def on(self, device: Device) -> OnDevice:
        """Put the case's arrays on `device`."""
        inputs = (self.q, self.k, self.v, self.dout, self.dlse, self.cu_seqlens or (), self.library_options())
        q, k, v, dout, dlse, cu_seqlens, options = device.put(inputs)
        return OnDevice(self, device, (q, k, v), dout, dlse, cu_seqlens, options)

    def reference_forward(self, **extra: Any) -> tuple[Array, Array]:
        """Return (out, lse) of the naive reference; `extra` may be ``work`` or ``round_to``."""
        inputs, given = (self.q, self.k, self.v), {**self.options, **extra}
        if self.cu_seqlens is not None:
            return reference.attention_varlen(*inputs, *self.cu_seqlens, **given)
        return reference.attention(*inputs, **given)

    def reference_backward(self, out: Array | None = None, lse: Array | None = None, **extra: Any) -> Grads:
        """Return the naive reference's gradients."""
        given = dict(self.options, dlse=self.dlse, out=out, lse=lse, **extra)
        if self.cu_seqlens is not None:
            return reference.attention_varlen_backward(self.dout, self.q, self.k, self.v, *self.cu_seqlens, **given)
        return reference.attention_backward(self.dout, self.q, self.k, self.v, **given)

    def _coarser(self, x: Array) -> np.dtype[Any]:
        """Return the coarser dtype of the inputs and a result, which may be a float32 lse or dbias of 16-bit scores."""
        return max(self.dtype, x.dtype, key=lambda dtype: tolerance.EPS[dtype.name])

    @property
    def _exact(self) -> dict[str, Any]:
        return {"work": tolerance.reference_work(self.dtype)}

    @property
    def _naive(self) -> dict[str, Any]:
        return {"round_to": self.dtype.name}

    def assert_forward(self, out: Array, lse: Array, *, strict: bool = False) -> None:
        """Hold (out, lse) against the reference by the tolerance rule.

        `strict` allows nothing for terms that cancel: for problems of so many elements that plain attention's error
        is a measure.
        """
        exact, naive = self.reference_forward(**self._exact), self.reference_forward(**self._naive)
        terms = {} if strict else forward_magnitudes(self)
        for name, actual, right, plain in zip(("out", "lse"), (out, lse), exact, naive, strict=True):
            check = partial(tolerance.assert_close, name=name, magnitude=terms.get(name))
            check(actual, right, plain, dtype=self._coarser(actual))

    def assert_gradients(
        self, grads: Grads, out: Array | None = None, lse: Array | None = None, *, strict: bool = False
    ) -> None:
        """Hold gradients (those that are not None) against the reference by the tolerance rule.

        With `out` and `lse` the reference starts from them, as the library did, else from its own. `strict` as above.
        """
        assert tuple(grads) == self.grad_names
        exact = self.reference_backward(out, lse, **self._exact)
        naive = self.reference_backward(out, lse, **self._naive)
        terms = gradient_magnitudes(self, out, lse)
        for name, actual in grads.items():
            if actual is not None:
                magnitude = None if strict and actual.size >= tolerance.FEW else terms[name]
                check = partial(tolerance.assert_close, gradient=True, name="d" + name, magnitude=magnitude)
                check(actual, exact[name], naive[name], dtype=self._coarser(actual))


def gaussian_case(
    seed: int,
    dtype: str,
    seqlens: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    batch: int = 2,
    **options: Any,
) -> Case:
    """Make a padded problem of normal random numbers; pairs are of (q, k), (q, kv) and (q and k, v)."""
    rng = np.random.default_rng(seed)
    (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v) = seqlens, heads, dims
    return Case(
        q=gaussian(rng, (batch, seqlen_q, heads_q, head_dim), dtype),
        k=gaussian(rng, (batch, seqlen_k, heads_kv, head_dim), dtype),
        v=gaussian(rng, (batch, seqlen_k, heads_kv, head_dim_v), dtype),
        dout=gaussian(rng, (batch, seqlen_q, heads_q, head_dim_v), dtype),
        dlse=gaussian(rng, (batch, heads_q, seqlen_q), accum_dtype(np_dtype(dtype))),
        options=options,
    )


@dataclass
class OnDevice:
    """A case whose arrays are on a device, and the library's calls with them. Results come back to the host."""

    case: Case
    device: Device
    qkv: tuple[Any, Any, Any]
    dout: Any
    dlse: Any
    cu_seqlens: tuple[Any, ...]
    options: dict[str, Any]

    def raw_forward(self, **extra: Any) -> Any:
        """Return the library's own result of the forward call."""
        return self.case.function("")(*self.qkv, *self.cu_seqlens, **{**self.options, **extra})

    def forward(self, **extra: Any) -> tuple[Array, Array]:
        """Return (out, lse), checked for type, dtype and shape."""
        raw = self.raw_forward(return_lse=True, **extra)
        assert isinstance(raw, tuple) and len(raw) == 2
        out, lse = self.device.get(raw)
        assert (out.dtype, out.shape) == (self.case.dtype, self.case.out_shape)
        assert (lse.dtype, lse.shape) == (accum_dtype(self.case.dtype), self.case.lse_shape)
        return out, lse

    def raw_backward(self, out: Array, lse: Array, /, **extra: Any) -> Any:
        """Return the library's own result of the stateless backward call, given host arrays out and lse."""
        residuals = self.device.put((out, lse))
        arguments = (self.dout, *self.qkv, *residuals, *self.cu_seqlens)
        return self.case.function("_backward")(*arguments, **{"dlse": self.dlse, **self.options, **extra})

    def backward(self, out: Array, lse: Array, /, **extra: Any) -> Grads:
        """Return the gradients of the stateless backward call."""
        return self.named(self.raw_backward(out, lse, **extra))

    def vjp(self, **extra: Any) -> tuple[Array, Array, Callable[..., Grads]]:
        """Return (out, lse, backward) of the vjp call; backward takes and returns host arrays."""
        options = {**self.options, **extra, "return_lse": True}
        (out, lse), pull = self.case.function("_vjp")(*self.qkv, *self.cu_seqlens, **options)

        def backward(*cotangents: Array) -> Grads:
            return self.named(pull(*self.device.put(cotangents)))

        return self.device.get(out), self.device.get(lse), backward

    def named(self, raw: Any) -> Grads:
        """Return a tuple of gradients as a dict of host arrays, checked for number, shape and dtype."""
        case = self.case
        assert isinstance(raw, tuple) and len(raw) == len(case.grad_names)
        grads = dict(zip(case.grad_names, self.device.get(raw), strict=True))
        for name, grad in grads.items():
            if grad is not None:
                own = case.input_of(name)
                assert (grad.dtype, grad.shape) == (own.dtype, own.shape), f"d{name}"
        return grads


def same_bits(a: Array, b: Array) -> bool:
    """Return True if two arrays hold the same bits, NaN payloads and signs of zero included."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def assert_same_bits(actual: Grads, expected: Grads) -> None:
    """Assert that every array of `actual` has the bits of its namesake in `expected`."""
    assert tuple(actual) == tuple(expected)
    for name, array in actual.items():
        assert same_bits(array, expected[name]), f"{name}: bits differ"
