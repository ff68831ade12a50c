"""Bytes between L2 cache and multiprocessors, counted by Nsight Compute, beside the theorem's N^2 d^2 / M.

Theorem 2 of the FlashAttention paper: with M elements of fast memory, exact attention moves O(N^2 d^2 / M) elements,
plain attention O(N d + N^2). `paper.py --io` runs this file under ncu, for which every measured call is a range.
"""

from __future__ import annotations

import csv
import importlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import curves

from cuflash.tools.bench import records

HEADS, HEAD_DIM, ELEMENT_BYTES = 8, 64, 2
SEQLENS = (1024, 2048, 4096, 8192)
METHODS = ("cuflash", "naive")
DIRECTIONS = ("forward", "backward")
# The bytes that multiprocessors read and write through the crossbar to L2, by copy engines too; and those of DRAM.
METRICS = {
    "l1tex__m_xbar2l1tex_read_bytes.sum": "l2_bytes",
    "l1tex__m_l1tex2xbar_write_bytes.sum": "l2_bytes",
    "dram__bytes.sum": "dram_bytes",
}
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
# Calls run as they always do, at the clocks and with the cache as they are; where not all metrics fit, the whole
# program runs again.
NCU = ["ncu", "--replay-mode", "app-range", "--clock-control", "none", "--cache-control", "none"]
NCU += ["--csv", "--print-units", "base"]


def calls_under_ncu(method: str) -> None:
    """Make the calls that ncu watches: one of each length and direction, whose kernels are compiled."""
    import cupy

    problem = importlib.import_module("paper").Problem  # beside this file, which is no package
    for seqlen in SEQLENS:
        calls = problem(cupy, 1, seqlen, options=False).calls(method)
        for direction in DIRECTIONS:
            call = getattr(calls, direction)
            call()  # compiles
            cupy.cuda.Device().synchronize()
            cupy.cuda.profiler.start()
            call()
            cupy.cuda.Device().synchronize()
            cupy.cuda.profiler.stop()
            print(f"{method}, n {seqlen}, {direction}", file=sys.stderr, flush=True)


def count(method: str, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The sums of the metrics of each call, from ncu's rows: one a range and metric."""
    results: list[dict[str, Any]] = [
        {"method": method, "n": n, "direction": direction, "l2_bytes": 0.0, "dram_bytes": 0.0}
        for n in SEQLENS
        for direction in DIRECTIONS
    ]
    for row in rows:
        value = float(row["Metric Value"].replace(",", ""))
        results[int(row["ID"])][METRICS[row["Metric Name"]]] += value * UNITS[row["Metric Unit"]]
    return results


def theorem_bytes(n: int, fast_bytes: int) -> float:
    """N^2 d^2 / M elements for all heads, in bytes."""
    return HEADS * ELEMENT_BYTES * n**2 * HEAD_DIM**2 / (fast_bytes / ELEMENT_BYTES)


def run(out: Path, facts: dict[str, Any]) -> int:
    """Count, print a table, write paper_io.jsonl and paper_io.svg."""
    import cupy

    fast_bytes = int(cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
    print(f"M = {fast_bytes} bytes of shared memory; MB between L2 and the multiprocessors (DRAM in brackets)")
    results: list[dict[str, Any]] = []
    for method in METHODS:  # a process each: what is counted is written before the next begins
        command = [*NCU, "--metrics", ",".join(METRICS), sys.executable, str(Path(__file__).resolve()), method]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stdout[-2000:], file=sys.stderr)
            return 1
        lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
        results += count(method, list(csv.DictReader(io.StringIO("\n".join(lines)))))
        for r in results[-len(SEQLENS) * len(DIRECTIONS) :]:
            r["theorem_bytes"] = theorem_bytes(r["n"], fast_bytes)
            bytes_moved = f"{r['l2_bytes'] / 1e6:9.1f} ({r['dram_bytes'] / 1e6:8.1f})"
            share = f"{r['l2_bytes'] / r['theorem_bytes']:7.2f} of the theorem's"
            print(f"{method:8} {r['direction']:8} n {r['n']:5}: {bytes_moved}, {share}")
        records.write(out / "paper_io.jsonl", {**facts, "batch": 1, "fast_bytes": fast_bytes}, results)
    draw(results, fast_bytes, out / "paper_io.svg")
    return 0


def draw(results: list[dict[str, Any]], fast_bytes: int, path: Path) -> None:
    """Measured bytes over n, and the theorem's line."""
    figure = curves.new_figure(10, 4.5)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        for method, style in zip(METHODS, curves.STYLES[: len(METHODS)], strict=True):
            values = [r["l2_bytes"] / 1e6 for r in results if (r["method"], r["direction"]) == (method, direction)]
            panel.plot(SEQLENS, values, label=method, **style.of_line())
        theorem = [theorem_bytes(n, fast_bytes) / 1e6 for n in SEQLENS]
        panel.plot(SEQLENS, theorem, "k--", label="N² d² / M, M the shared memory")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(SEQLENS, [str(n) for n in SEQLENS])
        panel.set(xlabel="n", title=f"{direction}: MB between L2 and multiprocessors")
        panel.grid(alpha=0.3)
    curves.legend_below(figure, panels[0], 3)
    curves.save(figure, path)


if __name__ == "__main__":
    calls_under_ncu(sys.argv[1])
