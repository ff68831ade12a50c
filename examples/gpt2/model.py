"""GPT-2 (Radford et al., 2019) with its gradients written out, on NumPy or CuPy alone.

No autodiff: each block returns its result and a function from the gradient of the result to that of its input.
Attention is either cuflash's or an honest baseline: batched matrix products and one softmax kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

import cuflash

from .ops import Array, NumpyOps, Rounded

Backward = Callable[[Array], Array]
WayBack = Callable[[Rounded], Rounded]

PRODUCTS = ("qkv", "merge", "expand", "contract")  # with weights, in a layer


@dataclass(frozen=True)
class Config:
    """The model's size; the defaults are GPT-2 small."""

    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    context: int = 1024
    vocabulary: int = 50304  # GPT-2's 50257, filled up to a multiple of 128


TINY = Config(width=256, num_layers=1, num_heads=4, context=128, vocabulary=256)


def cuflash_attention(ops: NumpyOps, qkv: Array, deterministic: bool | None = None) -> tuple[Array, Backward]:
    """Causal attention on a fused qkv (batch, seqlen, 3, heads, dim), its gradients written into a fused one too."""
    q, k, v = (qkv[:, :, i] for i in range(3))
    out, backward = cuflash.attention_vjp(q, k, v, causal=True, deterministic=deterministic)

    def gradient(dout: Array) -> Array:
        dqkv = ops.xp.empty_like(qkv)
        backward(dout, out=tuple(dqkv[:, :, i] for i in range(3)))
        return dqkv

    return out, gradient


def baseline_attention(ops: NumpyOps, qkv: Array) -> tuple[Array, Backward]:
    """The same by batched products in the same dtype and one kernel for the softmax, which keeps all weights.

    Every product is a batch over sequences, head by head: neither qkv nor the result has to be transposed.
    """
    batch, seqlen, _, num_heads, dim = qkv.shape
    scale = dim**-0.5
    weights = ops.xp.empty((num_heads, batch, seqlen, seqlen), qkv.dtype)
    out = ops.xp.empty((batch, seqlen, num_heads, dim), qkv.dtype)
    heads = [tuple(qkv[:, :, i, head] for i in range(3)) for head in range(num_heads)]
    for head, (q, k, _) in enumerate(heads):
        ops.matmul(q, k.swapaxes(1, 2), out=weights[head])
    ops.causal_softmax(weights, scale)
    for head, (_, _, v) in enumerate(heads):
        ops.matmul(weights[head], v, out=out[:, :, head])

    def gradient(dout: Array) -> Array:
        dqkv = ops.xp.empty_like(qkv)
        dweights = ops.xp.empty_like(weights)
        for head, (_, _, v) in enumerate(heads):
            ops.matmul(dout[:, :, head], v.swapaxes(1, 2), out=dweights[head])
            ops.matmul(weights[head].swapaxes(1, 2), dout[:, :, head], out=dqkv[:, :, 2, head])
        ops.causal_softmax_backward(dweights, weights, scale)
        for head, (q, k, _) in enumerate(heads):
            ops.matmul(dweights[head], k, out=dqkv[:, :, 0, head])
            ops.matmul(dweights[head].swapaxes(1, 2), q, out=dqkv[:, :, 1, head])
        return dqkv

    return out, gradient


ATTENTIONS = {"cuflash": cuflash_attention, "baseline": baseline_attention}


@lru_cache(maxsize=1)  # models that are compared start from the same ones
def _normal_numbers(seed: int, size: int) -> Array:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


class GPT2:
    """The parameters, and the loss with its gradients.

    Parameters
    ----------
    config : Config
    ops : NumpyOps or CupyOps
        Where and in which type it is computed.
    attention : callable
        ``(ops, qkv) -> out, backward``, as `ATTENTIONS`.
    seed : int
        Of the initial parameters.

    Attributes
    ----------
    master, weights, gradients : array (size,)
        All parameters in float32, in the working type, and their gradients in float32; matrices come first.
    """

    def __init__(self, config: Config, ops: NumpyOps, attention: Callable[..., Any], seed: int) -> None:
        self.config, self.ops, self.attention = config, ops, attention
        width, deep = config.width, config.num_layers
        matrices: dict[str, tuple[int, ...]] = {
            "tokens": (config.vocabulary, width),
            "positions": (config.context, width),
        }
        vectors: dict[str, tuple[int, ...]] = {}
        for layer in range(deep):
            matrices |= {
                f"qkv{layer}": (width, 3 * width),
                f"merge{layer}": (width, width),
                f"expand{layer}": (width, 4 * width),
                f"contract{layer}": (4 * width, width),
            }
            vectors |= {f"{name}_bias{layer}": shape[1:] for name, shape in self._of(matrices, layer).items()}
            vectors |= {f"{name}{layer}": (width,) for name in ("gain1_", "shift1_", "gain2_", "shift2_")}
        vectors |= {"gain": (width,), "shift": (width,)}
        self.shapes = matrices | vectors
        self.decayed = sum(math.prod(shape) for shape in matrices.values())
        initial = _normal_numbers(seed, sum(math.prod(shape) for shape in self.shapes.values())).copy()
        for name, view in self.views(initial).items():
            if view.ndim == 1:
                view[...] = name.startswith("gain")
            else:
                # the matrices that end a branch are smaller, so that the sum over branches keeps its size
                view *= 0.02 / math.sqrt(2 * deep) if name.startswith(("merge", "contract")) else 0.02
        self.master = ops.xp.asarray(initial)
        self.weights = self.master.astype(ops.dtype)
        self.gradients = ops.xp.zeros_like(self.master)
        self.w, self.dw = self.views(self.weights), self.views(self.gradients)
        layers = (name for name in matrices if name not in ("tokens", "positions"))
        self.factors = {name: ops.weight(self.w[name]) for name in layers}
        self.factors["tokens"] = ops.weight(self.w["tokens"].T)

    @staticmethod
    def _of(matrices: Mapping[str, tuple[int, ...]], layer: int) -> dict[str, tuple[int, ...]]:
        return {name: matrices[f"{name}{layer}"] for name in PRODUCTS}

    def views(self, flat: Array) -> dict[str, Array]:
        """Each parameter's part of a flat array of all, under its name."""
        parts, start = {}, 0
        for name, shape in self.shapes.items():
            parts[name] = flat[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        return parts

    def _layer(
        self, layer: int, x: Array, shape: tuple[int, ...], attention: Callable[..., Any]
    ) -> tuple[Array, WayBack]:
        """One block: its residual stream, and the way back."""
        ops, w, dw, factors = self.ops, self.w, self.dw, self.factors
        width, heads = self.config.width, self.config.num_heads
        gain1, shift1, gain2, shift2 = (f"{name}_{layer}" for name in ("gain1", "shift1", "gain2", "shift2"))
        qkv_bias, merge_bias, expand_bias, contract_bias = (f"{name}_bias{layer}" for name in PRODUCTS)

        y1, statistics1 = ops.layer_norm(x, w[gain1], w[shift1])
        qkv = ops.project(y1, factors[f"qkv{layer}"], w[qkv_bias])
        out, attention_backward = attention(ops, qkv.reshape(*shape, 3, heads, width // heads))
        rows = ops.rounded(out.reshape(-1, width))
        x2 = ops.project(rows, factors[f"merge{layer}"], w[merge_bias], added=x)
        y2, statistics2 = ops.layer_norm(x2, w[gain2], w[shift2])
        hidden, active = ops.project_gelu(y2, factors[f"expand{layer}"], w[expand_bias])
        result = ops.project(active, factors[f"contract{layer}"], w[contract_bias], added=x2)

        def backward(dx: Rounded) -> Rounded:
            dactive = ops.project_back(dx, factors[f"contract{layer}"])
            ops.matmul(active.full.T, dx.full, out=dw[f"contract{layer}"])
            dhidden = ops.gelu_backward(dactive, hidden, dw[expand_bias])
            dy2 = ops.project_back(dhidden, factors[f"expand{layer}"])
            ops.matmul(y2.full.T, dhidden.full, out=dw[f"expand{layer}"])
            of_norm2 = (dw[gain2], dw[shift2], dw[merge_bias])
            dx2 = ops.layer_norm_backward(dy2, x2, statistics2, w[gain2], dx.full, of_norm2)
            dout = ops.project_back(dx2, factors[f"merge{layer}"])
            ops.matmul(rows.full.T, dx2.full, out=dw[f"merge{layer}"])
            dqkv = attention_backward(dout.reshape(out.shape)).reshape(-1, 3 * width)
            rounded = ops.bias_gradient(dqkv, dw[qkv_bias])
            dy1 = ops.project_back(rounded, factors[f"qkv{layer}"])
            ops.matmul(y1.full.T, dqkv, out=dw[f"qkv{layer}"])
            of_norm1 = (dw[gain1], dw[shift1], dw.get(f"contract_bias{layer - 1}"))
            return ops.layer_norm_backward(dy1, x, statistics1, w[gain1], dx2.full, of_norm1)

        return result, backward

    def _forward(self, tokens: Array) -> tuple[Array, list[WayBack], WayBack]:
        ops, w, dw = self.ops, self.w, self.dw
        for factor in self.factors.values():
            ops.refresh(factor)
        x = ops.embed(tokens, w["tokens"], self.rows_of_positions(w["positions"], tokens.shape[1]))
        way_back = []
        for layer in range(self.config.num_layers):
            x, backward = self._layer(layer, x, tokens.shape, self.attention)
            way_back.append(backward)
        y, statistics = ops.layer_norm(x, w["gain"], w["shift"])
        last_bias = dw[f"contract_bias{self.config.num_layers - 1}"]

        def head_backward(dlogits: Rounded) -> Rounded:
            ops.matmul(dlogits.full.T, y.full, out=dw["tokens"])
            dy = ops.project_back(dlogits, self.factors["tokens"])
            return ops.layer_norm_backward(dy, x, statistics, w["gain"], None, (dw["gain"], dw["shift"], last_bias))

        return ops.project(y, self.factors["tokens"]), way_back, head_backward

    def logits(self, tokens: Array, positions: Array, wanted: Array, attend: Callable[..., Array]) -> Array:
        """Logits of what follows the wanted rows of packed `tokens` (total,), without gradients.

        ``attend(layer, q, k, v)`` is the attention of arrays (total, num_heads, head_dim).
        """
        ops, w = self.ops, self.w
        for factor in self.factors.values():
            ops.refresh(factor)
        x = ops.embed(self._contiguous(tokens[None]), w["tokens"], w["positions"][positions])
        for layer in range(self.config.num_layers):

            def attention(_: NumpyOps, qkv: Array, layer: int = layer) -> tuple[Array, None]:
                return attend(layer, *(qkv[:, i] for i in range(3))), None

            x, _ = self._layer(layer, x, tokens.shape, attention)
        y, _ = ops.layer_norm(x[wanted], w["gain"], w["shift"])
        return ops.project(y, self.factors["tokens"])

    def loss(self, windows: Array) -> Array:
        """Mean loss in nats of each token of `windows` (batch, seqlen + 1) but the first, given those before."""
        tokens, targets = self.split(windows)
        logits, _, _ = self._forward(tokens)
        return self.ops.cross_entropy(logits, targets.ravel())[0]

    def loss_and_gradients(self, windows: Array) -> Array:
        """The same, and all of `gradients` are written."""
        ops, dw = self.ops, self.dw
        tokens, targets = self.split(windows)
        logits, way_back, head_backward = self._forward(tokens)
        loss, dlogits = ops.cross_entropy(logits, targets.ravel())
        with ops.sums_into(self.gradients[self.decayed :], tokens.size):
            rounded = head_backward(dlogits)
            del logits, dlogits
            while way_back:
                rounded = way_back.pop()(rounded)  # and with it go the block's activations
        dx = rounded.full
        ops.add_rows(dw["tokens"], tokens, dx)
        seqlen, width = tokens.shape[1], self.config.width
        of_position = ops.xp.empty((seqlen, width), self.gradients.dtype)
        with ops.sums_into(of_position.reshape(-1), len(tokens)):
            ops.bias_gradient(dx.reshape(-1, seqlen * width), of_position.reshape(-1))
        dw["positions"][...] = 0
        self.put_rows_of_positions(dw["positions"], of_position)
        return loss

    def split(self, windows: Array) -> tuple[Array, Array]:
        """The tokens (batch, seqlen) of `windows` that this model reads, and those that follow each."""
        return self._contiguous(windows[:, :-1]), self._contiguous(windows[:, 1:])

    def rows_of_positions(self, table: Array, seqlen: int) -> Array:
        """The rows of a table (context, width) that belong to this model's tokens."""
        return table[:seqlen]

    def put_rows_of_positions(self, table: Array, rows: Array) -> None:
        """Write the rows of this model's tokens."""
        table[: len(rows)] = rows

    def _contiguous(self, tokens: Array) -> Array:
        return self.ops.xp.ascontiguousarray(tokens, dtype=np.int32)
