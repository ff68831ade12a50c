"""Launches of the portable kernels, and of the sums in around/reduce.cu that all families share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cuflash.cuda import device as cuda_device
from cuflash.gpu.kernels import load
from cuflash.gpu.launch import ExtraArguments, Kernel, Work, batch_heads, num_tiles
from cuflash.gpu.params import Arrays, num_splits
from cuflash.hardware import WARP
from cuflash.plan.config import KernelConfig
from cuflash.plan.entries import key_results
from cuflash.plan.portable.kernels import PortableConfig, key_kernels, plan, types_of
from cuflash.problem.attention_problem import Array, AttentionProblem

_FILE = "around/reduce"
_SUM_THREADS = 256  # threads of a thread block of the kernels in _FILE
SUM_ROWS = _SUM_THREADS // WARP  # rows of a thread block whose warps have a row each


@dataclass(frozen=True)
class Tiles(Kernel):
    """A kernel with a thread block for each tile of queries or keys."""

    orders_bits = False


@dataclass(frozen=True)
class InSlices(Tiles):
    """A kernel with a thread block for each tile and each slice of the columns of its widest result."""

    config: PortableConfig

    def extra_arguments(
        self, problem: AttentionProblem, arrays: Arrays, device: cuda_device.Device, tiles: int
    ) -> ExtraArguments:
        """Return the grid of thread blocks alone: tiles, and slices of the results that are wanted."""
        entry = self.config.entry
        results = key_results(entry) or (("out",) if entry == "forward" else ("dq",))
        widest = max((arrays[name].shape[-1] for name in results if name in arrays), default=1)
        return ExtraArguments((tiles, math.ceil(widest / self.config.slice_columns)))


@dataclass(frozen=True)
class Bias(Kernel):
    """The kernel for the gradient of a bias."""

    orders_bits = False

    def axes(self, problem: AttentionProblem) -> list[tuple[int, int]]:
        """Return (tiles, tiles of scores that each of them sums) for each axis of dbias.

        Axis of around/bias_range.cuh is its counterpart in the kernel.
        """
        assert problem.bias is not None
        scores = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
        blocks = (1, 1, self.config.block_m, self.config.block_n)
        return [
            (1, math.ceil(score / block)) if size == 1 and score != 1 else (math.ceil(size / block), 1)
            for size, score, block in zip(problem.bias, scores, blocks, strict=True)
        ]

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of tiles: (0, as they are no head's, and in all)."""
        return 0, math.prod(tiles for tiles, _ in self.axes(problem)) * num_splits(arrays)

    def splits(self, problem: AttentionProblem, at_once: int) -> int:
        """Return the number of splits of each sum with which a small dbias fills a GPU of `at_once` thread blocks."""
        tiles, summed = (math.prod(counts) for counts in zip(*self.axes(problem), strict=True))
        return min(max(2 * at_once // max(tiles, 1), 1), max(summed, 1))


@dataclass(frozen=True)
class WithoutTiles(Kernel):
    """A kernel that visits no tiles of scores."""

    visits_tiles = False


def constants_of_types(config: KernelConfig) -> dict[str, str | int]:
    """Return the types of a configuration, which are all that kernels without options know of it."""
    return {name: getattr(config, name) for name in ("element", "accum", "bias_element")}


def constants_of_sums(config: KernelConfig, slope_keys: int = 0) -> dict[str, str | int]:
    """Return the constants of around/reduce.cu, whose kernels know no options.

    `slope_keys` are those of `SlopeSums`.
    """
    return constants_of_types(config) | {"threads": _SUM_THREADS, "slope_keys": slope_keys}


@dataclass(frozen=True)
class Sum(WithoutTiles):
    """A kernel of around/reduce.cu."""

    threads = _SUM_THREADS

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel, which all configurations of the same types share."""
        return load(_FILE, self.entry, constants_of_sums(self.config), device)


@dataclass(frozen=True)
class Rows(Sum):
    """A kernel that has a warp for each row of the queries."""

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of thread blocks: (of one head, in all)."""
        tiles = num_tiles(problem, problem.seqlen_q, SUM_ROWS)
        return tiles, tiles * batch_heads(problem, problem.num_heads_q)


@dataclass(frozen=True)
class Reduce(Sum):
    """A kernel that sums over rows, sequences or splits."""

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of thread blocks: (0, as they are no head's, and in all)."""
        if "dbias" in arrays:
            return 0, math.ceil(arrays["dbias"].size / _SUM_THREADS)
        return 0, (arrays["dsink"] if "dsink" in arrays else arrays["dalibi_slopes"]).size


@dataclass(frozen=True)
class SlopeSums(Reduce):
    """The kernel that adds up the gradient of ALiBi's slopes over sums of tiles of keys."""

    keys: int = 0  # of a tile
    sums: int = 0  # of a tile of keys, for each query head

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """The compiled kernel for tiles of so many keys."""
        return load(_FILE, self.entry, constants_of_sums(self.config, self.keys), device)

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return how many sums a tile has."""
        return {"splits": self.sums}

    def empty(self, work: Work) -> Array:
        """Allocate the sums, which the kernel before the gradients makes 0."""
        problem = work.problem
        tiles = num_tiles(problem, problem.seqlen_k, self.keys)
        return work.empty((*problem.lse_shape[:-1], tiles * self.sums), problem.accum_dtype)


def slope_sums(problem: AttentionProblem, keys: int, sums: int) -> SlopeSums:
    """Return the kernel that adds up `sums` of each tile of so many keys."""
    return SlopeSums("reduce_slopes", types_of(problem), keys, sums)


def _tiles(work: Work, planned: str, entry: str = "") -> Tiles:
    """Return the kernel that is `planned` under an entry, or the other `entry` of its configuration."""
    configs = plan(work.problem, planned, work.device.smem_limit)
    kind = InSlices if configs[0].slice_columns else Tiles
    return work.chosen(kind(entry or planned, config) for config in configs)


def forward(work: Work) -> bool:
    """Write out and lse. Return True, because the portable kernels take every problem."""
    work.run(_tiles(work, "forward"), work.arrays)
    return True


def paged_forward(work: Work) -> bool:
    """Do as `forward` does, but read pages where they lie. Return True."""
    work.run(_tiles(work, "forward", "paged_forward"), work.arrays)
    return True


def delta(work: Work, arrays: Arrays) -> None:
    """Write delta; `arrays` have dlse where the call gave one."""
    work.run(Rows("delta", types_of(work.problem)), arrays)


def gradients(work: Work, grads: Arrays) -> None:
    """Write the gradients `grads`, by name."""
    problem, arrays = work.problem, work.arrays
    by_rows = rows_of_slopes(work, grads) if "dslope_rows" not in arrays else {}
    if "q" in grads:
        by_rows["dq"] = grads["q"]
    if by_rows:
        work.run(_tiles(work, "backward_dq"), arrays | by_rows)
    for entry in key_kernels(problem):
        of_keys = {name: grads[name[1:]] for name in key_results(entry) if name[1:] in grads}
        if of_keys:
            work.run(_tiles(work, entry), arrays | of_keys)
    types = types_of(problem)
    if "bias" in grads:
        configs = plan(problem, "backward_bias", work.device.smem_limit)
        gradient_of_bias(work, grads["bias"], work.chosen([Bias("backward_bias", config) for config in configs]))
    if "sink" in grads:
        work.run(Reduce("reduce_sink", types), arrays | {"dsink": grads["sink"]})
    if "alibi_slopes" in grads:
        work.run(Reduce("reduce_slopes", types), arrays | by_rows | {"dalibi_slopes": grads["alibi_slopes"]})


def gradient_of_bias(work: Work, array: Array, kernel: Bias, blocks: int = 1) -> None:
    """Write the gradient of a bias to `array`. A multiprocessor holds `blocks` thread blocks of the kernel."""
    dbias = {"dbias": array}
    splits = kernel.splits(work.problem, work.device.num_sms * blocks)
    if splits > 1:
        dbias["dbias_splits"] = work.empty((splits, *array.shape), work.problem.accum_dtype)
    work.run(kernel, work.arrays | dbias)
    if splits > 1:
        work.run(Reduce("reduce_bias", types_of(work.problem)), work.arrays | dbias)


def rows_of_slopes(work: Work, grads: Arrays) -> Arrays:
    """Return scratch memory for each row's share of the slopes' gradient, if that is wanted."""
    if "alibi_slopes" not in grads:
        return {}
    return {"dslope_rows": work.empty(work.problem.lse_shape, work.problem.accum_dtype)}
