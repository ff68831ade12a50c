"""The command line gives words to a person, and JSON and exit codes to a program."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.__main__ import main
from cuflash.tools import info
from cuflash.tools.info import missing

COMMANDS = ("info", "compile", "bench", "demo")


def exit_code(*argv: str) -> int:
    """Return the exit code, also where argparse leaves by SystemExit."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    assert f"usage: python -m cuflash {command}" in capsys.readouterr().out


def test_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 2
    assert exit_code("train") == 2
    assert exit_code("--help") == 0
    words = capsys.readouterr().out
    assert all(command in words for command in COMMANDS)
    for command in COMMANDS:
        assert exit_code(command, "--no-such-option") == 2
    assert exit_code("info", "--head-dim", "1025") == 2
    assert "1025" in capsys.readouterr().err
    assert exit_code("demo", "--steps", "0") == 2
    assert "expected at least 1, got 0" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough() -> None:
    """A reader may end early, as ``python -m cuflash info | head -1`` does."""
    with subprocess.Popen(
        [sys.executable, "-m", "cuflash", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        words = process.stderr.read()
    assert process.returncode == 0 and not words


def test_info_is_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--dtype", "bfloat16", "--head-dim", "128", "--causal"]) == 0
    words = capsys.readouterr().out
    assert "numpy" in words and "forward" in words and "missing" in words
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["missing"] == missing()
    assert "forward" in facts["kernels"]


def test_info_is_of_a_sequence_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    def tiles(*given: str) -> str:
        assert main(["info", "--dtype", "bfloat16", "--head-dim", "128", "--json", *given]) == 0
        kernel: str = json.loads(capsys.readouterr().out)["kernels"]["forward on Hopper"]
        return kernel.partition("tiles of ")[2].partition(",")[0]

    assert tiles() == tiles("--seqlen", "16384") != tiles("--seqlen", "1")


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(info, "_absent", lambda name: name in names)


def test_says_how_to_get_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hide(monkeypatch, "cupy", "ml_dtypes", "tqdm")
    lacks = missing()
    assert "cuflash[cuda13]" in lacks["CuPy"] and "cuflash[cuda12]" in lacks["CuPy"]
    assert "cuflash[bf16]" in lacks["ml_dtypes"] and "cuflash[demo]" in lacks["tqdm"]
    assert main(["info"]) == 0
    assert "missing: CuPy:" in capsys.readouterr().out


class CUDARuntimeError(RuntimeError):
    """A stand-in for CuPy's error."""


def cupy_with(monkeypatch: pytest.MonkeyPatch, **its: Any) -> None:
    """Stand in for CuPy on a machine with a Hopper GPU, but for what is given."""

    def value(name: str, otherwise: Any) -> Any:
        def call(*_: Any) -> Any:
            result = its.get(name, otherwise)
            if isinstance(result, Exception):
                raise result
            return result

        return call

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=value("devices", 1),
        driverGetVersion=value("driver", 13000),
    )
    cuda = SimpleNamespace(
        nvrtc=SimpleNamespace(getVersion=value("nvrtc", (13, 0))),
        runtime=runtime,
        Device=lambda index: SimpleNamespace(compute_capability="90"),
        device=SimpleNamespace(get_cublas_handle=value("cublas", 1)),
    )
    hide(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(
    ("its", "thing", "words"),
    [
        ({"nvrtc": RuntimeError("not found")}, "NVRTC", "cuflash[cuda13]"),
        ({"devices": CUDARuntimeError("no driver")}, "GPU", "nvidia.com/drivers"),
        ({"driver": 12040}, "driver", "cuflash[cuda12]"),
        ({"nvrtc": (12, 8), "driver": 12080}, "NVRTC 12.9", ">=12.9,<13"),
        ({"cublas": ImportError("libcublas")}, "cuBLAS", "cuflash[cuda13-full]"),
    ],
)
def test_says_how_to_mend(monkeypatch: pytest.MonkeyPatch, its: dict[str, Any], thing: str, words: str) -> None:
    cupy_with(monkeypatch, **its)
    lacks = missing()
    assert list(lacks) == [thing]
    assert words in lacks[thing]


def test_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy_with(monkeypatch)
    assert missing() == {}


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_compile_names_the_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_12", "sm_80"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sm_12: NVRTC") and "sm_80" in error
    assert main(["compile", "--arch", "sm_80", "--dtype", "float64", "--kernel", "backward_bias", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines and all(line["good"] and line["arch"] == "sm_80" for line in lines)


def test_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["bench", "--device", "gpu"]) == 2
    assert main(["demo", "--device", "gpu"]) == 2
    assert main(["compile"]) == 2
    assert capsys.readouterr().err.count("CuPy") == 3
