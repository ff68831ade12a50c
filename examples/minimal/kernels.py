"""The kernels of this folder as functions: on CuPy arrays on the GPU, on NumPy arrays on the CPU test device.

Arrays are (batch, heads, seqlen, head_dim), float32 or float16, with head_dim to 128.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
FOLDER = Path(__file__).parent
ELEMENTS = {"float32": "float", "float16": "__half"}
# The sources have these numbers, too.
MAX_HEAD_DIM, LANES, FORWARD_BLOCK, BACKWARD_BLOCK = 128, 4, 32, 16


class UnavailableError(RuntimeError):
    """NumPy arrays, and no way to run a kernel on them here."""


def forward(q: Array, k: Array, v: Array, causal: bool = False) -> tuple[Array, Array]:
    """The result in q's dtype, and lse, float32 (batch, heads, seqlen_q).

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For shapes that do not fit, or a head_dim above 128.
    UnavailableError
        For NumPy arrays where the CPU test device cannot run.
    """
    q, k, v = _checked(q=q, k=k, v=v)
    xp = _namespace(q)
    out, lse = xp.empty(q.shape, q.dtype), xp.empty(q.shape[:3], np.float32)
    _launch("forward", FORWARD_BLOCK, q.shape, q, k, v, out, lse, *_sizes(q, k, causal))
    return out, lse


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool = False
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v. It raises what `forward` does."""
    q, k, v = _checked(q=q, k=k, v=v)
    xp = _namespace(q)
    dout, out, lse = (
        xp.ascontiguousarray(x, dtype) for x, dtype in ((dout, q.dtype), (out, q.dtype), (lse, np.float32))
    )
    dq, dk, dv = (xp.empty(x.shape, x.dtype) for x in (q, k, v))
    delta, sizes = xp.empty(lse.shape, np.float32), _sizes(q, k, causal)
    _launch("backward_dq", BACKWARD_BLOCK, q.shape, dout, q, k, v, out, lse, delta, dq, *sizes)
    _launch("backward_dkv", BACKWARD_BLOCK, k.shape, dout, q, k, v, lse, delta, dk, dv, *sizes)
    return dq, dk, dv


def options(dtype: str) -> tuple[str, ...]:
    """The options with which the sources are compiled."""
    return ("-std=c++17", f"-DELEMENT={ELEMENTS[dtype]}")


def _checked(**arrays: Array) -> tuple[Array, ...]:
    q, k = arrays["q"], arrays["k"]
    for name, x in arrays.items():
        if str(x.dtype) not in ELEMENTS or x.dtype != q.dtype:
            raise TypeError(f"{name}: expected float32 or float16, all the same, got {x.dtype}")
        wanted = q.shape if name == "q" else (*q.shape[:2], k.shape[2] if k.ndim == 4 else 0, q.shape[-1])
        if x.ndim != 4 or x.shape != wanted:
            raise ValueError(f"{name}: expected (batch, heads, seqlen, head_dim), alike but for seqlen, got {x.shape}")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected 1 to {MAX_HEAD_DIM}, got {q.shape[3]}")
    return tuple(_namespace(x).ascontiguousarray(x) for x in arrays.values())


def _sizes(q: Array, k: Array, causal: bool) -> tuple[Any, ...]:
    return (*map(np.int32, (q.shape[2], k.shape[2], q.shape[3])), np.float32(q.shape[3] ** -0.5), np.int32(causal))


def _namespace(x: Array) -> Any:
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


def _launch(entry: str, block: int, shape: tuple[int, ...], *arguments: Any) -> None:
    """Run a kernel with a thread block for each tile of `block` rows of each head."""
    grid = (-(-shape[2] // block), shape[0] * shape[1])
    if math.prod(grid) == 0:
        return
    file, threads = f"{entry.split('_')[0]}.cu", (block * LANES,)
    if isinstance(arguments[0], np.ndarray):
        _cpu_module(file, str(arguments[0].dtype)).launch(entry, grid, threads, arguments)
    else:
        _gpu_module(file, str(arguments[0].dtype)).get_function(entry)(grid, threads, arguments)


@cache
def _gpu_module(file: str, dtype: str) -> Any:
    import cupy

    return cupy.RawModule(code=(FOLDER / file).read_text(encoding="utf-8"), options=options(dtype))


@cache
def _cpu_module(file: str, dtype: str) -> Any:
    """The kernels compiled for the CPU by the device with which this project's tests run theirs."""
    support = FOLDER.parents[1] / "tests" / "support"
    if not support.is_dir():
        raise UnavailableError(f"kernels on NumPy arrays need a checkout of cuflash: there is no {support}")
    if str(support) not in sys.path:
        sys.path.append(str(support))
    from cpu_device import device

    if not device.available():
        raise UnavailableError(f"kernels on NumPy arrays: {device.NO_COMPILER}")
    source = (FOLDER / file).read_text(encoding="utf-8")
    return device.compile(source, options(dtype), file.partition(".")[0], device.Check.SHARED)
