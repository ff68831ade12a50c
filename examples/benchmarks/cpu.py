"""Time and memory of attention on the CPU, beside PyTorch's on the same cores.

    python examples/benchmarks/cpu.py [--rounds 9] [--seqlen 4096] [--json FILE]

The two take turns, round by round, so that whatever else the machine does meets both; on a machine of many cores
`taskset -c 0,1` leaves them two. Load averages are recorded, and beside wall time the CPU time that each spends, which
other work on the machine disturbs less. Peak memory is what NumPy and Python allocate during one call beyond what was
there before (tracemalloc), the result included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from recorded import RESULTS

import cuflash
from cuflash.tools.bench import records

Work = Callable[[], Any]

BATCH, HEADS, HEAD_DIM = 1, 8, 64


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    details = [names.get(key, "") for key in ("model name", "cpu family", "model")]
    return "{}, family {}, model {}".format(*details) if details[0] else platform.processor()


def available_cores() -> int:
    """The cores that this process may run on: fewer than there are under `taskset`."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interleaved(works: dict[str, Work], rounds: int) -> dict[str, dict[str, float]]:
    """Median and least wall time, and median CPU time of all threads, of each work, in seconds."""
    wall: dict[str, list[float]] = {name: [] for name in works}
    cpu: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()  # libraries load and caches fill
    for _ in range(rounds):
        for name, work in works.items():
            started, started_cpu = time.perf_counter(), time.process_time()
            work()
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - started_cpu)
    return {
        name: {
            "wall_median_s": round(statistics.median(wall[name]), 4),
            "wall_min_s": round(min(wall[name]), 4),
            "cpu_median_s": round(statistics.median(cpu[name]), 4),
        }
        for name in works
    }


def peak_bytes(work: Work) -> int:
    """Return what NumPy and Python allocate at most at a time during `work`."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = work()
        peak = tracemalloc.get_traced_memory()[1]
        del result
        return peak - before
    finally:
        tracemalloc.stop()


def torch_work(arrays: list[Any], dout: Any) -> tuple[Work, Work, str] | None:
    """PyTorch's forward, its forward and backward, and its version; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    q, k, v, grad = (torch.from_numpy(x).transpose(1, 2) for x in (*arrays, dout))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        return torch.autograd.grad(out, leaves, grad)

    return forward, both, f"{torch.__version__}, {torch.get_num_threads()} threads"


def measure(seqlen: int, rounds: int) -> records.Record:
    """Measure forward, and forward and backward: a cell each."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((BATCH, seqlen, HEADS, HEAD_DIM), np.float32) for _ in range(4))

    def forward() -> Any:
        return cuflash.attention(q, k, v, causal=True)

    def both() -> Any:
        _, backward = cuflash.attention_vjp(q, k, v, causal=True)
        return backward(dout)

    works: dict[str, Work] = {"cuflash": forward}
    works_both: dict[str, Work] = {"cuflash": both}
    versions = {"python": platform.python_version(), "numpy": np.__version__, "cuflash": cuflash.__version__}
    peer = torch_work([q, k, v], dout)
    if peer is not None:
        works["torch"], works_both["torch"], versions["torch"] = peer
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    times, times_both = interleaved(works, rounds), interleaved(works_both, max(3, rounds // 3))
    facts: dict[str, Any] = {
        "command": "cpu",
        "problem": f"causal, float32, batch {BATCH}, heads {HEADS}, seqlen {seqlen}, head_dim {HEAD_DIM}",
        "cpu": cpu_model(),
        "cores": available_cores(),
        "system": platform.platform(),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "rounds": rounds,
        "load_average_before": load_before,
        "bytes_of_all_scores": 4 * BATCH * HEADS * seqlen**2,
    }
    cells = []
    for name, work, measured in (("forward", forward, times), ("forward_and_backward", both, times_both)):
        cell: dict[str, Any] = {"direction": name, "peers": measured, "peak_bytes": peak_bytes(work)}
        if "torch" in measured:
            ratios = {kind: measured["cuflash"][kind] / measured["torch"][kind] for kind in measured["torch"]}
            cell["ratio_to_torch"] = {kind.removesuffix("_s"): round(ratio, 3) for kind, ratio in ratios.items()}
        cells.append(cell)
    return records.Record(facts, cells)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Time and memory of attention on the CPU, beside PyTorch's.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--json", type=Path, default=RESULTS / "cpu.jsonl", metavar="FILE", help="of the figures")
    arguments = parser.parse_args()
    record = measure(arguments.seqlen, arguments.rounds)
    print(json.dumps(record._asdict(), indent=2))
    records.write(arguments.json, *record)


if __name__ == "__main__":
    main()
