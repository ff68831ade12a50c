"""Tests of the benchmark's own machinery on the CPU: cells, the sampled check, the report, the command."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.tools import bench
from cuflash.tools.bench import peers, records, report
from cuflash.tools.bench.cells import BACKWARD, FORWARD, SUITES, Cell, Grid, block_mask
from cuflash.tools.bench.inputs import Inputs, arguments, limit, take_sample, worst

PLAIN = Cell("plain", "float32", 2, 48, 80, 4, 4, 16, 24)
CELLS = [
    PLAIN,
    dataclasses.replace(PLAIN, name="causal", causal=True),
    dataclasses.replace(PLAIN, name="grouped", num_heads_kv=2),
    dataclasses.replace(PLAIN, name="window", causal=True, window_left=5),
    dataclasses.replace(PLAIN, name="sparse", batch=1, seqlen_q=300, seqlen_k=300, density=0.5),
    dataclasses.replace(
        PLAIN, name="smaller blocks", batch=1, seqlen_q=300, seqlen_k=300, density=0.3, block_size=64, causal=True
    ),
    dataclasses.replace(PLAIN, name="packed", seqlen_q=90, seqlen_k=90, batch=3, lengths=(50, 1, 39), causal=True),
    dataclasses.replace(
        PLAIN,
        name="mixed",
        seqlen_q=43,
        seqlen_k=130,
        batch=3,
        lengths=(2, 1, 40),
        key_lengths=(9, 60, 61),
        causal=True,
    ),
    dataclasses.replace(PLAIN, name="window as blocks", causal=True, window_left=5, options=("blocks",)),
    dataclasses.replace(PLAIN, name="but one pair", causal=True, window_left=50, options=("blocks", "hole")),
    *(
        dataclasses.replace(PLAIN, name=option, options=(option,))
        for option in ("softcap", "alibi", "bias", "dbias", "mask", "dropout")
    ),
]


def given_to_reference(inputs: Inputs) -> dict[str, Any]:
    """Return the cell's options as the reference takes them."""
    given = arguments(inputs)
    if "block_mask" in given:
        given["mask"] = given.pop("block_mask").to_dense()
    return given


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_sample_agrees_with_the_reference_and_sees_errors(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuflash.tools.bench.inputs.SMALL", 60)  # fewer than some cells have rows, more than others
    inputs = Inputs(cell, np)
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    given = given_to_reference(inputs)
    if cell.lengths:
        ends = [np.cumsum((0, *lengths)).astype(np.int32) for lengths in (cell.lengths, cell.keys)]
        out, lse = reference.attention_varlen(q, k, v, *ends, **given)
        gradients = reference.attention_varlen_backward(dout, q, k, v, *ends, **given)
    else:
        out, lse = reference.attention(q, k, v, **given)
        gradients = reference.attention_backward(dout, q, k, v, **given)
    dq, dk, dv, *dbias = (gradients[name] for name in ("q", "k", "v", "bias")[: 4 if "dbias" in cell.options else 3])
    sample = take_sample(inputs, arguments(inputs), out, lse)
    assert worst(sample.forward_errors(out)) < 1e-12
    assert worst(sample.backward_errors((dq, dk, dv, *dbias))) < 1e-12
    bound = limit(cell.dtype)
    assert worst(sample.forward_errors(out * 1.001)) > bound
    assert worst(sample.backward_errors((dq, dk, dv * 1.001))) > bound
    assert worst(sample.backward_errors((dq, np.full_like(dk, np.nan), dv))) > bound
    with pytest.raises(ArithmeticError, match="lse is wrong"):
        take_sample(inputs, arguments(inputs), out, lse + 0.01)


def test_flops_count_visible_pairs() -> None:
    square = dataclasses.replace(PLAIN, seqlen_k=48)
    full = square.flops(FORWARD)
    assert full == 2 * 2 * 48 * 48 * 4 * (16 + 24)
    assert square.flops(BACKWARD) == 2.5 * full
    assert dataclasses.replace(square, causal=True).flops(FORWARD) == full / 2
    diagonal = dataclasses.replace(square, causal=True, window_left=0)
    assert diagonal.flops(FORWARD) == pytest.approx(full / 48)
    mixed = dataclasses.replace(square, causal=True, lengths=(1, 3), key_lengths=(5, 7))
    assert mixed.flops(FORWARD) == 2 * (5 + (5 + 6 + 7)) * 4 * (16 + 24)
    assert mixed.plain == mixed


def test_a_mask_that_hides_all_is_no_work_and_only_zeros_are_right() -> None:
    empty = dataclasses.replace(PLAIN, batch=1, seqlen_q=300, seqlen_k=300, density=0.0)
    inputs = Inputs(empty, np)
    given = arguments(inputs)
    assert not empty.visible(np.arange(300)).any()
    out, lse = peers.cuflash_results(inputs, given)
    sample = take_sample(inputs, given, out, lse)
    gradients = peers.cuflash_calls(inputs).backward()
    assert worst(sample.forward_errors(out)) == worst(sample.backward_errors(gradients)) == 0.0
    assert worst(sample.forward_errors(out + np.float32(1e-20))) > limit(empty.dtype)
    result = report.Result(empty, FORWARD, {"cuflash": [1.0], "plain": [2.0]})
    assert result.tflops("cuflash") == 0.0 < result.tflops("plain")
    assert json.loads(json.dumps(result.as_json()))["flops"] == 0.0


def test_blocks_have_the_size_that_a_cell_says() -> None:
    blocks = dataclasses.replace(PLAIN, seqlen_q=512, seqlen_k=512, density=0.5)
    for size in (64, 128):
        mask = block_mask(dataclasses.replace(blocks, block_size=size)).to_dense()[0, 0]
        whole = {}
        for side in (size, 2 * size):
            cut = mask.reshape(512 // side, side, 512 // side, side)
            whole[side] = bool((cut == cut[:, :1, :, :1]).all())
        assert mask.mean() == 0.5 and whole == {size: True, 2 * size: False}


def test_sparse_suite() -> None:
    cells = SUITES["sparse"](Grid(head_dims=(64, 128)))
    densities = {
        (d, size): {cell.density for cell in cells if (cell.head_dim, cell.block_size) == (d, size)}
        for d in (64, 128)
        for size in (64, 128)
    }
    assert densities[64, 128] == densities[128, 128] == {1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.0}
    assert densities[128, 64] == {0.5, 0.1, 0.02} and not densities[64, 64]
    assert all(cell.num_heads_q * cell.head_dim == 2048 for cell in cells)


@pytest.mark.parametrize("suite", SUITES)
def test_suites(suite: str) -> None:
    chosen = SUITES[suite](Grid())
    assert chosen
    assert len({cell.name for cell in chosen}) == len(chosen)
    for cell in chosen:
        assert not cell.lengths or sum(cell.lengths) == cell.seqlen_q


def test_the_random_suite_follows_its_seed_and_its_limits() -> None:
    drawn = SUITES["random"](Grid(seed=3, count=200))
    assert drawn == SUITES["random"](Grid(seed=3, count=200)) != SUITES["random"](Grid(seed=4, count=200))
    for cell in drawn:
        assert 1 <= cell.batch <= 64 and 1 <= cell.num_heads_q <= 64 and cell.num_heads_q % cell.num_heads_kv == 0
        assert 1 <= cell.seqlen_q <= 65536 and 1 <= cell.seqlen_k <= 65536 and cell.flops(FORWARD) <= 2e13
        assert cell.head_dim % 8 == 0 and 32 <= cell.head_dim == cell.head_dim_v <= 256
    assert {cell.causal for cell in drawn} == {True, False}
    # Sizes are drawn in log scale: as many are below the root of the range as above it.
    assert sum(cell.seqlen_q < 256 for cell in drawn) > 60


def test_random_cells_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    small = dataclasses.replace(PLAIN, suite="random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            SUITES, "random", lambda grid: [dataclasses.replace(small, name=f"seed {grid.seed}")] * grid.count
        )
        arguments = ["--device", "cpu", "--suite", "random", "--seed", "7", "--cells", "2"]
        arguments += ["--rounds", "1", "--budget-ms", "1"]
        arguments += ["--json", str(tmp_path / "run.jsonl"), "--picture", str(tmp_path / "run.svg")]
        assert bench.run(parser.parse_args(arguments)) == 0
    facts, results = records.read(tmp_path / "run.jsonl")
    assert facts["seed"] == 7 and [r["cell"]["name"] for r in results] == ["seed 7"] * 4
    assert "speed over the fastest peer's, forward: 2 cells with a peer" in capsys.readouterr().out
    assert (tmp_path / "run.svg").read_text("utf-8").rstrip().endswith("</svg>")


def test_a_summary_separates_short_cells_and_lists_the_worst() -> None:
    def result(ratio: float, ms: float) -> report.Result:
        return report.Result(PLAIN, FORWARD, times={"cuflash": [ms], "fa3": [ratio * ms], "cudnn": [9 * ms]})

    lines = report.summary([*(result(1 + n / 100, 1.0) for n in range(11)), result(0.5, 0.02)]).splitlines()
    assert lines[0] == "12 cells with a peer"
    assert lines[1].startswith("above 50 us: 11 cells, geometric mean 1.050; quantiles 0% 1.00, ")
    assert lines[2].startswith("up to 50 us: 1 cells, geometric mean 0.500; ")
    assert lines[3] == "0.50  plain: cuflash 20.0, fa3 10.0, cudnn 180.0 us" and len(lines) == 3 + 10


def test_torch_computes_no_causal_mask_that_ends_at_the_last_key() -> None:
    cell = dataclasses.replace(PLAIN, causal=True)
    with pytest.raises(peers.Unavailable):
        peers.sdpa_calls(Inputs(cell, np), "default")


def test_plain_packed_sequences_have_equal_lengths() -> None:
    cell = Cell("packed", "float32", 3, 4096, 4096, 1, 1, 8, 8, lengths=(4000, 1, 95), causal=True)
    inputs = Inputs(cell, np)
    q, k, v = (inputs[name][None] for name in "qkv")
    np.testing.assert_allclose(peers.plain_calls(inputs).forward()[None], cuflash.attention(q, k, v, causal=True))
    with pytest.raises(peers.Unavailable):
        peers.plain_calls(inputs.of(cell.plain))


def test_plain_keeps_the_precision() -> None:
    cell = Cell("tf32", "float32", 1, 8, 8, 1, 1, 8, 8, options=("tf32",))
    assert cell.plain == cell
    assert dataclasses.replace(cell, options=("tf32", "softcap")).plain == cell
    with pytest.raises(peers.Unavailable):
        peers.plain_calls(Inputs(cell, np))


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SUITES, "cpu", lambda grid: CELLS)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    files = {name: tmp_path / "results" / name for name in ("run.jsonl", "run.png")}
    arguments = ["--device", "cpu", "--rounds", "2", "--budget-ms", "1"]
    arguments += ["--json", str(files["run.jsonl"]), "--picture", str(files["run.png"])]
    assert bench.run(parser.parse_args(arguments)) == 0
    assert files["run.png"].stat().st_size > 0
    facts, results = records.read(files["run.jsonl"])
    assert facts["versions"]["numpy"] == np.__version__
    assert len(results) == 2 * len(CELLS)
    for result in results:
        assert result["peers"]["cuflash"]["calls"] >= 6
    printed = capsys.readouterr().out
    assert "forward, TFLOP/s" in printed and "| causal" in printed


def test_a_wrong_result_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(inputs: Inputs) -> peers.Calls:
        calls = peers.cuflash_calls(inputs)
        return calls._replace(forward=lambda: 1.01 * calls.forward())

    monkeypatch.setattr(peers, "cpu_peers", lambda: {peers.US: wrong})
    monkeypatch.setitem(SUITES, "cpu", lambda grid: [PLAIN])
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.run(parser.parse_args(["--device", "cpu", "--rounds", "1", "--budget-ms", "1"])) == 1


def test_table_shows_who_is_absent() -> None:
    result = report.Result(PLAIN, FORWARD, times={"cuflash": [1.0, 3.0, 2.0], "torch": [4.0]}, absent={"fa3": "no"})
    alone = report.Result(PLAIN, FORWARD, times={"cuflash": [2.0]})
    assert result.ratio() == 2.0
    lines = report.table([result, alone], "ms").splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["plain", "2", "4", "2.00"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["plain", "2", "-", "-"]
