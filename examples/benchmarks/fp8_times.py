"""FP8 beside 16 bits, forward: decoding over a cache in pages, and whole sequences.

    python examples/benchmarks/fp8_times.py [--commit COMMIT] [--json FILE]

Three calls a shape, interleaved: all in bfloat16; bfloat16 queries over keys and values in e4m3; and queries in e4m3,
too. Scales are one for each token, and once more one for each head. Results are in bfloat16. Decoding is one query a
head over pages of 16 keys, prefill a causal sequence. Shown are milliseconds, the speed as a multiple of bfloat16's,
for decoding the bytes of keys and values over the time, and for prefill TFLOP/s. It needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuflash
from cuflash.tools import bench
from cuflash.tools.bench import records, report

Call = Callable[[], Any]

BFLOAT16, KEYS, ALL = "bfloat16", "fp8 keys", "fp8"
PAGE_SIZE = 16
HEADS, HEADS_KV = 32, 8
PERS = ("token", "head")


class Shape(NamedTuple):
    """A problem: decoding where seqlen_q is 1, else prefill."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int

    @property
    def name(self) -> str:
        """A few words."""
        kind = "decode" if self.seqlen_q == 1 else "prefill"
        return f"{kind} {self.batch} x {self.seqlen_k} d{self.head_dim}"

    @property
    def flops(self) -> float:
        """Floating-point operations, of which causal prefill has half."""
        share = 0.5 if self.seqlen_q > 1 else 1.0
        return 4.0 * self.batch * HEADS * self.seqlen_q * self.seqlen_k * self.head_dim * share


SHAPES = (
    *(Shape(batch, 1, seqlen, d) for d in (128, 64) for batch, seqlen in ((1, 32768), (16, 8192), (64, 2048))),
    *(Shape(batch, seqlen, seqlen, d) for d in (128, 64) for batch, seqlen in ((8, 2048), (2, 8192))),
)


def by_pages(x: Any, batch: int) -> Any:
    """An array (batch, seqlen, ...) as a pool of pages in order."""
    return x.reshape(batch * x.shape[1] // PAGE_SIZE, PAGE_SIZE, *x.shape[2:])


def calls_of(shape: Shape, per: str, xp: Any) -> dict[str, Call]:
    """The calls to be measured."""
    batch, seqlen_q, seqlen_k, d = shape
    rng = xp.random.default_rng(0)

    def drawn(seqlen: int, heads: int) -> Any:
        return rng.standard_normal((batch, seqlen, heads, d), dtype=xp.float32)

    q, k, v = drawn(seqlen_q, HEADS), drawn(seqlen_k, HEADS_KV), drawn(seqlen_k, HEADS_KV)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (cuflash.quantize_fp8(x, per) for x in (q, k, v))
    half = [x.astype("bfloat16") for x in (q, k, v)]
    options: dict[str, Any] = {"causal": True}
    if seqlen_q == 1:
        pages = seqlen_k // PAGE_SIZE
        options["block_table"] = xp.arange(batch * pages, dtype=xp.int32).reshape(batch, pages)
        options["kv_lengths"] = xp.full(batch, seqlen_k, xp.int32)
        half[1:] = (by_pages(x, batch) for x in half[1:])
        k8, v8 = by_pages(k8, batch), by_pages(v8, batch)
        # A pool has no axis of sequences: a scale for each head becomes one for each token.
        wide = (xp.broadcast_to(x, (batch, seqlen_k, HEADS_KV)) for x in (k_scale, v_scale))
        k_scale, v_scale = (by_pages(xp.ascontiguousarray(x), batch) for x in wide)
        if per == "head":
            k_scale, v_scale = (x[:1, :1] for x in (k_scale, v_scale))
    scales = {"k_scale": k_scale, "v_scale": v_scale, **options}
    return {
        BFLOAT16: lambda: cuflash.attention(*half, **options),
        KEYS: lambda: cuflash.attention(half[0], k8, v8, **scales),
        ALL: lambda: cuflash.attention(q8, k8, v8, q_scale=q_scale, **scales),
    }


def figures_of(shape: Shape, per: str, times: dict[str, float]) -> dict[str, Any]:
    """One line of the record, of times in seconds."""
    line: dict[str, Any] = {"cell": f"{shape.name} per {per}", "seconds": times}
    line["of_bfloat16"] = {name: times[BFLOAT16] / x for name, x in times.items()}
    if shape.seqlen_q == 1:
        numbers = 2 * shape.batch * shape.seqlen_k * HEADS_KV * shape.head_dim
        sizes = {BFLOAT16: 2, KEYS: 1, ALL: 1}
        line["gigabytes_per_second"] = {name: numbers * sizes[name] / x / 1e9 for name, x in times.items()}
    else:
        line["tflops"] = {name: shape.flops / x / 1e12 for name, x in times.items()}
    return line


def lines(xp: Any, stopwatch: report.Stopwatch, rounds: int, decode_alone: bool) -> Iterator[dict[str, Any]]:
    """The figures of one shape after the other."""
    for shape in SHAPES:
        if decode_alone and shape.seqlen_q > 1:
            continue
        for per in PERS:
            times = stopwatch.interleaved(calls_of(shape, per, xp), rounds)
            medians = {name: float(np.median(np.concatenate(own))) / 1e3 for name, own in times.items()}
            yield figures_of(shape, per, medians)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", action="store_true", help="only decoding")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="to be recorded, where this is no checkout with git")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, one line a cell")
    args = parser.parse_args()
    xp = bench.namespace("gpu")
    if xp is None:
        parser.error("no GPU that CuPy can use")
    facts = report.environment(xp, args.commit, "fp8_times")
    measured: list[dict[str, Any]] = []
    for line in lines(xp, report.Stopwatch(xp, 12.0), args.rounds, args.decode):
        measured.append(line)
        shown = ", ".join(f"{name} {x * 1e3:.3f} ms" for name, x in line["seconds"].items())
        ratios = ", ".join(f"{name} {line['of_bfloat16'][name]:.2f}" for name in (KEYS, ALL))
        print(f"{line['cell']}: {shown}; of bfloat16's speed: {ratios}", flush=True)
        if args.json:  # after every cell: a run that is cut short leaves what it had
            records.write(args.json, facts, measured)


if __name__ == "__main__":
    main()
