"""The CPU device finds defects that a GPU would hide; each is planted by an edit of a sample that is right."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from address_sanitizer import run_sanitized
from compiling import needs_compiler
from cpu_device import build, device, hook, tensor_map
from cpu_device.device import Check, DeviceError

from cuflash.cuda import device as cuda_device
from cuflash.cuda import source as cuda_source

Array = np.ndarray[Any, Any]
Run = Callable[[str, Check, int], float]
SAMPLES = Path(device.__file__).parent / "samples"
pytestmark = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)
needs_sanitizers = pytest.mark.skipif(not build.has_sanitizers(), reason=build.NO_SANITIZERS)


def error(got: Array, want: Array) -> float:
    """Return the largest difference beyond rounding; infinite where something is not finite."""
    difference = np.abs(got.astype(np.float64) - want)
    return float(max(difference.max() - 1e-3, 0.0)) if np.isfinite(difference).all() else np.inf


def integers(rng: np.random.Generator, *shape: int) -> Array:
    """Draw small integers, whose sums and products are exact."""
    return rng.integers(-2, 3, shape).astype(ml_dtypes.bfloat16)


def plain(text: str, check: Check, seed: int) -> float:
    values = np.random.default_rng(seed).standard_normal((3, 64, 64), np.float32)
    out = np.full((3, 64), np.nan, np.float32)
    module = device.compile(text, (), "plain", check)
    module.launch("column_sums", (3,), (64,), (values, out), 64 * 65 * 4, seed=seed)
    return error(out, values.astype(np.float64).sum(1)[:, ::-1])


def tensor_core(text: str, check: Check, seed: int) -> float:
    rng = np.random.default_rng(seed)
    a, b = integers(rng, 16, 128), integers(rng, 32, 128)
    out = np.full((16, 32), np.nan, np.float32)
    module = device.compile(cuda_source.source_of("ptx/sm80.cuh", {}) + text, (), "tensor_core", check)
    module.launch("multiply", (1,), (32,), (a, b, out), 2 * (16 + 32) * 32 * 2, seed=seed)
    return error(out, a.astype(np.float64) @ b.astype(np.float64).T)


def hopper(text: str, check: Check, seed: int) -> float:
    rng, tiles = np.random.default_rng(seed), 5
    q, k, v = integers(rng, 64, 64), integers(rng, tiles * 64, 64), integers(rng, tiles * 64, 64)
    out = np.full((64, 64), np.nan, ml_dtypes.bfloat16)
    maps = [
        tensor_map.encode(x.ctypes.data, "bfloat16", (64, len(x), 1), (128, x.nbytes), (64, 64, 1))
        for x in (q, k, v, out)
    ]
    module = device.compile(cuda_source.source_of("ptx/sm90.cuh", {}) + text, (), "hopper", check)
    module.launch("multiply", (1,), (160,), (*maps, tiles), 6 * 8192 + 64, seed=seed)
    weights = (q.astype(np.float64) @ k.astype(np.float64).T).astype(ml_dtypes.bfloat16).astype(np.float64)
    return error(out, (weights @ v.astype(np.float64)).astype(ml_dtypes.bfloat16).astype(np.float64))


RUNS: dict[str, Run] = {"plain": plain, "tensor_core": tensor_core, "hopper": hopper}


def sample(name: str, old: str = "", new: str = "") -> str:
    text = f'#line 1 "{name}.cu"\n' + (SAMPLES / f"{name}.cu").read_text()
    assert old in text
    return text.replace(old, new, 1) if old else text


def outcome(name: str, text: str, check: Check, seed: int = 0) -> str:
    """Return the outcome of a run: right, wrong, or the device's message."""
    try:
        return "wrong" if RUNS[name](text, check, seed) > 0 else "right"
    except DeviceError as defect:
        return str(defect)


@pytest.mark.parametrize("check", [Check.NONE, Check.SHARED])
@pytest.mark.parametrize("name", RUNS)
def test_the_samples_are_right(name: str, check: Check) -> None:
    for seed in range(3):
        assert outcome(name, sample(name), check, seed) == "right"


# These show without any check, by a wrong result or NaN, or by a message that matches.
BY_RESULT = [
    ("plain", "  __syncthreads();\n  float", "  float", "wrong"),
    ("tensor_core", "wait_group<1>", "wait_group<2>", "wrong"),
    ("tensor_core", "wait_group<0>", "wait_group<1>", "wrong"),
    ("tensor_core", "  ptx::cp_async_commit_group();\n", "", "wrong"),
    ("tensor_core", "lane / 16 * 8", "lane / 16", "not a multiple of 16"),
    ("tensor_core", "(lane / 4 + i / 2 * 8)", "(lane / 4 + i % 2 * 8)", "wrong"),
    ("tensor_core", "lane / 8 % 2 * 8", "lane / 8 % 2 * 0", "wrong"),
    ("hopper", "wait(shared.full[stage], tile / STAGES);\n", "", "wrong|arrivals"),
    (
        "hopper",
        "wait(shared.full[stage], tile / STAGES)",
        "wait(shared.full[stage], tile / STAGES + 1)",
        "wrong|arrivals",
    ),
    ("hopper", "ptx::wgmma_wait_group<0>();\n    unsigned", "unsigned", "wrong|changed before the wait"),
    ("hopper", "ptx::wgmma_wait_group<0>();  // the sums", "", "wrong|exits without having waited"),
    ("hopper", "2 * TILE_BYTES)", "TILE_BYTES)", "wrong|deadlock|arrivals|in flight"),
    ("hopper", "2 * TILE_BYTES)", "3 * TILE_BYTES)", "deadlock: .* waits for an mbarrier at hopper.cu:"),
    ("hopper", "if (tile >= STAGES) wait(shared.empty[stage], tile / STAGES - 1);", "", "wrong|arrivals|deadlock"),
    ("hopper", "k + stage * TILE_BYTES + step * 32, 0, 1024", "k + stage * TILE_BYTES + step * 32, 0, 512", "wrong"),
    ("hopper", "v + stage * TILE_BYTES + step * 2048", "v + stage * TILE_BYTES + step * 32", "wrong"),
    ("hopper", "q + step * 32, 0", "q + step * 64 + 128, 0", "does not begin with a repetition"),
    ("hopper", "full, 0, tile * SIDE", "full, 4, tile * SIDE", "no multiple of 16 bytes"),
    ("hopper", "ptx::wgmma_fence();", "", "no wgmma.fence"),
    ("hopper", "(q + step * 32,", "(q + (threadIdx.x & 32) * 32 + step * 32,", "warps of a warpgroup issue different"),
    ("hopper", "(column ^ row % 8)", "column", "wrong"),
    ("hopper", "ptx::bulk_wait_group_read<0>();", "", "may still read shared memory"),
    ("hopper", "ptx::bulk_commit_group();", "", "not committed"),
    ("hopper", "ptx::barrier_sync(1, CONSUMERS)", "ptx::barrier_sync(1, CONSUMERS + 32)", "deadlock: .*barrier.sync"),
    ("hopper", "full[s]), 1)", "full[s]), 2)", "deadlock"),
]


@pytest.mark.parametrize(("name", "old", "new", "expected"), BY_RESULT)
def test_defect_shows_without_checks(name: str, old: str, new: str, expected: str) -> None:
    assert re.search(expected, outcome(name, sample(name, old, new), Check.NONE))


LINE = r"(plain|tensor_core|hopper)\.cu:\d+"
RACE = rf"nothing orders them .*the other at {LINE}"
# The checked mode names these, with the line.
BY_CHECK = [
    ("plain", "  __syncthreads();\n  float", "  float", f"uninitialised shared memory|{RACE}"),
    ("plain", "  __syncthreads();\n  out", "  out", f"uninitialised shared memory|{RACE}"),
    ("plain", "shared.sums[N - 1 - t]", "*(shared.sums + N - t)", "shared memory out of bounds"),
    ("plain", "shared.tile[row * N + t]", "*(shared.tile + row * N + t + 1)", r"shared memory out of bounds"),
    ("plain", "i < N * N", "i < N * N - 256", r"uninitialised shared memory"),
    pytest.param("plain", "shared.tile + i)", "shared.tile + i + 1)", "misaligned", marks=needs_sanitizers),
    pytest.param("plain", "row % 4", "row % 5", "index beyond the array|too little room", marks=needs_sanitizers),
    ("tensor_core", "wait_group<1>", "wait_group<2>", r"in flight"),
    ("tensor_core", "wait_group<0>", "wait_group<1>", r"in flight"),
    ("tensor_core", "    __syncwarp();\n    for (int step", "    for (int step", f"in flight|{RACE}"),
    ("tensor_core", "    __syncwarp();\n  }\n", "  }\n", f"in flight|{RACE}"),
    ("hopper", "wait(shared.full[stage], tile / STAGES);\n", "", r"in flight|uninitialised"),
    ("hopper", "ptx::fence_async_shared();", "", r"without fence.proxy.async"),
    ("hopper", "ptx::barrier_sync(1, CONSUMERS);", "", f"uninitialised|{RACE}"),
    (
        "hopper",
        "    ptx::fence_mbarrier_init();\n  }\n  __syncthreads();",
        "  }\n",
        "not initialised|uninitialised|deadlock",
    ),
    ("hopper", "v + stage * TILE_BYTES + step * 2048", "v + 3 * TILE_BYTES", r"out of bounds|uninitialised"),
]


@pytest.mark.parametrize(("name", "old", "new", "expected"), BY_CHECK)
def test_defect_is_named_by_the_checked_mode(name: str, old: str, new: str, expected: str) -> None:
    assert re.search(rf"{LINE}.*({expected})", outcome(name, sample(name, old, new), Check.SHARED))


# AddressSanitizer reports these, and ends the process.
BY_ADDRESS = [
    ("plain", "i < N * N;", "i <= N * N;", "heap-buffer-overflow|use-after-poison"),
    ("plain", "in + blockIdx.x", "in + 4 + blockIdx.x", "heap-buffer-overflow"),
    ("plain", "shared.sums[N - 1 - t]", "*(shared.tile + N * N + t)", "use-after-poison"),
    ("tensor_core", "k + column, 16);\n  ptx", "k + column + 8, 16);\n  ptx", "heap-buffer-overflow"),
    ("tensor_core", "sums[n][i]", "*(&sums[0][0] + n * 8 + i)", "too little room|stack-buffer-overflow"),
]


def under_address_sanitizer(name: str, old: str, new: str) -> subprocess.CompletedProcess[str]:
    return run_sanitized(
        f"import test_cpu_device_defects as t\n"
        f"assert t.RUNS[{name!r}](t.sample({name!r}, {old!r}, {new!r}), t.Check.ADDRESS, 0) == 0"
    )


@needs_sanitizers
@pytest.mark.parametrize("name", RUNS)
def test_the_samples_are_right_under_address_sanitizer(name: str) -> None:
    run = under_address_sanitizer(name, "", "")
    assert run.returncode == 0, run.stderr[-4000:]


@needs_sanitizers
@pytest.mark.parametrize(("name", "old", "new", "expected"), BY_ADDRESS)
def test_defect_is_named_by_address_sanitizer(name: str, old: str, new: str, expected: str) -> None:
    run = under_address_sanitizer(name, old, new)
    assert run.returncode != 0
    assert re.search(expected, run.stderr), run.stderr[-4000:]


@needs_compiler
def test_nvrtc_refuses_what_the_host_takes() -> None:
    """A kernel's file may use what the host's headers have and its own includes lack."""
    text = 'extern "C" __global__ void own(float* x) { *x = ptx::multiply(*x, *x); }'
    device.compile(text, name="own")
    with pytest.raises(RuntimeError, match="own does not compile for sm_80"):
        hook.compile_by_nvrtc(text, "own", (8, 0))


@pytest.mark.parametrize(
    ("paths", "checked"), [("split/channels", True), ("split/rows", True), ("decode/decode", False)]
)
def test_kernels_that_no_table_lists_are_compiled_by_nvrtc(
    paths: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(hook, "compile_by_nvrtc", lambda *given: compiled.append(given))
    monkeypatch.setattr(hook, "_load", lambda *_: None)
    text = cuda_device.Text(paths, "own", {})
    own: Any = device.CpuDevice((8, 0))
    with hook.kernels_on(own):
        monkeypatch.setattr(cuda_device.Text, "source", "text")
        text.load(own, 0)
    assert compiled == ([("text", "own", (8, 0))] if checked else [])
