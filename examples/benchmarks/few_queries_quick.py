"""A first look at few queries: drawn problems beside float64, then times of rows and pages of keys beside FA3's.

    PYTHONPATH=. python examples/benchmarks/few_queries_quick.py [--seed N] [--checked N] [--seconds N] [--jobs N]

Processes side by side check the drawn problems (``few_queries_check.py``) and compile what is timed. Times are of the
device alone, in a CUDA graph; "of apart" is the speed relative to tiles of one query head each, with pages gathered
into rows. FlashAttention-3 is optional. The cells are as many of those of ``few_queries.py`` as there is time for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import few_queries_check
import numpy as np
from few_queries import LARGEST_DIFFERENCE, PAGE_SIZES, SHAPES, Arrays, Cell, fa3_call, microseconds, torch_microseconds

import cuflash
from cuflash.frontend import metadata
from cuflash.gpu import launch
from cuflash.gpu import sm90 as gpu_sm90
from cuflash.interop import dtype_of
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.tools import bench
from cuflash.tools.bench.inputs import Inputs, as_float64, as_torch
from cuflash.tools.bench.peers import Unavailable

MOST_BYTES = 2.2e9  # of K and V
# Cells of docs/lab and of decoding that are timed first, before others that are drawn.
FIRST = tuple(
    Cell(*numbers)
    for numbers in (
        (32, 8, 128, 1, 1, 8192),
        (32, 8, 128, 8, 1, 8192),
        (32, 8, 128, 64, 1, 8192),
        (64, 8, 64, 1, 1, 65536),
        (64, 8, 64, 64, 1, 8192),
        (16, 1, 128, 64, 1, 8192),
        (16, 2, 256, 8, 1, 8192),
        (32, 32, 128, 8, 1, 1024),
        (32, 8, 128, 16, 16, 8192),
        (32, 8, 128, 1, 4, 32768),
        (16, 1, 128, 16, 16, 8192),
        (64, 8, 64, 16, 4, 8192),
    )
)
DRAWN = 12
_PERIOD = (1 << 22) - 3  # a prime, so that heads, rows and arrays differ


class Repeated(Inputs):
    """Inputs whose numbers repeat: to draw as many as these arrays have takes longer than measuring."""

    def __init__(self, cell: Any, xp: Any) -> None:
        self.cell, self.xp = cell, xp
        numbers = np.random.default_rng(0).standard_normal(_PERIOD, np.float32).astype(dtype_of(cell.dtype))
        self._pool = xp.asarray(numbers)
        self.arrays = {}
        for position, (name, shape) in enumerate(cell.shapes().items()):
            first, count = position << 16, int(np.prod(shape))
            bits = self.xp.tile(self._pool.view(np.uint16), -(-(first + count) // _PERIOD))
            self.arrays[name] = bits[first : first + count].view(self._pool.dtype).reshape(shape)


def cells(seed: int) -> list[Cell]:
    """The first ones, and others drawn at random: decoding and more queries in turn."""
    rng = random.Random(seed)
    found = list(FIRST)
    while len(found) < len(FIRST) + DRAWN:
        queries = 1 if len(found) % 3 == 0 else int(2 ** rng.uniform(1, 6.01))
        cell = Cell(*rng.choice(SHAPES), int(2 ** rng.uniform(0, 7)), queries, int(2 ** rng.uniform(9, 16)))
        if cell.key_bytes <= MOST_BYTES:
            found.append(cell)
    return found


def forget_calls() -> None:
    """Let the next call choose its kernels anew."""
    launch._launches.clear()
    metadata._repeats.clear()
    sm90_forward.forward.cache_clear()
    sm90_grid.for_grid.cache_clear()


@contextmanager
def apart() -> Iterator[None]:
    """Let each query head have tiles of its own within the context."""
    real = sm90_forward.packs_heads
    sm90_forward.packs_heads = lambda problem: False
    forget_calls()
    try:
        yield
    finally:
        sm90_forward.packs_heads = real
        forget_calls()


@contextmanager
def gathered() -> Iterator[None]:
    """Let pages be gathered into rows, too."""
    real = gpu_sm90.paged_forward
    gpu_sm90.paged_forward = lambda work: False
    try:
        with apart():
            yield
    finally:
        gpu_sm90.paged_forward = real


def prepare(task: Cell | int) -> str:
    """Check a drawn problem, or a cell's pages against its rows; return what is wrong."""
    xp: Any = bench.namespace("gpu")
    try:
        return _difference(task, xp) if isinstance(task, Cell) else few_queries_check.wrong(task, xp)
    except Exception as error:  # a process reports what the table would not show
        return f"{task}: {type(error).__name__}: {error}"
    finally:
        xp.get_default_memory_pool().free_all_blocks()


def _difference(cell: Cell, xp: Any) -> str:
    arrays = Arrays(cell, xp, 0, Repeated)
    call = partial(cuflash.attention, arrays.q, causal=True)
    results = [call(arrays.k, arrays.v), *(call(**arrays.paged(size)) for size in PAGE_SIZES)]
    with gathered():
        results += [call(arrays.k, arrays.v), call(**arrays.paged(PAGE_SIZES[-1]))]
    first, *others = map(as_float64, results)
    largest = float(np.max([np.abs(x - first).max() for x in others]))
    return "" if largest <= LARGEST_DIFFERENCE else f"{cell.name}: results of one problem differ by {largest:.3g}"


def fa3_paged_call(arrays: Arrays, paged: dict[str, Any]) -> Callable[[], Any] | None:
    """FlashAttention-3 on the same pages; None where it is not installed or does not take them."""
    if fa3_call(arrays) is None:
        return None
    import torch

    q, k, v = (as_torch(x) for x in (arrays.q, paged["k"], paged["v"]))
    where = {"page_table": as_torch(paged["block_table"]), "seqused_k": as_torch(paged["kv_lengths"])}
    call = partial(torch.ops.flash_attn_3.fwd, q, k, v, softmax_scale=q.shape[-1] ** -0.5, is_causal=True, **where)
    try:
        call()
    except (RuntimeError, Unavailable):
        return None
    return call


def rows_of(cell: Cell, xp: Any) -> Iterator[tuple[str, float, float | None, float | None]]:
    """Yield what is timed of a cell, by name: microseconds, those of FA3, and those of heads apart."""
    arrays = Arrays(cell, xp, 0, Repeated)
    ours = partial(cuflash.attention, arrays.q, causal=True)
    for size in (None, *PAGE_SIZES):
        given = {"k": arrays.k, "v": arrays.v} if size is None else arrays.paged(size)
        call = partial(ours, **given)
        us, theirs, other = microseconds(call, xp), None, None
        if size in (None, PAGE_SIZES[-1]):
            with gathered():
                other = microseconds(call, xp)
        peer = fa3_call(arrays) if size is None else fa3_paged_call(arrays, given)
        if peer is not None:
            theirs = torch_microseconds(peer, xp)
        yield ("rows" if size is None else f"page {size}"), us, theirs, other


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the drawn problems and cells")
    parser.add_argument("--checked", type=int, default=60, help="drawn problems that are checked")
    parser.add_argument("--seconds", type=float, default=100.0, help="no cell begins later")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 12), help="processes that compile")
    args = parser.parse_args()
    start = time.perf_counter()
    xp: Any = bench.namespace("gpu")
    if xp is None:
        parser.error("no GPU that CuPy can use")
    timed = cells(args.seed)
    tasks: list[Cell | int] = [*timed, *range(args.seed, args.seed + args.checked)]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        faults = [text for text in pool.imap_unordered(prepare, tasks) if text]
    print(*faults, sep="\n")
    passed = time.perf_counter() - start
    print(f"{len(tasks) - len(faults)} of {len(tasks)} results are right; {passed:.0f} s with compilation", flush=True)
    print(f"{'cell':34}{'keys':>9}{'us':>9}{'GB/s':>7}{'of fa3':>8}{'of apart':>9}")
    ratios: dict[str, list[float]] = {}
    for number, cell in enumerate(timed):
        if time.perf_counter() - start > args.seconds:
            print(f"no time for {len(timed) - number} cells")
            break
        try:
            for name, us, *others in rows_of(cell, xp):
                shown = ["-" if x is None else f"{x / us:.2f}" for x in others]
                print(
                    f"{cell.name:34}{name:>9}{us:9.1f}{cell.key_bytes / us / 1e3:7.0f}{shown[0]:>8}{shown[1]:>9}",
                    flush=True,
                )
                for of, x in zip(("fa3", "apart"), others, strict=True):
                    if x is not None:
                        ratios.setdefault(f"{name} of {of}", []).append(x / us)
        except RuntimeError as error:
            faults.append(f"{cell.name}: {error}")
            print(faults[-1].splitlines()[0], flush=True)
        xp.get_default_memory_pool().free_all_blocks()
    for name, found in ratios.items():
        print(f"{name}: mean {np.exp(np.log(found).mean()):.2f}, least {min(found):.2f} over {len(found)}")
    sys.exit(f"{len(faults)} faults" if faults else 0)


if __name__ == "__main__":
    main()
