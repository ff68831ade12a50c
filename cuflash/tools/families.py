"""The kernels that run on a GPU, in a sentence for each pass.

They are the chosen ones of the list of candidates, so that `info` says one thing in both places.
"""

from __future__ import annotations

from collections.abc import Sequence

from cuflash.plan.config import KernelConfig
from cuflash.plan.entries import file_of
from cuflash.plan.split.kernels import SplitConfig
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools.candidates import BACKWARD, FORWARD, Candidate, Gpu
from cuflash.tools.reasons import BY_HALVES, WHERE_UNALIGNED, exactness_of, flags_in_words

_OF_BIAS = "bias"  # the gradient of a bias has kernels of its own, whose names have this word


def on_gpu(problem: AttentionProblem, gpu: Gpu, found: Sequence[Candidate]) -> dict[str, str]:
    """Return a sentence for each pass over a problem, of whose candidates `found` on that GPU the chosen ones run."""
    kernels = {direction: _chosen(found, direction) for direction in (FORWARD, BACKWARD)}
    of_bias = [config for config in kernels[BACKWARD] if _OF_BIAS in config.entry]
    others = [config for config in kernels[BACKWARD] if _OF_BIAS not in config.entry]
    in_order = "; results repeat to the bit" if problem.deterministic else ""
    passes = {FORWARD: _in_words(problem, kernels[FORWARD]), BACKWARD: _in_words(problem, others) + in_order}
    if of_bias:
        passes["gradient of a bias"] = _in_words(problem, of_bias)
    elif problem.bias is not None:
        passes["gradient of a bias"] = f"by the kernels of the {BACKWARD} pass"
    return {f"{name} on {gpu.arch}": words for name, words in passes.items()}


def _chosen(found: Sequence[Candidate], direction: str) -> list[KernelConfig]:
    """Return the configurations of a pass that run, in order."""
    own = [candidate for candidate in found if candidate.direction == direction and candidate.is_chosen]
    return [kernel.config for candidate in own for kernel in candidate.kernels]


def _in_words(problem: AttentionProblem, configs: Sequence[KernelConfig]) -> str:
    each = list(dict.fromkeys((config.entry, config.tile) for config in configs))
    is_halved = [config.entry for config in configs[:2]] == [configs[0].entry] * 2 and "forward" in configs[0].entry
    first = configs[0]
    most = max(config.smem_bytes for config in configs)
    return (
        f"{_family(first)}, tiles of {', '.join(f'{entry} {tile}' for entry, tile in each)}, {most} bytes of shared "
        f"memory: {flags_in_words(first, problem)}{BY_HALVES if is_halved else ''}"
        f"{WHERE_UNALIGNED if _has_maps(first) else ''}"
    )


def _family(config: KernelConfig) -> str:
    if isinstance(config, SplitConfig):
        return f"wgmma and TMA (NVRTC from 12.9 on), {exactness_of(config)}"
    if _has_maps(config):
        return "wgmma and TMA (NVRTC from 12.9 on)"
    if file_of(config.entry).startswith("decode/"):
        return "mma.sync (tensor cores), one query over a cache"
    if "sm80" in file_of(config.entry):
        return "mma.sync (tensor cores)"
    return "portable kernel (no tensor cores)"


def _has_maps(config: KernelConfig) -> bool:
    """Return True if TMA reads the inputs themselves, whose addresses it wants aligned."""
    return file_of(config.entry).startswith("sm90/")
