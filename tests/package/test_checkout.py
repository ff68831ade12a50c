"""A checkout works as it is, from its parent folder or by PYTHONPATH, whether anything is installed or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuflash

ROOT = Path(__file__).parents[2]
# Folders of PYTHONPATH are searched without what installers leave in them, so that nothing counts as installed.
LIBRARIES = str(Path(np.__file__).parent.parent)
USES_ALL = """
import numpy as np
import cuflash
from cuflash.cuda import source
from cuflash.examples import tape
x = np.ones((1, 3, 2, 8), np.float32)
assert np.allclose(cuflash.attention(x, x, x), 1) and cuflash.BlockMask
assert "struct Mask" in source._read("rules/mask.cuh")
print(cuflash.__file__, tape.__file__, cuflash.cuda_src.__file__)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy this checkout into a folder of the package's name."""
    folder = tmp_path_factory.mktemp("projects") / "cuflash"
    for part in ("cuflash", "cuda_src", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", folder)
    return folder


def python(*arguments: str, folder: Path, path: str, is_installed: bool) -> str:
    without_site = [] if is_installed else ["-S"]
    command = [sys.executable, *without_site, *arguments]
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def assert_works(checkout: Path, folder: Path, path: str, is_installed: bool) -> None:
    parts = ("cuflash/__init__.py", "examples/tape.py", "cuda_src/__init__.py")
    found = python("-c", USES_ALL, folder=folder, path=path, is_installed=is_installed)
    assert found.split() == [str(checkout / part) for part in parts]
    version = python("-m", "cuflash", "--version", folder=folder, path=path, is_installed=is_installed)
    assert version == f"cuflash {cuflash.__version__}"


@pytest.mark.parametrize("is_installed", [False, True])
def test_the_parent_folder_of_a_checkout_finds_it(checkout: Path, is_installed: bool) -> None:
    assert_works(checkout, checkout.parent, "" if is_installed else LIBRARIES, is_installed)


@pytest.mark.parametrize("is_installed", [False, True])
def test_pythonpath_finds_a_checkout(checkout: Path, tmp_path: Path, is_installed: bool) -> None:
    assert_works(checkout, tmp_path, os.pathsep.join([str(checkout), LIBRARIES]), is_installed)


def test_a_checkout_of_another_name_is_no_package_of_that_name(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(checkout, tmp_path / "attention")
    code = "import sys, attention; print('cuflash' in sys.modules, hasattr(attention, 'BlockMask'))"
    assert python("-c", code, folder=tmp_path, path="", is_installed=False) == "False False"
