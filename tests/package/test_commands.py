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
from cuflash.tools import bench, info
from cuflash.tools.bench.cells import Grid, cells_of
from cuflash.tools.info import missing

COMMANDS = ("info", "compile", "tune", "bench", "demo")


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
    words = capsys.readouterr().err
    assert all(command in words for command in COMMANDS)
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
    assert main(["info", "--dtype", "bfloat16", "--head-dim", "128", "--causal", "--arch", "sm_90a"]) == 0
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
    assert main(["compile", "--arch", "sm_85", "sm_80"]) == 2  # of a known generation, but there is none
    error = capsys.readouterr().err
    assert error.startswith("sm_85: NVRTC") and "sm_80" in error
    assert main(["compile", "--arch", "sm_80", "--dtype", "float64", "--kernel", "backward_bias", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines and all(line["good"] and line["arch"] == "sm_80" for line in lines)


def test_compile_without_the_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy is there, and the run-time compiler's library is not, as after `pip install cupy-cuda13x` alone."""
    cupy = pytest.importorskip("cupy")

    def absent() -> None:
        raise RuntimeError("Failure finding libnvrtc\nin many places")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", absent)
    assert main(["compile", "--arch", "sm_80"]) == 2
    error = capsys.readouterr().err
    assert "needs NVRTC" in error and "cuflash[cuda13]" in error and len(error.splitlines()) == 1


def test_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["bench", "--device", "gpu"]) == 2
    assert main(["demo", "--device", "gpu"]) == 2
    assert main(["compile"]) == 2
    assert capsys.readouterr().err.count("CuPy") == 3


def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(info, "_absent", lambda name: name == "cupy")


def test_info_without_a_gpu_begins_with_three_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu_here(monkeypatch)
    assert main(["info"]) == 0
    works, does_not, install, empty, *_ = capsys.readouterr().out.split("\n")
    assert works.startswith("works here:") and "NumPy arrays" in works and "threads" in works
    assert does_not.startswith("does not:") and "CuPy is not installed" in does_not
    assert install.startswith("to install:") and "cuflash[cuda13]" in install
    assert not empty
    assert main(["info", "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_info_without_a_compiler_leaves_out_what_nobody_there_can_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu_here(monkeypatch)
    assert main(["info", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "on the CPU" in printed and "NumPy, tiled" in printed and "--arch sm_80" in printed
    assert not any(word in printed for word in ("Hopper", "mma.sync", "candidates for"))
    for given in (["--arch", "sm_90a"], ["--strides", "unaligned"]):
        assert main(["info", "--dtype", "bfloat16", *given]) == 0
        printed = capsys.readouterr().out
        assert ("wgmma" in printed or "mma.sync" in printed) and "candidates for" in printed


def test_commands_that_compile_say_one_thing_of_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu_here(monkeypatch)
    said = []
    for command in ("compile", "tune"):
        assert main([command, "--arch", "sm_80"]) == 2
        said.append(capsys.readouterr().err.replace(command, "COMMAND"))
    assert said[0] == said[1] == f"cuflash COMMAND needs CuPy: {missing()['CuPy']}\n"


@pytest.mark.parametrize(
    ("its", "words"),
    [
        ({"nvrtc": RuntimeError("not found")}, ("run-time compiler", 'pip install "cuflash[cuda13]"')),
        ({"devices": CUDARuntimeError("no driver")}, ("finds no GPU", "driver")),
    ],
)
def test_the_three_lines_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, its: dict[str, Any], words: tuple[str, str]
) -> None:
    cupy_with(monkeypatch, **its)
    lines = info.without_gpu(missing())
    assert len(lines) == 3 and words[0] in lines[1] and words[1] in lines[2]


def kernels_of(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, str]:
    assert main(["info", "--json", *given]) == 0
    found: dict[str, str] = json.loads(capsys.readouterr().out)["kernels"]
    return found


def test_info_names_the_kernels_of_an_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    def of(*given: str) -> dict[str, str]:
        return kernels_of(capsys, "--dtype", "bfloat16", "--arch", "sm_75", "sm_80", "sm_90a", *given)

    plain = of()
    assert set(plain) == {
        f"{name} on sm_{arch}" for name in ("forward", "backward") for arch in ("75", "80", "90a")
    } | {"on the CPU"}
    assert "portable" in plain["forward on sm_75"]  # which multiplies no bfloat16
    assert "mma.sync" in plain["forward on sm_80"] and "wgmma" in plain["backward on sm_90a"]
    unaligned = of("--strides", "unaligned")
    assert "mma.sync" in unaligned["forward on sm_90a"] and "mma.sync" in unaligned["backward on sm_90a"]
    assert "gradient of a bias on sm_80" in of("--bias")
    assert of("--deterministic") != plain == of("--sink")
    float32 = {
        name: kernels_of(capsys, "--arch", "sm_90a", *given)["forward on sm_90a"]
        for name, given in {"exact": (), "tf32": ("--precision", "tf32")}.items()
    }
    assert "float32's error" in float32["exact"] and "TF32's error" in float32["tf32"]
    # Strides that are not aligned are a question about architectures.
    assert set(kernels_of(capsys, "--strides", "unaligned")) >= {f"forward on {arch}" for arch in info.ARCHITECTURES}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("info --arch sm_9", "sm_80 or sm_90a, got 'sm_9'"),
        *(
            (f"{command} --arch {arch}", f"architecture from sm_70 to sm_121, such as sm_80 or sm_90a, got '{arch}'")
            for command in ("info", "compile", "tune")
            for arch in ("sm_50", "sm_999", "hopper")
        ),
        ("demo --out a.foo", "expected a file that ends in .png, .svg, .pdf, got 'a.foo'"),
        ("bench --picture x", "expected a file that ends in .png, .svg, .pdf, got 'x'"),
        ("info --arch 80", "got '80'"),
        ("info --seqlen 0", "expected at least 1, got 0"),
        ("info --head-dim wide", "expected an integer, got 'wide'"),
        ("info --precision half", "tf32"),
        ("info --strides 8", "unaligned"),
        ("compile --jobs 0", "expected at least 1, got 0"),
        ("tune --jobs 0", "expected at least 1, got 0"),
        ("tune --rounds 0", "expected at least 1, got 0"),
        ("tune --count 0", "expected at least 1, got 0"),
        ("tune --seed x", "invalid int value: 'x'"),
        ("tune --arch 80", "got '80'"),
        ("tune --dtype half", "choose from"),
        ("bench --rounds 0", "expected at least 1, got 0"),
        ("bench --budget-ms -5", "expected a number above 0, got -5"),
        ("bench --seqlen 1k", "expected an integer, got '1k'"),
        ("bench --suite fast", "choose from"),
        ("demo --steps many", "expected an integer, got 'many'"),
    ],
)
def test_bad_arguments(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*given.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_compile_counts_and_begins_with_what_a_call_asks_first(capsys: pytest.CaptureFixture[str]) -> None:
    given = "compile --arch sm_80 --dtype float64 --kernel backward_bias --jobs 1"
    assert main(given.split()) == 0
    printed = capsys.readouterr()
    count = int(printed.err.split()[0])
    lines = printed.out.splitlines()[:-1]
    assert [line.split()[0] for line in lines] == [f"[{n}/{count}]" for n in range(1, count + 1)]
    from cuflash.tools import compile as command

    every = SimpleNamespace(dtype=("bfloat16",), kernel=None)
    order = [config.entry for config in command.configs(every, (9, 0), 227 << 10, True)]  # type: ignore[arg-type]
    first = {name: order.index(name) for name in ("forward_sm90", "forward_sm80", "forward") if name in order}
    assert list(first) == sorted(first, key=first.__getitem__) and len(first) == 3


def test_bench_counts_cells_and_warns_of_suites_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_gpu_here(monkeypatch)
    small = "--dtype float32 --tokens 64 --width 16 --head-dim 8 --seqlen 16 32 64 --peers cuflash --budget-ms 1"
    assert main(["bench", "--suite", "dense", "--quick", *small.split()]) == 0
    printed = capsys.readouterr().err
    assert "warning: on the CPU a cell of dense" in printed and "--suite cpu" in printed
    named = "3 cells: d8 full n16, d8 full n64, d8 causal n64; a line tells when one is done"
    before, _, after = printed.partition(named)
    assert after and "[1/3]" not in before
    assert "[1/3] d8 full n16" in printed and "[3/3] d8 causal n64" in printed and "left" in printed
    cells = cells_of("dense", Grid())
    assert bench._some(cells, False) == cells
    assert bench._some(cells, True)[::2] == [cells[0], cells[-1]]
