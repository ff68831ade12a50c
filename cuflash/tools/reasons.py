"""Sentences for users: the kernels that a pass over a problem takes, and why."""

from __future__ import annotations

from cuflash.hardware import capability_of, num_sms, smem_limit
from cuflash.plan.config import KernelConfig, not_taken, of_half
from cuflash.plan.entries import file_of
from cuflash.plan.record import AMPERE
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.plan.sm80 import splits as sm80_splits
from cuflash.plan.sm80 import wide as sm80_wide
from cuflash.plan.sm80.kinds import FLOAT64, HALF_RATE, PARTS_OF, kind_of, pays
from cuflash.plan.sm90 import backward as sm90_backward
from cuflash.plan.sm90 import codes as sm90_codes
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import fp8 as sm90_fp8
from cuflash.plan.split import kernels as split
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.tools import candidates

BY_HALVES = "; half of v's columns at a time"  # of a forward pass that runs once for each
OTHER_GPUS = "as on other GPUs"  # where other kernels run
WHERE_UNALIGNED = f"; {OTHER_GPUS} where an address or a stride of an input is no multiple of 16 bytes"
_HOPPER = "sm_90a"
# These words tell users how each kind multiplies, and with which error.
_PRODUCTS = {
    "float32": "float16 parts, float32's error",
    "tf32": "one product of float16 each, TF32's error",
    "float64": "float64 products",
}


def flags_in_words(config: KernelConfig, problem: AttentionProblem) -> str:
    """Return the options that a kernel has compiled in, by the names that users give them."""
    is_causal = problem.window_left is None and problem.window_right == 0
    return config.flags.replace("window", "causal", 1) if is_causal and config.has_window else config.flags


def forward_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that a forward pass takes on Hopper, and why."""
    return _on_hopper(problem, candidates.FORWARD, sm90_forward.obstacle(problem))


def backward_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernels that a backward pass takes on Hopper, and why."""
    return _on_hopper(problem, candidates.BACKWARD, sm90_backward.obstacle(problem))


def _on_hopper(problem: AttentionProblem, direction: str, obstacle: str) -> str:
    if obstacle:
        return f"{OTHER_GPUS}: {obstacle}"
    config = _first(problem, direction, _HOPPER)
    if not file_of(config.entry).startswith("sm90/"):
        return f"{OTHER_GPUS}: {config.entry} {config.tile} is faster"
    return (
        f"wgmma and TMA (NVRTC from 12.9 on), tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: "
        f"{flags_in_words(config, problem)}{WHERE_UNALIGNED}"
    )


def _first(problem: AttentionProblem, direction: str, arch: str) -> KernelConfig:
    """Return the first kernel of a pass that runs on the usual card of an architecture."""
    found = candidates.candidates_of(problem, candidates.gpu_of(arch))
    return next(own.kernels[0].config for own in found if own.direction == direction and own.is_chosen)


def fp8_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that a forward pass on codes takes on Hopper, and why."""
    if sm90_fp8.obstacle(problem):
        return f"as on other GPUs: {sm90_fp8.obstacle(problem)}"
    config = sm90_fp8.forward(problem, ())[0]
    return (
        f"wgmma on e4m3 codes and TMA, tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: "
        f"{flags_in_words(config, problem)}{WHERE_UNALIGNED}"
    )


def codes_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that 16-bit queries over e4m3 keys take on Hopper, and why."""
    found = sm90_codes.forward(problem, (), num_sms=num_sms(_HOPPER))
    if not found:
        return f"as on other GPUs: {sm90_codes.obstacle(problem)}"
    config, _ = found[0]
    return (
        f"wgmma on elements that are made of e4m3 codes, tiles of {config.tile}, {config.smem_bytes} bytes of shared "
        f"memory: {flags_in_words(config, problem)}{WHERE_UNALIGNED}"
    )


def forward_split(problem: AttentionProblem) -> str:
    """A sentence for users on the forward kernel; empty where other kernels run."""
    whole = split.forward(problem)
    configs = whole or split.forward(of_half(problem))
    return _split_in_words(problem, configs[0].tile, configs[0]) + ("" if whole else BY_HALVES) if configs else ""


def backward_split(problem: AttentionProblem) -> str:
    """A sentence for users on the gradient kernels; empty where other kernels run."""
    configs = next(iter(split.backward(problem)), ())
    tiles = ", ".join(f"{config.entry} {config.tile}" for config in configs)
    return _split_in_words(problem, tiles, *configs) if configs else ""


def _split_in_words(problem: AttentionProblem, tiles: str, *configs: split.SplitConfig) -> str:
    smem_bytes = max(config.smem_bytes for config in configs)
    limits = f"tiles of {tiles}, {smem_bytes} bytes of shared memory: {flags_in_words(configs[0], problem)}"
    return f"wgmma and TMA (NVRTC from 12.9 on), {exactness_of(configs[0])}, {limits}"


def exactness_of(config: split.SplitConfig) -> str:
    """Say how float16 parts multiply, and with which error."""
    return "one product of float16 each, TF32's error" if config.parts == 1 else "float16 parts, float32's error"


def forward_sm80(problem: AttentionProblem) -> str:
    """A sentence for users: the forward kernels that a problem takes on GPUs other than Hopper."""
    if problem.dtype not in sm80_forward.dtypes(AMPERE):
        return f"portable kernel: mma.sync has none for {problem.dtype} of this size"
    whole = problem
    if not_taken(sm80_forward.HANDLES, whole):
        problem = of_half(whole)
    if not_taken(sm80_forward.HANDLES, problem):
        return f"portable kernel: mma.sync has none with {not_taken(sm80_forward.HANDLES, whole)}"
    older = (
        ""
        if problem.dtype in sm80_forward.dtypes((7, 5))
        else f"; portable kernel on sm_75, which multiplies no {problem.dtype}"
    )
    places = {name: (True, capability_of(name), smem_limit(name)) for name in ("sm_80", "sm_86")}
    taken = [name for name, place in places.items() if sm80_forward.forward(problem, *place)]
    in_words = ", ".join(f"{_first(whole, candidates.FORWARD, name).tile} on {name}" for name in taken)
    return f"mma.sync, tiles of {in_words}{'' if problem is whole else BY_HALVES}{older}"


def backward_sm80(problem: AttentionProblem) -> str:
    """A sentence for users: the backward kernels that a problem takes on GPUs other than Hopper."""
    tiles = []
    for name in ("sm_80", "sm_86"):
        chosen = sm80_backward.backward(problem, True, capability_of(name), smem_limit(name))
        if not chosen:
            own_options = not_taken(sm80_backward.HANDLES, problem)
            lacking = f"with {own_options}" if own_options else f"for {problem.dtype} of this size"
            return f"portable kernels: mma.sync has none {lacking}"
        tiles.append(f"{_first(problem, candidates.BACKWARD, name).tile} on {name}")
    return f"mma.sync, tiles of {', '.join(tiles)}"


def _as_tiled(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem as tiles of mma.sync see it, in which query heads may be rows."""
    return sm80_splits.with_heads_as_rows(problem) if sm80_splits.heads_are_rows(problem) else problem


def fp8_sm80(problem: AttentionProblem) -> str:
    """A sentence for users: the forward kernels that a problem on e4m3 keys takes."""
    if not_taken(sm80_fp8.HANDLES, problem):
        return f"converted to float32: mma.sync on e4m3 has none with {not_taken(sm80_fp8.HANDLES, problem)}"
    problem = _as_tiled(problem)
    tiles = {
        name: sm80_fp8.forward(problem, True, capability_of(name), smem_limit(name)) for name in ("sm_80", "sm_89")
    }
    named = ", ".join(
        f"{configs[0].tile} on {name}{' by products of codes' if configs[0].multiplies_codes else ''}"
        for name, configs in tiles.items()
        if configs
    )
    return f"mma.sync on e4m3 keys, tiles of {named}; converted to float32 on GPUs older than sm_80"


def wide(problem: AttentionProblem, gradients: bool) -> str:
    """A sentence for users on the kernels of a pass; empty where it has none of these."""
    kind = kind_of(problem)
    if kind not in PARTS_OF or not _wide_tiles(problem, False, "sm_80"):
        return ""
    architectures = ", ".join("sm_{}{}".format(*x) for x in FLOAT64) if kind == "float64" else "sm_80 and later"
    tiles = _wide_tiles(problem, gradients, "sm_80")
    what = f"mma.sync on {architectures}, {_PRODUCTS[kind]}, tiles of {tiles}"
    if kind == "float32":
        in_99_kb = _wide_tiles(problem, gradients, "sm_86")
        if in_99_kb and not pays(problem, HALF_RATE[0], gradients):
            in_99_kb += f" (portable on {', '.join(HALF_RATE)})"
        what += f"; in 99 KB of shared memory {in_99_kb or 'portable'}"
    return what if tiles else "portable kernels"


def _wide_tiles(problem: AttentionProblem, gradients: bool, name: str) -> str:
    place = True, capability_of(name), smem_limit(name)
    if gradients:
        return ", ".join(f"{c.entry} {c.tile}" for c in next(iter(sm80_wide.backward(problem, *place)), ()))
    whole, half = (sm80_wide.forward(_as_tiled(p), *place) for p in (problem, of_half(problem)))
    return f"{(whole or half)[0].entry} {(whole or half)[0].tile}{'' if whole else BY_HALVES}" if half else ""
