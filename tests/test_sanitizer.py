"""compute-sanitizer over a small set of problems on a GPU: memory accesses, and races in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuflash.kernels import WITHOUT_WGMMA

SCRIPT = Path(__file__).with_name("sanitized_cases.py")
MEMCHECK = ("memcheck", "ERROR SUMMARY: 0 errors")
# It takes every copy by TMA for a race with those who wait for it at an mbarrier, in a program of ten lines, too: the
# kernels of Hopper have the CPU device's random order of threads and late copies instead.
RACECHECK = ("racecheck", "RACECHECK SUMMARY: 0 hazards")


@pytest.mark.gpu
@pytest.mark.parametrize(("tool", "clean", "without_wgmma"), [(*MEMCHECK, ""), (*MEMCHECK, "1"), (*RACECHECK, "1")])
def test_sanitizer_finds_nothing(tool: str, clean: str, without_wgmma: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    environment = {**os.environ, WITHOUT_WGMMA: without_wgmma}
    script = [sys.executable, str(SCRIPT)]
    # Compiled and cached beforehand, as compilers are slow under the tool.
    for command in (script, [sanitizer, "--tool", tool, *script]):
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert clean in run.stdout, run.stdout[-2000:]
