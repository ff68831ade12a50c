"""Recorded results, and what is read from one.

A result is one line of a file that `python -m cuflash bench --json` writes, whose first line has the run's own facts
(commit, GPU, versions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pages

Result = dict[str, Any]

RESULTS = Path(__file__).parents[2] / "docs" / "lab" / "results"
US, PLAIN, FA3 = "cuflash", "plain", "fa3"


@dataclass(frozen=True)
class Recorded:
    """The lines of one file, or of several of one commit."""

    files: tuple[str, ...]
    facts: dict[str, Any]
    cells: dict[str, list[dict[str, Any]]]  # by the command that wrote them

    @property
    def results(self) -> list[Result]:
        """The results that `python -m cuflash bench` measured."""
        return self.cells.get("bench", [])

    @property
    def commit(self) -> str:
        """The commit as people write it."""
        return pages.short_commit(self.facts)

    @property
    def is_mma(self) -> bool:
        """Whether Hopper ran the kernels of other GPUs."""
        return bool(self.facts.get("without_wgmma"))


def milliseconds(result: Result, peer: str = US) -> float:
    """Median time; NaN if the peer was not measured."""
    return float(result["peers"].get(peer, {}).get("median_ms", math.nan))


def of_fastest(result: Result) -> float:
    """Speed as a multiple of the fastest peer's."""
    return result["speed_of_fastest_peer"] or math.nan


def of_peer(peer: str) -> Callable[[Result], float]:
    """Speed as a multiple of one peer's."""
    return lambda result: milliseconds(result, peer) / milliseconds(result)


def of_plain(result: Result) -> float:
    """Speed as a share of the same kernel's without the option; packed: rate as a share of equal lengths'."""
    if not result["cell"]["lengths"] or PLAIN not in result["peers"]:
        return milliseconds(result, PLAIN) / milliseconds(result)
    # In the same rounds: the medians of all calls may lie on either side of where the card meets its limit of power.
    plain = result["peers"][PLAIN]
    return float(result["speed_of_plain"]) * result["flops"] / (1e9 * plain["tflops"] * plain["median_ms"])


def of_visible_share(result: Result) -> float:
    """Time over that of the dense problem, as a multiple of the visible share; NaN of an empty mask."""
    density = result["cell"]["density"]
    return 1 / of_plain(result) / density if density else math.nan


def repeats(result: Result) -> float:
    """How many of 50 further calls gave the same bits."""
    return math.nan if result["same_bits"] is None else float(result["same_bits"])


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def line(shares: Sequence[float], times: Sequence[float]) -> tuple[float, float, float]:
    """Fit by least squares of relative residuals: the time at share 0, the slope, and the largest relative distance."""
    x, y = np.asarray(shares), np.asarray(times)
    (start, slope), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(len(y)), rcond=None)
    return float(start), float(slope), float(np.abs(y / (start + slope * x) - 1).max())


def towards(figure: float, digits: int, up: bool = False) -> str:
    """A figure rounded up or down."""
    if math.isinf(figure):
        return str(figure)
    scale = 10**digits
    rounded = (math.ceil if up else math.floor)(round(figure * scale, 6)) / scale
    return f"{rounded:.{digits}f}"
