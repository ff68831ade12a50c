"""NVRTC compiles chosen records of the tables for chosen architectures, and each is checked."""

from __future__ import annotations

import functools
import math
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import pytest
import rows
import tiers

from cuflash import hardware
from cuflash.cuda import compile as cuda_compile
from cuflash.gpu import kernels as gpu_kernels
from cuflash.plan.config import KernelConfig, without_window
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm80 import forward as sm80_forward

ARCHITECTURES = (
    *("sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90a"),
    *("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
)
HOPPER = "sm_90a"
HALVES = "__half", "__nv_bfloat16"
SAMPLED = 5  # one record in so many is compiled though it shows nothing of its own
# Kernels whose configurations are those of an entry that reads pages, too.
PAGED = "forward", "forward_sm80", "fp8_forward_sm80"


@functools.cache
def has_compiler() -> bool:
    """Return True if NVRTC and its headers are installed, which CuPy alone does not bring."""
    try:
        return "Used" in kernels_log()
    except (RuntimeError, ImportError, OSError):
        return False


def kernels_log() -> str:
    report = cuda_compile.compile_for("sm_90", '#include <cuda_fp16.h>\nextern "C" __global__ void probe() {}', "probe")
    return f"Used {report.registers}"


needs_compiler = pytest.mark.skipif(not has_compiler(), reason='no NVRTC with headers: pip install "cuflash[cuda13]"')


def source(config: KernelConfig) -> str:
    return gpu_kernels.source_of(config)


def reading_pages(config: KernelConfig) -> KernelConfig:
    """Return the kernel of the same configuration that reads pages; its registers are its own."""
    assert config.entry in PAGED
    return replace(config, entry=f"paged_{config.entry}")


def is_known(arch: str) -> bool:
    """Return True if this NVRTC compiles for an architecture."""
    from cupy.cuda import nvrtc

    major, minor = hardware.capability_of(arch)
    return 10 * major + minor in nvrtc.getSupportedArchs()


def version() -> tuple[int, int]:
    """Return this NVRTC's version."""
    from cupy.cuda import nvrtc

    major, minor = nvrtc.getVersion()
    return major, minor


@functools.cache
def tables_of(arch: str) -> list[KernelConfig]:
    """Return what an architecture may compile of the tables that others share, with one of the 16-bit dtypes.

    The two differ in one operand of one instruction.
    """
    capability, limit = hardware.capability_of(arch), hardware.smem_limit(arch)
    dtype = sm80_forward.dtypes(capability)[-1]
    mma = listing.kernels(chain(listing.of_forward(capability, limit), listing.of_backward(capability, limit)))
    return [
        *(config for config, _ in listing.kernels(listing.of_portable(limit))),
        *(config for config, own_dtype in mma if own_dtype == dtype),
        *(config for config, _ in listing.kernels(listing.of_wide(capability, limit))),
    ]


@functools.cache
def passes_of(arch: str) -> list[listing.Pass]:
    """Return the passes of an architecture."""
    of_hopper = sm90_listing.of_hopper() if arch == HOPPER else ()
    return [*listing.of_any_gpu(hardware.capability_of(arch), hardware.smem_limit(arch)), *of_hopper]


# MANY_OPTIONS is how many options beside a window may leave a pass of gradients no candidate that keeps to its
# registers, if another family serves.
MANY_OPTIONS = 3


@functools.cache
def may_spill(arch: str) -> set[KernelConfig]:
    """Return the kernels that another family's replace where these and all later candidates spill."""
    kernels = (kernel for own in passes_of(arch) if own.others_serve for kernel in own.candidates[0])
    return {kernel for kernel in kernels if len(without_window(kernel.flags)) >= MANY_OPTIONS}


@functools.cache
def later_of(arch: str) -> dict[KernelConfig, list[tuple[KernelConfig, ...]]]:
    """Return the candidates that run where a kernel of the first ones spills, by kernel."""
    found: dict[KernelConfig, list[tuple[KernelConfig, ...]]] = {}
    for own in passes_of(arch):
        for kernel in own.candidates[0]:
            found.setdefault(kernel, [*own.candidates[1:]])
            if kernel.entry in PAGED:
                later = [tuple(reading_pages(c) for c in kernels) for kernels in own.candidates[1:]]
                found.setdefault(reading_pages(kernel), later)
    return found


@functools.cache
def own_architectures() -> dict[KernelConfig, str]:
    """Return the architecture for which each record is compiled in any case: Hopper, or the oldest that has it."""
    found: dict[KernelConfig, str] = {}
    for arch in (HOPPER, *ARCHITECTURES):
        for config in tables_of(arch):
            found.setdefault(config, arch)
    return found


@functools.cache
def alike(arch: str) -> list[str]:
    """The architectures that have this one's instructions and shared memory: its tables, or all of them and more."""
    own = set(tables_of(arch))
    return [other for other in ARCHITECTURES if own <= set(tables_of(other)) or own >= set(tables_of(other))]


def sampled(configs: Sequence[KernelConfig]) -> list[KernelConfig]:
    """Choose the records of a table that the whole suite compiles; tests that are named, and ``long``, have all.

    Of each tile it is the one with the most options, for one of the 16-bit dtypes, whose kernels differ in conversions
    and in one operand of one instruction; of the others one in `SAMPLED`, by their text; and then so many that every
    option and dtype of each kernel occurs.
    """
    if tiers.has_every_case():
        return list(configs)
    fullest: dict[tuple[object, ...], KernelConfig] = {}
    for config in sorted(configs, key=lambda config: len(config.flags.split(", "))):
        element = "16 bits" if config.element in HALVES else config.element
        fullest[config.entry, element, config.head_dim, config.head_dim_v, config.tile] = config
    kept = {*fullest.values(), *(c for c in configs if zlib.crc32(repr(c).encode()) % SAMPLED == 0)}
    kept.update(tiers.covering(configs, rows.options_of, kept))
    return [c for c in configs if c in kept]


def compiled(arch: str, configs: Sequence[KernelConfig]) -> list[KernelConfig]:
    """Choose those of an architecture's records that are compiled for it.

    These are all that it has of some kernels. On Hopper it is a sample of all, and elsewhere of those that neither
    Hopper nor an older architecture has. Architectures that are alike share so many of the others, each in its turn,
    that every option of each kernel occurs: NVRTC takes most of a second for each. The quick tier has no sample, so
    that they share more. ``python -m cuflash compile`` compiles all.
    """
    if not tiers.is_whole():
        return share_of(arch, configs)
    kept = {*sample_of(arch, configs), *share_of(arch, configs, sample_of)}
    return [c for c in configs if c in kept]


Choice = Callable[[str, Sequence[KernelConfig]], Sequence[KernelConfig]]


def sample_of(arch: str, configs: Sequence[KernelConfig]) -> list[KernelConfig]:
    """Choose a sample of the records that neither Hopper nor an older architecture has."""
    return sampled([c for c in configs if own_architectures().get(c, arch) == arch])


def share_of(arch: str, configs: Sequence[KernelConfig], beside: Choice = lambda *_: ()) -> list[KernelConfig]:
    """Choose records such that every option occurs in those of the architectures that are alike, and those beside."""
    entries = {c.entry for c in configs}
    tables = {other: [c for c in tables_of(other) if c.entry in entries] for other in alike(arch) if other != arch}
    tables[arch] = list(configs)
    chosen = tiers.covering(
        max(tables.values(), key=len), rows.options_of, chain(*(beside(*table) for table in tables.items()))
    )
    held = {other: set(table) for other, table in sorted(tables.items())}
    found = []
    for i, config in enumerate(chosen):
        sharing = [other for other, table in held.items() if config in table]
        if sharing[i % len(sharing)] == arch:
            found.append(config)
    return found


@functools.cache  # some rows of a table are the same kernel
def assert_compiles_well(arch: str, config: KernelConfig) -> None:
    """Assert that a row compiles for an architecture quickly, without spills or warnings, in its shared memory.

    Where it spills, a later candidate does not, which a call would take, or another family serves so many options.
    """
    if not is_known(arch):
        pytest.skip(f"this NVRTC does not know {arch}")
    text = source(config)
    report, seconds = compile_timed(arch, text, config.entry)
    assert (
        report.spill_bytes == 0
        or config in may_spill(arch)
        or any(spill_nothing(arch, later) for later in later_of(arch).get(config, ()))
    ), f"{arch} {config}"
    assert not report.warnings, f"{arch} {config}: {report.warnings}"
    assert config.smem_bytes <= hardware.smem_limit(arch), f"{arch} {config}"
    if not is_quick(arch, text, config.entry, seconds):
        pytest.fail(
            f"{arch} {config}: {seconds:.2f} s of processor time, and in none of {len(ROUNDS)} rounds less than "
            f"{MOST_SECONDS} times what empty kernels say of this machine"
        )


def spill_nothing(arch: str, kernels: Sequence[KernelConfig]) -> bool:
    """Return True if no kernel of a pass spills."""
    return all(cuda_compile.compile_for(arch, source(c), c.entry).spill_bytes == 0 for c in kernels)


# A kernel compiles cold in fewer seconds than these, by the time of the thread, as others use the machine, too. Others
# slow compilers down all the same (shared caches and cores), as do older machines; an empty kernel says by how much,
# against its seconds on the two idle cores where the figures of docs/lab/logs/host_and_wheel.md were measured.
MOST_SECONDS, EMPTY_SECONDS = 1.5, 0.029
EMPTY = '#include <cuda_bf16.h>\n#include <cuda_fp16.h>\nextern "C" __global__ void empty() {}'
ROUNDS = 1 / 8, 1 / 4, 1 / 2, 1, 1, 1  # how long each compiles empty kernels, by the kernel's own seconds


def is_quick(arch: str, text: str, entry: str, seconds: float) -> bool:
    """Return True if a kernel that took so many seconds takes fewer than `MOST_SECONDS` where the figures are from.

    On a machine that is slow all the time the least of three empty kernels says so at once. Else more of them are
    compiled, and then the kernel again and empty kernels over ever longer times, until one round says so: a kernel that
    is too slow is so in every round.
    """
    if seconds < MOST_SECONDS:
        return True
    found = slownesses(arch, 3)
    if seconds < MOST_SECONDS * min(found):
        return True
    for share in ROUNDS:
        found = slownesses(arch, math.ceil(share * seconds / EMPTY_SECONDS / statistics.fmean(found)))
        if seconds < MOST_SECONDS * statistics.fmean(found):
            return True
        seconds = compile_timed(arch, text, entry)[1]
    return False


def slownesses(arch: str, count: int) -> list[float]:
    """Return the times of so many empty kernels, as multiples of what one takes where the figures are from."""
    return [max(1, compile_timed(arch, EMPTY, "empty")[1] / EMPTY_SECONDS) for _ in range(count)]


def compile_timed(arch: str, text: str, entry: str) -> tuple[cuda_compile.Report, float]:
    """Compile, and return the report and the seconds of this thread that it took."""
    start = time.thread_time()
    return cuda_compile.compile_for(arch, text, entry), time.thread_time() - start
