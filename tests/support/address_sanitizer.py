"""Python runs under AddressSanitizer, which must be loaded before anything else, in a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from cpu_device import build

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent / "cpu_device"
# Programs start at fixed places: one in four of the places that a system draws from 2^32 pages (vm.mmap_rnd_bits) lies
# where the AddressSanitizer of GCC 12 has its heap, and the process dies.
FIXED_PLACES = ("setarch", "--addr-no-randomize", "env")


@functools.cache
def _prefix() -> tuple[str, ...]:
    """Return the start of a command whose memory is laid out alike every time; plain env where that is forbidden."""
    try:
        run = subprocess.run([*FIXED_PLACES, "true"], capture_output=True, check=False)
    except OSError:
        return FIXED_PLACES[-1:]
    return FIXED_PLACES if run.returncode == 0 else FIXED_PLACES[-1:]


def run_sanitized(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code`, which can import the tests' modules; a defect ends it with a report on stderr."""
    paths = os.pathsep.join([str(SUPPORT), str(TESTS), str(TESTS.parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {"LD_PRELOAD": build.sanitizer_library(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": paths}
    command = [*_prefix(), *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)
