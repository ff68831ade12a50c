"""compute-sanitizer finds no wrong access and no race in shared memory over a small set of problems on a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import devices
import pytest

from cuflash.cuda.device import WITHOUT_WGMMA

SCRIPT = Path(devices.__file__).with_name("sanitized_cases.py")
BLIND_SPOTS = Path(devices.__file__).with_name("racecheck_blind_spots.py")
MEMCHECK = ("memcheck", "ERROR SUMMARY: 0 errors")
# Hopper's kernels synchronise in two ways that it does not see (BLIND_SPOTS): the CPU device's random order of threads
# and late copies stand in there.
RACECHECK = ("racecheck", "RACECHECK SUMMARY: 0 hazards")

pytestmark = pytest.mark.gpu


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    return found


# Each group of SCRIPT's problems is one process, so that several can run side by side.
GROUPS = (
    ("half", "half 128", "half 192", "half 256"),
    ("packed", "window", "one query"),
    ("blocks", "bias", "mask", "dropout", "deterministic"),
    ("half, everything",),
    ("float", "float 192", "tf32"),
    ("float, everything",),
    ("double", "double 256", "double, window"),
    ("double, everything",),
)


@pytest.mark.parametrize("names", GROUPS, ids=" and ".join)
@pytest.mark.parametrize(("tool", "clean", "without_wgmma"), [(*MEMCHECK, ""), (*MEMCHECK, "1"), (*RACECHECK, "1")])
def test_sanitizer_finds_nothing(tool: str, clean: str, without_wgmma: str, names: tuple[str, ...]) -> None:
    # The script imports what this process does, whether anything is installed or not.
    path = os.pathsep.join(folder for folder in sys.path if folder)
    environment = {**os.environ, "PYTHONPATH": path, WITHOUT_WGMMA: without_wgmma}
    script = [sys.executable, str(SCRIPT), *names]
    # Compiled and cached beforehand, as compilers are slow under the tool.
    for command in (script, [sanitizer(), "--tool", tool, *script]):
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert clean in run.stdout, run.stdout[-2000:]


def test_every_problem_is_in_a_group() -> None:
    import sanitized_cases

    assert sorted(name for names in GROUPS for name in names) == sorted(sanitized_cases.CASES)


@pytest.mark.parametrize(
    ("entry", "is_seen"), [("by_all", True), ("by_one_of_a_warp", False), ("by_bar_arrive", False)]
)
def test_what_racecheck_sees(entry: str, is_seen: bool) -> None:
    """It takes some right programs for wrong ones; once it does not, it is to see Hopper's kernels."""
    command = [sanitizer(), "--tool", "racecheck", sys.executable, str(BLIND_SPOTS), entry]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert (RACECHECK[1] in run.stdout) == is_seen, run.stdout[-2000:]
