"""A kernel that spills registers is refused for the plan's next candidate, and no later process compiles it."""

from __future__ import annotations

import argparse
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import gaussian_case
from compiling import needs_compiler, source
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from devices import Device, forget_launches
from spilling import SAMPLES, Nothing, sample

import cuflash
from cuflash.cuda import ahead, refusals
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import device as cuda_device
from cuflash.gpu import choose, launch
from cuflash.hardware import smem_limit
from cuflash.plan.config import KernelConfig
from cuflash.plan.listing import families as listing
from cuflash.plan.portable import kernels as plan_portable
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.problem.attention_problem import accum_of
from cuflash.rules.form import trace_rules
from cuflash.tools import info

needs_cpu_device = pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
HOST = Device("numpy", np)
COMPILER = "sm_80, NVRTC 1.2, driver 3"


class Spilling(CpuDevice):
    """A GPU whose kernels run nothing, and whose compiler spills where a tile has too many queries and keys."""

    def __init__(self, capability: tuple[int, int], most: int, compiler: str = COMPILER) -> None:
        super().__init__(capability, num_sms=4)
        self.compiler, self.most, self.loaded = compiler, most, [0]

    def load(self, source: str, entry: str, smem_bytes: int, options: Sequence[str] = ()) -> Any:
        size = {name: int(n) for name, n in re.findall(r"constexpr int (BLOCK_[MN]) = (\d+);", source)}
        elements = size.get("BLOCK_M", 0) * size.get("BLOCK_N", 0)
        self.loaded.append(elements)
        kernel = Nothing()
        kernel.local_bytes = elements - self.most if elements > self.most else 0
        return kernel


def forget() -> None:
    """Begin a process anew, as far as kernels are concerned; no other thread notes what it refuses any more."""
    with ahead._pool._changed:
        ahead._pool._waiting.clear()
        ahead._pool._later.clear()
        ahead._pool._changed.notify_all()
    ahead.wait()
    forget_launches()
    for kept in (cuda_device._kernels, cuda_device._spilled, choose._chosen):
        kept.clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setattr(ahead, "IDLE_SECONDS", 0.03)
    forget()
    yield tmp_path / "cache"
    forget()


def tiles(device: Spilling, dtype: str = "float16", **options: Any) -> dict[str, str]:
    """Return the tiles of both passes by kernel, in a new process."""
    forget()
    q = np.zeros((1, 300, 2, 64), dtype)
    with hook.kernels_on(device):
        out, backward = cuflash.attention_vjp(q, q, q, **options)
        backward(out)
    return {x.kernel.entry: x.kernel.config.tile for x in launch._launches.values() if x.kernel.visits_tiles}


CASES = {  # capability, dtype, elements of a tile that do not spill, and the kernels whose first tile has more
    "portable": ((7, 5), "float32", 64 * 64, {"forward", "backward_dq", "backward_dkv"}),
    "mma.sync": ((8, 0), "float16", 64 * 64, {"forward_sm80"}),
    "parts by mma.sync": ((8, 0), "float32", 64 * 32, {"parts_forward"}),
    "wgmma": ((9, 0), "float16", 64 * 128, {"forward_sm90", "backward_sm90"}),
    "parts by wgmma": ((9, 0), "float32", 64 * 64, {"split_forward", "split_dq", "split_dkv"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_next_candidate_runs_and_is_remembered(name: str, folder: Path) -> None:
    capability, dtype, most, expected = CASES[name]
    without, first = tiles(Spilling(capability, 1 << 20), dtype), Spilling(capability, most)
    assert not folder.exists()
    chosen = tiles(first, dtype)
    assert {entry for entry in chosen if chosen[entry] != without[entry]} == expected
    assert all(m * n <= most for m, n in (map(int, tile.split("x")[:2]) for tile in chosen.values()))
    assert max(first.loaded) > most
    # A later process takes the same kernels, and compiles none of those that were refused.
    later = Spilling(capability, most)
    assert tiles(later, dtype) == chosen
    assert 0 < max(later.loaded) <= most
    # Another compiler is asked anew.
    other = Spilling(capability, 1 << 20, "another")
    assert tiles(other, dtype) == without
    found = list(refusals.every())
    assert {refusal.kernel.split()[0] for refusal in found} == expected
    assert all(refusal.compiler == COMPILER and refusal.local_bytes > 0 for refusal in found)


class Running(Spilling):
    """The same GPU with kernels that run, on the CPU."""

    def load(self, source: str, entry: str, smem_bytes: int, options: Sequence[str] = ()) -> Any:
        kernel = CpuDevice.load(self, source, entry, smem_bytes, options)
        kernel.local_bytes = super().load(source, entry, smem_bytes, options).local_bytes
        return kernel


@needs_cpu_device
@pytest.mark.parametrize("name", CASES)
def test_later_candidates_compute_the_same(name: str) -> None:
    capability, dtype, most, expected = CASES[name]
    options = {"precision": "tf32"} if dtype == "tf32" else {}
    case = gaussian_case(
        0, "float32" if dtype == "tf32" else dtype, (150, 200), (4, 2), (64, 64), 1, causal=True, **options
    )
    with hook.kernels_on(Running(capability, most)):
        out, lse = case.on(HOST).forward()
        case.assert_forward(out, lse)
        case.assert_gradients(case.on(HOST).backward(out, lse))
    assert {refusal.kernel.split()[0] for refusal in refusals.every()} == expected


def test_where_all_spill_the_least_is_taken() -> None:
    device = Spilling((8, 0), 1)
    assert tiles(device)["forward_sm80"] == "64x32"
    assert len(set(device.loaded)) > 2


FAMILIES = {  # of GPUs where all kernels spill: capability, dtype, the kernels of another family that take a rule
    "wgmma": ((9, 0), "float16", {"forward_sm80", "backward_sm80"}),
    "parts by wgmma": ((9, 0), "float32", {"forward", "backward_dq", "backward_dkv"}),
    "parts by mma.sync": ((8, 0), "float32", {"forward", "backward_dq", "backward_dkv"}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rule_that_spills_everywhere_takes_the_next_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ahead.SWITCH, "0")  # other threads would prepare the first family's kernels
    capability, dtype, expected = FAMILIES[name]
    rule: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s * j}
    first = Spilling(capability, 1)
    chosen = tiles(first, dtype, **rule)
    assert set(chosen) == expected
    # Without a rule the family's own forward kernel runs, and spills; gradients take the next family all the same.
    own = set(tiles(Spilling(capability, 1), dtype))
    assert own & expected == {entry for entry in expected if entry.startswith("backward")}
    # A later process compiles what it takes alone.
    later = Spilling(capability, 1)
    assert tiles(later, dtype, **rule) == chosen
    assert set(later.loaded) == {0, *(m * n for m, n in (map(int, tile.split("x")[:2]) for tile in chosen.values()))}


def test_only_kernels_of_several_candidates_are_asked() -> None:
    class Kernel:
        def spilled_bytes(self, device: Any) -> int:
            raise AssertionError("compiled")

    device: Any = Spilling((8, 0), 0)
    cpu: Any = CpuDevice((8, 0))
    only = (Kernel(),)
    assert choose.choose(device, [only]) is only
    assert choose.choose(device, []) == ()
    assert choose.choose(cpu, [only, (Kernel(),)]) is only
    assert choose.choose(cpu, [only], others_serve=True) is only
    with pytest.raises(AssertionError, match="compiled"):
        choose.choose(device, [only], others_serve=True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"kernel": "x"}', '{"kernel": "", "compiler": "", "local_bytes": "x"}']
)
def test_a_note_that_is_not_whole_says_nothing(text: str, folder: Path) -> None:
    refusals.note("source", refusals.Refusal("kernel", COMPILER, 8))
    assert refusals.known("source", COMPILER) == 8
    assert refusals.known("other", COMPILER) == refusals.known("source", "other") == 0
    (file,) = folder.iterdir()
    file.write_text(text)
    assert refusals.known("source", COMPILER) == 0 and list(refusals.every()) == []
    refusals.note("source", refusals.Refusal("kernel", COMPILER, 8))
    assert refusals.known("source", COMPILER) == 8


def test_many_write_one_note(folder: Path) -> None:
    refusal = refusals.Refusal("kernel", COMPILER, 8)
    threads = [threading.Thread(target=refusals.note, args=("source", refusal)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [json.loads(file.read_text()) for file in folder.iterdir()] == [refusal._asdict()]


def test_without_a_folder_the_choice_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("no folder")
    for _ in range(2):
        device = Spilling((8, 0), 64 * 64)
        assert tiles(device)["forward_sm80"] == "64x64"
        assert max(device.loaded) > 64 * 64
    folder.unlink()
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    tiles(Spilling((8, 0), 64 * 64))
    assert not folder.exists()


def test_info_names_what_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tiles(Spilling((8, 0), 64 * 64))
    parser = argparse.ArgumentParser()
    info.add_arguments(parser)
    assert info.run(parser.parse_args([])) == 0
    refused = [x for x in capsys.readouterr().out.splitlines() if x.startswith("refused: ")]
    assert len(refused) == len(set(refused))  # sources that differ may have the same words
    (line,) = [x for x in refused if x.startswith("refused: forward_sm80 __half d64/64 128x128")]
    assert f"spills {128 * 128 - 64 * 64} bytes a thread ({COMPILER})" in line
    info.run(parser.parse_args(["--json"]))
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert {refusal["compiler"] for refusal in refused} == {COMPILER}


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_cubin_tells_its_local_memory(name: str, arch: str) -> None:
    report = cuda_compile.compile_for(arch, sample(name), "sample")
    assert (report.spill_bytes > 0) == (name == "spills")
    assert (report.local_bytes > 0) == (name != "nothing")
    assert report.local_bytes == 128 or name != "an array"


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_sines_have_local_memory_by_design(dtype: str) -> None:
    problem = listing.problem_of(dtype, 64, 64, ("has_score_mod",))
    config: KernelConfig = (
        plan_portable.plan(problem, "forward")[0]
        if dtype == "float64"
        else sm80_forward.forward(problem, True, (8, 0), smem_limit("sm_80"))[-1]
    )
    for function in (lambda s, b, h, i, j: np.sin(s) + np.cos(s * j), lambda s, b, h, i, j: s * j):
        rules = trace_rules(function, None, (), accum_of(dtype))
        own = replace(config, rules=rules)
        report = cuda_compile.compile_for("sm_80", source(own), "forward")
        assert report.spill_bytes == 0 and report.local_bytes == own.local_bytes
