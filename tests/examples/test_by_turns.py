"""The comparison of two checkouts by turns: processes of their own, figures, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load_script

from cuflash.tools.bench import records

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("by_turns")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples/benchmarks/by_turns.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_a_checkout_beside_itself(tmp_path: Path) -> None:
    sizes = ["--tokens", "64", "--width", "32", "--head-dim", "16", "--seqlen", "32", "--dtype", "float32"]
    timing = ["--device", "cpu", "--rounds", "2", "--budget-ms", "1"]
    done = run(str(ROOT), *sizes, *timing, "--json", str(tmp_path / "x.jsonl"))
    assert done.returncode == 0, done.stderr
    cells = records.read(tmp_path / "x.jsonl").cells
    assert {(x["cell"], x["direction"]) for x in cells} == {
        (f"d16 {mask} n32", direction) for mask in ("full", "causal") for direction in ("forward", "backward")
    }
    assert all(x["speed"] == x["other_ms"] / x["this_ms"] > 0 for x in cells)
    assert "dense forward: " in done.stdout
    assert "dense backward: " in done.stdout


def test_what_it_refuses(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--device", "cpu")
    assert done.returncode == 2
    assert f"other: expected a folder with the package cuflash, got {tmp_path}" in done.stderr


def test_the_summary_tells_means_and_losses(script: ModuleType) -> None:
    cells = [
        {"cell": name, "suite": "dense", "direction": "forward", "speed": speed}
        for name, speed in (("a", 2.0), ("b", 0.5), ("c", 1.0))
    ]
    assert script.summary(cells).splitlines() == [
        "dense forward: 1.000 (0.500 to 2.000), 3 cells",
        "slower: b forward: 0.500",
    ]
