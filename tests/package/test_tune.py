"""`info` lists a problem's candidates, and `tune` compiles and times them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_device import device as cpu_device
from cpu_device.device import CpuDevice

import cuflash
from cuflash.__main__ import main
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import refusals
from cuflash.gpu.ahead import Rehearsal
from cuflash.gpu.kernels import source_of
from cuflash.hardware import smem_limit
from cuflash.tools import candidates, info, problems, tune
from cuflash.tools.bench import clock as clocks

COMPILER = "sm_80, NVRTC 1.2, driver 3"


def listed(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, list[dict[str, Any]]]:
    assert main(["info", "--json", *given]) == 0
    found: dict[str, list[dict[str, Any]]] = json.loads(capsys.readouterr().out)["candidates"]
    return found


def one_is_chosen(found: list[dict[str, Any]]) -> None:
    answers = {(own["direction"], own["answer"]) for own in found}
    chosen = [(own["direction"], own["answer"]) for own in found if own["chosen"]]
    assert sorted(chosen) == sorted(answers)


@pytest.mark.parametrize(
    ("given", "arch", "families"),
    [
        ("--dtype bfloat16 --causal --heads 4", "sm_90a", {"wgmma"}),
        ("--bias --mask --alibi --dropout", "sm_90a", {"wgmma on float16 parts", "mma.sync on float16 parts"}),
        ("--dtype float16 --block-mask --bias --deterministic", "sm_80", {"mma.sync"}),
        ("--dtype float64 --window --sink", "sm_80", {"mma.sync on float64"}),
        ("--precision tf32 --softcap", "sm_86", {"mma.sync on float16 parts"}),
        ("--dtype bfloat16 --strides unaligned", "sm_90a", {"mma.sync"}),
        ("--dtype bfloat16 --packed --batch 3", "sm_75", {"portable"}),
        ("--dtype float16 --seqlen 4 --seqlen-k 9000 --heads 8 --heads-kv 2", "sm_90a", {"wgmma"}),
        ("--head-dim 512", "sm_100", {"portable"}),
    ],
)
def test_info_lists_candidates(given: str, arch: str, families: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    ((name, found),) = listed(capsys, *given.split(), "--arch", arch).items()
    assert name == arch and {own["family"] for own in found} == families
    one_is_chosen(found)
    assert {own["direction"] for own in found} == {"forward", "backward"}
    assert all(own["smem_bytes"] <= smem_limit(arch) and own["refused_bytes"] is None for own in found)


def test_info_predicts_what_hopper_compares(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dtype", "bfloat16", "--head-dim", "128", "--seqlen", "2048", "--arch", "sm_90a"]
    forward = [own for own in listed(capsys, *given)["sm_90a"] if own["direction"] == "forward"]
    (chosen,) = (own for own in forward if own["chosen"])
    assert chosen["predicted_us"] == min(own["predicted_us"] for own in forward)
    assert len({own["num_splits"] for own in forward}) > 3
    assert len({own["kernels"][0]["tile"] for own in forward}) > 2
    # The plan has nothing in microseconds with an option, and weights of tiles of mma.sync.
    assert {own["predicted_us"] for own in listed(capsys, *given, "--softcap")["sm_90a"]} == {None}
    weights = [own["relative_weight"] for own in listed(capsys, "--dtype", "float16", "--arch", "sm_80")["sm_80"]]
    assert weights[0] == 1 and max(weights) > 1.5


@pytest.mark.parametrize(
    "given",
    [
        "--head-dim 128 --heads 16 --seqlen 2048 --causal",
        "--head-dim 128 --heads 16 --seqlen 2048 --bias",
        "--seqlen 1 --seqlen-k 30000 --heads 8 --heads-kv 2",
        "--batch 64 --heads 4 --seqlen 100 --softcap --deterministic",
        "--dtype float32 --mask --block-mask",
    ],
)
def test_info_says_one_thing_in_both_places(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence on a pass names the kernels that the list of candidates says to run."""
    arguments = ["--dtype", "bfloat16", *given.split()]
    for arch in ("sm_75", "sm_80", "sm_90a", "sm_120"):
        assert main(["info", "--json", *arguments, "--arch", arch]) == 0
        found = json.loads(capsys.readouterr().out)
        for direction in ("forward", "backward"):
            words = found["kernels"][f"{direction} on {arch}"] + found["kernels"].get(
                f"gradient of a bias on {arch}", ""
            )
            own = [x for x in found["candidates"][arch] if x["direction"] == direction and x["chosen"]]
            assert own and all(f"{kernel['entry']} {kernel['tile']}" in words for x in own for kernel in x["kernels"])
    assert main(["info", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    if "float32" not in given:
        (own,) = (x for x in found["candidates"]["sm_90a"] if x["direction"] == "forward" and x["chosen"])
        assert f"tiles of {own['kernels'][0]['tile']}," in found["kernels"]["forward on Hopper"]


def test_info_says_causal_and_window_as_they_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    for given, other in (("causal", "window"), ("window", "causal")):
        for arch in ([], ["--arch", "sm_75", "sm_80", "sm_90a"]):
            for dtype in ("float16", "float32", "float64"):
                assert main(["info", "--json", "--dtype", dtype, f"--{given}", *arch]) == 0
                words = " ".join(json.loads(capsys.readouterr().out)["kernels"].values())
                assert given in words and other not in words


def test_info_tells_candidates_apart_and_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--dtype", "float16", "--seqlen", "512", "--arch", "sm_80"]) == 0
    title, *rows = capsys.readouterr().out.partition("candidates for ")[2].splitlines()
    assert title.startswith("float16 b1 h1 512x512 d64 full on sm_80")
    assert "no GPU of sm_80 with NVRTC is here" in title or "NVRTC" in title
    assert len(set(rows)) == len(rows) > 4
    assert sum("runs" in row for row in rows) == 2 and any("x1." in row for row in rows)


@pytest.mark.parametrize(
    "given", ["--head-dim 128 --heads 16 --seqlen 2048 --causal", "--heads 16", "--seqlen-k 3 --window", ""]
)
def test_info_tells_candidates_apart_on_hopper(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--dtype", "bfloat16", "--arch", "sm_90a", *given.split()]) == 0
    rows = capsys.readouterr().out.partition("candidates for ")[2].splitlines()[1:]
    assert len({row.removesuffix("runs").rstrip() for row in rows}) == len(rows) > 5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    return tmp_path


def test_info_knows_what_was_refused_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device: Any = CpuDevice((8, 0), num_sms=108)
    device.compiler = COMPILER
    monkeypatch.setattr(candidates, "device_here", lambda: device)
    given = ["--dtype", "float16", "--seqlen", "512"]
    first, second = listed(capsys, *given)["sm_80"][:2]
    assert first["chosen"] and first["refused_bytes"] == second["refused_bytes"] == 0
    problem = problems.problem_of(SimpleNamespace(dtype="float16", seqlen=512))  # type: ignore[arg-type]
    config = candidates.candidates_of(problem, candidates.gpu_here(device))[0].kernels[0].config
    refusals.note(source_of(config), refusals.Refusal(config.words, COMPILER, 72))
    first, second = listed(capsys, *given)["sm_80"][:2]
    assert first["refused_bytes"] == 72 and not first["chosen"] and second["chosen"]
    assert main(["info", *given]) == 0
    words = capsys.readouterr().out.partition("candidates for ")[2]
    assert COMPILER in words and "refused: it spills 72 bytes a thread" in words


def test_info_lists_each_named_gpu_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device: Any = CpuDevice((9, 0), num_sms=78)
    device.has_wgmma = True
    monkeypatch.setattr(candidates, "device_here", lambda: device)
    # Without its own instructions a Hopper takes other kernels, as with an older NVRTC.
    assert main(["info", "--dtype", "float16", "--arch", "sm_90", "sm_90a", "sm_90"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("candidates for")]
    assert ["on sm_90, 132" in titles[0], "on sm_90a, 78" in titles[1]] == [True] * len(titles)


class Clock:
    """A stopwatch by which a candidate takes as many milliseconds as its number, plus one, in each round."""

    def __init__(self) -> None:
        self.calls = 0

    def within(self) -> Any:
        return nullcontext()

    def prepared(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        self.calls += 1
        return call

    def interleaved(self, calls: dict[str, Any], rounds: int) -> dict[str, list[list[float]]]:
        return {name: [[1.0 + int(name), 1.0 + int(name), 99.0]] * rounds for name in calls}


def reports(monkeypatch: pytest.MonkeyPatch, *, spilling: str = "") -> list[str]:
    """Let the compiler report on kernels, of which those whose source has some text spill; return their entries."""
    compiled = []

    def compile_for(arch: str, source: str, name: str) -> Any:
        compiled.append(name)
        spills = bool(spilling) and spilling in source
        return SimpleNamespace(registers=96, local_bytes=40 * spills, seconds=0.5)

    monkeypatch.setattr(cuda_compile, "compile_for", compile_for)
    monkeypatch.setattr(tune, "compiler_lacking", lambda command: "")
    monkeypatch.setattr(tune, "_nvrtc", lambda: "1.2")
    monkeypatch.setattr(tune, "unknown_architectures", lambda names: "")
    return compiled


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
def test_tune_times_every_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, device, run = Clock(), CpuDevice((7, 5), num_sms=4), candidates.run
    ran: list[str] = []

    def run_and_check(direction: str, work: Any, grads: dict[str, Any]) -> None:
        if isinstance(work, Rehearsal):
            run(direction, work, grads)
            return
        for x in (work.arrays["out"],) if direction == "forward" else grads.values():
            x[...] = np.nan
        run(direction, work, grads)
        q, k, v = (work.arrays[name] for name in "qkv")
        if direction == "forward":
            expected = [cuflash.attention(q, k, v, causal=True)]
            found = [work.arrays["out"]]
        else:
            residuals = (work.arrays[name] for name in ("out", "lse"))
            expected = list(cuflash.attention_backward(work.arrays["dout"], q, k, v, *residuals, causal=True))
            found = list(grads.values())
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
        ran.append(direction)

    compiled = reports(monkeypatch)
    monkeypatch.setattr(candidates, "device_here", lambda: device)
    monkeypatch.setattr(tune, "stopwatch", lambda device: clock)
    monkeypatch.setattr(candidates, "run", run_and_check)
    file = tmp_path / "figures.jsonl"
    given = f"tune --seqlen 70 --heads 2 --head-dim 32 --causal --rounds 3 --commit abc --output {file}"
    assert main(given.split()) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    one_is_chosen(lines)
    assert clock.calls == 3 * len(lines) == ran.count("forward") - 1 + ran.count("backward") > 12
    assert len(compiled) == len(lines)
    for number, line in enumerate(lines):
        assert line["measured_us"] == 1e3 * (1 + number) and len(line["round_us"]) == 3
        assert line["registers"] == [96] and line["compile_seconds"] == [0.5] and line["spilled_bytes"] == 0
        assert {"gpu", "driver", "nvrtc", "versions", "date", "problem", "predicted_us"} <= set(line)
        assert line["command"] == "tune" and line["commit"] == "abc" and line["arch"] == "sm_75"
        assert (line["dtype"], line["seqlen_q"], line["head_dim"]) == ("float32", 70, 32)
    words = capsys.readouterr().out
    assert "[1/1] float32 b1 h2 70x70 d32 causal on sm_75, 4 multiprocessors" in words and "1000.0 us" in words
    assert "chosen within 5% of the best: 100.0% of 2 passes" in words


def test_tune_prepares_a_block_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mask whose first call is captured is refused.
    masks: set[int] = set()

    def run(direction: str, work: Any, grads: dict[str, Any]) -> None:
        masks.add(work._block_mask.serial)

    device: Any = CpuDevice((8, 0), num_sms=4)
    problem = problems.problem_of(SimpleNamespace(dtype="float16", seqlen=200, block_mask=True))  # type: ignore[arg-type]
    found = candidates.candidates_of(problem, candidates.gpu_here(device))
    monkeypatch.setattr(candidates, "run", run)
    clock: Any = Clock()
    times = tune._times(problem, device, found, clock, 1)
    assert clock.calls == len(times) == len(found) > 2 and len(masks) == 1


class Full(Clock):
    """A stopwatch for which some candidates find no memory, or fail."""

    def prepared(self, call: Callable[[], None]) -> Callable[[], None]:
        self.calls += 1
        if self.calls in (1, 2):
            raise (MemoryError, RuntimeError)[self.calls - 1](f"failure {self.calls}\nand more")
        return call


def test_a_candidate_that_fails_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device: Any = CpuDevice((8, 0), num_sms=4)
    reports(monkeypatch)
    monkeypatch.setattr(candidates, "device_here", lambda: device)
    monkeypatch.setattr(tune, "stopwatch", lambda device: Full())
    monkeypatch.setattr(tune._Compiler, "load", lambda *_: None)
    run = candidates.run
    monkeypatch.setattr(candidates, "run", lambda *x: run(*x) if isinstance(x[1], Rehearsal) else None)
    file = tmp_path / "missing" / "figures.jsonl"
    given = f"tune --dtype float16 --seqlen 70 --rounds 2 --output {file}"
    assert main(given.split()) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["failure"] for line in lines[:3]] == ["failure 1", "failure 2", None] and len(lines) > 3
    assert [line["measured_us"] is None for line in lines] == [True, True] + [False] * (len(lines) - 2)
    words = capsys.readouterr()
    assert "does not run: failure 1" in words.err and "does not run: failure 2" in words.err
    assert words.out.count("failed") == 2


def test_a_problem_without_memory_is_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device: Any = CpuDevice((8, 0), num_sms=4)
    reports(monkeypatch)
    monkeypatch.setattr(candidates, "device_here", lambda: device)
    monkeypatch.setattr(tune, "stopwatch", lambda device: Clock())
    monkeypatch.setattr(tune._Compiler, "load", lambda *_: None)

    def random_arrays(*_: Any) -> Any:
        raise MemoryError("out of memory")

    monkeypatch.setattr(problems, "random_arrays", random_arrays)
    assert main(["tune", "--dtype", "float16", "--seqlen", "70"]) == 0
    words = capsys.readouterr()
    assert "left out" in words.err and words.out == "nothing was timed\n"


def test_a_failed_capture_is_ended() -> None:
    called: list[str] = []

    class Stream:
        def __getattr__(self, name: str) -> Any:
            return lambda: called.append(name)

    clock = object.__new__(clocks.GraphStopwatch)
    clock._torch, clock._stream = None, Stream()
    clock._gpu_times = lambda *_: [1.0]  # type: ignore[method-assign]

    def call() -> None:
        if "begin_capture" in called:
            raise MemoryError

    with pytest.raises(MemoryError):
        clock.prepared(call)
    assert called == ["synchronize", "begin_capture", "end_capture"]


def test_a_place_that_takes_no_file_is_found_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for place, words in ((tmp_path, "it is a folder"), (tmp_path / "file" / "x.jsonl", "is no folder")):
        assert main(["tune", "--compile-only", "--output", str(place)]) == 2
        assert words in capsys.readouterr().err
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


def test_the_gpu_here_has_two_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device: Any = CpuDevice((9, 0), num_sms=4)
    reports(monkeypatch)
    monkeypatch.setattr(candidates, "device_here", lambda: device)
    monkeypatch.setattr(tune, "stopwatch", lambda device: Clock())
    monkeypatch.setattr(tune, "_figures", lambda *_: [])
    for arch in ("sm_90", "sm_90a"):
        assert main(["tune", "--arch", arch, "--seqlen", "8"]) == 0


def test_the_precision_is_float32s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reports(monkeypatch)
    for given, is_said in (("", False), ("--dtype float32", True), ("--dtype float16 --seqlen 64", False)):
        assert main(f"tune --compile-only --arch sm_80 --count 1 --precision tf32 {given}".split()) == 0
        (title,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("["))
        assert ("tf32" in title) is is_said


def test_tune_compiles_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports(monkeypatch, spilling="constexpr int BLOCK_N = 128;")
    file = tmp_path / "figures.jsonl"
    given = f"tune --compile-only --arch sm_80 --dtype float16 --seqlen 512 --output {file}"
    assert main(given.split()) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    one_is_chosen(lines)
    first, second = lines[:2]
    assert first["kernels"] == [{"entry": "forward_sm80", "tile": "128x128"}]
    assert first["spilled_bytes"] == 40 and not first["chosen"] and second["chosen"]
    assert {line["measured_us"] for line in lines} == {None} == {line["gpu"] for line in lines}
    words = capsys.readouterr().out
    assert "40 bytes" in words and words.endswith("nothing was timed\n")


def test_tune_draws_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reports(monkeypatch)

    def titles(*given: str) -> list[str]:
        assert main(["tune", "--compile-only", "--arch", "sm_80", "--count", "3", *given]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]

    first = titles("--seed", "5")
    assert first == titles("--seed", "5") != titles("--seed", "6") and len(first) == 3
    assert all("bfloat16" in line for line in first)
    assert all("float32" in line for line in titles("--dtype", "float32"))
    assert len(titles("--seqlen", "64")) == 1


def test_tune_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reports(monkeypatch)
    monkeypatch.setattr(candidates, "device_here", lambda: None)
    assert main(["tune"]) == 2
    words = capsys.readouterr().err
    assert "CuPy finds none here" in words and "--compile-only" in words and len(words.splitlines()) == 1
    monkeypatch.setattr(candidates, "device_here", lambda: CpuDevice((8, 0)))
    assert main(["tune", "--arch", "sm_90a"]) == 2
    assert "expected sm_80, the GPU here, got sm_90a" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(info, "missing", lambda: {"NVRTC": "kernels are compiled by it"})
    assert main(["tune", "--compile-only"]) == 2
    assert capsys.readouterr().err == "cuflash tune needs NVRTC: kernels are compiled by it\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--head-dim 1025", "expected 1 to 1024, got 1025"),
        ("--heads 6 --heads-kv 4", "expected a divisor of --heads = 6, got 4"),
        ("--packed --bias", "packed sequences have none"),
    ],
)
@pytest.mark.parametrize("command", ["info", "tune --compile-only"])
def test_sizes_that_contradict_each_other(
    command: str, given: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), *given.split()]) == 2
    assert words in capsys.readouterr().err


def test_summary_of_predictions_and_choices() -> None:
    def figures(us: float, predicted: float | None, is_chosen: bool) -> Any:
        place = SimpleNamespace(number=0)
        own = SimpleNamespace(predicted_us=predicted, is_chosen=is_chosen, place=place)
        return SimpleNamespace(candidate=own, measured_us=us)

    good = [figures(104.0, 104.0, True), figures(100.0, 110.0, False)]
    bad = [figures(106.0, 53.0, True), figures(100.0, None, False)]
    words = tune.summary([good, bad, []])
    assert (
        words == "median error of predictions: 10.0% of 3 candidates; chosen within 5% of the best: 50.0% of 2 passes"
    )
    assert tune.summary([]) == "nothing was timed"
