"""FP8 beside 16 bits, forward: decoding over caches, contiguous and in pages, and whole sequences.

    python examples/benchmarks/fp8_times.py [--decode] [--check N] [--commit COMMIT] [--json FILE]

Three calls a shape, interleaved: all in bfloat16; bfloat16 queries over keys and values in e4m3; and queries in e4m3,
too. Scales are one for each token, and once more one for each head. Results are in bfloat16. Decoding is one query a
head over a cache of its own or pages of 16 keys, prefill a causal sequence. Shown are microseconds, the speed in tokens
as a multiple of that over bfloat16's cache, for decoding the bytes of the cache over the time, and for prefill TFLOP/s.
With --check N problems drawn at random (fp8_check.py) are held to float64 first, and the command ends where one is off
by more than rounding. It needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fp8_check
import numpy as np
import recording

import cuflash
from cuflash.hardware import FLOAT_BYTES
from cuflash.tools.bench.clock import Stopwatch

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
    is_paged: bool = False

    @property
    def name(self) -> str:
        """A few words."""
        kind = "decode" if self.seqlen_q == 1 else "prefill"
        return f"{kind} {self.batch} x {self.seqlen_k} d{self.head_dim}{' pages' if self.is_paged else ''}"

    @property
    def flops(self) -> float:
        """Floating-point operations, of which causal prefill has half."""
        share = 0.5 if self.seqlen_q > 1 else 1.0
        return 4.0 * self.batch * HEADS * self.seqlen_q * self.seqlen_k * self.head_dim * share


SHAPES = (
    *(
        Shape(batch, 1, seqlen, d, is_paged)
        for d in (128, 64)
        for batch, seqlen in ((1, 32768), (16, 8192), (64, 2048))
        for is_paged in (False, True)
    ),
    *(Shape(batch, seqlen, seqlen, d) for d in (128, 64) for batch, seqlen in ((8, 2048), (2, 8192))),
)


def by_pages(x: Any, batch: int) -> Any:
    """An array (batch, seqlen, ...) as a pool of pages in order."""
    return x.reshape(batch * x.shape[1] // PAGE_SIZE, PAGE_SIZE, *x.shape[2:])


def calls_of(shape: Shape, per: str, xp: Any) -> dict[str, Call]:
    """The calls to be measured."""
    batch, seqlen_q, seqlen_k, d, is_paged = shape
    rng = xp.random.default_rng(0)

    def drawn(seqlen: int, heads: int) -> Any:
        return rng.standard_normal((batch, seqlen, heads, d), dtype=xp.float32)

    q, k, v = drawn(seqlen_q, HEADS), drawn(seqlen_k, HEADS_KV), drawn(seqlen_k, HEADS_KV)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (cuflash.quantize_fp8(x, per) for x in (q, k, v))
    half = [x.astype("bfloat16") for x in (q, k, v)]
    options: dict[str, Any] = {"causal": True}
    if is_paged:
        pages = seqlen_k // PAGE_SIZE
        options["block_table"] = xp.arange(batch * pages, dtype=xp.int32).reshape(batch, pages)
        options["kv_lengths"] = xp.full(batch, seqlen_k, xp.int32)
        half[1:] = (by_pages(x, batch) for x in half[1:])
        if per == "head":  # a pool has no axis of sequences, which share the scales of heads
            (k8, k_scale), (v8, v_scale) = (cuflash.quantize_fp8(x.reshape(1, -1, HEADS_KV, d), per) for x in (k, v))
        else:
            k_scale, v_scale = (by_pages(x, batch) for x in (k_scale, v_scale))
        k8, v8 = (x.reshape(-1, PAGE_SIZE, HEADS_KV, d) for x in (k8, v8))
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
        rows = 2 * shape.batch * shape.seqlen_k * HEADS_KV
        of_codes = shape.head_dim + (FLOAT_BYTES if per == "token" else 0)
        sizes = {BFLOAT16: 2 * shape.head_dim, KEYS: of_codes, ALL: of_codes}
        line["gigabytes_per_second"] = {name: rows * sizes[name] / x / 1e9 for name, x in times.items()}
    else:
        line["tflops"] = {name: shape.flops / x / 1e12 for name, x in times.items()}
    return line


def lines(xp: Any, stopwatch: Stopwatch, rounds: int, decode_alone: bool) -> Iterator[dict[str, Any]]:
    """The figures of one shape after the other."""
    for shape in SHAPES:
        if decode_alone and shape.seqlen_q > 1:
            continue
        for per in PERS:
            calls = {name: stopwatch.prepared(call) for name, call in calls_of(shape, per, xp).items()}
            times = stopwatch.interleaved(calls, rounds)
            medians = {name: float(np.median(np.concatenate(own))) / 1e3 for name, own in times.items()}
            yield figures_of(shape, per, medians)


def in_words(line: dict[str, Any]) -> str:
    """One line of the record, as it is printed."""
    name, rates = next((name, line[name]) for name in ("gigabytes_per_second", "tflops") if name in line)
    unit = "GB/s" if name == "gigabytes_per_second" else "TFLOP/s"
    shown = ", ".join(f"{of} {x * 1e6:.1f} us {rates[of]:.0f} {unit}" for of, x in line["seconds"].items())
    ratios = ", ".join(f"{of} {line['of_bfloat16'][of]:.2f}" for of in (KEYS, ALL))
    return f"{line['cell']}: {shown}; speed in tokens over bfloat16's: {ratios}"


def check(count: int, xp: Any) -> bool:
    """Print the worst of `count` drawn problems, and those that are beyond their bound; return True if none is."""
    found = sorted(fp8_check.shares(range(count), xp), key=lambda x: x[1])
    beyond = [(name, share) for name, share in found if not share <= 1]
    for name, share in beyond or found[-3:]:
        print(f"{share:.3f} of what rounding may do: {name}", flush=True)
    print(f"{count - len(beyond)} of {count} problems are right", flush=True)
    return not beyond


def main() -> None:
    """Check, measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--decode", action="store_true", help="only decoding")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="problems drawn at random come first")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    if args.check and not check(args.check, xp):
        raise SystemExit(1)
    recorder = recording.Recorder(args, xp, "fp8_times")
    measured: list[dict[str, Any]] = []
    for line in lines(xp, Stopwatch(xp, 12.0), args.rounds, args.decode):
        measured.append(line)
        print(in_words(line), flush=True)
        recorder.write(measured)


if __name__ == "__main__":
    main()
