"""Launches of the kernels by mma.sync, for both passes on 16 bits (`plan.sm80_*`) and on wide elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.gpu import pages as gpu_pages
from cuflash.gpu import portable as gpu_portable
from cuflash.gpu import split as gpu_split
from cuflash.gpu.launch import Kernel, Work, batch_heads, num_tiles
from cuflash.gpu.params import Arrays
from cuflash.plan import sm80_backward, sm80_forward, sm80_fp8, sm80_kinds, sm80_wide
from cuflash.plan.sm80_backward import DQ, MAIN, ROWS, Sm80BackwardConfig
from cuflash.plan.sm80_forward import Capability, Sm80QueryConfig
from cuflash.problem.attention_problem import AttentionProblem


@dataclass(frozen=True)
class _Gradient(Kernel):
    """A kernel of the backward pass on 16 bits: the main one, or the one before or behind it."""

    config: Sm80BackwardConfig

    @property
    def visits_tiles(self) -> bool:
        """True of the main kernel alone."""
        return self.entry == MAIN

    of_keys = visits_tiles

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """Return the number of query tiles, by which sums of dq are laid out."""
        return {"num_query_tiles": num_tiles(problem, problem.seqlen_q, self.config.block_m)}


@dataclass(frozen=True)
class _Bias(gpu_portable.Bias):
    """The kernel for the gradient of a bias."""

    config: Sm80QueryConfig


def _place(work: Work, *names: str) -> tuple[AttentionProblem, bool, Capability, int]:
    return work.problem, work.is_aligned(names), work.device.capability, work.device.smem_limit


def _pays(work: Work, gradients: bool) -> bool:
    return sm80_kinds.pays(work.problem, work.device.name, gradients)


def forward(work: Work) -> bool:
    """Write out and lse; False where another family runs."""
    return _run_forward(work, *_place(work, "q", "k", "v"))


def _run_forward(work: Work, *place: Any, is_alike: bool = False) -> bool:
    """Write out and lse by the first candidate that spills no registers; False where another family runs."""
    if not _pays(work, gradients=False):
        return False
    halves = sm80_forward.forward(*place)
    configs = halves or sm80_wide.forward(*place)
    candidates = [Kernel(config.entry, config) for config in (_aligned_as(work, configs) if is_alike else configs)]
    # Where a rule spills on wide elements the portable kernels serve; on 16 bits tensor cores are faster yet.
    kernel = work.chosen(candidates) if halves else work.chosen_or_none(candidates)
    if kernel is None:
        return False
    work.run(kernel, gpu_split.split(work, kernel.config))
    return True


def forward_alike(work: Work) -> bool:
    """Do as `forward` by a kernel and a tile that dtypes, head dims and options alone choose; False without one.

    A row's bits do not depend on other sequences, because a thread block has queries of one head and loops over all of
    its keys in tiles that begin at multiples of the tile's keys.
    """
    place = work.problem, True, work.device.capability, work.device.smem_limit
    return _run_forward(work, *place, is_alike=True)


def paged_forward(work: Work) -> bool:
    """Do as `forward` on 16 bits, but read pages in place; splits of one size take the tile of `forward_alike`."""
    is_alike = work.problem.split_size is not None
    is_aligned = is_alike or work.is_aligned(("q", "k", "v"))
    configs = sm80_forward.forward(work.problem, is_aligned, work.device.capability, work.device.smem_limit)
    if not configs:
        return False
    of_arrays = _aligned_as(work, configs) if is_alike else configs
    work.run(work.chosen(Kernel("paged_forward_sm80", config) for config in of_arrays), work.arrays)
    return True


def fp8_forward(work: Work) -> bool:
    """`forward` on e4m3 keys and values, which are read where they lie, in pages too; False where no kernel does.

    With splits of one size dtypes, head dims and options alone choose the tile, as in `forward_alike`.
    """
    is_alike = work.problem.split_size is not None
    is_aligned = is_alike or work.is_aligned(("q", "k", "v"))
    configs = sm80_fp8.forward(work.problem, is_aligned, work.device.capability, work.device.smem_limit)
    if not configs:
        return False
    of_arrays = _aligned_as(work, configs) if is_alike else configs
    if work.problem.pages is not None:
        gpu_pages.with_first_keys(work)
        of_arrays = [replace(config, entry=sm80_fp8.PAGED_ENTRY) for config in of_arrays]
    work.run(work.chosen(Kernel(config.entry, config) for config in of_arrays), work.arrays)
    return True


def _aligned_as(work: Work, configs: Sequence[Any]) -> Sequence[Any]:
    """Return the same tiles, which are filled element by element where arrays are not aligned."""
    if work.is_aligned(("q", "k", "v")):
        return configs
    return [replace(config, aligned=False, has_bias_tiles=False) for config in configs]


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dk, dv and delta, and dq unless there is a block mask and its bits must repeat.

    The result are the gradients that are left, or None where another family runs.
    """
    problem, arrays = work.problem, work.arrays
    passes = sm80_backward.backward(*_place(work, "q", "k", "v", "dout", "out"))
    kernels = work.chosen_pass([tuple(_Gradient(MAIN, config) for config in each) for each in passes])
    if not kernels:
        return None
    first = kernels[0].config
    others = {name: x for name, x in grads.items() if name not in ("k", "v")}
    of_queries: Arrays = {}
    if "q" in grads and (first.deterministic or not problem.deterministic):
        tiles = batch_heads(problem, problem.num_heads_q) * num_tiles(problem, problem.seqlen_q, first.block_m)
        if tiles:  # without tiles no thread block would clear the counters of the order
            of_queries["dq_sum"] = work.empty((tiles, first.block_m * first.head_dim), problem.accum_dtype)
            if first.deterministic:
                of_queries["dq_order"] = work.empty((1 + tiles * first.turns,), np.int32)
        del others["q"]
    work.run(_Gradient(ROWS, sm80_backward.of_rows(first, ROWS)), with_dlse | of_queries)
    inputs = {name: x for name, x in arrays.items() if name != "out"}
    for kernel in kernels:
        sums = of_queries if kernel.config.computes_dk else {}
        computed = (("k", kernel.config.computes_dk), ("v", kernel.config.computes_dv))
        of_keys = {f"d{name}": grads[name] for name, here in computed if here and name in grads}
        if of_keys or sums:
            work.run(kernel, inputs | sums | of_keys)
    if of_queries:
        work.run(_Gradient(DQ, sm80_backward.of_rows(first, DQ)), inputs | of_queries | {"dq": grads["q"]})
    return others


def of_queries(work: Work, grads: Arrays) -> Arrays:
    """Write dq and each row's share of the slopes' gradient where a family left them; return the other gradients."""
    if not grads.keys() & {"q", "alibi_slopes"}:
        return grads
    configs = sm80_backward.of_queries(*_place(work, "q", "k", "v", "dout"))
    if not configs:
        return grads
    work.arrays |= gpu_portable.rows_of_slopes(work, grads)
    dq = {f"d{name}": x for name, x in grads.items() if name == "q"}
    work.run(work.chosen(gpu_portable.Tiles(config.entry, config) for config in configs), work.arrays | dq)
    return {name: x for name, x in grads.items() if name != "q"}


def of_bias(work: Work, grads: Arrays) -> Arrays:
    """Write the gradient of a bias where a family left it; return the other gradients."""
    if "bias" not in grads:
        return grads
    configs = sm80_backward.of_bias(*_place(work, "q", "k", "v", "dout"))
    if not configs or not _pays(work, gradients=True):
        return grads
    kernel = work.chosen(_Bias(config.entry, config) for config in configs)
    gpu_split.split(work, kernel.config)
    gpu_portable.gradient_of_bias(work, grads["bias"], kernel, kernel.config.min_blocks)
    return {name: x for name, x in grads.items() if name != "bias"}


def wide_backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv, delta and each row's share of the slopes' gradient by kernels on wide elements.

    The result are the gradients that are left, or None where another family runs.
    """
    if not _pays(work, gradients=True):
        return None
    passes = sm80_wide.backward(*_place(work, "q", "k", "v", "dout"))
    candidates = [tuple(gpu_portable.Tiles(config.entry, config) for config in each) for each in passes]
    return gpu_split.run_passes(work, with_dlse, grads, work.chosen_pass(candidates, others_serve=True))
