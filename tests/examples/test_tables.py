"""Tables of recorded figures say what a run measured, and the committed ones are of the committed files."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cuflash.tools.bench import records, report
from cuflash.tools.bench.cells import BACKWARD, FORWARD, Grid, cells_of

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"
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


def record(folder: Path, results: list[report.Result], name: str = "run", **facts: Any) -> None:
    """Write the record that `python -m cuflash bench` would."""
    facts = {**FACTS, "versions": {"torch": "2"}, **facts}
    records.write(folder / f"{name}.jsonl", facts, (result.as_json() for result in results))


def error_bar(start: str) -> str:
    return f"{start}, as a multiple of FlashAttention-3's, n 512 and 1k, within three standard errors of all heads"


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
    assert rows[error_bar("forward: mean error"), "at most 1"] == ["not measured", "-", "-"]
    assert rows["backward with dbias (b, h, n, n): share of plain", "at least 0.5"] == ["not measured", "-", "-"]


def test_both_kinds_of_kernels_of_one_commit(tables: ModuleType, tmp_path: Path) -> None:
    (cell,) = cells_of("dense", Grid(head_dims=(64,), seqlens=(512,), masks=("full",)))
    half = dataclasses.replace(cell, dtype="float16")
    files = (("hopper", cell, "fa3", False), ("mma", cell, "flash", True), ("mma_fp16", half, "flash", True))
    for name, cell, peer, is_mma in files:
        results = [report.Result(cell, FORWARD, {"cuflash": [1.0], peer: [1.0]})]
        record(tmp_path, results, name, without_wgmma=is_mma)
    rows = {row[0]: row[2] for row in (bar.row(tables.load(tmp_path)) for bar in tables.BARS)}
    assert rows["forward, bf16: speed of the faster of FlashAttention-3 and cuDNN"] == "1.00, mean 1.000"
    for short in ("bf16", "fp16"):
        assert rows[f"forward by mma.sync, {short}: speed of FlashAttention-2"] == "1.00, mean 1.000"


def test_shares_and_repeats(tables: ModuleType, tmp_path: Path) -> None:
    grid = Grid(head_dims=(128,), masks=("full",))
    (cell,) = (c for c in cells_of("deterministic", grid) if c.seqlen_q == 8192)
    # neither the empty mask nor the smaller blocks belong to the row
    sparse = [c for c in cells_of("sparse", grid) if c.density in (0.0, 0.02)]
    assert len(sparse) == 3
    results = [
        report.Result(cell, BACKWARD, {"cuflash": [2.0], "plain": [1.9]}, same_bits=49),
        *(
            report.Result(c, FORWARD, {"cuflash": [0.04 if c.block_size == 128 else 1.0], "plain": [1.0]})
            for c in sparse
        ),
    ]
    record(tmp_path, results)
    rows = {row[0]: row[2:4] for row in (bar.row(tables.load(tmp_path)) for bar in tables.BARS)}
    assert rows["backward, deterministic: share of the free order, n 8k and 16k"] == ["0.95", "yes"]
    assert rows["backward, deterministic: same bits"] == ["49 calls", "no"]
    assert rows["forward: random blocks, time over dense time over density, down to 2%"] == ["2.00", "no"]


def test_packed_sequences_beside_equal_lengths_in_the_same_rounds(tables: ModuleType, tmp_path: Path) -> None:
    mix, equal = cells_of("varlen", Grid())
    # The medians of all calls are from either side of a change of clocks, .8 and .76.
    times = {"cuflash": [[0.7] * 3, [0.8] * 3, [0.8] * 3], "plain": [[0.76] * 2, [0.76] * 2, [0.87] * 2]}
    record(tmp_path, [report.Result(mix, FORWARD, times), report.Result(equal, FORWARD, {"cuflash": [[0.1]]})])
    rows = {row[0]: row[2:4] for row in (bar.row(tables.load(tmp_path)) for bar in tables.BARS)}
    share = 0.76 / 0.7 * mix.flops(FORWARD) / equal.flops(FORWARD)
    assert rows["forward, packed mix of 64 to 8k: rate of equal lengths"] == [tables.towards(share, 2), "yes"]


def blocks_of_line(bend: float) -> list[report.Result]:
    """Return times of 50 us + 3 ms * share, and others that are no part of the line and lie far off."""
    results = []
    for cell in cells_of("sparse", Grid(head_dims=(64, 128))):
        assert cell.density is not None
        ms = 0.05 + 3.0 * cell.density * (bend if cell.density == 0.5 else 1.0)
        if (cell.head_dim, cell.block_size) != (128, 128) or cell.density in (0.0, 1.0):
            ms *= 7
        results += [report.Result(cell, way, {"cuflash": [ms], "plain": [2.5]}) for way in (FORWARD, BACKWARD)]
    return results


@pytest.mark.parametrize("is_mma", [False, True])
def test_random_blocks_lie_on_a_line(tables: ModuleType, tmp_path: Path, is_mma: bool) -> None:
    family, other = ("", " by mma.sync")[:: -1 if is_mma else 1]
    what = ": random blocks: distance from a straight line in visible blocks"
    for bend, reached in ((1.0, "yes"), (1.3, "no")):
        record(tmp_path, blocks_of_line(bend), "sparse", without_wgmma=is_mma)
        rows = {row[0]: row[2:4] for row in (bar.row(tables.load(tmp_path)) for bar in tables.BARS)}
        for way in (FORWARD, BACKWARD):
            assert rows[way + other + what] == ["not measured", "-"]
            assert rows[way + family + what][1] == reached
            assert bend != 1.0 or rows[way + family + what][0] == "0.0%; 50 us + 1.20 of dense"


def test_two_masks_say_nothing_of_a_line(tables: ModuleType, tmp_path: Path) -> None:
    record(tmp_path, [r for r in blocks_of_line(1.0) if r.cell.density in (0.5, 0.1)])
    rows = [bar.row(tables.load(tmp_path)) for bar in tables.BARS]
    assert all(row[2] == "not measured" for row in rows if "straight line" in row[0])


def test_line_has_the_least_relative_residuals(tables: ModuleType) -> None:
    shares, times = (0.02, 0.05, 0.1, 0.25, 0.5), (0.11, 0.21, 0.35, 0.80, 1.55)
    start, slope, distance = sys.modules["recorded"].line(shares, times)

    def residuals(start: float, slope: float) -> list[float]:
        return [(start + slope * share) / ms - 1 for share, ms in zip(shares, times, strict=True)]

    def loss(start: float, slope: float) -> float:
        return sum(x * x for x in residuals(start, slope))

    for factor in (0.99, 1.01):
        assert loss(start * factor, slope) > loss(start, slope) < loss(start, slope * factor)
    assert distance == pytest.approx(max(abs(1 / (1 + x) - 1) for x in residuals(start, slope)))


def errors_file(folder: Path, **ratios: tuple[float, float]) -> None:
    """Write one cell whose results have these ratios of mean errors, and largest errors that are equal."""
    (cell,) = cells_of("dense", Grid(head_dims=(128,), seqlens=(512,), masks=("causal",)))
    results = {
        name: {"mean": {"ratio": ratio, "se": se}, "max": {"ratio": 1.0, "se": 0.0}}
        for name, (ratio, se) in ratios.items()
    }
    entry = {"cell": cell.describe(), "heads": 512, "results": results}
    records.write(folder / "errors.jsonl", {**FACTS, "command": "errors", "versions": {}}, [entry])


def test_host_and_counters_beside_cells_of_one_commit(tables: ModuleType, tmp_path: Path) -> None:
    """Records of one commit count as one, whatever command wrote them."""
    (cell,) = cells_of("dense", Grid(head_dims=(64,), seqlens=(512,), masks=("full",)))
    record(tmp_path, [report.Result(cell, FORWARD, {"cuflash": [1.0], "fa3": [1.0]})])
    costs = {"forward_total": 12.34, "torch_sdpa_forward_total": 21.5}
    facts = {**FACTS, "command": "host", "versions": {}}
    records.write(tmp_path / "host.jsonl", facts, ({"call": name, "us": us} for name, us in costs.items()))
    (both,) = tables.load(tmp_path)
    assert both.files == ("host.jsonl", "run.jsonl") and len(both.results) == 1
    assert tables.host_row([both])[2:4] == ["12.3 us (torch's SDPA 21.5)", "yes"]
    counted = dict.fromkeys(tables.counters.METRICS.values(), 1e9)
    call = {"part": "forward", "which": "best", "cell": {"name": "n512"}, "peer": "cuflash", **counted}
    records.write(tmp_path / "counters.jsonl", {**FACTS, "command": "counters", "versions": {}}, [call])
    page = tables.page(tables.load(tmp_path), tmp_path)
    assert "| forward, best | n512 | cuflash | 1000.000 |" in page


def test_errors_of_all_heads(tables: ModuleType, tmp_path: Path) -> None:
    def rows() -> dict[str, list[str]]:
        return {row[0]: row[2:4] for row in (bar.row(tables.load(tmp_path)) for bar in tables.BARS)}

    errors_file(tmp_path, out=(1.0019, 1e-4), dq=(1.0002, 1e-4), dk=(0.99981, 1e-4), dv=(math.nan, math.nan))
    assert rows()[error_bar("forward: mean error")] == ["1.0019 to 1.0019; 0 of 1", "no"]
    assert rows()[error_bar("forward: max error of a head")] == ["1.0000 to 1.0000; 1 of 1", "yes"]
    assert rows()[error_bar("backward: mean error")] == ["1.0002 to 0.9999; 2 of 2", "yes"]
    page = tables.page(tables.load(tmp_path), tmp_path)
    assert "## Errors of all heads" in page
    assert "| bfloat16 d128 causal n512 | 512 | 1.0019 ± 0.0001 | 1.0000 ± 0.0000 | 1.0002 ± 0.0001 |" in page
    errors_file(tmp_path, out=(math.inf, math.nan))
    assert rows()[error_bar("forward: mean error")] == ["inf to inf; 0 of 1", "no"]
    assert rows()[error_bar("backward: mean error")] == ["not measured", "-"]


def test_float32_beside_torch(tables: ModuleType, tmp_path: Path) -> None:
    """The manual shows every head dim of the Hopper kernels; the bars are for 64 and 128."""
    cells = [c for c in cells_of("float32", Grid(masks=("full",))) if c.dtype == "float32"]
    for is_mma, ours in ((False, 1.0), (True, 8.0)):
        results = [
            report.Result(c, way, {"cuflash": [ours], "efficient": [5.0 if c.head_dim < 256 else 1.5]})
            for c in cells
            for way in (FORWARD, BACKWARD)
        ]
        record(tmp_path, results, f"float32_{is_mma}", without_wgmma=is_mma)
    recorded = tables.load(tmp_path)
    rows = {row[0]: row[2:4] for row in (bar.row(recorded) for bar in tables.BARS)}
    assert rows["forward, float32: speed of torch's memory-efficient kernel"] == ["5.00 to 5.00; 2 of 2", "yes"]
    section = tables.kernels_section(recorded)
    assert section.count("**float32**") == 1 and "| 256 | full |" in section and "(1.5)" in section
    assert "(0.6)" not in section and " not measured: [the bars]" in section
    row = ["float32, with float32's error", "H200", "torch's memory-efficient kernel", "3", *2 * ["3.3 (1.5 to 5.0)"]]
    assert f"| {' | '.join(row)} |" in tables.readme_section(recorded, tmp_path)


def test_shapes_at_random_stand_in_the_readme(tables: ModuleType, tmp_path: Path) -> None:
    facts = {**FACTS, "command": "small_grids", "gpu": "NVIDIA H100 80GB HBM3"}
    records.write(tmp_path / "small_grids.jsonl", facts, [{"speed_of_fastest_peer": x} for x in (0.8, 1.25)])
    assert "| H100 | the faster of FlashAttention-3 and cuDNN | 2 | 1.00 (0.80 to 1.25) | - |" in tables.readme_section(
        tables.load(tmp_path), tmp_path
    )


def test_committed_tables_are_of_the_committed_files(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


def test_a_section_is_replaced(tables: ModuleType) -> None:
    begin, end = tables.pages.BEGIN.format("speed"), tables.pages.END.format("speed")
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert tables.pages.with_section(text, "speed", "new\n") == f"before\n{begin}\nnew\n{end}\nafter\n"


def test_files_of_other_kinds_are_left_out(tables: ModuleType, tmp_path: Path) -> None:
    records.write(tmp_path / "gpt2.jsonl", {**FACTS, "command": "train_gpt2"}, [{"step_ms": 1.0}])
    records.write(tmp_path / "cpu.jsonl", {"command": "bench"}, [{"cell": {"suite": "cpu"}}])
    assert tables.load(tmp_path) == []


def test_training_and_bytes_moved(tables: ModuleType, tmp_path: Path) -> None:
    facts: dict[str, Any] = {**FACTS, "versions": {"torch": "2"}}
    steps = [
        {"attention": name, "step_ms": ms, "attention_ms": 10.0, "attention_share": 0.1, "tokens_per_second": 1.0}
        | {"speed_of_baseline": 100.0 / ms}
        for name, ms in (("baseline", 100.0), ("cuflash", 50.0))
    ]
    for context in (1024, 4096):
        records.write(tmp_path / f"gpt2_{context}.jsonl", {**facts, "run": {"batch": 2, "context": context}}, steps)
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
    records.write(tmp_path / "paper_io.jsonl", {**facts, "fast_bytes": 227 * 1024}, calls)
    times = {"batch": 16, "ms": {"own": 3.0, "cuflash": 1.0}, "differences": [1e-4, 3e-4]}
    compared = [{"compared": "attention", "context": 1024, **times}]
    compared += [
        {"compared": "training", "attention": name, "ms_a_step": ms, "losses": [9.0, 4.0]}
        for name, ms in (("own", 30.0), ("cuflash", 20.0))
    ]
    records.write(tmp_path / "mytorch.jsonl", {**facts, "size": "base", "batch": 8}, compared)

    measured = tables.measured
    assert [row[2:4] for row in measured.gpt2_bars(tmp_path)] == [["2.00", "yes"], ["2.00", "no"]]
    eight = {**facts, "run": {"batch": 2, "context": 1024, "fp8": True}}
    records.write(tmp_path / "gpt2_1024_fp8.jsonl", eight, steps)
    assert measured.gpt2_bars(tmp_path)[0][2] == "2.00 (2.00 with --fp8)"
    assert "| bfloat16 | 4096 | 3 | 33.3 ms | -6.7 ms | - | 10.0 ms | 216 TFLOP/s |" in measured.gpt2(tmp_path)
    assert "| forward | 1024 | 20.0 | 8.0 | 2.5 | 4.0 | 2.0 | 1.0 | 1.0 |" in measured.moved(tmp_path)
    assert "12 heads of 64 | 3.00 | 1.00 | 3.00 |" in measured.mytorch(tmp_path)
    assert "base, 8 x 1024 | 30.0 | 20.0 | 1.50 |" in measured.mytorch(tmp_path)
    assert "at most 3.0e-04 in norm" in measured.mytorch(tmp_path)
    records.write(tmp_path / "gpt2_loss.jsonl", eight, [{"validation": 2.5, "losses": [9.0, *[3.0] * 10]}])
    assert "| 8 bits | 9.00 | 3.000 | 2.500 |" in measured.loss(tmp_path)
    assert "No count" in measured.moved(tmp_path / "empty") and "Not recorded" in measured.mytorch(tmp_path / "empty")
