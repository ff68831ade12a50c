"""cuflash inside HIPS autograd: a primitive and its vector-Jacobian product.

First derivatives only: the gradient is a primitive too, whose derivative raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from autograd.extend import defvjp_argnums, primitive

import cuflash

Array = np.ndarray


@primitive
def attention_with_lse(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """``(out, lse)`` of `cuflash.attention`, with gradients for q, k and v; the options are constants."""
    return cuflash.attention(q, k, v, return_lse=True, **options)


@primitive
def attention_gradients(dout: Array, dlse: Array, *inputs: Array, **options: Any) -> tuple[Array, ...]:
    """Gradients of q, k and v, from the inputs q, k, v, out and lse."""
    return cuflash.attention_backward(dout, *inputs, dlse=dlse, **options)


def _attention_vjp(argnums: tuple[int, ...], ans: Any, args: tuple[Any, ...], options: Any) -> Callable[[Any], Any]:
    def vjp(gradient: tuple[Array, Array]) -> tuple[Array, ...]:
        gradients = attention_gradients(*gradient, *args, *ans, **options)
        return tuple(gradients[i] for i in argnums)

    return vjp


def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError("attention has no second derivative: its gradient cannot be differentiated")


defvjp_argnums(attention_with_lse, _attention_vjp)
defvjp_argnums(attention_gradients, _no_second_derivative)


def attention(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """`cuflash.attention` with gradients for q, k and v."""
    return attention_with_lse(q, k, v, **options)[0]


if __name__ == "__main__":
    from autograd import grad
    from autograd.test_util import check_grads

    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 8, 2, 4))
    check_grads(lambda *qkv: attention(*qkv, causal=True), modes=["rev"], order=1)(q, k, v)
    print("check_grads passed; gradient of q:", grad(lambda q: attention(q, k, v, causal=True).sum())(q).shape)
