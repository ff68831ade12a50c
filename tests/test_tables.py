"""The tables of recorded figures: what they say of a run, and that the committed ones are of the committed files."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cuflash.bench import report
from cuflash.bench.cells import BACKWARD, FORWARD, Grid, cells_of

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"
FACTS = {
    "command": "bench",
    "commit": "0123456789",
    "date": "2026-01-02T03:04:05+00:00",
    "gpu": "H200",
    "driver": "1",
    "nvrtc": "13.0",
}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("tables", FOLDER / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tables", module)
    spec.loader.exec_module(module)
    return module


def record(folder: Path, results: list[report.Result]) -> None:
    report.write_json(folder / "run.json", {**FACTS, "versions": {"torch": "2"}}, results)


def test_a_dense_run(tables: ModuleType, tmp_path: Path) -> None:
    cells = cells_of("dense", Grid(head_dims=(64,), seqlens=(512, 1024)))
    ours = (1.0, 1.0, 1.0, 1.0303)  # the last is 0.9706 of the peer's speed
    errors = {"out": {"max": 2e-3, "mean": 1e-4, "of_largest": 1e-3}}
    record(
        tmp_path,
        [
            report.Result(
                cell, FORWARD, {"cuflash": [ms], "fa3": [1.0], "cudnn": [2.0]}, {"cuflash": errors, "fa3": errors}
            )
            for cell, ms in zip(cells, ours, strict=True)
        ],
    )
    recorded = tables.load(tmp_path)
    page = tables.page(recorded)
    assert "Commit 0123456, 2026-01-02, H200" in page
    assert "(0.97 ✗)" in page and page.count("(1.00)") == 3
    assert "Geometric mean of the ratios 0.992; 3 of 4 reach 0.98." in page
    rows = {tuple(row[:2]): row[2:] for row in (bar.row(recorded) for bar in tables.BARS)}
    what = "forward, bf16: speed of the faster of FlashAttention-3 and cuDNN"
    bar = "at least 0.98, geometric mean 1.03"
    assert rows[what, bar] == ["0.97 to 1.00, mean 0.992; 3 of 4", "no", "0123456"]
    equal = rows["forward: mean error, as a multiple of FlashAttention-3's, n up to 1k", "at most 1"]
    assert equal == ["1.000 to 1.000; 4 of 4", "yes", "0123456"]
    assert rows["backward with dbias (b, h, n, n): share of plain", "at least 0.5"] == ["not measured", "-", "-"]


def test_both_kinds_of_kernels_of_one_commit(tables: ModuleType, tmp_path: Path) -> None:
    (cell,) = cells_of("dense", Grid(head_dims=(64,), seqlens=(512,), masks=("full",)))
    for name, peer, is_mma in (("hopper", "fa3", False), ("mma", "flash", True)):
        facts = {**FACTS, "versions": {}, "without_wgmma": is_mma}
        report.write_json(
            tmp_path / f"{name}.json", facts, [report.Result(cell, FORWARD, {"cuflash": [1.0], peer: [1.0]})]
        )
    rows = {row[0]: row[2] for row in (bar.row(tables.load(tmp_path)) for bar in tables.BARS)}
    assert rows["forward, bf16: speed of the faster of FlashAttention-3 and cuDNN"] == "1.00, mean 1.000"
    assert rows["forward by mma.sync, bf16: speed of FlashAttention-2"] == "1.00, mean 1.000"


def test_shares_and_repeats(tables: ModuleType, tmp_path: Path) -> None:
    grid = Grid(head_dims=(128,), masks=("full",))
    (cell,) = (c for c in cells_of("deterministic", grid) if c.seqlen_q == 8192)
    (sparse,) = (c for c in cells_of("sparse", grid) if c.density == 0.02)
    sparse = dataclasses.replace(sparse, density=None)  # building the mask takes a while
    results = [
        report.Result(cell, BACKWARD, {"cuflash": [2.0], "plain": [1.9]}, same_bits=49),
        report.Result(sparse, FORWARD, {"cuflash": [0.04], "plain": [1.0]}),
    ]
    record(tmp_path, results)
    (recorded,) = tables.load(tmp_path)
    recorded.results[1]["cell"]["density"] = 0.02
    rows = {row[0]: row[2:4] for row in (bar.row([recorded]) for bar in tables.BARS)}
    assert rows["backward, deterministic: share of the free order, n 8k and 16k"] == ["0.95", "yes"]
    assert rows["backward, deterministic: same bits"] == ["49 calls", "no"]
    assert rows["forward: random blocks, time over dense time over density, down to 2%"] == ["2.00", "no"]


def test_committed_tables_are_of_the_committed_files(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


def test_a_section_is_replaced(tables: ModuleType) -> None:
    begin, end = tables.pages.BEGIN.format("speed"), tables.pages.END.format("speed")
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert tables.pages.with_section(text, "speed", "new\n") == f"before\n{begin}\nnew\n{end}\nafter\n"


def test_files_of_other_kinds_are_left_out(tables: ModuleType, tmp_path: Path) -> None:
    others: dict[str, Any] = {"gpt2": {"step_ms": 1.0}, "cpu": {"results": [{"cell": {"suite": "cpu"}}]}}
    for name, content in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert tables.load(tmp_path) == []


def test_training_and_bytes_moved(tables: ModuleType, tmp_path: Path) -> None:
    facts: dict[str, Any] = {**FACTS, "versions": {"torch": "2"}}
    steps = {
        name: {"step_ms": ms, "attention_ms": 10.0, "attention_share": 0.1, "tokens_per_second": 1.0}
        | {"speed_of_baseline": 100.0 / ms}
        for name, ms in (("baseline", 100.0), ("cuflash", 50.0))
    }
    for context in (1024, 4096):
        record = {**facts, "run": {"batch": 2, "context": context}, "results": steps}
        (tmp_path / f"gpt2_{context}.json").write_text(json.dumps(record))
    calls = [
        {
            "method": method,
            "n": 1024,
            "direction": "forward",
            "l2_bytes": moved,
            "dram_bytes": 1e6,
            "theorem_bytes": 4e6,
        }
        for method, moved in (("cuflash", 8e6), ("naive", 20e6))
    ]
    (tmp_path / "paper_io.json").write_text(json.dumps({**facts, "fast_bytes": 227 * 1024, "results": calls}))
    attention = {"1024": {"batch": 16, "ms": {"own": 3.0, "cuflash": 1.0}, "differences": [1e-4, 3e-4]}}
    training = {name: {"ms_a_step": ms, "losses": [9.0, 4.0]} for name, ms in (("own", 30.0), ("cuflash", 20.0))}
    record = {**facts, "size": "base", "batch": 8, "attention": attention, "training": training}
    (tmp_path / "mytorch.json").write_text(json.dumps(record))

    measured = tables.measured
    assert [row[2:4] for row in measured.gpt2_bars(tmp_path)] == [["2.00", "yes"], ["2.00", "no"]]
    assert "takes 50 and 50 ms on an H200, at 2 x 1024 and 2 x 4096 tokens;" in measured.readme_training(tmp_path)
    eight = {**facts, "run": {"batch": 2, "context": 1024, "fp8": True}, "results": steps}
    (tmp_path / "gpt2_1024_fp8.json").write_text(json.dumps(eight))
    assert measured.gpt2_bars(tmp_path)[0][2] == "2.00 (2.00 with --fp8)"
    assert "| bfloat16 | 4096 | 3 | 33.3 ms | -6.7 ms | - | 10.0 ms | 216 TFLOP/s |" in measured.gpt2(tmp_path)
    assert "| forward | 1024 | 20.0 | 8.0 | 2.5 | 4.0 | 2.0 | 1.0 | 1.0 |" in measured.moved(tmp_path)
    assert "12 heads of 64 | 3.00 | 1.00 | 3.00 |" in measured.mytorch(tmp_path)
    assert "base, 8 x 1024 | 30.0 | 20.0 | 1.50 |" in measured.mytorch(tmp_path)
    assert "at most 3.0e-04 in norm" in measured.mytorch(tmp_path)
    assert "No count" in measured.moved(tmp_path / "empty") and "Not recorded" in measured.mytorch(tmp_path / "empty")
