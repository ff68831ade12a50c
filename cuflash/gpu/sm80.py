"""Launches of the kernels by mma.sync, for both passes on 16 bits (`plan.sm80`) and on wide elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuflash.gpu import heads_as_rows, key_splits
from cuflash.gpu import pages as gpu_pages
from cuflash.gpu import portable as gpu_portable
from cuflash.gpu import split as gpu_split
from cuflash.gpu.launch import Kernel, Work, batch_heads, num_tiles
from cuflash.gpu.params import Arrays, num_key_splits
from cuflash.plan.record import Capability
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.plan.sm80 import kinds as sm80_kinds
from cuflash.plan.sm80 import splits as sm80_splits
from cuflash.plan.sm80 import wide as sm80_wide
from cuflash.plan.sm80.backward import DQ, MAIN, ROWS, Sm80BackwardConfig
from cuflash.plan.sm80.forward import Sm80QueryConfig
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

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of tiles: (of one head, in all); a cluster has all keys of a head."""
        if self.config.all_keys:
            return 1, batch_heads(problem, problem.num_heads_kv) * self.config.cluster
        return super().grid(problem, arrays)

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


@dataclass(frozen=True)
class Forward(Kernel):
    """A forward kernel, whose thread blocks have a tile of queries with its keys or a split of them."""

    config: Sm80QueryConfig
    heads_are_rows: bool = False  # the query heads of a KV head are rows of its tiles

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """Return the problem and the arrays, in which heads may be rows."""
        return heads_as_rows.seen(problem, arrays) if self.heads_are_rows else (problem, arrays)

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of tiles: (of one head, in all); each split of the keys has its own."""
        tiles, total = super().grid(problem, arrays)
        return tiles, total * num_key_splits(problem, arrays)


Plan = Callable[..., Sequence[Sm80QueryConfig]]


def _run_forward(work: Work, *plans: Plan, is_alike: bool = False, entry: str = "") -> bool:
    """Write out and lse by a kernel of the first of `plans` that has any; False where none has.

    It is the first candidate that spills no registers. Its thread blocks have splits of the keys, if that is faster,
    and query heads are rows where they may be. Where a row's bits are to be alike in every batch, dtypes, head dims and
    options alone choose the kernel.
    """
    problem, device = work.problem, work.device
    are_rows = sm80_splits.heads_are_rows(problem)
    own = sm80_splits.with_heads_as_rows(problem) if are_rows else problem
    is_aligned = work.is_aligned(("q", "k", "v"))
    place = own, is_alike or is_aligned, device.capability, device.smem_limit
    plan, configs = next(((plan, found) for plan in plans if (found := plan(*place))), (None, ()))
    if not configs:
        return False
    if not is_aligned:
        # The same tiles are filled element by element.
        configs = [replace(config, aligned=False, has_bias_tiles=False) for config in configs]
    splits = dict(sm80_splits.with_splits(own, config, device.num_sms) for config in configs)
    candidates = [Forward(entry or config.entry, config, are_rows) for config in splits]
    # Where a rule spills on wide elements the portable kernels serve; on 16 bits tensor cores are faster yet.
    kernel = work.chosen_or_none(candidates) if plan is sm80_wide.forward else work.chosen(candidates)
    if kernel is None:
        return False
    gpu_split.split(work, kernel.config)
    num_splits = splits[kernel.config]
    key_splits.run(work, kernel, num_splits)
    return True


def forward(work: Work, is_alike: bool = False) -> bool:
    """Write out and lse; False where another family runs."""
    if not _pays(work, gradients=False):
        return False
    return _run_forward(work, sm80_forward.forward, sm80_wide.forward, is_alike=is_alike)


def forward_alike(work: Work) -> bool:
    """Do as `forward` by a kernel and a tile that dtypes, head dims and options alone choose; False without one.

    A row's bits do not depend on other sequences, because a thread block has queries of one head and loops over all of
    its keys in tiles that begin at multiples of the tile's keys.
    """
    return forward(work, is_alike=True)


def paged_forward(work: Work) -> bool:
    """Do as `forward` on 16 bits, but read pages in place; splits of one size take the tile of `forward_alike`."""
    is_alike = work.problem.split_size is not None
    return _run_forward(work, sm80_forward.forward, is_alike=is_alike, entry="paged_forward_sm80")


def fp8_forward(work: Work) -> bool:
    """`forward` on e4m3 keys and values, which are read where they lie, in pages too; False where no kernel does.

    With splits of one size dtypes, head dims and options alone choose the tile, as in `forward_alike`.
    """
    if work.problem.pages is not None and sm80_fp8.takes(work.problem, work.device.capability):
        gpu_pages.with_first_keys(work)
    entry = "" if work.problem.pages is None else sm80_fp8.PAGED_ENTRY
    return _run_forward(work, sm80_fp8.forward, is_alike=work.problem.split_size is not None, entry=entry)


def backward_alone(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Do as `backward` does by one kernel, whose tile has all keys; None where that is slower, or no kernel does it."""
    if "alibi_slopes" in grads:
        return None
    place = _place(work, "q", "k", "v", "dout", "out")
    candidates = sm80_backward.all_keys(*place, num_sms=work.device.num_sms)
    kernels = [tuple(_Gradient(MAIN, config) for config in each) for each in candidates]
    chosen = work.chosen_pass(kernels, others_serve=True)
    if not chosen:
        return None
    (kernel,) = chosen
    of_inputs = {f"d{name}": x for name, x in grads.items() if name in ("q", "k", "v")}
    work.run(kernel, work.arrays | with_dlse | of_inputs)
    return {name: x for name, x in grads.items() if name not in ("q", "k", "v")}


def backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dk, dv and delta, and dq and the slopes' gradient unless there is a block mask and bits must repeat.

    The result are the gradients that are left, or None where another family runs.
    """
    problem, arrays = work.problem, work.arrays
    # The kernel for dq in the order of keys has the slopes' gradient, too. Without queries nobody would clear sums.
    dslopes = "alibi_slopes" in grads and not (problem.deterministic and problem.block_mask) and problem.seqlen_q > 0
    passes = sm80_backward.backward(*_place(work, "q", "k", "v", "dout", "out"), dslopes=dslopes)
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
                of_queries["dq_order"] = work.empty((1 + tiles * first.order_counters,), np.int32)
        del others["q"]
    slopes = gpu_portable.slope_sums(problem, first.block_n, first.num_warps)
    of_slopes = {"dslope_rows": slopes.empty(work)} if first.writes_dslopes else {}
    work.run(_Gradient(ROWS, sm80_backward.of_rows(first, ROWS)), with_dlse | of_queries | of_slopes)
    inputs = {name: x for name, x in arrays.items() if name != "out"}
    for kernel in kernels:
        sums = of_queries | of_slopes if kernel.config.computes_dk else {}
        computed = (("k", kernel.config.computes_dk), ("v", kernel.config.computes_dv))
        of_keys = {f"d{name}": grads[name] for name, here in computed if here and name in grads}
        if of_keys or sums:
            work.run(kernel, inputs | sums | of_keys)
    if of_queries:
        work.run(_Gradient(DQ, sm80_backward.of_rows(first, DQ)), inputs | of_queries | {"dq": grads["q"]})
    if of_slopes:
        work.run(slopes, arrays | of_slopes | {"dalibi_slopes": others.pop("alibi_slopes")})
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
