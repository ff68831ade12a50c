"""The benchmark of FP8: its calls compute one thing, on small problems on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_scripts import load_script
from fp8 import rms

script = load_script("fp8_times")


@pytest.mark.parametrize("per", script.PERS)
@pytest.mark.parametrize("lengths", [(1, 64), (32, 32)], ids=["decode", "prefill"])
def test_the_calls_agree(lengths: tuple[int, int], per: str) -> None:
    shape = script.Shape(2, *lengths, 16)
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
