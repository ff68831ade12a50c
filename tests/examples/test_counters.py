"""Hardware counters are counted for the chosen cells, and read from ncu's list."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import FOLDER, load_script

from cuflash.tools.bench import records


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))  # for the scripts that it imports
    return load_script("counters")


def result(n: int, direction: str, ratio: float | None, **milliseconds: float) -> dict[str, Any]:
    peers = {name: {"median_ms": value} for name, value in milliseconds.items()}
    return {"cell": {"name": f"n{n}"}, "direction": direction, "peers": peers, "speed_of_fastest_peer": ratio}


def test_best_and_worst_cells_beside_their_fastest_peers(counters: ModuleType, tmp_path: Path) -> None:
    full = [result(1, "backward", 1.1, cuflash=1.0, fa3=1.1, cudnn=2.0), result(2, "forward", 9.0, cuflash=1.0, fa3=9)]
    causal = [
        result(3, "backward", 0.9, cuflash=1.0, fa3=3.0, cudnn=0.9, plain=0.1),
        result(4, "backward", None, cuflash=1.0),
        result(5, "backward", 1.0, cuflash=1.0, fa3=1.0),
    ]
    for name, results in (("full", full), ("causal", causal)):
        records.write(tmp_path / f"backward_{name}.jsonl", {"command": "bench"}, results)
    chosen = counters.best_and_worst("backward", tmp_path)
    assert [(call["which"], call["cell"]["name"], call["peer"]) for call in chosen] == [
        ("best", "n1", "cuflash"),
        ("best", "n1", "fa3"),
        ("worst", "n3", "cuflash"),
        ("worst", "n3", "cudnn"),
    ]
    assert {call["direction"] for call in chosen} == {"backward"}


def test_longest_kernel_of_each_call(counters: ModuleType) -> None:
    """The longest kernel is found of a call of three kernels and of a call of one; every metric is a row."""
    rows = []
    kernels = [("before", 10.0), ("gradients(Params)", 70.0), ("behind", 20.0), ("end_of_call", 1.0)]
    for index, (kernel, nanoseconds) in enumerate([*kernels, ("forward", 5.0), ("end_of_call", 1.0)]):
        for metric, name in counters.METRICS.items():
            value = f"{nanoseconds:,}" if name == "nanoseconds" else f"{1000 + index:,}"
            rows.append({"ID": str(index), "Kernel Name": kernel, "Metric Name": metric, "Metric Value": value})
    first, second = counters.by_call(rows)
    assert (first["kernel"], first["nanoseconds"], first["instructions"]) == ("gradients", 70.0, 1001.0)
    assert (second["kernel"], second["nanoseconds"], second["wait"]) == ("forward", 5.0, 1004.0)
    assert first["share_of_call"] == pytest.approx(0.7) and second["share_of_call"] == 1.0
    call = {"part": "forward", "which": "best", "cell": {"name": "d64 full n512"}, "peer": "fa3"}
    lines = counters.table([{**call, **second}]).splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1 and "d64 full n512" in lines[2]
