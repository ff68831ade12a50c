"""Types as a user's program sees them: mypy and pyright read one that is written against the public names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("typed_program.py")
ADAPTERS = Path(__file__).with_name("typed_adapters.py")
PROGRAMS = pytest.mark.parametrize("program", [PROGRAM, ADAPTERS], ids=["functions", "adapters"])


def check(command: list[str], program: Path, folder: Path) -> None:
    """Run a type checker away from the checkout, which it finds as a library is found."""
    if program == ADAPTERS and (find_spec("thinc") is None or find_spec("autograd") is None):
        pytest.skip("Thinc or HIPS autograd is not installed")
    shutil.copy(program, folder)
    command = [*command, program.name]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.whole
@PROGRAMS
def test_mypy(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    options = ["--strict", "--follow-imports=silent", "--explicit-package-bases", "--python-executable", sys.executable]
    check([sys.executable, "-m", "mypy", *options], program, tmp_path)


@pytest.mark.whole
@PROGRAMS
def test_pyright(program: Path, tmp_path: Path) -> None:
    """The one that brings its Node.js with its wheel."""
    if find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    options = f'{{"typeCheckingMode": "strict", "extraPaths": ["{ROOT}"], "reportMissingModuleSource": false}}'
    (tmp_path / "pyrightconfig.json").write_text(options, encoding="utf-8")
    check([sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable], program, tmp_path)
