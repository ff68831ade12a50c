"""What a GPT-2 training step does beside attention, on NumPy and on CuPy arrays.

`NumpyOps` says in float32 what each operation means. `CupyOps` does the same in bfloat16: cuBLAS for the matrix
products, and kernels of the ``.cu`` files beside this one for what is between two of them. Matrices are row-major:
(rows, columns).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .products import Products

Array = Any
Statistics = Any  # per row of a layer norm: mean and inverse standard deviation

EPSILON = 1e-5  # of the layer norm
GELU_SCALE, GELU_CUBE = (2 / np.pi) ** 0.5, 0.044715


class NumpyOps:
    """The operations on the CPU."""

    xp: Any = np
    dtype: Any = np.dtype(np.float32)  # of activations and of the weights in the products

    def matmul(
        self, a: Array, b: Array, out: Array | None = None, add: bool = False, bias: Array | None = None
    ) -> Array:
        """``a @ b`` of matrices or stacks of them, into `out` or added to it; `bias` is added to every row."""
        if add and out is not None:
            out += a @ b
            return out
        result = np.matmul(a, b, out=out)
        if bias is not None:
            result += bias
        return result

    def embed(self, tokens: Array, of_token: Array, of_position: Array) -> Array:
        """Rows of both tables, added, for `tokens` (batch, seqlen)."""
        return (of_token[tokens] + of_position[: tokens.shape[1]]).reshape(-1, of_token.shape[1])

    def add_rows(self, table: Array, tokens: Array, rows: Array) -> None:
        """Add each of `rows` to its token's row of `table`, those of one token in one order."""
        np.add.at(table, tokens.ravel(), rows)

    def add_layer_norm(
        self, x: Array, branch: Array | None, bias: Array | None, gain: Array, shift: Array
    ) -> tuple[Array, Array, Statistics]:
        """``x + branch + bias``, its layer norm, and what backward needs of that."""
        if branch is not None:
            x = x + branch + bias
        mean = x.mean(axis=1, keepdims=True)
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + self.dtype.type(EPSILON))
        return x, (x - mean) * inverse * gain + shift, (mean, inverse)

    def layer_norm_backward(
        self,
        dy: Array,
        x: Array,
        statistics: Statistics,
        gain: Array,
        dx: Array | None,
        out: tuple[Array, Array, Array | None],
    ) -> Array:
        """Add the gradient through the layer norm to `dx`; `out` takes those of gain, shift and the branch's bias."""
        mean, inverse = statistics
        normal = (x - mean) * inverse
        out[0][:] = (dy * normal).sum(axis=0)
        out[1][:] = dy.sum(axis=0)
        d = dy * gain
        d = (d - d.mean(axis=1, keepdims=True) - normal * (d * normal).mean(axis=1, keepdims=True)) * inverse
        result = d if dx is None else dx + d
        if out[2] is not None:
            out[2][:] = result.sum(axis=0)
        return result

    def bias_gradient(self, dy: Array, out: Array) -> None:
        """The sum of all rows."""
        out[:] = dy.sum(axis=0)

    def matmul_gelu(self, a: Array, b: Array, bias: Array) -> tuple[Array, Array]:
        """``z = a @ b + bias`` and its GELU, by tanh as in GPT-2."""
        z = self.matmul(a, b, bias=bias)
        return z, z * self._gelu_sigmoid(z)

    def gelu_backward(self, dy: Array, z: Array, out: Array) -> Array:
        """The gradient of `z`, in place of `dy`; `out` takes that of its bias."""
        sigmoid = self._gelu_sigmoid(z)
        dy *= sigmoid + z * sigmoid * (1 - sigmoid) * (2 * GELU_SCALE * (1 + 3 * GELU_CUBE * z * z))
        out[:] = dy.sum(axis=0)
        return dy

    @staticmethod
    def _gelu_sigmoid(z: Array) -> Array:
        return 1 / (1 + np.exp(-2 * GELU_SCALE * (z + GELU_CUBE * z**3)))

    def cross_entropy(self, logits: Array, targets: Array) -> Array:
        """The mean of ``-log softmax(logits)[target]``; `logits` become its gradient."""
        rows = np.arange(len(logits))
        logits -= logits.max(axis=1, keepdims=True)
        hit = logits[rows, targets]
        np.exp(logits, out=logits)
        sums = logits.sum(axis=1, keepdims=True)
        loss = (np.log(sums[:, 0]) - hit).mean()
        logits /= sums
        logits[rows, targets] -= 1
        logits /= len(logits)
        return loss

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


SOURCES = ("vectors.cuh", "layers.cu", "baseline.cu", "optimizer.cu")  # one text, the first one first
WARP, VECTOR = 32, 8  # as in vectors.cuh
WARPS = 8  # in a block that has a row a warp
GRADIENT_WARPS, GRADIENT_BLOCKS = 4, 2  # of layer_norm_backward: in a block, and blocks on a multiprocessor
MAX_SUM_PARTS = 128  # parts of a sum over rows, each made by blocks of their own
PARTIAL_WARPS = 16  # of sum_partials
ROWS_AT_ONCE = 8  # of add_rows, in a block
SQUARE_BLOCKS = 8  # of square_sums, on a multiprocessor
SCORE_VECTORS = 4


class CupyOps(NumpyOps):
    """The operations on a GPU, in bfloat16 with float32 sums.

    Parameters
    ----------
    width : int
        The model's; a multiple of 256.
    search : bool
        Whether products may choose their kernels by timing.
    """

    def __init__(self, width: int, search: bool = True) -> None:
        import cupy
        import ml_dtypes

        if width % (WARP * VECTOR):
            raise ValueError(f"width: expected a multiple of {WARP * VECTOR} on a GPU, got {width}")
        self.xp = cupy
        self.dtype = np.dtype(ml_dtypes.bfloat16)
        self.width = width
        self._functions: dict[str, Any] = {}
        self._products = Products(search)

    @cached_property
    def _module(self) -> Any:
        source = "".join(Path(__file__).with_name(name).read_text() for name in SOURCES)
        options = ("--std=c++17", f"-DWIDTH={self.width}", f"-DEPSILON={EPSILON}f")
        return self.xp.RawModule(code=source, options=options)

    def _launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any, shared: int = 0
    ) -> None:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(name)
        if shared > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared
        # None is a null pointer; a Python int is 64 bits wide, so 32-bit arguments come as np.int32
        function(grid, block, tuple(0 if x is None else x for x in arguments), shared_mem=shared)

    def matmul(
        self, a: Array, b: Array, out: Array | None = None, add: bool = False, bias: Array | None = None
    ) -> Array:
        """See `NumpyOps`."""
        return self._products(a, b, out, add, bias)

    def embed(self, tokens: Array, of_token: Array, of_position: Array) -> Array:
        """See `NumpyOps`."""
        x = self.xp.empty((tokens.size, self.width), self.dtype)
        threads = self.width // VECTOR
        self._launch("embed", (len(x),), (threads,), x, tokens, of_token, of_position, np.int32(tokens.shape[1]))
        return x

    def add_rows(self, table: Array, tokens: Array, rows: Array) -> None:
        """See `NumpyOps`."""
        order = tokens.ravel().argsort(kind="stable")
        arguments = (table, rows, tokens.ravel()[order], order, np.int32(len(rows)))
        self._launch("add_rows", (len(rows),), (self.width // VECTOR, ROWS_AT_ONCE), *arguments)

    def add_layer_norm(
        self, x: Array, branch: Array | None, bias: Array | None, gain: Array, shift: Array
    ) -> tuple[Array, Array, Statistics]:
        """See `NumpyOps`; the sum takes the branch's place."""
        y, statistics = self.xp.empty_like(x), self.xp.empty((len(x), 2), np.float32)
        arguments = (y, statistics, branch, x, branch, bias, gain, shift, np.int32(len(x)))
        self._launch("add_layer_norm", (-(-len(x) // WARPS),), (WARP, WARPS), *arguments)
        return x if branch is None else branch, y, statistics

    def layer_norm_backward(
        self,
        dy: Array,
        x: Array,
        statistics: Statistics,
        gain: Array,
        dx: Array | None,
        out: tuple[Array, Array, Array | None],
    ) -> Array:
        """See `NumpyOps`; the result takes the place of `dy`."""
        parts = GRADIENT_BLOCKS * self._multiprocessors
        partial = self.xp.empty((parts, 3, self.width), np.float32)
        arguments = (dy, partial, dy, x, statistics, gain, dx, np.int32(len(x)))
        self._launch("layer_norm_backward", (parts,), (WARP, GRADIENT_WARPS), *arguments)
        self._sum_partials(partial, *out)
        return dy

    @cached_property
    def _multiprocessors(self) -> int:
        return int(self.xp.cuda.Device().attributes["MultiProcessorCount"])

    def _sum_partials(self, partial: Array, *out: Array | None) -> None:
        """The sum of each (parts, columns) of `partial` (parts, len(out), columns) into its target."""
        columns = partial.size // (len(partial) * len(out))
        grid = (-(-columns // WARP), len(out))
        arguments = (*out, *[None] * (3 - len(out)), partial, np.int32(len(partial)), np.int32(columns))
        self._launch("sum_partials", grid, (WARP, PARTIAL_WARPS), *arguments)

    def bias_gradient(self, dy: Array, out: Array) -> None:
        """See `NumpyOps`."""
        self._sum_rows("bias_gradient", out, dy)

    def _sum_rows(self, name: str, out: Array, dy: Array, *inputs: Array) -> None:
        rows, columns = dy.shape
        parts = max(1, min(MAX_SUM_PARTS, rows // WARPS))
        partial = self.xp.empty((parts, columns), np.float32)
        grid = (-(-columns // (WARP * VECTOR)), parts)
        self._launch(name, grid, (WARP, WARPS), partial, dy, *inputs, np.int32(rows), np.int32(columns))
        self._sum_partials(partial, out)

    def matmul_gelu(self, a: Array, b: Array, bias: Array) -> tuple[Array, Array]:
        """See `NumpyOps`."""
        z = self.xp.empty((len(a), b.shape[1]), self.dtype)
        return z, self._products(a, b, bias=bias, before_gelu=z)

    def gelu_backward(self, dy: Array, z: Array, out: Array) -> Array:
        """See `NumpyOps`."""
        self._sum_rows("gelu_backward", out, dy, z)
        return dy

    def cross_entropy(self, logits: Array, targets: Array) -> Array:
        """See `NumpyOps`."""
        rows, columns = logits.shape
        losses = self.xp.empty(rows, np.float32)
        threads = 512
        arguments = (losses, logits, targets, np.int32(columns), np.float32(1 / rows))
        self._launch("cross_entropy", (rows,), (threads,), *arguments, shared=columns * logits.itemsize)
        return losses.mean()

    def causal_softmax(self, scores: Array, scale: float) -> None:
        """See `NumpyOps`."""
        self._launch("causal_softmax", *self._over_rows(scores), scores, np.int32(scores.shape[-1]), np.float32(scale))

    def causal_softmax_backward(self, dweights: Array, weights: Array, scale: float) -> None:
        """See `NumpyOps`."""
        arguments = (dweights, weights, np.int32(weights.shape[-1]), np.float32(scale))
        self._launch("causal_softmax_backward", *self._over_rows(weights), *arguments)

    def _over_rows(self, scores: Array) -> tuple[tuple[int], tuple[int, int]]:
        """A row to each group of threads that holds it in registers."""
        seqlen = scores.shape[-1]
        if seqlen % (WARP * VECTOR):
            raise ValueError(f"seqlen: expected a multiple of {WARP * VECTOR} for the baseline, got {seqlen}")
        threads = -(-seqlen // (WARP * VECTOR * SCORE_VECTORS)) * WARP
        rows_per_block = 4 if threads == WARP else 1  # the number of rows, batch * heads * seqlen, is a multiple of 4
        return (scores.size // seqlen // rows_per_block,), (threads, rows_per_block)

    def adamw(
        self,
        weights: Array,
        master: Array,
        moments: tuple[Array, Array],
        gradient: Array,
        decayed: int,
        **settings: Any,
    ) -> None:
        """See `NumpyOps`."""
        threads = 256
        partial = self.xp.empty((SQUARE_BLOCKS * self._multiprocessors, 1), np.float32)
        self._launch("square_sums", (len(partial),), (threads,), partial, gradient, gradient.size // 4)
        squared_norm = self.xp.empty(1, np.float32)
        self._sum_partials(partial, squared_norm)
        beta1, beta2, step = settings["beta1"], settings["beta2"], settings["step"]
        corrections = 1 / (1 - beta1**step), 1 / (1 - beta2**step)
        scalars = (
            settings["clip"],
            settings["rate"],
            beta1,
            beta2,
            *corrections,
            settings["epsilon"],
            settings["decay"],
        )
        arrays = (weights, master, *moments, gradient, squared_norm)
        grid = (-(-weights.size // (4 * threads)),)
        self._launch("adamw", grid, (threads,), *arrays, weights.size, decayed, *map(np.float32, scalars))
