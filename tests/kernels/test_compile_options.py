"""Compilation without a GPU takes the options that CuPy takes on one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from cuflash.cuda import compile as cuda_compile

pytest.importorskip("cupy", reason="needs CuPy")


class _Stop(Exception):
    pass


def test_options_are_those_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generic lambdas, for one, are functions of the device for the NVRTC of CUDA 13.0 with one of them only."""
    from cupy.cuda import compiler, nvrtc

    seen: dict[str, tuple[str, ...]] = {}

    class OfCupy:
        """Notes the options with which CuPy compiles."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def compile(self, options: tuple[str, ...], *_: Any) -> None:
            seen["cupy"] = options
            raise _Stop

    def note(program: int, options: tuple[str, ...]) -> None:
        seen["cuflash"] = options
        raise _Stop

    monkeypatch.setattr(compiler, "_NVRTCProgram", OfCupy)
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda _: ("-arch=sm_90", "cubin"))
    monkeypatch.setattr(nvrtc, "compileProgram", note)
    with contextlib.suppress(_Stop):
        # A RawModule adds -ftz=true before this call.
        compiler.compile_using_nvrtc("", (*cuda_compile.OPTIONS, "-ftz=true"), "90")
    with contextlib.suppress(_Stop):
        cuda_compile.compile_for("sm_90", "", "empty")
    own = {x for x in seen["cuflash"] if not x.startswith(("-I", "--ptxas-options"))}
    assert own == {x for x in seen["cupy"] if not x.startswith("-I")}
