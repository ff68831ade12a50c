"""Times, where they were measured, a table and a picture."""

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from cuflash.cuda.device import WITHOUT_WGMMA
from cuflash.tools.bench.cells import Cell
from cuflash.tools.bench.inputs import Errors
from cuflash.tools.bench.peers import PLAIN, US
from cuflash.tools.info import versions

# A median beyond so many times the least: others use the device.
STEADY = 1.5
LIBRARIES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "ml-dtypes", "torch", "nvidia-cudnn-cu13", "flash-attn-3")
# The host fills the queue behind so much work.
HEAD_START_BYTES = 1 << 30
# Shorter calls may take less time than their launch.
SHORT_MS = 0.25
MIN_CALLS, MAX_CALLS = 3, 100

Call = Callable[[], Any]


@dataclass
class Result:
    """One cell in one direction: each peer's times in ms, its errors, or why it has none."""

    cell: Cell
    direction: str
    times: dict[str, list[Any]] = field(default_factory=dict)  # a list of times for each round
    errors: dict[str, Errors] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    wrong: bool = False  # cuflash's error is beyond the limit
    same_bits: int | None = None  # repeated calls with the first's bits, where that was tried

    def median(self, peer: str) -> float:
        """Median time in ms."""
        return float(np.median(self.times[peer]))

    def tflops(self, peer: str) -> float:
        """TFLOP/s at the median time."""
        cell = self.cell.plain if peer == PLAIN else self.cell
        return cell.flops(self.direction) / self.median(peer) / 1e9

    def ratio(self) -> float | None:
        """Speed of cuflash over the fastest peer's."""
        others = [self.median(peer) for peer in self.times if peer not in (US, PLAIN)]
        return min(others) / self.median(US) if others and US in self.times else None

    def of_plain(self) -> float | None:
        """Plain's time over cuflash's, both of the same round: clocks differ between rounds."""
        if not {US, PLAIN} <= self.times.keys():
            return None
        return float(np.median(np.median(self.times[PLAIN], -1) / np.median(self.times[US], -1)))

    @property
    def is_unsteady(self) -> bool:
        """By `STEADY`."""
        return any(self.median(peer) > STEADY * np.min(times) for peer, times in self.times.items())

    def as_json(self) -> dict[str, Any]:
        """The result as JSON takes it."""
        return {
            "cell": self.cell.describe(),
            "direction": self.direction,
            "flops": self.cell.flops(self.direction),
            "peers": {
                peer: {
                    "median_ms": self.median(peer),
                    "min_ms": np.min(times),
                    "max_ms": np.max(times),
                    "calls": np.size(times),
                    "tflops": self.tflops(peer),
                    "errors": self.errors.get(peer),
                }
                for peer, times in self.times.items()
            },
            "absent": self.absent,
            "wrong": self.wrong,
            "unsteady": self.is_unsteady,
            "same_bits": self.same_bits,
            "speed_of_fastest_peer": self.ratio(),
            "speed_of_plain": self.of_plain(),
        }


class Stopwatch:
    """Times calls: by events on a GPU, by the clock on the CPU."""

    def __init__(self, xp: ModuleType, budget_ms: float) -> None:
        self.xp = xp
        self.budget_ms = budget_ms  # milliseconds of one round of one call

    def interleaved(self, calls: dict[str, Call], rounds: int) -> dict[str, list[Any]]:
        """Times in ms of each call, a list a round, every round in another order."""
        counts = {name: self._count(call) for name, call in calls.items()}
        times: dict[str, list[Any]] = {name: [] for name in calls}
        names = list(calls)
        for number in range(rounds):
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                times[name].append(self._times(calls[name], *counts[name]))
        return times

    def _count(self, call: Call) -> tuple[int, bool]:
        """Calls that fill the budget, and whether they are short."""
        call()  # compiles, and fills caches
        once = min(self._times(call, 2, False))
        return int(np.clip(self.budget_ms / once, MIN_CALLS, MAX_CALLS)), once < SHORT_MS

    def _times(self, call: Call, count: int, head_start: bool) -> list[float]:
        return self._cpu_times(call, count) if self.xp is np else self._gpu_times(call, count, head_start)

    def _cpu_times(self, call: Call, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def _gpu_times(self, call: Call, count: int, head_start: bool) -> list[float]:
        events = [(self.xp.cuda.Event(), self.xp.cuda.Event()) for _ in range(count)]
        call()  # the clocks and the caches as this call leaves them
        if head_start:
            busy = self.xp.empty(HEAD_START_BYTES, np.uint8)
            for _ in range(count):
                busy.data.memset_async(0, busy.nbytes)
        for start, end in events:
            start.record()
            call()
            end.record()
        events[-1][1].synchronize()
        return [self.xp.cuda.get_elapsed_time(start, end) for start, end in events]


def environment(xp: ModuleType, commit: str | None, command: str = "bench") -> dict[str, Any]:
    """The settings and the machine of a run."""
    facts: dict[str, Any] = {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {"cuflash": cuflash.__version__, **versions(LIBRARIES)},
    }
    if xp is not np:
        runtime = xp.cuda.runtime
        facts["gpu"] = runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode()
        facts["driver"] = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["driver_cuda"] = runtime.driverGetVersion()
        facts["without_wgmma"] = bool(os.environ.get(WITHOUT_WGMMA))
        facts["nvrtc"] = ".".join(map(str, xp.cuda.nvrtc.getVersion()))
    return facts


def _commit() -> str | None:
    here = str(Path(__file__).parent)
    return _first_line("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _first_line(*command: str) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.partition("\n")[0].strip() or None


def table(results: Iterable[Result], unit: str) -> str:
    """One Markdown row a cell, one column a peer."""
    results = list(results)
    peers = list(dict.fromkeys(peer for result in results for peer in result.times))
    lines = [["cell", *peers, "of the fastest peer"]]
    for result in results:
        value = result.median if unit == "ms" else result.tflops
        ratio = result.ratio()
        figures = [f"{value(peer):.4g}" if peer in result.times else "-" for peer in peers]
        lines.append([result.cell.name, *figures, "-" if ratio is None else f"{ratio:.2f}"])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def draw(path: Path, facts: dict[str, Any], results: list[Result]) -> None:
    """Bars of TFLOP/s, one panel a direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directions = list(dict.fromkeys(result.direction for result in results))
    peers = list(dict.fromkeys(peer for result in results for peer in result.times))
    most = max(sum(r.direction == direction for r in results) for direction in directions)
    figure, panels = pyplot.subplots(
        len(directions), 1, figsize=(max(6.0, 0.6 * most), 3.6 * len(directions)), squeeze=False, layout="constrained"
    )
    for panel, direction in zip(panels[:, 0], directions, strict=True):
        shown = [r for r in results if r.direction == direction]
        width = 0.8 / len(peers)
        for position, peer in enumerate(peers):
            places = np.arange(len(shown)) + (position - (len(peers) - 1) / 2) * width
            heights = [r.tflops(peer) if peer in r.times else 0.0 for r in shown]
            panel.bar(places, heights, width, label=peer)
        panel.set_xticks(range(len(shown)), [r.cell.name for r in shown], rotation=45, ha="right", fontsize=8)
        panel.set_ylabel("TFLOP/s")
        panel.set_title(f"{direction}, {facts.get('gpu', 'CPU')}")
    panels[0, 0].legend(ncols=len(peers), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
