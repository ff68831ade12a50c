"""Decoding and few queries: rows and pages of keys, tree masks and splits, beside FlashAttention-3 where it is there.

    python examples/benchmarks/few_queries.py [--seed N] [--cells N] [--splits] [--commit COMMIT] [--json FILE]

Times are of the device alone, in a CUDA graph, and speeds are those of reading K and V once. The first cells were
measured before the query heads of a group were rows of a tile; the others are drawn in log scale with a seed that
changes. Each cell's paged and masked results are held against those of contiguous keys. ``--splits`` also times fixed
numbers of splits of the keys, by which the predictions of ``cuflash/plan/sm90/few_queries.py`` can be fitted. It needs
a Hopper GPU; torch and FlashAttention-3 are optional. ``few_queries_quick.py`` is a first look, with a check of drawn
problems against float64.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuflash
from cuflash.tools import bench
from cuflash.tools.bench import cells as bench_cells
from cuflash.tools.bench import records, report
from cuflash.tools.bench.inputs import Inputs, as_float64
from cuflash.tools.bench.peers import Unavailable, fa3_calls

CALLS, REPLAYS = 8, 12
MOST_BYTES = 12e9  # of K and V
PAGE_SIZES = (1, 16, 64, 256)
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
LARGEST_DIFFERENCE = 0.02  # between results in bfloat16 whose sums have other orders
SHAPES = ((32, 8, 128), (16, 1, 128), (64, 8, 64), (16, 2, 256), (32, 32, 128), (8, 8, 64), (24, 8, 96), (71, 1, 64))


class Cell(NamedTuple):
    """One problem in bfloat16; `queries` are the last ones of `keys`, causal."""

    heads: int
    heads_kv: int
    head_dim: int
    batch: int
    queries: int
    keys: int

    @property
    def name(self) -> str:
        """The name that tables have."""
        return f"h{self.heads}/{self.heads_kv} d{self.head_dim} b{self.batch} sq{self.queries} n{self.keys}"

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * 2 * self.batch * self.keys * self.heads_kv * self.head_dim


FIRST = tuple(
    Cell(*numbers)
    for numbers in (
        (32, 8, 128, 16, 16, 8192),
        (32, 8, 128, 1, 4, 32768),
        (32, 8, 128, 8, 16, 32768),
        (32, 8, 128, 1, 16, 8192),
        (32, 8, 128, 64, 16, 8192),
        (16, 1, 128, 16, 16, 8192),
        (16, 1, 128, 1, 4, 32768),
        (16, 1, 128, 64, 16, 8192),
        (64, 8, 64, 16, 4, 8192),
        (64, 8, 64, 1, 16, 32768),
        (64, 8, 64, 64, 16, 8192),
        (32, 8, 128, 64, 1, 8192),
        (32, 8, 128, 8, 1, 8192),
        (32, 8, 128, 1, 1, 8192),
        (16, 1, 128, 1, 1, 8192),
        (64, 8, 64, 1, 1, 65536),
        (16, 2, 256, 8, 1, 8192),
        (32, 32, 128, 8, 1, 1024),
    )
)


def cells(seed: int, count: int) -> list[Cell]:
    """The first ones, and others drawn at random."""
    rng = random.Random(seed)
    drawn = list(FIRST[:count])
    while len(drawn) < count:
        sizes = int(2 ** rng.uniform(0, 7)), int(2 ** rng.uniform(0, 6.01)), int(2 ** rng.uniform(9, 16))
        cell = Cell(*rng.choice(SHAPES), *sizes)
        if cell.key_bytes <= MOST_BYTES:
            drawn.append(cell)
    return drawn


def microseconds(call: Callable[[], Any], xp: Any) -> float:
    """The median time of a call on the device, in a graph."""
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(3):
            call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(CALLS):
            call()
        graph = stream.end_capture()
        return _median(lambda: graph.launch(stream), stream, xp)


def _median(replay: Callable[[], Any], stream: Any, xp: Any) -> float:
    times = []
    for _ in range(REPLAYS):
        begin, end = xp.cuda.Event(), xp.cuda.Event()
        begin.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        times.append(xp.cuda.get_elapsed_time(begin, end) / CALLS * 1e3)
    return float(np.median(times[1:]))


def torch_microseconds(call: Callable[[], Any], xp: Any) -> float:
    """`microseconds` of a call of torch's."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        return _median(graph.replay, xp.cuda.ExternalStream(stream.cuda_stream), xp)


class Arrays:
    """The arrays of a cell: padded ones, and pools whose pages are shuffled."""

    def __init__(self, cell: Cell, xp: Any, seed: int, kind: type[Inputs] = Inputs) -> None:
        self.cell, self.xp = cell, xp
        self._rng = np.random.default_rng(seed)
        sizes = cell.batch, cell.queries, cell.keys, cell.heads, cell.heads_kv, cell.head_dim, cell.head_dim
        self.inputs = kind(bench_cells.Cell(cell.name, "bfloat16", *sizes, causal=True), xp)
        self.q, self.k, self.v = (self.inputs[name] for name in "qkv")

    def tree_mask(self) -> Any:
        """Each query sees all keys but the last ones, which are the queries' own, and of these those of its branch."""
        cell = self.cell
        mask = np.ones((cell.batch, 1, cell.queries, cell.keys), bool)
        mask[..., -cell.queries :] = np.tril(self._rng.random((cell.batch, 1, cell.queries, cell.queries)) < 0.5)
        mask[..., np.arange(cell.queries), cell.keys - cell.queries + np.arange(cell.queries)] = True
        return self.xp.asarray(mask)

    def paged(self, page_size: int) -> dict[str, Any]:
        """Pools, and the options that go with them."""
        cell = self.cell
        pages = -(-cell.keys // page_size)
        order = self._rng.permutation(cell.batch * pages).reshape(cell.batch, pages).astype(np.int32)
        place = self.xp.asarray(np.argsort(order.ravel()))
        pools = {}
        for name in "kv":
            x = getattr(self, name).view(np.uint16)  # CuPy copies no bfloat16 by all of its functions
            rows = self.xp.zeros((cell.batch, pages * page_size, *x.shape[2:]), x.dtype)
            rows[:, : cell.keys] = x
            pool = rows.reshape(cell.batch * pages, page_size, *x.shape[2:])[place]
            pools[name] = pool.view(self.k.dtype)
        lengths = self.xp.full(cell.batch, cell.keys, np.int32)
        return {**pools, "block_table": self.xp.asarray(order), "kv_lengths": lengths}


def calls_of(arrays: Arrays) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is timed, by name, contiguous keys first."""
    q, k, v = arrays.q, arrays.k, arrays.v
    yield "contiguous", partial(cuflash.attention, q, k, v, causal=True)
    yield "tree mask", partial(cuflash.attention, q, k, v, mask=arrays.tree_mask())
    for page_size in PAGE_SIZES:
        yield f"page {page_size}", partial(cuflash.attention, q, causal=True, **arrays.paged(page_size))


def calls_of_splits(arrays: Arrays) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Fixed numbers of splits of contiguous keys."""
    for number in SPLITS:
        if number * 128 <= arrays.cell.keys:
            given = arrays.q, arrays.k, arrays.v
            yield f"splits {number}", partial(cuflash.attention, *given, causal=True, num_splits=number)


def check(arrays: Arrays) -> float:
    """The largest difference between contiguous and other results of the same problem."""
    cell = arrays.cell
    expected = as_float64(cuflash.attention(arrays.q, arrays.k, arrays.v, causal=True))
    causal = np.tril(np.ones((cell.queries, cell.keys), bool), cell.keys - cell.queries)
    others = [cuflash.attention(arrays.q, arrays.k, arrays.v, mask=arrays.xp.asarray(causal))]
    others += [cuflash.attention(arrays.q, causal=True, **arrays.paged(size)) for size in PAGE_SIZES]
    return float(np.max([np.abs(as_float64(x) - expected).max() for x in others]))  # NaN where any is


def fa3_call(arrays: Arrays) -> Callable[[], Any] | None:
    """FlashAttention-3 on contiguous keys; None where it is not installed."""
    try:
        return fa3_calls(arrays.inputs).forward
    except Unavailable:
        return None


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--splits", action="store_true", help="time fixed numbers of splits, too")
    parser.add_argument("--commit", help="to be recorded, where this is no checkout with git")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, one line a cell")
    args = parser.parse_args()
    xp = bench.namespace("gpu")
    if xp is None:
        parser.error("no GPU that CuPy can use")
    facts = report.environment(xp, args.commit, "few_queries") | {"seed": args.seed}
    measured: list[dict[str, Any]] = []
    for cell in cells(args.seed, args.cells):
        arrays = Arrays(cell, xp, args.seed)
        difference = check(arrays)
        times = {name: microseconds(call, xp) for name, call in calls_of(arrays)}
        if args.splits:
            times |= {name: microseconds(call, xp) for name, call in calls_of_splits(arrays)}
        if (peer := fa3_call(arrays)) is not None:
            times["fa3"] = torch_microseconds(peer, xp)
        found = {name: cell.key_bytes / time / 1e3 for name, time in times.items()}
        measured.append({"cell": cell.name, "us": times, "gb_per_s": found, "difference": difference})
        wrong = "" if difference <= LARGEST_DIFFERENCE else f" RESULTS DIFFER by {difference:.3f}"
        print(f"{cell.name}: {', '.join(f'{name} {x:.0f}' for name, x in found.items())} GB/s{wrong}", flush=True)
        if args.json:  # after every cell: a run that is cut short leaves what it had
            records.write(args.json, facts, measured)
    for name in ("fa3", "tree mask", *(f"page {size}" for size in PAGE_SIZES)):
        speeds = [row["gb_per_s"] for row in measured if name in row["gb_per_s"]]
        ours, theirs = ("contiguous", name) if name == "fa3" else (name, "contiguous")
        ratios = np.array([x[ours] / x[theirs] for x in speeds])
        if len(ratios):
            mean = np.exp(np.log(ratios).mean())
            print(f"{ours} of {theirs}: mean {mean:.3f}, least {ratios.min():.3f} over {len(ratios)} cells")
    if not all(row["difference"] <= LARGEST_DIFFERENCE for row in measured):
        raise SystemExit("some results differ")


if __name__ == "__main__":
    main()
