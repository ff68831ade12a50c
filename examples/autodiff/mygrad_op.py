"""cuflash inside MyGrad: an ``Operation`` that keeps the backward function of ``attention_vjp``.

MyGrad's gradients are plain NumPy arrays outside any graph, so a second derivative cannot be asked for.
"""

from __future__ import annotations

from typing import Any

import mygrad
import numpy as np
from mygrad.operation_base import Operation

import cuflash


class Attention(Operation):
    """`cuflash.attention` as a node of MyGrad's graph."""

    def __call__(self, q: mygrad.Tensor, k: mygrad.Tensor, v: mygrad.Tensor, **options: Any) -> np.ndarray:
        """Forward pass: MyGrad wraps the result in a tensor."""
        self.variables = (q, k, v)
        out, self._backward = cuflash.attention_vjp(q.data, k.data, v.data, **options)
        return out

    def backward_var(self, grad: np.ndarray, index: int, **kwargs: Any) -> np.ndarray:
        """Gradient of one of q, k, v; MyGrad asks for each that needs one."""
        name = "qkv"[index]
        gradient: np.ndarray = self._backward(grad, grads=(name,))[index]
        return gradient


def attention(q: Any, k: Any, v: Any, **options: Any) -> mygrad.Tensor:
    """`cuflash.attention` with gradients for q, k and v; the options are constants."""
    return mygrad.execute_op(Attention, q, k, v, op_kwargs=options)


if __name__ == "__main__":
    q, k, v = (mygrad.tensor(x) for x in np.random.default_rng(0).normal(size=(3, 2, 64, 4, 32)))
    mygrad.sum(attention(q, k, v, causal=True)).backward()
    print("gradient of q:", q.grad.shape, q.grad.dtype)
