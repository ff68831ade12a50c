"""Results, where they were measured, tables and pictures."""

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cuflash
from cuflash.cuda.device import WITHOUT_WGMMA
from cuflash.tools.bench.cells import RANDOM, Cell
from cuflash.tools.bench.inputs import Errors
from cuflash.tools.bench.peers import PLAIN, US
from cuflash.tools.info import versions

# A median beyond so many times the least: others use the device.
STEADY = 1.5
LIBRARIES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "ml-dtypes", "torch", "nvidia-cudnn-cu13", "flash-attn-3")
# Ratios of problems of less time are a class of their own.
SHORT_US = 50
WORST = 10  # cells that a summary lists
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 100)  # percentages


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
    host_us: dict[str, float] = field(default_factory=dict)  # each peer's time on the host, where that was measured

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
            "host_us": self.host_us,
            "speed_of_fastest_peer": self.ratio(),
            "speed_of_plain": self.of_plain(),
        }


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


def summary(results: Iterable[Result]) -> str:
    """Quantiles of the ratios to the fastest peer, and the cells where it is least."""
    rated = [(ratio, result) for result in results if (ratio := result.ratio()) is not None]
    lines = [f"{len(rated)} cells with a peer"]
    for name, short in ((f"above {SHORT_US} us", False), (f"up to {SHORT_US} us", True)):
        ratios = np.array([ratio for ratio, result in rated if (1e3 * result.median(US) <= SHORT_US) == short])
        if ratios.size:
            quantiles = ", ".join(
                f"{q}% {x:.2f}" for q, x in zip(QUANTILES, np.percentile(ratios, QUANTILES), strict=True)
            )
            mean = np.exp(np.log(ratios).mean())
            lines.append(f"{name}: {ratios.size} cells, geometric mean {mean:.3f}; quantiles {quantiles}")
    for ratio, result in sorted(rated, key=lambda pair: pair[0])[:WORST]:
        times = ", ".join(f"{peer} {1e3 * result.median(peer):.1f}" for peer in result.times)
        lines.append(f"{ratio:.2f}  {result.cell.name}: {times} us")
    return "\n".join(lines)


def draw(path: Path, facts: dict[str, Any], results: list[Result]) -> None:
    """Draw a panel a direction: bars of TFLOP/s, or for cells drawn at random the ratio over the work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if all(result.cell.suite == RANDOM for result in results):
        figure = _scattered(pyplot, facts, results)
    else:
        figure = _bars(pyplot, facts, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _scattered(pyplot: Any, facts: dict[str, Any], results: list[Result]) -> Any:
    directions = list(dict.fromkeys(result.direction for result in results))
    figure, panels = pyplot.subplots(
        len(directions), 1, figsize=(8.0, 3.6 * len(directions)), squeeze=False, layout="constrained"
    )
    for panel, direction in zip(panels[:, 0], directions, strict=True):
        rated = [(r, ratio) for r in results if r.direction == direction and (ratio := r.ratio()) is not None]
        for causal, marker in ((False, "o"), (True, "^")):
            shown = [(r.cell.flops(direction), ratio) for r, ratio in rated if r.cell.causal == causal]
            if shown:
                panel.plot(*zip(*shown, strict=True), marker, mfc="none", label="causal" if causal else "full")
        panel.axhline(1.0, color="gray", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_yscale("log", base=2)
        panel.set_xlabel("FLOPs")
        panel.set_ylabel("speed of the fastest peer")
        panel.set_title(f"{direction}, {facts.get('gpu', 'CPU')}")
        panel.legend(fontsize=8)
    return figure


def _bars(pyplot: Any, facts: dict[str, Any], results: list[Result]) -> Any:
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
    return figure
