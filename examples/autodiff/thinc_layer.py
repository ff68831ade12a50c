"""cuflash as a Thinc layer: Thinc's forward functions return a backprop callback, as ``attention_vjp`` does.

Thinc's gradients are plain arrays outside any graph, so a second derivative cannot be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from thinc.api import Model

import cuflash

Array = Any  # of Model.ops: NumPy or CuPy
Heads = tuple[Array, Array, Array]


def attention(**options: Any) -> Model[Heads, Array]:
    """A layer from ``(q, k, v)``, each (batch, seqlen, heads, dim), to the output of `cuflash.attention`."""
    return Model("attention", _forward, attrs={"options": options})


def _forward(model: Model[Heads, Array], qkv: Heads, is_train: bool) -> tuple[Array, Callable[[Array], Heads]]:
    return cuflash.attention_vjp(*qkv, **model.attrs["options"])


if __name__ == "__main__":
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 64, 4, 32)).astype("float32")
    layer = attention(causal=True)
    out, backprop = layer.begin_update((q, k, v))
    dq, dk, dv = backprop(np.ones_like(out))
    print("output:", out.shape, "gradient of q:", dq.shape)
