"""Splits of the keys: memory for their partial results, and the kernel that merges them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from cuflash.cuda import device as cuda_device
from cuflash.gpu.kernels import load
from cuflash.gpu.launch import Kernel, Work
from cuflash.gpu.params import Arrays, num_key_splits
from cuflash.gpu.portable import WithoutTiles, constants_of_types
from cuflash.hardware import ALIGNMENT, WARP
from cuflash.plan.config import KernelConfig
from cuflash.plan.portable.kernels import types_of
from cuflash.problem.attention_problem import AttentionProblem

_THREADS = 256
_WARPS = _THREADS // WARP


class AtOnce(NamedTuple):
    """A warp loads so much together, 16 bytes a lane each; the more that is, the fewer warps run at once."""

    splits: int
    rows: int


# The first that has all splits merges them, or the last. Powers in float64 are calls, over which two rows would spill.
AT_ONCE = {
    "float32": (AtOnce(4, 2), AtOnce(16, 1)),
    "float64": (AtOnce(4, 1), AtOnce(16, 1)),
}


def constants_of(config: KernelConfig, at_once: AtOnce) -> dict[str, str | int]:
    """Return the constants of around/merge_splits.cu, which knows no options."""
    return constants_of_types(config) | {
        "threads": _THREADS,
        "splits_at_once": at_once.splits,
        "rows_at_once": at_once.rows,
    }


@dataclass(frozen=True)
class Merge(WithoutTiles):
    """The kernel that merges partial results over splits of the keys.

    Its thread blocks are ready when the kernel that writes the partial results ends.
    """

    at_once: AtOnce
    begins_early = True
    threads = _THREADS

    def load(self, device: cuda_device.Device) -> cuda_device.LoadedKernel:
        """Load the compiled kernel, which all configurations of the same types share."""
        return load("around/merge_splits", self.entry, constants_of(self.config, self.at_once), device)

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of thread blocks: (0, as they are no head's, and in all)."""
        columns = WARP * (ALIGNMENT // arrays["out_splits"].dtype.itemsize)
        if problem.head_dim_v % (columns // WARP):  # rows of partial results are not aligned
            columns = WARP
        vectors = math.ceil(problem.head_dim_v / columns)
        warps = math.ceil(problem.batch * problem.seqlen_q * problem.num_heads_q * vectors / self.at_once.rows)
        warps_of_row = 1  # as in the kernel
        while warps_of_row < _WARPS and warps_of_row * self.at_once.splits < num_key_splits(problem, arrays):
            warps_of_row *= 2
        return 0, math.ceil(warps * warps_of_row / _WARPS)

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """Packed sequences as one, as each row is merged by itself; where keys lie does not matter any more."""
        if not problem.packed:
            return replace(problem, pages=None), arrays
        whole = {name: x if name.endswith("_splits") else x[None] for name, x in arrays.items()}
        return replace(problem, packed=False, batch=1, pages=None), whole


def partial_results(work: Work, num_splits: int) -> Arrays:
    """Scratch memory for the partial results over splits of the keys; none where keys stay whole."""
    if num_splits == 1:
        return {}
    problem = work.problem
    batch, rows, heads = num_splits * (1 if problem.packed else problem.batch), problem.seqlen_q, problem.num_heads_q
    return {
        "out_splits": work.empty((batch, rows, heads, problem.head_dim_v), problem.accum_dtype),
        "lse_splits": work.empty((batch, heads, rows), problem.accum_dtype),
    }


def merge(work: Work, partials: Arrays) -> None:
    """Write out and lse from the partial results."""
    results = {name: work.arrays[name] for name in ("out", "lse")}
    num_splits = num_key_splits(work.problem, partials)
    choices = AT_ONCE[work.problem.accum_dtype]
    at_once = next((each for each in choices if num_splits <= each.splits), choices[-1])
    work.run(Merge("merge_splits", types_of(work.problem), at_once), results | partials)


def run(work: Work, kernel: Kernel, num_splits: int) -> None:
    """Run a kernel whose thread blocks have so many splits of the keys, and merge their results."""
    partials = partial_results(work, num_splits)
    work.run(kernel, work.arrays | partials)
    if partials:
        merge(work, partials)
