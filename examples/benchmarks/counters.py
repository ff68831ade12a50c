"""Hardware counters of the best and the worst recorded cell of each pass, and of the fastest peer there, by ncu.

    python examples/benchmarks/counters.py [--results FOLDER] [--commit COMMIT]

Which cells these are is read from FOLDER's records, beside which counters.jsonl is written. It needs ncu (Nsight
Compute), the peers of the records, and a GPU whose counters may be read. Clocks and caches are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pages
from recorded import PLAIN, RESULTS, US
from recording import add_commit

from cuflash.tools.bench import records

# By name: the records, and whether Hopper runs the kernels of other GPUs.
PARTS = {
    "forward": (("forward.jsonl",), False),
    "backward": (("backward_full.jsonl", "backward_causal.jsonl"), False),
    "mma.sync forward": (("mma.jsonl",), True),
    "mma.sync backward": (("mma.jsonl",), True),
    "float32 forward": (("float32.jsonl",), False),
    "float32 backward": (("float32.jsonl",), False),
}
STALLS = ("wait", "barrier", "long_scoreboard", "short_scoreboard", "gmma", "math_pipe_throttle", "dispatch_stall")
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "gpc__cycles_elapsed.avg.per_second": "hertz",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor_percent",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "powers_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    "sm__inst_executed.sum": "instructions",
    "l1tex__m_xbar2l1tex_read_bytes.sum": "l2_read_bytes",
    "dram__bytes.sum": "dram_bytes",
    **{f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": name for name in STALLS},
}
NCU = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--csv"]
NCU += ["--print-units", "base", "--metrics", ",".join(METRICS)]
# A kernel of this name ends the kernels of a call in ncu's list.
MARK = "end_of_call"
Call = dict[str, Any]  # part, best (or worst), direction, cell, peer


def best_and_worst(part: str, folder: Path) -> list[Call]:
    """Both cells of a part, each with cuflash and with its fastest peer."""
    files, _ = PARTS[part]
    direction = part.split()[-1]
    recorded = (result for file in files for result in records.read(folder / file).cells)
    chosen = [r for r in recorded if r["direction"] == direction and r["speed_of_fastest_peer"]]
    chosen.sort(key=lambda r: float(r["speed_of_fastest_peer"]))
    calls = []
    for which, result in (("best", chosen[-1]), ("worst", chosen[0])):
        times = {name: peer["median_ms"] for name, peer in result["peers"].items() if name not in (US, PLAIN)}
        for peer in (US, min(times, key=lambda name: times[name])):
            calls.append({"part": part, "which": which, "direction": direction, "cell": result["cell"], "peer": peer})
    return calls


def make_calls(calls: Sequence[Call]) -> None:
    """Make the calls that ncu watches: each once, compiled before."""
    import cupy

    from cuflash.tools.bench.cells import Cell
    from cuflash.tools.bench.inputs import Inputs
    from cuflash.tools.bench.peers import gpu_peers

    mark = cupy.RawKernel(f'extern "C" __global__ void {MARK}() {{}}', MARK)
    for call in calls:
        of_peer = gpu_peers()[call["peer"]](Inputs(Cell(**call["cell"]), cupy))
        run = getattr(of_peer, call["direction"])
        run()
        mark((1,), (1,), ())
        cupy.cuda.Device().synchronize()
        cupy.cuda.profiler.start()
        run()
        mark((1,), (1,), ())
        cupy.cuda.Device().synchronize()
        cupy.cuda.profiler.stop()
        print(f"{call['part']}, {call['which']}: {call['peer']}", file=sys.stderr, flush=True)


def by_call(rows: Iterable[dict[str, str]]) -> list[dict[str, Any]]:
    """Return each call's longest kernel, and how much of the call's time it took; a row is one metric."""
    calls: list[list[dict[str, Any]]] = [[]]
    kernels: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["Kernel Name"]
        if row["ID"] not in kernels:
            kernels[row["ID"]] = {"kernel": name.partition("(")[0]}
            if name.startswith(MARK):
                calls.append([])
            else:
                calls[-1].append(kernels[row["ID"]])
        kernels[row["ID"]][METRICS[row["Metric Name"]]] = float(row["Metric Value"].replace(",", ""))
    longest = [max(call, key=lambda kernel: float(kernel["nanoseconds"])) for call in calls if call]
    for kernel, call in zip(longest, filter(None, calls), strict=True):
        kernel["share_of_call"] = kernel["nanoseconds"] / sum(other["nanoseconds"] for other in call)
    return longest


def count(calls: Sequence[Call], without_wgmma: bool) -> list[dict[str, Any]]:
    """The same calls, each with its longest kernel's counters."""
    from cuflash.cuda.device import WITHOUT_WGMMA

    environment = {**os.environ, WITHOUT_WGMMA: "1"} if without_wgmma else dict(os.environ)
    command = [*NCU, sys.executable, str(Path(__file__).resolve()), "--calls", json.dumps(list(calls))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    counters = by_call(csv.DictReader(io.StringIO("\n".join(lines))))
    if done.returncode or len(counters) != len(calls):
        raise RuntimeError(f"ncu: expected {len(calls)} calls, got {len(counters)}:\n{done.stdout[-2000:]}")
    return [{**call, **kernel} for call, kernel in zip(calls, counters, strict=True)]


def table(counted: Iterable[dict[str, Any]]) -> str:
    """A row a call."""
    head = ["pass", "cell", "of", "ms", "GHz", "tensor pipe", "powers", "issue slots", "M instructions", "GB from L2"]
    rows = [[*head, "GB DRAM", "warps stalled per issue"]]
    for x in counted:
        stalls = sorted(STALLS, key=lambda name: -x[name])[:3]
        rows.append(
            [
                f"{x['part']}, {x['which']}",
                x["cell"]["name"],
                x["peer"],
                f"{x['nanoseconds'] / 1e6:.3f}",
                f"{x['hertz'] / 1e9:.2f}",
                *(f"{x[name]:.0f}%" for name in ("tensor_percent", "powers_percent", "issue_percent")),
                f"{x['instructions'] / 1e6:.0f}",
                *(f"{x[name] / 1e9:.2f}" for name in ("l2_read_bytes", "dram_bytes")),
                ", ".join(f"{name.replace('_', ' ')} {x[name]:.2f}" for name in stalls),
            ]
        )
    return pages.table(rows)


def main() -> None:
    """Count, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    add_commit(parser)
    parser.add_argument("--calls", type=json.loads, help=argparse.SUPPRESS)  # the process that ncu watches
    args = parser.parse_args()
    if args.calls:
        make_calls(args.calls)
        return
    if shutil.which("ncu") is None:
        parser.error("ncu (Nsight Compute) is not on the path")
    import cupy

    from cuflash.tools.bench import report

    calls = [call for part in args.part for call in best_and_worst(part, args.results)]
    counted = []
    for without_wgmma in (False, True):  # a process each, as it is read from the environment
        here = [call for call in calls if PARTS[call["part"]][1] == without_wgmma]
        counted += count(here, without_wgmma) if here else []
    facts = report.environment(cupy, args.commit, "counters")
    print(table(counted))
    records.write(args.results / "counters.jsonl", facts, counted)


if __name__ == "__main__":
    main()
