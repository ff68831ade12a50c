"""What cuflash wants to reach on an H200, and whether recorded results do.

A result here is one entry of the JSON that `python -m cuflash bench --json` writes, with the run's own facts (commit,
GPU, versions) beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pages

Result = dict[str, Any]

NOT_MEASURED = ("not measured", "-", "-")
# What every cell of the dense suite is to reach of the fastest peer, and their geometric mean.
DENSE_BAR, DENSE_MEAN = 0.98, 1.03
US, PLAIN, FA3 = "cuflash", "plain", "fa3"


@dataclass(frozen=True)
class Recorded:
    """The results of one file, or of several of one commit."""

    files: tuple[str, ...]
    facts: dict[str, Any]
    results: list[Result]

    @property
    def commit(self) -> str:
        """As people write it."""
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
    """Speed as a share of the same kernel's without the option."""
    return milliseconds(result, PLAIN) / milliseconds(result)


def of_visible_share(result: Result) -> float:
    """Time over that of the dense problem, as a multiple of the visible share."""
    return 1 / of_plain(result) / result["cell"]["density"]


def of_error(kind: str) -> Callable[[Result], float]:
    """The mean error of all results of a call, or the largest error among them, as a multiple of FlashAttention-3's."""
    together: Callable[[list[float]], float] = max if kind == "max" else sum

    def ratio(result: Result) -> float:
        ours, theirs = (result["peers"].get(peer, {}).get("errors") or {} for peer in (US, FA3))
        if not ours or not theirs:
            return math.nan
        return together([ours[name][kind] for name in ours]) / together([theirs[name][kind] for name in ours])

    return ratio


def repeats(result: Result) -> float:
    """How many of 50 further calls gave the same bits."""
    return math.nan if result["same_bits"] is None else float(result["same_bits"])


def _is(result: Result, suite: str, direction: str) -> bool:
    return (result["cell"]["suite"], result["direction"]) == (suite, direction)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


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
        """What a record says of it."""
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
        found = [(record.commit, self.figures(record)) for record in recorded]
        figures = [figure for _, of_record in found for figure in of_record]
        commits = ", ".join(dict.fromkeys(commit for commit, of_record in found if of_record))
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


def towards(figure: float, digits: int, up: bool = False) -> str:
    """A figure rounded up or down."""
    scale = 10**digits
    rounded = (math.ceil if up else math.floor)(round(figure * scale, 6)) / scale
    return f"{rounded:.{digits}f}"


def _named(*starts: str) -> Callable[[dict[str, Any]], bool]:
    return lambda cell: cell["name"].startswith(starts)


def _small(cell: dict[str, Any]) -> bool:
    """Cells whose errors are those of a whole head."""
    return int(cell["seqlen_q"]) <= 1024


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
        for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))
    ]


def _errors(direction: str) -> list[Bar]:
    return [
        Bar(
            f"{direction}: {kind} error, as a multiple of FlashAttention-3's, n up to 1k",
            "dense",
            direction,
            1.0,
            of_error(kind),
            cells=_small,
            at_most=True,
            digits=3,
        )
        for kind in ("mean", "max")
    ]


def _window(direction: str, limit: float) -> list[Bar]:
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
            at_most=True,
        ),
    ]


def _mma(direction: str) -> Bar:
    what = f"{direction} by mma.sync, bf16: speed of FlashAttention-2"
    return Bar(what, "dense", direction, DENSE_BAR, of_peer("flash"), is_mma=True, mean_limit=DENSE_MEAN)


def _float32(direction: str, exact: float, tf32: float) -> list[Bar]:
    measure = of_peer("efficient")
    of_torch = "speed of torch's memory-efficient kernel"
    return [
        Bar(f"{direction}, float32: {of_torch}", "float32", direction, exact, measure, _named("float32"), "float32"),
        Bar(
            f'{direction}, precision="tf32": {of_torch}', "float32", direction, tf32, measure, _named("tf32"), "float32"
        ),
    ]


BARS = (
    *_dense("forward"),
    *_dense("backward"),
    *_errors("forward"),
    *_errors("backward"),
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
    *_window("forward", 0.24),
    *_window("backward", 0.72),
    Bar("backward with dbias (b, h, n, n): share of plain", "dbias", "backward", 0.5, of_plain),
    Bar("backward, deterministic: share of the free order, n 8k and 16k", "deterministic", "backward", 0.92, of_plain),
    Bar("backward, deterministic: same bits", "deterministic", "backward", 50, repeats, unit=" calls", digits=0),
    Bar("forward, packed mix of 64 to 8k: speed of FlashAttention-3", "varlen", "forward", 1.0, of_peer(FA3)),
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
    _mma("forward"),
    _mma("backward"),
    *_float32("forward", 2.5, 4.0),
    *_float32("backward", 2.0, 3.5),
)

EQUAL_SHARE = 0.9


def varlen_row(recorded: Sequence[Recorded]) -> list[str]:
    """The row of packed sequences of mixed lengths beside as many tokens in equal ones."""
    what, bar = "forward, packed mix of 64 to 8k: rate of equal lengths", f"at least {EQUAL_SHARE:g}"
    for record in recorded:
        rates = [r["peers"][US]["tflops"] for r in record.results if _is(r, "varlen", "forward") and US in r["peers"]]
        if len(rates) == 2:  # the mix comes first
            share = rates[0] / rates[1]
            return [what, bar, towards(share, 2), "yes" if share >= EQUAL_SHARE else "no", record.commit]
    return [what, bar, *NOT_MEASURED]


HOST_MICROSECONDS = 20.0


def host_row(recorded: Sequence[Recorded]) -> list[str]:
    """The row of what a repeated small call costs the host."""
    what, bar = "forward: host time of a repeated small call", f"at most {HOST_MICROSECONDS:g} us"
    for record in recorded:
        costs = record.facts.get("host_us", {})
        if "forward_total" in costs:
            ours = costs["forward_total"]
            shown = f"{ours:.1f} us (torch's SDPA {costs['torch_sdpa_forward_total']:.1f})"
            return [what, bar, shown, "yes" if ours <= HOST_MICROSECONDS else "no", record.commit]
    return [what, bar, *NOT_MEASURED]
