"""The operations of a GPT-2 training step on a GPU, in bfloat16.

cuBLASLt for the matrix products, and kernels of the ``.cu`` files beside this one for what is between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.cuda.source import source_of
from cuflash.hardware import WARP

from .ops import EPSILON, Array, NumpyOps, Rounded, Statistics, Weight
from .products import Products

SOURCES = ("vectors.cuh", "layers.cu", "loss.cu", "eight.cu", "baseline.cu", "optimizer.cu")  # in this order
VECTOR = 8  # elements in 16 bytes
WARPS = 8  # in a block that has a row a warp
GRADIENT_THREADS, GRADIENT_BLOCKS = 288, 2  # of layer_norm_backward: in a block, and blocks on a multiprocessor
LOSS_THREADS, LOSS_ROWS = 512, 2  # of the loss: that compute, and from Hopper on rows in shared memory
LOSS_BYTES = 1024  # beside them, at most
AHEAD = 4  # loads of a thread under way where rows are summed
PARTIAL_WARPS = 16  # of sum_partials
ROWS_AT_ONCE, RUN = 4, 64  # of add_rows: at once, and in all, in a block
SQUARE_BLOCKS = 8  # of square_sums, on a multiprocessor
SCORE_VECTORS = 4  # of a row of scores, per thread
TILE = 64  # of weights_to_eight: rows and columns of a block
# Those that the kernels need, too: `source` writes them in front, behind the numbers of the hardware.
CONSTANTS = {
    "VECTOR": VECTOR,
    "WARPS": WARPS,
    "GRADIENT_THREADS": GRADIENT_THREADS,
    "GRADIENT_BLOCKS": GRADIENT_BLOCKS,
    "LOSS_ROWS": LOSS_ROWS,
    "AHEAD": AHEAD,
    "PARTIAL_WARPS": PARTIAL_WARPS,
    "ROWS_AT_ONCE": ROWS_AT_ONCE,
    "RUN": RUN,
    "SCORE_VECTORS": SCORE_VECTORS,
    "TILE": TILE,
}
# Numbers in 8 bits are multiplied by these: E4M3 has 2^-6 to 448, E5M2 2^-14 to 57344. A gradient is that of a mean
# over tokens, so that it is multiplied by their number, too.
ACTIVATION_SCALE, WEIGHT_SCALE, GRADIENT_SCALE = 8.0, 64.0, 32.0


def source() -> str:
    """All kernels as one text, behind `CONSTANTS` and cuflash's functions of one instruction each."""
    own = (f'#line 1 "{name}"\n{Path(__file__).with_name(name).read_text()}' for name in SOURCES)
    return "".join((source_of("ptx/sm90.cuh", CONSTANTS), *own))


class CupyOps(NumpyOps):
    """The operations on a GPU, in bfloat16 with float32 sums.

    Parameters
    ----------
    width : int
        The model's; a multiple of 256.
    search : bool
        Whether products may choose their kernels by timing.
    eight : bool
        Whether the products of layers and logits, and with their weights backward, are of numbers in 8 bits.
    """

    def __init__(self, width: int, search: bool = True, eight: bool = False) -> None:
        import cupy
        import ml_dtypes

        if width % (WARP * VECTOR):
            raise ValueError(f"width: expected a multiple of {WARP * VECTOR} on a GPU, got {width}")
        self.xp = cupy
        self.dtype = np.dtype(ml_dtypes.bfloat16)
        if eight and int(cupy.cuda.Device().compute_capability) < 89:
            raise ValueError("products of 8 bits: expected a GPU of compute capability 8.9 or more")
        self.width, self.eight = width, eight
        self._functions: dict[str, Any] = {}
        self._products = Products(search)

    @cached_property
    def _module(self) -> Any:
        options = ("--std=c++17", f"-DWIDTH={self.width}", f"-DEPSILON={EPSILON}f")
        return self.xp.RawModule(code=source(), options=options)

    def _like(self, x: Array, dtype: Any) -> Array | None:
        """Room for the same in 8 bits; E5M2 numbers are in arrays of int8, E4M3 numbers of uint8."""
        return self.xp.empty(x.shape, dtype) if self.eight else None

    @staticmethod
    def _gradient_scale(rows: int) -> float:
        return float(GRADIENT_SCALE * 2 ** rows.bit_length())

    def weight(self, full: Array) -> Weight:
        """See `NumpyOps`."""
        rows, columns = full.shape
        if not self.eight:
            return Weight(full)
        return Weight(full, self._like(full, np.uint8), self.xp.empty((columns, rows), np.uint8))

    def refresh(self, weight: Weight) -> None:
        """See `NumpyOps`."""
        if weight.by_row is None or weight.by_column is None:
            return
        full, by_row, by_column = weight
        if full.strides[1] != full.itemsize:  # a transposed view
            full, by_row, by_column = full.T, by_column, by_row
        rows, columns = full.shape
        arguments = (by_row, by_column, np.float32(WEIGHT_SCALE), full, np.int32(rows), np.int32(columns))
        self._launch("weights_to_eight", (columns // TILE, rows // TILE), (TILE // VECTOR, WARP), *arguments)

    def rounded(self, x: Array) -> Rounded:
        """See `NumpyOps`."""
        eight = self._like(x, np.uint8)
        if eight is not None:
            self._by_vectors("to_eight", x.size, eight, np.float32(ACTIVATION_SCALE), x)
        return Rounded(x, eight)

    def _by_vectors(self, name: str, size: int, *arguments: Any) -> None:
        threads = 256
        vectors = size // VECTOR
        self._launch(name, (-(-vectors // threads),), (threads,), *arguments, vectors)

    def project(self, x: Rounded, weight: Weight, bias: Array | None = None, added: Array | None = None) -> Array:
        """See `NumpyOps`."""
        if x.eight is None or weight.by_column is None:
            return self._products(x.full, weight.full, added=added, bias=bias)
        out = self.xp.empty((len(x.full), len(weight.by_column)), self.dtype)
        scale = 1 / (ACTIVATION_SCALE * WEIGHT_SCALE)
        return self._products(x.eight, weight.by_column.T, out, added, bias, scale=scale)

    def project_back(self, dy: Rounded, weight: Weight) -> Array:
        """See `NumpyOps`."""
        if dy.eight is None or weight.by_row is None:
            return self._products(dy.full, weight.full.T)
        out = self.xp.empty((len(dy.full), len(weight.by_row)), self.dtype)
        scale = 1 / (self._gradient_scale(len(dy.full)) * WEIGHT_SCALE)
        return self._products(dy.eight, weight.by_row.T, out, scale=scale)

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
        self,
        a: Array,
        b: Array,
        out: Array | None = None,
        added: Array | None = None,
        bias: Array | None = None,
    ) -> Array:
        """See `NumpyOps`."""
        return self._products(a, b, out, added, bias)

    def embed(self, tokens: Array, of_token: Array, of_position: Array) -> Array:
        """See `NumpyOps`."""
        x = self.xp.empty((tokens.size, self.width), self.dtype)
        threads = self.width // VECTOR
        self._launch("embed", (len(x),), (threads,), x, tokens, of_token, of_position, np.int32(tokens.shape[1]))
        return x

    def add_rows(self, table: Array, tokens: Array, rows: Array) -> None:
        """See `NumpyOps`."""
        order = tokens.ravel().argsort(kind="stable")
        ordered, count = tokens.ravel()[order], np.int32(len(rows))
        shares = self.xp.empty((-(-len(rows) // RUN), self.width), np.float32)
        block = (self.width // VECTOR, ROWS_AT_ONCE)
        self._launch("add_rows", (len(rows),), block, table, shares, rows, ordered, order, count)
        self._launch("add_runs", (len(shares),), block, table, shares, ordered, count)

    def layer_norm(self, x: Array, gain: Array, shift: Array) -> tuple[Rounded, Statistics]:
        """See `NumpyOps`."""
        y, statistics = Rounded(self.xp.empty_like(x), self._like(x, np.uint8)), self.xp.empty((len(x), 2), np.float32)
        arguments = (*y, np.float32(ACTIVATION_SCALE), statistics, x, gain, shift, np.int32(len(x)))
        self._launch("layer_norm", (-(-len(x) // WARPS),), (WARP, WARPS), *arguments)
        return y, statistics

    def layer_norm_backward(
        self,
        dy: Array,
        x: Array,
        statistics: Statistics,
        gain: Array,
        dx: Array | None,
        out: tuple[Array, Array, Array | None],
    ) -> Rounded:
        """See `NumpyOps`; the result takes the place of `dy`."""
        result, scale = Rounded(dy, self._like(dy, np.int8)), np.float32(self._gradient_scale(len(dy)))
        threads = self.width // VECTOR
        block = (threads, max(1, GRADIENT_THREADS // threads))
        shares = [self._shares_of(target) for target in out]
        arguments = (*result, scale, *shares, self._vectors.size, dy, x, statistics, gain, dx, np.int32(len(x)))
        self._launch("layer_norm_backward", (len(self._shares),), block, *arguments)
        return result

    @contextmanager
    def sums_into(self, vectors: Array, rows: int) -> Iterator[None]:
        """See `NumpyOps`: blocks leave shares of all sums, in one order, which one kernel adds if there are several."""
        parts = min(GRADIENT_BLOCKS * self._multiprocessors, -(-rows // (WARPS * AHEAD)))
        self._vectors, self._shares = vectors, vectors[None]
        if parts > 1:
            self._shares = self.xp.empty((parts, vectors.size), np.float32)
        yield
        if parts > 1:
            self._sum_partials(self._shares, vectors)
        del self._vectors, self._shares

    def _shares_of(self, target: Array | None) -> Array | None:
        """Where the first share of a vector goes."""
        if target is None:
            return None
        start = (target.data.ptr - self._vectors.data.ptr) // target.itemsize
        return self._shares[0, start:]

    @cached_property
    def _multiprocessors(self) -> int:
        return int(self.xp.cuda.Device().attributes["MultiProcessorCount"])

    def _sum_partials(self, partial: Array, out: Array) -> None:
        """The sum of `partial` (parts, columns)."""
        parts, columns = partial.shape
        grid = (-(-columns // WARP),)
        self._launch("sum_partials", grid, (WARP, PARTIAL_WARPS), out, partial, np.int32(parts), columns)

    def bias_gradient(self, dy: Array, out: Array) -> Rounded:
        """See `NumpyOps`."""
        return self._sum_rows("bias_gradient", out, dy)

    def _sum_rows(self, name: str, out: Array, dy: Array, *inputs: Array) -> Rounded:
        rows, columns = dy.shape
        grid = (-(-columns // (WARP * VECTOR)), len(self._shares))
        result, scale = Rounded(dy, self._like(dy, np.int8)), np.float32(self._gradient_scale(rows))
        arguments = (*result, scale, *inputs, np.int32(rows), np.int32(columns))
        self._launch(name, grid, (WARP, WARPS), self._shares_of(out), self._vectors.size, *arguments)
        return result

    def project_gelu(self, x: Rounded, weight: Weight, bias: Array) -> tuple[Array, Rounded]:
        """See `NumpyOps`; cuBLASLt's products in 8 bits take longer with GELU behind them than a kernel of its own."""
        if x.eight is None:
            z = self.xp.empty((len(x.full), weight.full.shape[1]), self.dtype)
            return z, Rounded(self._products(x.full, weight.full, bias=bias, before_gelu=z))
        z = self.project(x, weight, bias)
        active = Rounded(self.xp.empty_like(z), self._like(z, np.uint8))
        self._by_vectors("gelu", z.size, *active, np.float32(ACTIVATION_SCALE), z)
        return z, active

    def gelu_backward(self, dy: Array, z: Array, out: Array) -> Rounded:
        """See `NumpyOps`."""
        return self._sum_rows("gelu_backward", out, dy, z)

    def cross_entropy(self, logits: Array, targets: Array) -> tuple[Array, Rounded]:
        """See `NumpyOps`."""
        rows, columns = logits.shape
        losses = self.xp.empty(rows, np.float32)
        result, scale = Rounded(logits, self._like(logits, np.int8)), np.float32(self._gradient_scale(rows))
        arguments = (losses, *result, scale, targets, np.int32(rows), np.int32(columns), np.float32(1 / rows))
        row_bytes = columns * logits.itemsize
        if LOSS_ROWS * row_bytes + LOSS_BYTES <= self._hopper_bytes:
            grid, threads = (min(rows, self._multiprocessors),), (LOSS_THREADS + WARP,)
            self._launch("cross_entropy_sm90", grid, threads, *arguments, shared=LOSS_ROWS * row_bytes)
        else:
            self._launch("cross_entropy", (rows,), (LOSS_THREADS,), *arguments, shared=row_bytes)
        return losses.mean(), result

    @cached_property
    def _hopper_bytes(self) -> int:
        """Return the shared memory that a block may have, from Hopper on: others have no bulk copies into it."""
        gpu = self.xp.cuda.Device()
        return int(gpu.attributes["MaxSharedMemoryPerBlockOptin"]) if int(gpu.compute_capability) >= 90 else 0

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
