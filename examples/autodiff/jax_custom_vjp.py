"""cuflash inside JAX: attention that learns a table of relative positions, under ``jit``, ``grad`` and ``vmap``.

The rule adds ``table[h, j - i]`` to the scores, as T5 does (Raffel et al., 2020, section 2.1), and its gradient comes
with those of q, k and v. The target is attention by a table that the model does not know. ``vmap`` trains several
tables at once, from seeds of their own.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from cuflash.adapters.jax import attention

REACH = 4  # positions on either side that have entries of their own


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """The score of query i and key j, with what their distance adds."""
    return s + table[h, np.clip(j - i, -REACH, REACH) + REACH]


def learn(models: int = 2, steps: int = 150) -> tuple[jax.Array, jax.Array]:
    """The models' losses before and after as many steps of gradient descent with momentum."""
    keys = jax.random.split(jax.random.key(0), 2)
    q, k, v = jax.random.normal(keys[0], (3, 4, 16, 2, 8))
    true_table = jax.random.normal(keys[1], (2, 2 * REACH + 1))
    target = attention(q, k, v, score_mod=relative, operands=(true_table,))

    def loss(table: jax.Array) -> jax.Array:
        out = attention(q, k, v, score_mod=relative, operands=(table,))
        return jnp.sum((out - target) ** 2) / 64

    def step(state: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        table, velocity = state
        value, gradient = jax.value_and_grad(loss)(table)
        velocity = 0.9 * velocity - 0.1 * gradient
        return (table + velocity, velocity), value

    @jax.jit
    @jax.vmap
    def train(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses = jax.lax.scan(step, (table, jnp.zeros_like(table)), None, steps)[1]
        return losses[0], losses[-1]

    return train(0.1 * jax.random.normal(jax.random.key(1), (models, *true_table.shape)))


if __name__ == "__main__":
    first, last = learn()
    for before, after in zip(first, last, strict=True):
        print(f"a learned table takes the loss from {before:.4f} to {after:.6f}")
