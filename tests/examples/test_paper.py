"""The script of the paper's tables runs on small problems on the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash.tools.bench import records

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(FOLDER))
paper, paper_io = importlib.import_module("paper"), importlib.import_module("paper_io")


def test_tables_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(paper, "BUDGET", 0.0)
    arguments = ["--device", "cpu", "--batch", "1", "--out", str(tmp_path), "--seqlens"]
    for lengths in (["128"], ["64", "128"]):  # the second run's rows join those of the first, or take their places
        assert paper.main([*arguments, *lengths]) == 0
    assert paper.main([*arguments, "64", "--batch", "2"]) == 2  # another problem
    facts, results = records.read(tmp_path / "paper.jsonl")
    assert facts["command"] == "paper" and facts["batch"] == 1
    assert len(results) == len(paper.VARIANTS) * len(paper.METHODS) * 2
    assert all(r["forward_ms"] > 0 and r["backward_ms"] > 0 and r["bytes"] > 0 for r in results)
    assert (tmp_path / "paper.md").read_text().count("| naive |") == len(paper.VARIANTS) * 4
    assert (tmp_path / "paper.svg").read_text("utf-8").startswith("<?xml")


def test_the_naive_method_is_right() -> None:
    problem = paper.Problem(np, 2, 64, options=False)
    out, weights, kept = (naive := problem.naive()).forward()
    ours = problem.cuflash(sparse=False)
    assert kept is None and weights.shape == (16, 64, 64)
    np.testing.assert_allclose(as_ours(out), ours.forward(), atol=4e-3)
    for theirs, mine in zip(naive.backward(), ours.backward(), strict=True):
        np.testing.assert_allclose(as_ours(theirs), mine, atol=2e-2)


def as_ours(x: Any) -> Any:
    """Bring (batch * heads, seqlen, dim) into our order."""
    return x.reshape(2, 8, 64, 64).swapaxes(1, 2)


def test_growth() -> None:
    results = [{"variant": "plain", "method": "naive", "n": n, "both_ms": 3 * n**2} for n in (128, 256, 512)]
    assert paper.slope(results, "plain", "naive", "both_ms") == pytest.approx(2)
    assert paper.slope(results, "plain", "cuflash", "both_ms") is None


def test_what_counting_needs_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(paper.shutil, "which", lambda name: None)
    assert paper.main(["--io"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_counted_bytes_belong_to_their_calls() -> None:
    rows = []
    for call in range(3):
        for metric, unit, value in zip(paper_io.METRICS, ("byte", "Kbyte", "byte"), ("1,000", "2", "7"), strict=True):
            row = {"ID": f"{call}", "Kernel Name": "range", "Metric Name": metric}
            rows.append({**row, "Metric Unit": unit, "Metric Value": value})
    results = paper_io.count("naive", rows)
    assert [(r["method"], r["n"], r["direction"]) for r in results[:3]] == [
        ("naive", 1024, "forward"),
        ("naive", 1024, "backward"),
        ("naive", 2048, "forward"),
    ]
    assert all(r["l2_bytes"] == 1000 + 2000 and r["dram_bytes"] == 7 for r in results[:3])
    assert paper_io.theorem_bytes(1024, 2 * 64**2) == 8 * 2 * 1024**2
