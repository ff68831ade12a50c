"""A GPT-2 training step does this beside attention: what each operation means, in float32 on NumPy arrays.

Matrices are (rows, columns), row-major.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

Array = Any
Statistics = Any  # per row of a layer norm: mean and inverse standard deviation


class Rounded(NamedTuple):
    """A matrix, and perhaps the same in 8 bits."""

    full: Array
    eight: Array | None = None


class Weight(NamedTuple):
    """A factor of products, and perhaps the same in 8 bits, contiguous by rows and by columns."""

    full: Array
    by_row: Array | None = None
    by_column: Array | None = None


EPSILON = 1e-5  # of the layer norm
GELU_SCALE, GELU_CUBE = (2 / np.pi) ** 0.5, 0.044715


class NumpyOps:
    """The operations on the CPU."""

    xp: Any = np
    dtype: Any = np.dtype(np.float32)  # of activations and of the weights in the products

    def sums_into(self, vectors: Array, rows: int) -> AbstractContextManager[Any]:
        """In this context sums over so many rows go into views of `vectors`, and into all of it; it ends with them."""
        return nullcontext()

    def matmul(
        self,
        a: Array,
        b: Array,
        out: Array | None = None,
        added: Array | None = None,
        bias: Array | None = None,
    ) -> Array:
        """``a @ b`` of matrices or stacks of them, plus `added`, which may be `out`; `bias` is added to every row."""
        result = a @ b
        for summand in (added, bias):
            if summand is not None:
                result += summand
        if out is None:
            return result
        out[...] = result
        return out

    def weight(self, full: Array) -> Weight:
        """A matrix of weights as a factor."""
        return Weight(full)

    def refresh(self, weight: Weight) -> None:
        """To be called when the matrix has changed."""

    def rounded(self, x: Array) -> Rounded:
        """A matrix as a factor."""
        return Rounded(x)

    def project(self, x: Rounded, weight: Weight, bias: Array | None = None, added: Array | None = None) -> Array:
        """``x @ weight + added``; `bias` is added to every row."""
        return self.matmul(x.full, weight.full, bias=bias, added=added)

    def project_back(self, dy: Rounded, weight: Weight) -> Array:
        """The gradient of `x`."""
        return self.matmul(dy.full, weight.full.T)

    def embed(self, tokens: Array, of_token: Array, of_position: Array) -> Array:
        """Rows of both tables, added, for `tokens` (batch, seqlen)."""
        return (of_token[tokens] + of_position[: tokens.shape[1]]).reshape(-1, of_token.shape[1])

    def add_rows(self, table: Array, tokens: Array, rows: Array) -> None:
        """Add each of `rows` to its token's row of `table`, those of one token in one order."""
        np.add.at(table, tokens.ravel(), rows)

    def layer_norm(self, x: Array, gain: Array, shift: Array) -> tuple[Rounded, Statistics]:
        """The layer norm of `x`, and what backward needs of it."""
        mean = x.mean(axis=1, keepdims=True)
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + self.dtype.type(EPSILON))
        return Rounded((x - mean) * inverse * gain + shift), (mean, inverse)

    def layer_norm_backward(
        self,
        dy: Array,
        x: Array,
        statistics: Statistics,
        gain: Array,
        dx: Array | None,
        out: tuple[Array, Array, Array | None],
    ) -> Rounded:
        """Add the gradient through the layer norm to `dx`; `out` takes those of gain, shift and x's bias."""
        mean, inverse = statistics
        normal = (x - mean) * inverse
        out[0][:] = (dy * normal).sum(axis=0)
        out[1][:] = dy.sum(axis=0)
        d = dy * gain
        d = (d - d.mean(axis=1, keepdims=True) - normal * (d * normal).mean(axis=1, keepdims=True)) * inverse
        result = d if dx is None else dx + d
        if out[2] is not None:
            out[2][:] = result.sum(axis=0)
        return Rounded(result)

    def bias_gradient(self, dy: Array, out: Array) -> Rounded:
        """The sum of all rows; `dy` is returned."""
        out[:] = dy.sum(axis=0)
        return Rounded(dy)

    def project_gelu(self, x: Rounded, weight: Weight, bias: Array) -> tuple[Array, Rounded]:
        """``z = x @ weight + bias`` and its GELU, by tanh as in GPT-2."""
        z = self.project(x, weight, bias)
        return z, Rounded(z * self._gelu_sigmoid(z))

    def gelu_backward(self, dy: Array, z: Array, out: Array) -> Rounded:
        """The gradient of `z`, in place of `dy`; `out` takes that of its bias."""
        sigmoid = self._gelu_sigmoid(z)
        dy *= sigmoid + z * sigmoid * (1 - sigmoid) * (2 * GELU_SCALE * (1 + 3 * GELU_CUBE * z * z))
        out[:] = dy.sum(axis=0)
        return Rounded(dy)

    @staticmethod
    def _gelu_sigmoid(z: Array) -> Array:
        return 1 / (1 + np.exp(-2 * GELU_SCALE * (z + GELU_CUBE * z**3)))

    def cross_entropy(self, logits: Array, targets: Array) -> tuple[Array, Rounded]:
        """The mean of ``-log softmax(logits)[target]``, and its gradient in place of `logits`."""
        rows = np.arange(len(logits))
        logits -= logits.max(axis=1, keepdims=True)
        hit = logits[rows, targets]
        np.exp(logits, out=logits)
        sums = logits.sum(axis=1, keepdims=True)
        loss = (np.log(sums[:, 0]) - hit).mean()
        logits /= sums
        logits[rows, targets] -= 1
        logits /= len(logits)
        return loss, Rounded(logits)

    def causal_softmax(self, scores: Array, scale: float) -> None:
        """The baseline's weights in place of its scores (heads, batch, seqlen, seqlen)."""
        hidden = ~np.tri(scores.shape[-1], dtype=bool)
        scores *= scale
        scores[..., hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)

    def causal_softmax_backward(self, dweights: Array, weights: Array, scale: float) -> None:
        """The gradient of the scores in place of `dweights`."""
        dweights -= (weights * dweights).sum(axis=-1, keepdims=True)
        dweights *= scale * weights

    def adamw(
        self,
        weights: Array,
        master: Array,
        moments: tuple[Array, Array],
        gradient: Array,
        decayed: int,
        **settings: Any,
    ) -> None:
        """One step on all parameters, the first `decayed` of which decay; `weights` are `master` in the working type.

        Settings: step (from 1), rate, beta1, beta2, epsilon, decay, and clip, the largest norm of the gradient.
        """
        beta1, beta2, step = settings["beta1"], settings["beta2"], settings["step"]
        g = gradient * min(1.0, settings["clip"] / float(np.sqrt(np.vdot(gradient, gradient))))
        first, second = moments
        first += (1 - beta1) * (g - first)
        second += (1 - beta2) * (g * g - second)
        master[:decayed] *= 1 - settings["rate"] * settings["decay"]
        corrected = np.sqrt(second / (1 - beta2**step)) + settings["epsilon"]
        master -= settings["rate"] / (1 - beta1**step) * first / corrected
        weights[:] = master
