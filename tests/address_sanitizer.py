"""Python under AddressSanitizer, which must be loaded before anything else: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cpu_device import build

TESTS = Path(__file__).resolve().parent


def run_sanitized(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code`, which can import the tests' modules; a defect ends it with a report on stderr."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    variables = {"LD_PRELOAD": build.sanitizer_library(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
