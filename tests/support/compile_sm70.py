"""Compile every kernel for Volta (sm_70), which NVRTC 13 no longer knows, in an environment of its own with CUDA 12.

    python tests/support/compile_sm70.py [FOLDER]

makes a virtual environment in FOLDER (default: a temporary one), installs cuflash with the extra cuda12 there, and runs
``python -m cuflash compile --arch sm_70``; its exit status is that command's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Return 0 if every kernel compiles for sm_70 without spills."""
    if len(sys.argv) > 1:
        return compile_in(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        return compile_in(Path(folder))


def python_of(environment: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def compile_in(folder: Path) -> int:
    """Build the environment and compile in it."""
    venv.create(folder, with_pip=True)
    python = python_of(folder)
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{ROOT}[cuda12]"], check=True)
    return subprocess.run([python, "-m", "cuflash", "compile", "--arch", "sm_70"], cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
