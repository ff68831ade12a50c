"""Sentences for users: the kernels that a pass over a problem takes, and why."""

from __future__ import annotations

from cuflash.hardware import capability_of, num_sms, smem_limit
from cuflash.plan import (
    sm80_backward,
    sm80_forward,
    sm80_fp8,
    sm80_wide,
    sm90_backward,
    sm90_codes,
    sm90_forward,
    sm90_fp8,
    split,
)
from cuflash.plan.config import not_taken, of_half
from cuflash.plan.record import AMPERE
from cuflash.plan.sm80_kinds import FLOAT64, HALF_RATE, PARTS_OF, kind_of, pays
from cuflash.problem.attention_problem import AttentionProblem

BY_HALVES = "; half of v's columns at a time"  # of a forward pass that runs once for each
OTHER_GPUS = "as on other GPUs"  # where other kernels run
_MASK_OF_VECTORS = (0, 0, 0, 1), (1, 1, 1, 16)  # strides and shape of a mask that is read 16 keys at a time
# These words tell users how each kind multiplies, and with which error.
_PRODUCTS = {
    "float32": "float16 parts, float32's error",
    "tf32": "one product of float16 each, TF32's error",
    "float64": "float64 products",
}


def forward_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that a forward pass takes on Hopper, and why."""
    if sm90_forward.obstacle(problem):
        return f"{OTHER_GPUS}: {sm90_forward.obstacle(problem)}"
    config = sm90_forward.config_for(problem)
    return (
        f"wgmma and TMA (NVRTC from 12.9 on), tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: "
        f"{config.flags}; {OTHER_GPUS} where an address or a stride of q, k or v is no multiple of 16 bytes"
    )


def backward_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernels that a backward pass takes on Hopper, and why."""
    if sm90_backward.obstacle(problem):
        return f"{OTHER_GPUS}: {sm90_backward.obstacle(problem)}"
    config = (sm90_backward.backward(problem, ()) or sm90_backward.backward(problem, (), mask=_MASK_OF_VECTORS))[0]
    return (
        f"wgmma and TMA, tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: {config.flags}; "
        f"{OTHER_GPUS} where an address or a stride of an input is no multiple of 16 bytes"
    )


def fp8_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that a forward pass on codes takes on Hopper, and why."""
    if sm90_fp8.obstacle(problem):
        return f"as on other GPUs: {sm90_fp8.obstacle(problem)}"
    config = sm90_fp8.forward(problem, ())[0]
    return (
        f"wgmma on e4m3 codes and TMA, tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: "
        f"{config.flags}; as on other GPUs where an address or a stride of q, k or v is no multiple of 16 bytes"
    )


def codes_sm90(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that 16-bit queries over e4m3 keys take on Hopper, and why."""
    found = sm90_codes.forward(problem, (), num_sms=num_sms("sm_90a"))
    if not found:
        return f"as on other GPUs: {sm90_codes.obstacle(problem)}"
    config, _ = found[0]
    return (
        f"wgmma on elements that are made of e4m3 codes, tiles of {config.tile}, {config.smem_bytes} bytes of shared "
        f"memory: {config.flags}; as on other GPUs where an address or a stride of q, k or v is no multiple of 16 bytes"
    )


def forward_split(problem: AttentionProblem) -> str:
    """A sentence for users on the forward kernel; empty where other kernels run."""
    whole = split.forward(problem)
    configs = whole or split.forward(of_half(problem))
    return _split_in_words(configs[0].tile, configs[0]) + ("" if whole else BY_HALVES) if configs else ""


def backward_split(problem: AttentionProblem) -> str:
    """A sentence for users on the gradient kernels; empty where other kernels run."""
    configs = next(iter(split.backward(problem)), ())
    return (
        _split_in_words(", ".join(f"{config.entry} {config.tile}" for config in configs), *configs) if configs else ""
    )


def _split_in_words(tiles: str, *configs: split.SplitConfig) -> str:
    parts = configs[0].parts
    exactness = "one product of float16 each, TF32's error" if parts == 1 else "float16 parts, float32's error"
    smem_bytes = max(config.smem_bytes for config in configs)
    limits = f"tiles of {tiles}, {smem_bytes} bytes of shared memory: {configs[0].flags}"
    return f"wgmma and TMA (NVRTC from 12.9 on), {exactness}, {limits}"


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
    tiles = {
        name: sm80_forward.forward(problem, True, capability_of(name), smem_limit(name)) for name in ("sm_80", "sm_86")
    }
    in_words = ", ".join(f"{configs[0].tile} on {name}" for name, configs in tiles.items() if configs)
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
        tiles.append(f"{chosen[0][0].tile} on {name}")
    return f"mma.sync, tiles of {', '.join(tiles)}"


def fp8_sm80(problem: AttentionProblem) -> str:
    """A sentence for users: the forward kernels that a problem on e4m3 keys takes."""
    if not_taken(sm80_fp8.HANDLES, problem):
        return f"converted to float32: mma.sync on e4m3 has none with {not_taken(sm80_fp8.HANDLES, problem)}"
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
    whole, half = (sm80_wide.forward(p, *place) for p in (problem, of_half(problem)))
    return f"{(whole or half)[0].entry} {(whole or half)[0].tile}{'' if whole else BY_HALVES}" if half else ""
