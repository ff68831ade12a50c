"""The kernels that a problem takes on a named architecture, in the order in which the GPU path asks the families."""

from __future__ import annotations

from typing import Any

from cuflash.hardware import capability_of, num_sms, smem_limit
from cuflash.plan import sm80_backward, sm80_forward, sm80_kinds, sm80_wide, sm90_backward, sm90_forward
from cuflash.plan import split as plan_split
from cuflash.plan.config import KernelConfig, of_half
from cuflash.plan.portable import key_kernels, plan
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import reasons
from cuflash.tools.reasons import BY_HALVES

_CARD = ""  # a card of the architecture that is none of those with rules of their own


def on_architecture(problem: AttentionProblem, arch: str, aligned: bool) -> dict[str, str]:
    """A sentence for each pass; `aligned` says that addresses and strides are multiples of 16 bytes."""
    in_order = "; results repeat to the bit" if problem.deterministic else ""
    passes = {"forward": _forward(problem, arch, aligned), "backward": _backward(problem, arch, aligned) + in_order}
    if problem.bias is not None:
        passes["gradient of a bias"] = _of_bias(problem, arch, aligned)
    return {f"{name} on {arch}": words for name, words in passes.items()}


def _place(arch: str, aligned: bool) -> tuple[bool, tuple[int, int], int]:
    return aligned, capability_of(arch), smem_limit(arch)


def _forward(problem: AttentionProblem, arch: str, aligned: bool) -> str:
    place = _place(arch, aligned)
    if place[1] == (9, 0) and aligned and not sm90_forward.obstacle(problem):
        return reasons.forward_sm90(problem)
    for own, words in ((problem, ""), (of_half(problem), BY_HALVES)):
        if place[1] == (9, 0) and plan_split.forward(own):
            return reasons.forward_split(problem)
        configs = sm80_forward.forward(own, *place) or sm80_wide.forward(own, *place)
        if configs and sm80_kinds.pays(own, _CARD, False):
            return _by_mma(configs[0]) + words
    return _portable(problem, arch, "forward")


def _backward(problem: AttentionProblem, arch: str, aligned: bool) -> str:
    place = _place(arch, aligned)
    if alone := sm80_backward.all_keys(problem, *place, num_sms=num_sms(arch)):
        return _by_mma(*alone[0])
    if place[1] == (9, 0):
        if aligned and not sm90_backward.obstacle(problem):
            return reasons.backward_sm90(problem)
        if plan_split.backward(problem):
            return reasons.backward_split(problem)
    passes: tuple[Any, ...] = sm80_backward.backward(problem, *place)
    if not passes and sm80_kinds.pays(problem, _CARD, True):
        passes = sm80_wide.backward(problem, *place)
    return _by_mma(*passes[0]) if passes else _portable(problem, arch, "backward_dq", *key_kernels(problem))


def _of_bias(problem: AttentionProblem, arch: str, aligned: bool) -> str:
    configs = sm80_backward.of_bias(problem, *_place(arch, aligned)) if sm80_kinds.pays(problem, _CARD, True) else ()
    return _by_mma(configs[0]) if configs else _portable(problem, arch, "backward_bias")


def _by_mma(*configs: KernelConfig) -> str:
    return _in_words("mma.sync (tensor cores)", *configs)


def _portable(problem: AttentionProblem, arch: str, *entries: str) -> str:
    configs = [plan(problem, entry, smem_limit(arch))[0] for entry in entries]
    return _in_words("portable kernel (no tensor cores)", *configs)


def _in_words(family: str, *configs: KernelConfig) -> str:
    kernels = ", ".join(f"{config.entry} {config.tile}" for config in configs)
    most = max(config.smem_bytes for config in configs)
    return f"{family}, tiles of {kernels}, {most} bytes of shared memory: {configs[0].flags}"
