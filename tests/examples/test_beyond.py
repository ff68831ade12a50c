"""The benchmarks of keys in host memory and of sums behind attention compute one thing in all ways, and have tables."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import load_script

from cuflash.distributed import tensor_parallel
from cuflash.distributed.__main__ import run
from cuflash.distributed.communicators import Communicator
from cuflash.tools.bench import records

FACTS: dict[str, Any] = {
    "commit": "0123456789",
    "date": "2026-01-02T03:04:05+00:00",
    "gpu": "H200",
    "driver": "1",
    "nvrtc": "13.0",
    "versions": {},
}


class OnDevice(np.ndarray[Any, Any]):
    """A NumPy array that has an address as CuPy's have it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def offload(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with few keys and queries, in one round."""
    script = load_script("offload")
    small = {"STREAM_KEYS": 512, "DECODE_KEYS": 1024, "CACHE_KEYS": 512, "DRAWN": 1 << 12, "MANY_QUERIES": 33}
    small |= {"CHUNK_BYTES": 1 << 14, "MOST_CHUNKS": 7, "LEAST_ROUNDS": 1, "MOST_ROUNDS": 1}
    for name, size in small.items():
        monkeypatch.setattr(script, name, size)
    return script


def test_keys_on_the_host_and_elsewhere_give_one_result(offload: ModuleType) -> None:
    bench = offload.Bench(np, offload.DECODE_KEYS, fewer=2)
    bench.link = 10.0
    lines = {part: [measure(bench, *cell) for cell in cells] for part, (measure, cells) in cells_of(offload).items()}
    assert [len(own) for own in lines.values()] == [8, 2, 4, 2]
    for line in (line for own in lines.values() for line in own):
        assert line["apart"] < (0.02 if "float32" not in line["cell"] else 1e-5), line
        assert all(x > 0 for x in line["seconds"].values())
        assert line["cell"] in offload.in_words(line)
    assert lines["stream"][0]["cell"] == "stream bfloat16, 1 x 256, pinned"
    stream = lines["stream"][-1]
    assert stream["of_link"] == pytest.approx(256 * 8 * 128 * 4 * 2 / stream["seconds"]["host"] / 1e10)
    assert lines["cache"][0]["on_host"] == pytest.approx(0.5, abs=0.1)


def cells_of(offload: ModuleType) -> dict[str, Any]:
    """Return all parts but the link, which needs a GPU."""
    small = {"kernels": [("forward", 512), ("backward", 256)]}
    return {
        part: (measure, small.get(part, cells)) for part, (measure, cells) in offload.PARTS.items() if part != "link"
    }


def test_numbers_are_of_normal_size_in_both_dtypes(offload: ModuleType) -> None:
    bench = offload.Bench(np, 100)
    for dtype in offload.DTYPES:
        k, v = (x.astype(np.float64) for x in bench.keys(100, dtype))
        assert k.std() == pytest.approx(1, abs=0.1) and abs(v).max() < 10
        assert (k != v).mean() > 0.9


def test_the_link_copies_chunks_there_and_back(offload: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def copy(target: int, source: int, size: int, kind: int, stream: int) -> None:
        copied.append((kind, size))
        ctypes.memmove(target, source, size)

    current = SimpleNamespace(synchronize=lambda: None, ptr=0)
    runtime = SimpleNamespace(memcpyAsync=copy, memcpyHostToDevice=1, memcpyDeviceToHost=2)
    cuda = SimpleNamespace(runtime=runtime, Stream=lambda non_blocking: current, get_current_stream=lambda: current)
    xp = SimpleNamespace(cuda=cuda, empty=lambda size, dtype: np.zeros(size, dtype).view(OnDevice))
    bench = offload.Bench(xp, 64)
    before = bench.memory["pinned"].copy()
    line = offload.link(bench)
    assert bench.link == line["gigabytes_per_second"]["in"] > 0
    assert copied == [(kind, 1 << 14) for _ in range(offload.WARM_UP + 1) for kind in (1, 2) for _ in range(7)]
    np.testing.assert_array_equal(bench.memory["pinned"], before)


def result_of(script: ModuleType, kind: str, comm: Communicator) -> Any:
    """Return what one rank's call gives."""
    return script.call_of(kind, comm, 400, np)()


def test_in_turn_and_the_overlap_give_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("allreduce")
    monkeypatch.setattr(script, "HEAD_DIM", 8)
    monkeypatch.setattr(script, "MODEL", 20)
    monkeypatch.setattr(tensor_parallel, "LEAST_ROWS", 128)
    results = {kind: run(2, partial(result_of, script, kind)) for kind in script.KINDS}
    whole = sum(x.astype(np.float64) for x in results[script.COMPUTE])
    for kind in (script.OVERLAP, script.IN_TURN, script.SUM):
        for x in results[kind]:
            assert x.dtype.name == "bfloat16"
            np.testing.assert_allclose(x.astype(np.float64).reshape(whole.shape), whole, rtol=0.02, atol=0.1)
    assert script.text_of(script.cell_of(2, 400, dict.fromkeys(script.KINDS, 1e-3))).endswith("the sum is 1.00")


WALL = {"forward": 1e-3, "backward": 1e-3}  # seconds


def test_tables_and_bars(tmp_path: Path) -> None:
    beyond = load_script("beyond")
    assert beyond.bars(tmp_path) == beyond.sections(tmp_path) == []
    times = {"seconds": {"host": 0.02, "gpu": 0.001}, "gigabytes_per_second": {"host": 53.0, "gpu": 1000.0}}
    cells = [
        {"part": "stream", "cell": f"stream {memory}", "memory": memory, **times, "of_link": share, "apart": 0.0}
        for memory, share in (("pinned", 0.99), ("pinned", 0.949), ("pageable", 0.5))
    ]
    tflops = {"seconds": times["seconds"], "tflops": {"host": 690.0, "gpu": 700.0}}
    cells.append({"part": "kernels", "cell": "kernels forward", **tflops, "of_kernels": 0.9857, "apart": 0.0})
    facts = {**FACTS, "command": "offload", "cpu": "A CPU", "cores": 16, "quick": False}
    records.write(tmp_path / "offload.jsonl", facts, cells)
    script = load_script("allreduce")
    sums = [
        script.cell_of(2, seqlen, {"overlap": 1e-3, "in turn": own, "compute": 8e-4, "sum": 5e-4})
        for seqlen, own in ((4096, 1e-3), (8192, 1.4e-3))
    ]
    records.write(tmp_path / "allreduce.jsonl", {**FACTS, "command": "allreduce", "ranks": "threads"}, sums)
    rows = beyond.bars(tmp_path)
    assert [row[1:] for row in rows] == [
        ["at least 0.95", "0.94 to 0.99; 1 of 2", "no", "0123456"],
        ["at least 0.5", "0.50", "yes", "0123456"],
        ["at least 0.95", "0.98", "yes", "0123456"],
        ["at least 1.3", "1.40 at 8192 tokens, of which the sum is 0.36", "yes", "0123456"],
    ]
    tables = load_script("tables")
    page = tables.page(tables.load(tmp_path), tmp_path)
    assert all("| " + " | ".join(row) + " |" in page for row in rows)
    assert "| stream pinned | 20.00 | 53.0 | 1.00 | 1000.0 | 0.94 |" in page
    assert "| kernels forward | 20.00 | 690.0 | 1.00 | 700.0 | 0.98 |" in page
    assert "| 8192 tokens on 2 GPUs | 1.000 | 1.400 | 0.800 | 0.500 | 0.36 | 1.40 |" in page
    of_ring = load_script("ring").cell_of(
        "ring zigzag on 2 GPUs, 8192 tokens each", 2, 8192, WALL, {**WALL, "forward": 9.1e-4}
    )
    records.write(tmp_path / "ring.jsonl", {**FACTS, "command": "ring", "ranks": "threads"}, [of_ring])
    assert [row[2:4] for row in beyond.bars(tmp_path)[:2]] == [["0.91", "yes"], ["1.00", "yes"]]
    assert "| ring zigzag on 2 GPUs, 8192 tokens each | 550 of 604 | 1374 of 1374 | 0.91 | 1.00 |" in tables.page(
        tables.load(tmp_path), tmp_path
    )
    (tmp_path / "ring.jsonl").unlink()
    records.write(tmp_path / "offload.jsonl", {**facts, "quick": True}, cells)
    assert len(beyond.bars(tmp_path)) == 1 and "A quarter of the keys" in "".join(beyond.sections(tmp_path))
