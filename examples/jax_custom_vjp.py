"""cuflash inside JAX on the CPU: ``attention(q, k, v, ...)`` under ``jit`` and ``grad``.

The rule is a ``custom_vjp``; within compiled code the arrays reach cuflash through ``pure_callback``. First derivatives
only: the gradient has no derivative rule and says so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

import cuflash

Options = tuple[tuple[str, Any], ...]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """`cuflash.attention` with gradients for q, k and v; the options are constants and must be hashable."""
    return _attention_with_lse(tuple(sorted(options.items())), q, k, v)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention_with_lse(options: Options, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    def on_host(*qkv: Any) -> tuple[np.ndarray, np.ndarray]:
        return cuflash.attention(*map(np.asarray, qkv), return_lse=True, **dict(options))

    batch, seqlen_q, num_heads, _ = q.shape
    out = jax.ShapeDtypeStruct((batch, seqlen_q, num_heads, v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, num_heads, seqlen_q), np.promote_types(q.dtype, np.float32))
    return jax.pure_callback(on_host, (out, lse), q, k, v, vmap_method="sequential")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(options: Options, dout: jax.Array, dlse: jax.Array, *residuals: jax.Array) -> tuple[jax.Array, ...]:
    def on_host(dout: Any, dlse: Any, *residuals: Any) -> tuple[np.ndarray, ...]:
        arrays = map(np.asarray, (dout, *residuals))
        return cuflash.attention_backward(*arrays, dlse=np.asarray(dlse), **dict(options))

    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in residuals[:3])
    return jax.pure_callback(on_host, shapes, dout, dlse, *residuals, vmap_method="sequential")


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
    print("gradient of q under jit:", gradient.shape, gradient.dtype)
