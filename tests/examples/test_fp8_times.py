"""The benchmark of FP8: its calls compute one thing, on small problems on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmark_scripts import load_script
from fp8 import rms

import cuflash

script = load_script("fp8_times")


@pytest.mark.parametrize("per", script.PERS)
@pytest.mark.parametrize("sizes", [(1, 64, 16), (1, 64, 16, True), (32, 32, 16)], ids=["decode", "pages", "prefill"])
def test_the_calls_agree(sizes: tuple[int, ...], per: str) -> None:
    shape = script.Shape(2, *sizes)
    results = {name: call() for name, call in script.calls_of(shape, per, np).items()}
    plain = results.pop(script.BFLOAT16).astype(np.float64)
    for out in results.values():
        assert out.dtype.name == "bfloat16"
        assert rms(out.astype(np.float64) - plain) < 0.1 * rms(plain)


def test_figures() -> None:
    times = {script.BFLOAT16: 2e-3, script.KEYS: 1e-3, script.ALL: 4e-3}
    decode = script.figures_of(script.Shape(1, 1, 1000, 128), "head", times)
    assert decode["of_bfloat16"] == {script.BFLOAT16: 1, script.KEYS: 2, script.ALL: 0.5}
    # Twice as fast on half the bytes: as many a second.
    rates = decode["gigabytes_per_second"]
    assert rates[script.KEYS] == rates[script.BFLOAT16] == pytest.approx(2 * 1000 * 8 * 128 * 2 / 2e-3 / 1e9)
    prefill = script.figures_of(script.Shape(1, 1000, 1000, 128), "head", times)
    assert prefill["tflops"][script.KEYS] == pytest.approx(2 * 32 * 1000 * 1000 * 128 / 1e-3 / 1e12)
    assert script.in_words(decode).endswith("; speed in tokens over bfloat16's: fp8 keys 2.00, fp8 0.50")
    # A scale for each token is read, too.
    of_token = script.figures_of(script.Shape(1, 1, 1000, 128), "token", times)["gigabytes_per_second"]
    assert of_token[script.KEYS] == pytest.approx(rates[script.KEYS] * 132 / 128)


def test_drawn_problems_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.check(12, np)
    assert "12 of 12 problems are right" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "is_right"), [(2.0**-11, True), (-(2.0**-11), True), (2.0**-8, False)])
def test_scores_may_be_off_as_the_tanh_instruction_is(
    error: float, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tanh = np.tanh

    def off(x: Any, **given: Any) -> Any:
        y = tanh(x, **given)
        if y.dtype == np.float32:  # and not the reference's
            y *= 1 + error
        return y

    monkeypatch.setattr(np, "tanh", off)
    assert script.check(12, np) == is_right


def test_a_wrong_result_is_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = cuflash.attention

    def without_a_scale(*arrays: Any, **options: Any) -> Any:
        return attention(*arrays, **{name: x for name, x in options.items() if name != "k_scale"})

    monkeypatch.setattr(cuflash, "attention", without_a_scale)
    assert not script.check(12, np)


def test_lines_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SHAPES", (script.Shape(1, 1, 64, 16, True), script.Shape(1, 32, 32, 16)))
    decode, *_ = found = list(script.lines(np, script.Stopwatch(np, 0.1), 1, True))
    assert [line["cell"] for line in found] == [f"decode 1 x 64 d16 pages per {per}" for per in script.PERS]
    assert set(decode["seconds"]) == {script.BFLOAT16, script.KEYS, script.ALL}
    assert all(x > 0 for x in decode["gigabytes_per_second"].values())
