"""Checks of e4m3 arrays, their scales and the result's dtype, and the form that both have inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import e4m3, interop
from cuflash.problem.attention_problem import HALF_DTYPES, Array

if TYPE_CHECKING:
    from cuflash.problem.options import Options

SCALES = ("q_scale", "k_scale", "v_scale")
FP8 = e4m3.NAME  # the dtype of a problem whose queries are FP8
# FP8 arrays have ml_dtypes' e4m3, or its bytes.
_DTYPES = (e4m3.NAME, "uint8")
_RESULTS = (*HALF_DTYPES, "float32")  # of FP8 and 16-bit queries


def is_fp8(x: Array) -> bool:
    """The array holds e4m3 numbers."""
    return x.dtype.itemsize == 1 and x.dtype.name in _DTYPES


def check_fp8_dtypes(q: Array, k: Array, v: Array) -> str:
    """Check that k and v are FP8 and q is FP8 or of 16 bits, and return q's dtype."""
    for name, x, other, its in (("k", k, "v", v), ("v", v, "k", k)):
        if is_fp8(its) and not is_fp8(x):
            raise TypeError(f"{name}: expected uint8 or {e4m3.NAME}, as {other} is FP8, got {x.dtype.name}")
    if not is_fp8(k):
        raise TypeError(f"k: expected uint8 or {e4m3.NAME}, as q is FP8, got {k.dtype.name}")
    if is_fp8(q):
        return e4m3.NAME
    if q.dtype.name not in HALF_DTYPES:
        wanted = ", ".join((*HALF_DTYPES, *_DTYPES))
        raise TypeError(f"q: expected dtype {wanted}, as k and v are FP8, got {q.dtype.name}")
    dtype: str = q.dtype.name
    return dtype


def check_scales(arrays: dict[str, Array], options: Options) -> None:
    """Check that scales belong to FP8 arrays, are float32 and broadcast to all axes of theirs but the last."""
    for name in SCALES:
        scale = getattr(options, name)
        if scale is None:
            continue
        array = name.removesuffix("_scale")
        x = arrays[array]
        if not is_fp8(x):
            raise ValueError(
                f"{name}: expected None, as {array} is not FP8 (uint8 or {e4m3.NAME}) but {x.dtype.name}, got a scale"
            )
        if scale.dtype.name != "float32":
            raise TypeError(f"{name}: expected dtype float32, got {scale.dtype.name}")
        shape, wanted = tuple(scale.shape), tuple(x.shape[:-1])
        if len(shape) != len(wanted) or any(n not in (1, want) for n, want in zip(shape, wanted, strict=True)):
            raise ValueError(
                f"{name}: expected {len(wanted)} axes that broadcast to {wanted}, those of {array} without the last, "
                f"got {shape}"
            )


def check_out_dtype(out_dtype: Any, dtype: str) -> str:
    """Return the result's dtype for queries of a dtype."""
    if out_dtype is None:
        return "bfloat16" if dtype == e4m3.NAME else dtype
    allowed = _RESULTS if dtype in (e4m3.NAME, *HALF_DTYPES) else (dtype,)
    name = interop.dtype_name(out_dtype)
    if name not in allowed:
        raise TypeError(f"out_dtype: expected None or {', '.join(allowed)} for queries of {dtype}, got {out_dtype!r}")
    return name


def spread_scales(operands: dict[str, Array]) -> None:
    """Give FP8 arrays the dtype uint8, and their scales all of their rows, in place and without a copy."""
    for name in SCALES:
        x = operands[name.removesuffix("_scale")]
        if is_fp8(x) and x.dtype.name == e4m3.NAME:  # the name of a dtype takes longer to find than its size
            operands[name.removesuffix("_scale")] = x.view(np.uint8)
        if name in operands:
            operands[name] = interop.namespace_of(x).broadcast_to(operands[name], x.shape[:-1])


def refuse_gradients(*arrays: Array) -> None:
    """Raise NotImplementedError where an array is FP8."""
    for x in arrays:
        if is_fp8(x):
            raise NotImplementedError(
                "gradients of attention with FP8 arrays: expected float16, bfloat16, float32 or float64 inputs, "
                f"got {x.dtype.name}"
            )
