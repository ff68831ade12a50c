"""cuflash inside HIPS autograd: attention that learns a table of relative positions.

The rule adds ``table[h, j - i]`` to the scores, as T5 does (Raffel et al., 2020, section 2.1), and its gradient comes
with those of q, k and v. The target is attention by a table that the model does not know.
"""

from __future__ import annotations

from typing import Any

import autograd.numpy as np
from autograd import value_and_grad
from autograd.test_util import check_grads

from cuflash.adapters.autograd import attention

Array = Any
REACH = 4  # positions on either side that have entries of their own


def relative(s: Array, b: Array, h: Array, i: Array, j: Array, table: Array) -> Array:
    """The score of query i and key j, with what their distance adds."""
    return s + table[h, np.clip(j - i, -REACH, REACH) + REACH]


def attention_with_lse(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """``(out, lse)``, both of which have gradients."""
    return attention(q, k, v, return_lse=True, **options)


def learn(steps: int = 150) -> tuple[float, float]:
    """Losses before and after as many steps of gradient descent with momentum."""
    rng = np.random.RandomState(0)
    q, k, v = rng.normal(size=(3, 4, 16, 2, 8))
    true_table = rng.normal(size=(2, 2 * REACH + 1))
    target = attention(q, k, v, score_mod=relative, operands=(true_table,))

    def loss(table: Array) -> Array:
        out = attention(q, k, v, score_mod=relative, operands=(table,))
        return np.sum((out - target) ** 2) / 64

    table, velocity = np.zeros_like(true_table), np.zeros_like(true_table)
    losses = []
    for _ in range(steps):
        value, gradient = value_and_grad(loss)(table)
        losses.append(float(value))
        velocity = 0.9 * velocity - 0.1 * gradient
        table = table + velocity
    return losses[0], losses[-1]


if __name__ == "__main__":
    q, k, v = np.random.RandomState(0).normal(size=(3, 1, 8, 2, 4))
    table = np.zeros((2, 2 * REACH + 1))
    check_grads(
        lambda table, *qkv: attention(*qkv, causal=True, score_mod=relative, operands=(table,)), modes=["rev"], order=1
    )(table, q, k, v)
    first, last = learn()
    print(f"check_grads passed; a learned table takes the loss from {first:.4f} to {last:.6f}")
