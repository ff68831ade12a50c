"""compute-sanitizer over a small set of problems on a GPU: memory accesses and races in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitized_cases.py")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "clean"), [("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "RACECHECK SUMMARY: 0 hazards")]
)
def test_sanitizer_finds_nothing(tool: str, clean: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    command = [sanitizer, "--tool", tool, sys.executable, str(SCRIPT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert clean in run.stdout, run.stdout[-2000:]
