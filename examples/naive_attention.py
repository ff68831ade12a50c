"""Attention by its formula, with its gradients, and how its error and memory compare with cuflash's."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import cuflash

from .tape import Array, Backward


def naive_attention_vjp(q: Array, k: Array, v: Array) -> tuple[Array, Backward]:
    """Causal attention of (batch, seqlen, heads, dim) arrays with whole seqlen x seqlen matrices in memory."""
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    position = np.arange(q.shape[2], like=q)
    scores = np.where(position[:, None] >= position, scale * (q @ k.swapaxes(2, 3)), -np.inf)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    weights /= np.sum(weights, axis=-1, keepdims=True)
    out = weights @ v

    def backward(dout: Array) -> tuple[Array, Array, Array]:
        dout = dout.swapaxes(1, 2)
        dweights = dout @ v.swapaxes(2, 3)
        dscores = scale * weights * (dweights - np.sum(dout * out, axis=-1, keepdims=True))
        dq, dk, dv = dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dout
        return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2)

    return out.swapaxes(1, 2), backward


def cuflash_vjp(q: Array, k: Array, v: Array) -> tuple[Array, Backward]:
    """The same through cuflash."""
    return cuflash.attention_vjp(q, k, v, causal=True)


def compare(q: Array, k: Array, v: Array) -> dict[str, tuple[list[float], int]]:
    """Greatest errors of out, dq, dk and dv against float64, and the peak of memory in bytes, forward and backward.

    Parameters
    ----------
    q, k, v : array (batch, seqlen, heads, dim)
        NumPy or CuPy. The gradient that flows back is the output itself.

    Returns
    -------
    dict
        ``{"naive": (errors, bytes), "cuflash": (errors, bytes)}``.
    """
    out, backward = naive_attention_vjp(*(x.astype("float64") for x in (q, k, v)))
    dout = out.astype(q.dtype)
    exact = (out, *backward(dout.astype("float64")))
    del out, backward

    report = {}
    for name, vjp in {"naive": naive_attention_vjp, "cuflash": cuflash_vjp}.items():

        def forward_and_backward(vjp: Callable[..., tuple[Array, Backward]] = vjp) -> tuple[Array, ...]:
            out, backward = vjp(q, k, v)
            return (out, *backward(dout))

        results, peak = peak_memory(forward_and_backward, on_gpu=not isinstance(q, np.ndarray))
        errors = [float(np.max(abs(x.astype("float64") - y))) for x, y in zip(results, exact, strict=True)]
        report[name] = errors, peak
    return report


def peak_memory(function: Callable[[], Any], on_gpu: bool) -> tuple[Any, int]:
    """The result of ``function()`` and the most bytes that were allocated at once while it ran."""
    if on_gpu:
        import cupy

        pool = cupy.cuda.MemoryPool()  # a fresh pool's size is its high-water mark
        with cupy.cuda.using_allocator(pool.malloc):
            return function(), pool.total_bytes()
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
