"""The GPU path: the first family that takes a problem. Those by mma.sync need no more than these launches."""

from dataclasses import dataclass

import numpy as np

from cuflash import kernels, launch, launch_sm90, launch_split, plan_sm80, plan_sm80_backward, plan_wide
from cuflash.launch import Kernel, Work, images, num_tiles
from cuflash.params import Arrays
from cuflash.plan_sm80 import Capability
from cuflash.plan_sm80_backward import DQ, MAIN, ROWS
from cuflash.plan_split import of_half
from cuflash.problem import Array, AttentionProblem, Operands
from cuflash.recording import Recording


@dataclass(frozen=True)
class _Gradient(Kernel):
    """A kernel of the backward pass on 16 bits."""

    @property
    def visits_tiles(self) -> bool:
        """Whether it is the main one."""
        return self.entry == MAIN

    of_keys = visits_tiles

    def numbers(self, problem: AttentionProblem) -> dict[str, int]:
        """How sums of dq are laid out."""
        return {"num_query_tiles": num_tiles(problem, problem.seqlen_q, self.config.block_m)}


def _place(work: Work, *names: str) -> tuple[AttentionProblem, bool, Capability, int]:
    return work.problem, work.is_aligned(names), work.device.capability, work.device.smem_limit


def _pays(work: Work, gradients: bool) -> bool:
    return plan_wide.pays(work.problem, work.device.name, gradients)


def _mma_forward(work: Work) -> bool:
    """Write out and lse; False where others run."""
    place = _place(work, "q", "k", "v")
    config = plan_sm80.forward(*place) or plan_wide.forward(*place)
    if config is None or not _pays(work, gradients=False):
        return False
    work.run(Kernel(config.entry, config), launch_split.split(work, config))
    return True


def _mma_backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dk, dv, delta, dq unless beside a block mask its bits must repeat; return the others, None if nothing."""
    problem, arrays = work.problem, work.arrays
    configs = plan_sm80_backward.backward(*_place(work, "q", "k", "v", "dout", "out"))
    if not configs:
        return None
    first = configs[0]
    others = {name: x for name, x in grads.items() if name not in ("k", "v")}
    of_queries: Arrays = {}
    if "q" in grads and (first.deterministic or not problem.deterministic):
        tiles = images(problem, problem.num_heads_q) * num_tiles(problem, problem.seqlen_q, first.block_m)
        if tiles:  # else nobody clears the counter of turns
            of_queries["dq_sum"] = work.empty((tiles, first.block_m * first.head_dim), problem.accum_dtype)
            if first.deterministic:
                of_queries["dq_turns"] = work.empty((1 + tiles * first.turns,), np.int32)
        del others["q"]
    work.run(_Gradient(ROWS, plan_sm80_backward.of_rows(first, ROWS)), with_dlse | of_queries)
    inputs = {name: x for name, x in arrays.items() if name != "out"}
    for config in configs:
        sums = of_queries if config.computes_dk else {}
        computed = (("k", config.computes_dk), ("v", config.computes_dv))
        of_keys = {f"d{name}": grads[name] for name, here in computed if here and name in grads}
        if of_keys or sums:
            work.run(_Gradient(MAIN, config), inputs | sums | of_keys)
    if of_queries:
        work.run(_Gradient(DQ, plan_sm80_backward.of_rows(first, DQ)), inputs | of_queries | {"dq": grads["q"]})
    return others


def _of_queries(work: Work, grads: Arrays) -> Arrays:
    """Write dq and each row's part of the slopes' gradient where families left them; return the other gradients."""
    if not grads.keys() & {"q", "alibi_slopes"}:
        return grads
    if (config := plan_sm80_backward.of_queries(*_place(work, "q", "k", "v", "dout"))) is None:
        return grads
    work.arrays |= launch.rows_of_slopes(work, grads)
    dq = {f"d{name}": x for name, x in grads.items() if name == "q"}
    work.run(launch.Tiles(config.entry, config), work.arrays | dq)
    return {name: x for name, x in grads.items() if name != "q"}


def _of_bias(work: Work, grads: Arrays) -> Arrays:
    """Write the gradient of a bias where families left it; return the other gradients."""
    if "bias" not in grads:
        return grads
    config = plan_sm80_backward.of_bias(*_place(work, "q", "k", "v", "dout"))
    if config is None or not _pays(work, gradients=True):
        return grads
    launch_split.split(work, config)
    launch.gradient_of_bias(work, grads["bias"], launch.Bias(config.entry, config), config.min_blocks)
    return {name: x for name, x in grads.items() if name != "bias"}


def _wide_backward(work: Work, with_dlse: Arrays, grads: Arrays) -> Arrays | None:
    """Write dq, dk, dv, delta and each row's part of the slopes' gradient; return the others, None if nothing."""
    if not _pays(work, gradients=True):
        return None
    configs = plan_wide.backward(*_place(work, "q", "k", "v", "dout"))
    kernels = [launch.Tiles(config.entry, config) for config in configs]
    return launch_split.run_passes(work, with_dlse, grads, kernels)


def _by_halves(work: Work) -> bool:
    """Write out by halves of its columns; False where no kernel takes these."""
    half = of_half(work.problem).head_dim_v
    parts = work.of_values(slice(half)), work.of_values(slice(half, None))
    return all(launch_split.forward(part) or _mma_forward(part) for part in parts)


_FORWARD = (launch_sm90.forward, launch_split.forward, _mma_forward, _by_halves, launch.forward)
_BACKWARD = (launch_sm90.backward, launch_split.backward, _mma_backward, _wide_backward)


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> Recording:
    """Write the result of a problem, and lse if it is wanted; return how."""
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    work = Work(problem, operands, results, kernels.device_of(out))
    if lse is None:
        work.arrays["lse"] = work.empty(problem.lse_shape, problem.accum_dtype)
    next(filter(None, (family(work) for family in _FORWARD)))
    work.recording.end()
    return work.recording


def backward(
    problem: AttentionProblem,
    operands: Operands,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    grads: dict[str, Array],
) -> Recording:
    """Write the wanted gradients of a problem; return how."""
    given = {"dout": dout, "out": out, "lse": lse}
    of_lse = {} if dlse is None else {"dlse": dlse}
    results = {f"d{name}": x for name, x in grads.items()}
    work = Work(problem, operands, given, kernels.device_of(out), of_lse | results)
    work.arrays["delta"] = work.empty(problem.lse_shape, problem.accum_dtype)
    for family in _BACKWARD:
        rest = family(work, work.arrays | of_lse, grads)
        if rest is not None:
            break
    else:
        launch.delta(work, work.arrays | of_lse)
        rest = grads
    launch.gradients(work, _of_bias(work, _of_queries(work, rest)))
    work.recording.end()
    return work.recording
