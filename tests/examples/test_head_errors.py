"""Errors of all heads are compared with another library's, by the truth, with a ratio and its standard error."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import load_script

from cuflash import reference
from cuflash.tools.bench.cells import Cell
from cuflash.tools.bench.inputs import Inputs
from cuflash.tools.bench.peers import cuflash_calls, sdpa_calls


@pytest.fixture(scope="module")
def errors() -> ModuleType:
    return load_script("errors")


@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_against_the_reference(
    errors: ModuleType, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(errors, "fa3_calls", lambda inputs: sdpa_calls(inputs, "default"))
    inputs = Inputs(Cell("small", "float32", 2, 40, 40, 3, 3, 16, 16, causal=causal), np)
    found = errors.measure(inputs)
    assert found["heads"] == 6 and found["cell"]["name"] == "small"
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    out, _ = reference.attention(q, k, v, causal=causal)
    gradients = reference.attention_backward(dout, q, k, v, causal=causal)
    true = dict(zip(("out", "dq", "dk", "dv"), (out, *(gradients[name] for name in "qkv")), strict=True))
    for peer, calls in (("cuflash", cuflash_calls(inputs)), ("fa3", sdpa_calls(inputs, "default"))):
        results = dict(zip(true, (calls.forward(), *calls.backward()), strict=True))
        for name, value in results.items():
            error = np.abs(np.asarray(value).astype(np.float64) - true[name])
            kinds = found["results"][name]
            assert kinds["mean"][peer] == pytest.approx(error.mean(), rel=1e-6)
            assert kinds["max"][peer] == pytest.approx(error.max(axis=(1, 3)).mean(), rel=1e-6)
    for kinds in found["results"].values():
        for kind in kinds.values():
            assert kind["ratio"] == pytest.approx(kind["cuflash"] / kind["fa3"]) and 0 < kind["se"] < 1
    assert "out mean" in errors.line(found)


def test_standard_error_is_how_much_the_ratio_varies(errors: ModuleType) -> None:
    """Heads whose errors differ much, but in both libraries alike, tell a ratio apart from 1 all the same."""
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(400):
        theirs = rng.uniform(1.0, 3.0, 128)
        draws.append(errors.ratio(1.02 * theirs * rng.normal(1.0, 0.05, 128), theirs))
    ratios, given = ([draw[name] for draw in draws] for name in ("ratio", "se"))
    assert np.mean(ratios) == pytest.approx(1.02, abs=1e-3)
    assert np.mean(given) == pytest.approx(np.std(ratios), rel=0.15)
    assert np.mean(given) < 0.006  # 0.05 / sqrt(128), and a little for heads of unequal weight


def test_results_that_are_not_finite(errors: ModuleType) -> None:
    found = errors.ratio(np.array([1.0, np.inf]), np.array([1.0, 1.0]))
    assert found["ratio"] == math.inf and math.isnan(found["se"])
