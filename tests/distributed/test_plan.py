"""The plan's figures are those of the records, its predictions follow, and it says what nobody measured."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cuflash
from cuflash.distributed import figures, plan
from cuflash.distributed.__main__ import main
from cuflash.distributed.predict import Layer, Machine, grids, interpolated, kernel_rate, predict, rate

RESULTS = Path(cuflash.__file__).parent.parent / "docs" / "lab" / "results"
LAYER = Layer(seqlen=16 << 20, num_heads_q=32, num_heads_kv=8, head_dim=128)
MACHINE = Machine()


def records() -> Iterator[dict[str, Any]]:
    for name in ("forward", "backward_causal", "backward_full"):
        for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("cell", {}).get("suite") == "dense":
                yield record


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no checkout: the records are not part of a wheel")
def test_figures_are_those_of_the_records() -> None:
    tables = {"forward": figures.FORWARD, "backward": figures.BACKWARD}
    seen = set()
    for record in records():
        cell, direction = record["cell"], record["direction"]
        if cell["seqlen_q"] in figures.SEQLENS:
            key = cell["head_dim"], cell["causal"]
            index = figures.SEQLENS.index(cell["seqlen_q"])
            assert tables[direction][key][index] == round(record["peers"]["cuflash"]["tflops"]), (direction, key)
            seen.add((direction, key, index))
    assert len(seen) == sum(len(figures.SEQLENS) * len(table) for table in tables.values())


def test_one_gpu_takes_what_its_kernels_take() -> None:
    layer = Layer(16384, 16, 16, 128)
    way = predict(layer, 1, 1, MACHINE)
    assert way.forward.seconds == pytest.approx(layer.flops / figures.FORWARD[128, True][2] / 1e12)
    assert way.backward.seconds == pytest.approx(2.5 * layer.flops / figures.BACKWARD[128, True][2] / 1e12)
    assert way.forward.link_use == way.backward.link_use == 0
    assert rate(layer, way.forward.seconds, 1, backward=False) == pytest.approx(figures.FORWARD[128, True][2])


def test_predictions_are_within_a_tenth_of_what_was_measured() -> None:
    for measured in figures.MEASURED:
        layer = Layer(measured.seqlen, measured.num_heads_q, measured.num_heads_kv, measured.head_dim)
        heads = measured.gpus if measured.scheme == "heads" else 1
        way = predict(layer, measured.gpus // heads, heads, MACHINE)
        assert rate(layer, way.forward.seconds, measured.gpus, backward=False) == pytest.approx(
            measured.forward, rel=0.1
        )
        assert rate(layer, way.backward.seconds, measured.gpus, backward=True) == pytest.approx(
            measured.backward, rel=0.1
        )


def test_every_way_computes_the_same_work() -> None:
    """No scheme is faster than its kernels, as its compute times the ranks is the work at some measured rate."""
    for causal in (True, False):
        layer = Layer(1 << 20, 32, 8, 128, causal=causal)
        rates = [table[128, kind][n] for table in (figures.FORWARD,) for kind in (True, False) for n in range(3)]
        for gpus in (1, 2, 8, 32):
            for way in grids(layer, gpus, MACHINE):
                assert way.ring * way.heads == gpus
                assert rate(layer, way.forward.seconds, gpus, backward=False) <= max(rates)
                assert way.forward.seconds <= way.backward.seconds


def test_a_slow_network_is_waited_for() -> None:
    """A ring takes as long as its link where a message takes longer than a step."""
    slow = predict(LAYER, 1024, 1, Machine(network=1.0))
    message = 2 * LAYER.seqlen / 1024 * 8 * 128 * 2
    assert slow.forward.step_link == pytest.approx(message / 1e9)
    assert slow.forward.step_link > slow.forward.step_compute
    assert slow.forward.seconds == pytest.approx(
        1023 * slow.forward.step_link + slow.forward.step_compute + figures.HOST
    )
    assert slow.forward.link_use == pytest.approx(1, abs=0.01)
    fast = predict(LAYER, 1024, 1, Machine(network=50.0))
    assert fast.forward.exposed == figures.HOST
    assert 0 < fast.forward.link_use < 1


def test_a_ring_within_a_host_takes_peer_copies() -> None:
    layer = Layer(128 << 10, 16, 16, 128)
    way = predict(layer, 4, 1, MACHINE)
    message = 2 * (32 << 10) * 16 * 128 * 2
    assert way.forward.step_link == pytest.approx(message / 395e9)


def test_memory_grows_with_the_tokens_of_a_gpu() -> None:
    one, two = (predict(LAYER, gpus, 1, MACHINE).memory for gpus in (1024, 512))
    assert two == pytest.approx(2 * one)
    tokens = LAYER.seqlen / 1024
    inputs = tokens * (4 * 32 * 128 + 4 * 8 * 128) * 2
    assert inputs < one < 3 * inputs


def test_heads_beyond_those_there_are_leave_gpus_idle() -> None:
    few = predict(LAYER, 1, 1024, MACHINE)
    enough = predict(LAYER, 32, 32, MACHINE)
    assert few.forward.seconds > 20 * enough.forward.seconds


def test_interpolation() -> None:
    table = {1: 10.0, 4: 20.0, 16: 40.0}
    assert [interpolated(table, x) for x in (0.5, 1, 2, 4, 8, 16, 99)] == [10, 10, 15, 20, 30, 40, 40]
    assert kernel_rate("forward", 128, True, 1 << 20) == 1e12 * figures.FORWARD[128, True][2]
    assert kernel_rate("forward", 96, True, 1 << 20) == pytest.approx(0.75e12 * figures.FORWARD[128, True][2])


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("16M", 16 << 20), ("4k", 4096), ("1.5K", 1536), ("2g", 2 << 30)]
)
def test_counts(text: str, count: int) -> None:
    assert plan.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "0", "-4", "1.0001", "4T", "nan", "inf", "1e30"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a "):
        plan.parse_count(text)


def test_the_command() -> None:
    """The command prints ring, heads and grids in a table, a picture, and errors or that nothing was measured."""
    arguments = ["plan", "--gpus", "1024", "--seqlen", "16M", "--heads", "32", "--kv-heads", "8", "--head-dim", "128"]
    done = subprocess.run(
        [sys.executable, "-m", "cuflash.distributed", *arguments], capture_output=True, text=True, check=True
    )
    text = done.stdout
    for part in ("ring           1024 x 1", "heads          1 x 1024", "128 x 8", "<- fastest", "|####", "|="):
        assert part in text
    assert text.count("<- fastest") == 1
    assert "link use" in text
    assert "GiB" in text
    for gpus in figures.HELD_AGAINST:
        lines = [line for line in text.splitlines() if line.startswith(f"  {gpus} GPU")]
        assert lines
        measured = any(x.gpus == gpus for x in figures.MEASURED)
        assert all(("measured (" in line) == measured for line in lines)
        assert measured or "not measured yet" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpus 4 --seqlen 4k --heads 6 --kv-heads 4", "--kv-heads: expected a divisor of the 6 query heads, got 4"),
        ("--gpus 4 --seqlen 4k --heads 6 --network 0", "--network: expected more than 0 GB/s, got 0.0"),
        ("--gpus 4 --seqlen 4k --heads 6 --network nan", "--network: expected more than 0 GB/s, got nan"),
    ],
)
def test_wrong_use(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "1", "--seqlen", "64M", "--heads", "32"]) == 0
    assert "none of these fits" in capsys.readouterr().out
    assert main(["plan", "--gpus", "1", "--seqlen", "64k", "--heads", "32", "--full"]) == 0
    found = capsys.readouterr().out
    assert "none of these fits" not in found
    assert "one GPU alone" in found


def test_the_plan_names_the_call() -> None:
    machine = Machine(network=5.0)
    by_scheme = {way.name: plan.picture(way, machine)[1] for way in grids(LAYER, 16, machine)}
    assert by_scheme["ring"] == "  by ring_attention(q, k, v, comm)"
    assert by_scheme["heads"] == "  by ulysses_attention(q, k, v, comm)"
    assert re.fullmatch(r"  by ring_attention\(q, k, v, comm, heads=(2|4|8)\)", by_scheme["grid"])
    assert plan.picture(predict(LAYER, 1, 1, machine), machine)[1] == "  by attention(q, k, v)"
