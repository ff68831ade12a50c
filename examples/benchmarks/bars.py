"""Bars are what cuflash wants to reach on an H200; recorded results are held against them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from recorded import (
    FA3,
    PLAIN,
    US,
    Recorded,
    Result,
    geometric_mean,
    line,
    milliseconds,
    of_fastest,
    of_peer,
    of_plain,
    of_visible_share,
    repeats,
    towards,
)

Figure = TypeVar("Figure")

NOT_MEASURED = ("not measured", "-", "-")
# Every cell of the dense suite is to reach the first of the fastest peer, and their geometric mean the second.
DENSE_BAR, DENSE_MEAN = 0.98, 1.03
DTYPES = (("bfloat16", "bf16"), ("float16", "fp16"))
# So far above its bar a ratio of errors may lie by chance.
STANDARD_ERRORS = 3
# Two masks always lie on a line.
FEWEST_POINTS = 3


def _is(result: Result, suite: str, direction: str) -> bool:
    return (result["cell"]["suite"], result["direction"]) == (suite, direction)


def gathered(figures_of: Callable[[Recorded], list[Figure]], recorded: Sequence[Recorded]) -> tuple[list[Figure], str]:
    """Gather what all records say, and the commits of those that say something."""
    found = [(record.commit, figures_of(record)) for record in recorded]
    commits = dict.fromkeys(commit for commit, figures in found if figures)
    return [figure for _, figures in found for figure in figures], ", ".join(commits)


@dataclass(frozen=True)
class Bar:
    """A figure that results of one suite are to reach."""

    what: str
    suite: str
    direction: str
    limit: float
    measure: Callable[[Result], float]
    cells: Callable[[dict[str, Any]], bool] = lambda cell: True
    dtype: str = "bfloat16"
    is_mma: bool = False
    at_most: bool = False
    mean_limit: float | None = None  # what the geometric mean of all cells is to reach
    unit: str = ""
    digits: int = 2

    def figures(self, record: Recorded) -> list[float]:
        """Return what a record says of it."""
        if record.is_mma != self.is_mma:
            return []
        figures = [
            self.measure(result)
            for result in record.results
            if _is(result, self.suite, self.direction)
            and result["cell"]["dtype"] == self.dtype
            and US in result["peers"]
            and self.cells(result["cell"])
        ]
        return [figure for figure in figures if not math.isnan(figure)]

    def reached(self, figure: float) -> bool:
        """Whether a figure is on the right side."""
        return figure <= self.limit if self.at_most else figure >= self.limit

    def row(self, recorded: Sequence[Recorded]) -> list[str]:
        """What, the bar, what was measured, whether that is enough, and of which commit it is."""
        bar = f"{'at most' if self.at_most else 'at least'} {self.limit:g}{self.unit}"
        if self.mean_limit is not None:
            bar += f", geometric mean {self.mean_limit:g}"
        figures, commits = gathered(self.figures, recorded)
        if not figures:
            return [self.what, bar, *NOT_MEASURED]
        met = sum(map(self.reached, figures))
        is_reached = met == len(figures)
        worst, best = sorted((min(figures), max(figures)), reverse=self.at_most)
        # Rounded towards failure, so that a figure that misses the bar does not look as if it met it.
        shown = f"{towards(worst, self.digits, up=self.at_most)}{self.unit}"
        if len(figures) > 1:
            shown += f" to {towards(best, self.digits, up=self.at_most)}{self.unit}"
        if self.mean_limit is not None:
            mean = geometric_mean(figures)
            shown += f", mean {towards(mean, 3)}"
            is_reached &= mean >= self.mean_limit
        if len(figures) > 1:
            shown += f"; {met} of {len(figures)}"
        return [self.what, bar, shown, "yes" if is_reached else "no", commits]


@dataclass(frozen=True)
class ErrorBar:
    """An error that is to be no larger than FlashAttention-3's, by what `errors.py` found."""

    direction: str
    kind: str  # mean or max
    limit: float = 1.0

    def figures(self, record: Recorded) -> list[tuple[float, float]]:
        """Each result's ratio and its standard error."""
        if record.is_mma:
            return []
        results = ("out",) if self.direction == "forward" else ("dq", "dk", "dv")
        found = [
            cell["results"][name][self.kind]
            for cell in record.cells.get("errors", [])
            for name in results
            if name in cell["results"]
        ]
        return [(x["ratio"], x["se"]) for x in found if not math.isnan(x["ratio"])]

    def reached(self, ratio: float, se: float) -> bool:
        """Whether a ratio is on the right side, or so little above that this may be chance."""
        return ratio - STANDARD_ERRORS * se <= self.limit

    def row(self, recorded: Sequence[Recorded]) -> list[str]:
        """Do as `Bar.row`."""
        error = "mean error" if self.kind == "mean" else "max error of a head"
        what = f"{self.direction}: {error}, as a multiple of FlashAttention-3's, n 512 and 1k, within three standard "
        what += "errors of all heads"
        bar = f"at most {self.limit:g}"
        figures, commits = gathered(self.figures, recorded)
        if not figures:
            return [what, bar, *NOT_MEASURED]
        met = sum(self.reached(*figure) for figure in figures)
        ratios = [ratio for ratio, _ in figures]
        shown = f"{towards(max(ratios), 4, up=True)} to {towards(min(ratios), 4, up=True)}; {met} of {len(figures)}"
        return [what, bar, shown, "yes" if met == len(figures) else "no", commits]


@dataclass(frozen=True)
class LineBar:
    """How far the times of random blocks are to lie from a straight line in the visible share."""

    direction: str
    is_mma: bool = False
    limit: float = 5.0  # percent

    def points(self, record: Recorded) -> list[Result]:
        """The masks that the kernels look into: one that hides nothing is a window, and an empty one is no work."""
        if record.is_mma != self.is_mma:
            return []
        return [
            result
            for result in record.results
            if _is(result, "sparse", self.direction)
            and result["cell"]["dtype"] == "bfloat16"
            and _blocks_of_128(result["cell"])
            and 0 < result["cell"]["density"] < 1
            and not math.isnan(of_plain(result))
        ]

    def row(self, recorded: Sequence[Recorded]) -> list[str]:
        """Do as `Bar.row`; of several records the worst counts."""
        family = " by mma.sync" if self.is_mma else ""
        what = f"{self.direction}{family}: random blocks: distance from a straight line in visible blocks"
        rows = []
        for record in recorded:
            points = self.points(record)
            if len(points) < FEWEST_POINTS:
                continue
            times = [milliseconds(result) for result in points]
            start, slope, distance = line([result["cell"]["density"] for result in points], times)
            dense = statistics.median(milliseconds(result, PLAIN) for result in points)
            percent = 100 * distance
            shown = f"{towards(percent, 1, up=True)}%; {1000 * start:.0f} us + {slope / dense:.2f} of dense"
            rows.append((percent, [shown, "yes" if percent <= self.limit else "no", record.commit]))
        return [what, f"at most {self.limit:g}%", *(max(rows)[1] if rows else NOT_MEASURED)]


def _named(*starts: str) -> Callable[[dict[str, Any]], bool]:
    return lambda cell: cell["name"].startswith(starts)


def _blocks_of_128(cell: dict[str, Any]) -> bool:
    return (cell["head_dim"], cell.get("block_size", 128)) == (128, 128)


def _with_option(*options: str) -> Callable[[dict[str, Any]], bool]:
    return lambda cell: cell["head_dim"] == 128 and set(cell["options"]) <= set(options)


def _dense(direction: str) -> list[Bar]:
    what = "speed of the faster of FlashAttention-3 and cuDNN"
    return [
        Bar(
            f"{direction}, {short}: {what}",
            "dense",
            direction,
            DENSE_BAR,
            of_fastest,
            dtype=dtype,
            mean_limit=DENSE_MEAN,
        )
        for dtype, short in DTYPES
    ]


def _sparse(direction: str, limit: float) -> list[Bar | LineBar]:
    what = f"{direction}: window (1023, 0), n 16k d128 h16"
    forms = {
        "window 1023 d128": "",
        "window 1023 as blocks": ", as a block mask",
        "window 1023 but one pair": ", as a block mask that lacks one pair",
    }
    return [
        *(
            Bar(
                what + form,
                "window",
                direction,
                limit,
                milliseconds,
                _named(name),
                at_most=True,
                unit=" ms",
                digits=3,
            )
            for name, form in forms.items()
        ),
        Bar(
            f"{direction}: random blocks, time over dense time over density, down to 2%",
            "sparse",
            direction,
            1.1,
            of_visible_share,
            _blocks_of_128,
            at_most=True,
        ),
        LineBar(direction),
    ]


def _mma(direction: str) -> list[Bar | LineBar]:
    bars = [
        Bar(
            f"{direction} by mma.sync, {short}: speed of FlashAttention-2",
            "dense",
            direction,
            DENSE_BAR,
            of_peer("flash"),
            dtype=dtype,
            is_mma=True,
            mean_limit=DENSE_MEAN,
        )
        for dtype, short in DTYPES
    ]
    return [*bars, LineBar(direction, is_mma=True)]


def _float32(direction: str, exact: float, tf32: float) -> list[Bar]:
    measure = of_peer("efficient")
    of_torch = "speed of torch's memory-efficient kernel"
    return [
        Bar(f"{direction}, {words}: {of_torch}", "float32", direction, limit, measure, cells, "float32")
        for words, limit, cells in (
            ("float32", exact, _named("float32 d64", "float32 d128")),
            ('precision="tf32"', tf32, _named("tf32 d64", "tf32 d128")),
        )
    ]


BARS: tuple[Bar | ErrorBar | LineBar, ...] = (
    *_dense("forward"),
    *_dense("backward"),
    *(ErrorBar(direction, kind) for direction in ("forward", "backward") for kind in ("mean", "max")),
    Bar(
        "forward: softcap, alibi, share of plain, d128 n 8k",
        "options",
        "forward",
        0.85,
        of_plain,
        _with_option("softcap", "alibi"),
    ),
    Bar(
        "forward: bias, mask, dropout, share of plain, d128 n 8k",
        "options",
        "forward",
        0.6,
        of_plain,
        _with_option("bias", "mask", "dropout"),
    ),
    *_sparse("forward", 0.24),
    *_sparse("backward", 0.72),
    Bar("backward with dbias (b, h, n, n): share of plain", "dbias", "backward", 0.5, of_plain),
    Bar("backward, deterministic: share of the free order, n 8k and 16k", "deterministic", "backward", 0.92, of_plain),
    Bar("backward, deterministic: same bits", "deterministic", "backward", 50, repeats, unit=" calls", digits=0),
    Bar("forward, packed mix of 64 to 8k: speed of FlashAttention-3", "varlen", "forward", 1.0, of_peer(FA3)),
    Bar("forward, packed mix of 64 to 8k: rate of equal lengths", "varlen", "forward", 0.9, of_plain),
    *(
        Bar(
            f"{direction}, 16 query heads over 2, and head dims 192/128, causal: speed of the fastest peer",
            "gqa",
            direction,
            0.98,
            of_fastest,
        )
        for direction in ("forward", "backward")
    ),
    Bar("decode: speed of the fastest peer", "decode", "forward", 0.98, of_fastest),
    *_mma("forward"),
    *_mma("backward"),
    *_float32("forward", 2.5, 4.0),
    *_float32("backward", 2.0, 3.5),
)

HOST_MICROSECONDS = 20.0


def host_row(recorded: Sequence[Recorded]) -> list[str]:
    """The row of what a repeated small call costs the host."""
    what, bar = "forward: host time of a repeated small call", f"at most {HOST_MICROSECONDS:g} us"
    for record in recorded:
        costs = {cell["call"]: cell["us"] for cell in record.cells.get("host", [])}
        if "forward_total" in costs:
            ours = costs["forward_total"]
            shown = f"{ours:.1f} us (torch's SDPA {costs['torch_sdpa_forward_total']:.1f})"
            return [what, bar, shown, "yes" if ours <= HOST_MICROSECONDS else "no", record.commit]
    return [what, bar, *NOT_MEASURED]
