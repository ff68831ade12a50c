"""cuflash inside JAX: ``attention(q, k, v, ...)`` under ``jit`` and ``grad``, on the CPU and on a GPU.

The rule is a ``custom_vjp``; within compiled code cuflash works in place on JAX's own buffers, on JAX's stream, through
``buffer_callback``. First derivatives only: the gradient has no derivative rule and says so.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

import cuflash

Options = tuple[tuple[str, Any], ...]
Array = Any  # of NumPy or CuPy


def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`cuflash.attention` with gradients for q, k and v; the options are constants and must be hashable."""
    return _attention_with_lse(tuple(sorted(options.items())), q, k, v)[0]


def _array(buffer: Any) -> Array:
    """JAX's memory as an array of NumPy or CuPy."""
    on_cpu = 1  # DLPack's number
    if buffer.__dlpack_device__()[0] == on_cpu:
        return np.asarray(buffer)
    import cupy

    return cupy.from_dlpack(buffer)


def _on_stream_of(context: Any, array: Array) -> contextlib.AbstractContextManager[Any]:
    if isinstance(array, np.ndarray):
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.ExternalStream(context.stream, array.device.id)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention_with_lse(options: Options, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    def write(context: Any, results: Any, *inputs: Any) -> None:
        out, lse, *qkv = map(_array, (*results, *inputs))
        with _on_stream_of(context, out):
            lse[...] = cuflash.attention(*qkv, out=out, return_lse=True, **dict(options))[1]

    batch, seqlen_q, num_heads, _ = q.shape
    out = jax.ShapeDtypeStruct((batch, seqlen_q, num_heads, v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, num_heads, seqlen_q), np.promote_types(q.dtype, np.float32))
    return buffer_callback(write, (out, lse), vmap_method="sequential")(q, k, v)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(options: Options, dout: jax.Array, dlse: jax.Array, *residuals: jax.Array) -> tuple[jax.Array, ...]:
    def write(context: Any, results: Any, *inputs: Any) -> None:
        gradients = tuple(map(_array, results))
        dout, dlse, *arrays = map(_array, inputs)
        with _on_stream_of(context, dout):
            cuflash.attention_backward(dout, *arrays, dlse=dlse, out=gradients, **dict(options))

    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in residuals[:3])
    return buffer_callback(write, shapes, vmap_method="sequential")(dout, dlse, *residuals)


def _forward(options: Options, *qkv: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    results = _attention_with_lse(options, *qkv)
    return results, (*qkv, *results)


def _backward(
    options: Options, residuals: tuple[jax.Array, ...], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, ...]:
    return _gradients(options, *gradients, *residuals)


def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError("attention has no second derivative: its gradient cannot be differentiated")


_attention_with_lse.defvjp(_forward, _backward)
_gradients.defvjp(_no_second_derivative, _no_second_derivative)


if __name__ == "__main__":
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 32))
    gradient = jax.jit(jax.grad(lambda q: attention(q, k, v, causal=True).sum()))(q)
    print("gradient of q under jit:", gradient.shape, gradient.dtype, "on", *gradient.devices())
