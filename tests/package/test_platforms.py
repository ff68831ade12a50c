"""The library asks the right things of operating systems that this machine does not run."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compile_sm70
import numpy as np
import pytest

from cuflash.cpu import threads
from cuflash.cuda import driver
from cuflash.cuda import source as cuda_source

# Each system has a sys.platform, the driver's library, and whether BLAS is found by the module that links to it.
SYSTEMS = {"win32": ("nvcuda.dll", False), "linux": ("libcuda.so.1", True)}


@pytest.fixture(autouse=True, params=SYSTEMS)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("sys.platform", request.param)
    for cached in (driver.driver, threads._blas_functions):
        cached.cache_clear()
    yield request.param
    for cached in (driver.driver, threads._blas_functions):
        cached.cache_clear()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give the stand-ins for libraries that are opened, by file name, and the names that were asked for."""
    libraries: dict[str, Any] = {}

    def open_library(path: Any) -> Any:
        library = libraries.get(Path(path).name)
        if library is None:
            raise OSError(path)
        return library

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    return libraries


def test_driver(system: str, opened: dict[str, Any]) -> None:
    opened[SYSTEMS[system][0]] = library = object()
    assert driver.driver() is library


def test_threads_of_blas(system: str, opened: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's wheels have a module that calls BLAS, and BLAS in a folder next to the package."""
    package, libraries = tmp_path / "numpy", tmp_path / "numpy.libs"
    libraries.mkdir()
    name = "libscipy_openblas64_-0123abcd" + (".dll" if system == "win32" else ".so")
    (libraries / name).touch()
    (libraries / "msvcp140.dll").touch()
    monkeypatch.setattr(np, "__file__", str(package / "__init__.py"))
    blas = SimpleNamespace(scipy_openblas_get_num_threads64_=lambda: 3, scipy_openblas_set_num_threads64_=print)
    extension = Path(importlib.import_module("numpy._core._multiarray_umath").__file__ or "")
    opened.update({name: blas, extension.name: blas if SYSTEMS[system][1] else SimpleNamespace()})
    functions = threads._blas_functions()
    assert functions is not None and functions[0]() == 3


def test_no_blas_that_we_know(opened: dict[str, Any]) -> None:
    assert threads._blas_functions() is None


def test_python_of_an_environment(system: str) -> None:
    folder = "Scripts" if system == "win32" else "bin"
    assert compile_sm70.python_of(Path("env")) == Path("env", folder, "python")


def test_sources_are_the_same_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkout may have other line endings, but the kernels' key and the lines of messages are of the text."""
    text = cuda_source._read("rules/score.cuh")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/score.cuh").write_bytes(text.replace("\n", "\r\n").encode())
    monkeypatch.setattr(cuda_source, "files", lambda package: tmp_path)
    assert cuda_source._read("rules/score.cuh") == text
