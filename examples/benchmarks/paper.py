"""The tables of the FlashAttention paper (Dao et al., 2022, appendix E), measured anew.

    python examples/benchmarks/paper.py                    # time and memory over n = 128 ... 64k
    python examples/benchmarks/paper.py --methods naive    # these rows alone; they join those in --out
    python examples/benchmarks/paper.py --io               # bytes that the multiprocessors read and write, by ncu

Batch 16, 8 heads, head dim 64, float16, forward, backward and both, plain and with dropout and a padding mask:
attention by its formula, cuflash, and cuflash with a block mask (BigBird's, as many blocks a row whatever n is).
``--io`` compares what the kernels move between L2 cache and multiprocessors with the theorem's N^2 d^2 / M. Results:
paper.jsonl, paper.md and paper.svg, or paper_io.jsonl and paper_io.svg, in ``--out``.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import curves
import numpy as np
from recorded import RESULTS

import cuflash
from cuflash.tools.bench import records
from cuflash.tools.bench.peers import matmul as cublas_matmul
from cuflash.tools.bench.report import environment

Array = Any

SEQLENS = [2**i for i in range(7, 17)]
HEADS, HEAD_DIM = 8, 64
DROPOUT = 0.1
PADDING = 0.1  # of the keys, hidden by the mask
# BigBird's: a band of 3 blocks, 1 global and 2 random ones in every row of blocks
BLOCKS: dict[str, Any] = {"window_blocks": 3, "global_blocks": 1, "random_blocks": 2, "seed": 0}
BUDGET = 0.04  # seconds to spend on the repetitions of one figure; a longer call is made once
VARIANTS = {"plain": False, "dropout and mask": True}
METHODS = ("naive", "cuflash", "block-sparse")
DIRECTIONS = ("forward", "backward", "both")


class Calls(NamedTuple):
    """The calls that are timed."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    both: Callable[[], Any]


class Problem:
    """Inputs of one length."""

    def __init__(self, xp: Any, batch: int, seqlen: int, options: bool) -> None:
        rng = xp.random.default_rng(0)
        shape = (batch, seqlen, HEADS, HEAD_DIM)
        self.xp, self.seqlen, self.options = xp, seqlen, options
        self.q, self.k, self.v, self.dout = (
            rng.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(4)
        )
        self.mask = rng.random((batch, 1, 1, seqlen)) >= PADDING

    def cuflash(self, sparse: bool) -> Calls:
        """cuflash, perhaps with the block mask."""
        options: dict[str, Any] = {}
        if self.options:
            options = {"mask": self.mask, "dropout_p": DROPOUT, "dropout_seed": 1}
        if sparse:
            options["block_mask"] = cuflash.BlockMask.bigbird(self.seqlen, **BLOCKS)
        qkv = self.q, self.k, self.v
        out, lse = cuflash.attention(*qkv, return_lse=True, **options)

        def both() -> Any:
            return cuflash.attention_vjp(*qkv, **options)[1](self.dout)

        return Calls(
            lambda: cuflash.attention(*qkv, **options),
            lambda: cuflash.attention_backward(self.dout, *qkv, out, lse, **options),
            both,
        )

    def naive(self) -> Calls:
        """Attention by its formula: batched products, and every step between them as an array of its own."""
        xp = self.xp
        matmul = np.matmul if xp is np else cublas_matmul
        shape = (-1, HEADS, self.seqlen, self.seqlen)
        q, k, v, dout = (
            xp.ascontiguousarray(x.swapaxes(1, 2)).reshape(-1, self.seqlen, HEAD_DIM)
            for x in (self.q, self.k, self.v, self.dout)
        )
        scale = np.float32(HEAD_DIM**-0.5)
        random = xp.random.default_rng(0)

        def forward() -> tuple[Array, Array, Array | None]:
            scores = matmul(q, k.swapaxes(1, 2)).astype(np.float32) * scale
            if self.options:
                scores = xp.where(self.mask, scores.reshape(shape), -np.inf).reshape(scores.shape)
            scores -= scores.max(axis=-1, keepdims=True)
            xp.exp(scores, out=scores)
            weights = (scores / scores.sum(axis=-1, keepdims=True)).astype(np.float16)
            kept = None
            if self.options:
                kept = (random.random(weights.shape, np.float32) >= DROPOUT) * np.float16(1 / (1 - DROPOUT))
            return matmul(weights if kept is None else weights * kept, v), weights, kept

        def backward(out: Array, weights: Array, kept: Array | None) -> tuple[Array, ...]:
            dv = matmul((weights if kept is None else weights * kept).swapaxes(1, 2), dout)
            dweights = matmul(dout, v.swapaxes(1, 2))
            if kept is not None:
                dweights *= kept
            delta = (dout.astype(np.float32) * out).sum(axis=-1, keepdims=True)
            dscores = (weights * (dweights - delta) * scale).astype(np.float16)
            return matmul(dscores, k), matmul(dscores.swapaxes(1, 2), q), dv

        results = forward()
        return Calls(forward, lambda: backward(*results), lambda: backward(*forward()))

    def calls(self, method: str) -> Calls:
        """By its name."""
        return self.naive() if method == "naive" else self.cuflash(method == "block-sparse")


def milliseconds(xp: Any, call: Callable[[], Any]) -> float:
    """Median time of repeated calls; everything was compiled before."""
    once = _times(xp, call, 1)
    count = int(np.clip(BUDGET / max(sum(once), 1e-6), 1, 50))
    return 1e3 * float(np.median(_times(xp, call, count) if count > 1 else once))


def _times(xp: Any, call: Callable[[], Any], count: int) -> list[float]:
    if xp is np:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times
    events = [xp.cuda.Event() for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [xp.cuda.get_elapsed_time(a, b) / 1e3 for a, b in zip(events[:-1], events[1:], strict=True)]


@contextmanager
def peak_memory(xp: Any) -> Iterator[Callable[[], int]]:
    """Bytes that are allocated at most at a time, beyond what was there before."""
    if xp is np:
        import tracemalloc

        tracemalloc.start()
        yield lambda: tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return

    class Peak(xp.cuda.MemoryHook):
        name = "peak"
        now = most = 0

        def malloc_postprocess(self, **its: Any) -> None:
            self.now += its["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **its: Any) -> None:
            self.now -= its["mem_size"]

    with Peak() as hook:
        yield lambda: hook.most


def measure(xp: Any, batch: int, seqlen: int, options: bool, method: str) -> dict[str, float]:
    """Milliseconds and bytes of one method at one length."""
    problem = Problem(xp, batch, seqlen, options)
    calls = problem.calls(method)
    with peak_memory(xp) as peak:  # and all that these calls need is compiled
        calls.both()
        size = peak()
    figures = {f"{name}_ms": milliseconds(xp, call) for name, call in calls._asdict().items()}
    return {**figures, "bytes": size}


def run(xp: Any, args: argparse.Namespace, naive_bytes: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """All figures; the naive method ends where it does not fit, every method where a call would take too long."""
    for variant in args.variants:
        for method in args.methods:
            both_ms = 0.0
            for seqlen in sorted(args.seqlens):
                # scores, weights, dropout and their gradients, in float16 and float32: 24 bytes at a time or less
                if method == "naive" and 24 * args.batch * HEADS * seqlen**2 > naive_bytes:
                    break
                if 4 * both_ms > 1e3 * args.longest:
                    break
                figures = measure(xp, args.batch, seqlen, VARIANTS[variant], method)
                both_ms = figures["both_ms"]
                print(
                    f"{variant:18} {method:14} n {seqlen:6}: "
                    + ", ".join(f"{name} {figures[f'{name}_ms']:9.3f} ms" for name in DIRECTIONS)
                    + f", {figures['bytes'] / 2**20:10.1f} MiB",
                    flush=True,
                )
                keep({"variant": variant, "method": method, "n": seqlen, **figures})
                if xp is not np:
                    xp.get_default_memory_pool().free_all_blocks()


def rows_before(path: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file of the same code on the same machine."""
    if not path.exists():
        return []
    before, rows = records.read(path)
    other = [name for name, value in facts.items() if name != "date" and before.get(name) != value]
    if other:
        raise ValueError(f"{path} is of a run with other {', '.join(other)}: give another --out, or remove it")
    return rows


def slope(results: list[dict[str, Any]], variant: str, method: str, figure: str) -> float | None:
    """How the figure grows between the two longest lengths: n to this power."""
    points = [(r["n"], r[figure]) for r in results if r["variant"] == variant and r["method"] == method][-2:]
    if len(points) < 2 or min(value for _, value in points) <= 0:
        return None
    (n0, y0), (n1, y1) = points
    return float(np.log(y1 / y0) / np.log(n1 / n0))


def markdown(results: list[dict[str, Any]]) -> str:
    """The tables, in ms and MiB."""
    lines = []
    figures = [*((f"{name}, ms", f"{name}_ms", 1.0) for name in DIRECTIONS), ("memory, MiB", "bytes", 2.0**20)]
    for variant in VARIANTS:
        for title, figure, unit in figures:
            mine = [r for r in results if r["variant"] == variant]
            if not mine:
                continue
            seqlens = sorted({r["n"] for r in mine})
            lines += ["", f"{variant}: {title}", "", "| | " + " | ".join(map(str, seqlens)) + " | grows as |"]
            lines.append("| --- |" + " --- |" * (len(seqlens) + 1))
            for method in METHODS:
                values = {r["n"]: r[figure] / unit for r in mine if r["method"] == method}
                power = slope(results, variant, method, figure)
                cells = [f"{values[n]:.4g}" if n in values else "-" for n in seqlens]
                cells.append("-" if power is None else f"n^{power:.2f}")
                lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def title_of(facts: dict[str, Any]) -> str:
    """The problem, and where it was measured."""
    return f"batch {facts['batch']}, {HEADS} heads of {HEAD_DIM}, float16, {facts.get('gpu', 'CPU')}"


def draw(results: list[dict[str, Any]], title: str, path: Path) -> None:
    """Time of both passes, and memory, over n."""
    figure = curves.new_figure(10, 4.8)
    panels = figure.subplots(1, 2)
    for panel, (label, name, unit) in zip(
        panels, (("forward and backward, ms", "both_ms", 1), ("peak memory, MiB", "bytes", 2**20)), strict=True
    ):
        for method, style in zip(METHODS, curves.STYLES[: len(METHODS)], strict=True):
            for variant, linestyle in zip(VARIANTS, ("-", ":"), strict=True):
                mine = (r for r in results if (r["variant"], r["method"]) == (variant, method))
                points = sorted((r["n"], r[name] / unit) for r in mine)
                if points:
                    looks = style.of_line(linestyle)
                    panel.plot(*zip(*points, strict=True), label=f"{method}, {variant}", **looks)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set(xlabel="n", title=label)
        panel.grid(alpha=0.3)
    curves.legend_below(figure, panels[0], len(METHODS))
    figure.suptitle(title, fontsize=10)
    curves.save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), default="gpu")
    add("--batch", type=int, default=16)
    add("--seqlens", type=int, nargs="+", default=SEQLENS)
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--methods", nargs="+", choices=METHODS, default=METHODS)
    add("--longest", type=float, default=5.0, help="skip lengths whose single call takes more seconds (default 5)")
    add("--io", action="store_true", help="count bytes by ncu instead")
    add("--commit", help="of the measured code, where the checkout does not tell")
    add("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    lacks = "ncu (Nsight Compute) is not on the path" if args.io and shutil.which("ncu") is None else None
    try:
        xp = importlib.import_module("numpy" if args.device == "cpu" and not args.io else "cupy")
        free = 2 << 30 if xp is np else int(xp.cuda.runtime.memGetInfo()[0])
    except (ImportError, RuntimeError) as error:  # no CuPy, no GPU
        line = str(error).partition("\n")[0]
        lacks = f"{line}: python -m cuflash info tells what is missing"
    if lacks:
        print(f"error: {lacks}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {**environment(xp, args.commit, "paper"), "batch": args.batch, "heads": HEADS, "head_dim": HEAD_DIM}
    if args.io:
        # beside this file, which is no package
        return int(importlib.import_module("paper_io").run(args.out, facts))
    path = args.out / "paper.jsonl"
    try:
        rows = {(r["variant"], r["method"], r["n"]): r for r in rows_before(path, facts)}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def keep(row: dict[str, Any]) -> None:  # after every row: a run that is cut short leaves what it had
        rows[row["variant"], row["method"], row["n"]] = row
        results = sorted(rows.values(), key=lambda r: r["n"])
        records.write(path, facts, results)
        (args.out / "paper.md").write_text(markdown(results))

    run(xp, args, free, keep)
    draw(list(rows.values()), title_of(facts), args.out / "paper.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
