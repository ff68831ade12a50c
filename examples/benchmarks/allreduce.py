"""Attention whose sums over ranks travel behind it, beside the same with the sum at the end.

    python examples/benchmarks/allreduce.py [--world 2] [--seqlen 4096 8192 16384] [--commit COMMIT] [--json FILE]
    torchrun --nproc-per-node 2 examples/benchmarks/allreduce.py

`attention_allreduce` of one causal sequence in bfloat16: 32 query heads and 8 KV heads of 128 columns over all ranks,
and a projection to 4096 columns. `overlap` is as it is, `one block` all queries in one block, whose sum hides behind
nothing; `compute` is attention and the projection of a rank alone, `sum` the sum over ranks alone, whose share of `one
block` is given. A time is that of the slowest rank, the median of all calls. Ranks are threads, or the processes of a
launcher. It needs two GPUs or more.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import recording
from ring import random, seconds_of

import cuflash
from cuflash import distributed
from cuflash.distributed import tensor_parallel
from cuflash.distributed.__main__ import run
from cuflash.distributed.agreement import telling
from cuflash.distributed.block_sums import BlockSums
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.environment import is_launched
from cuflash.distributed.products import product
from cuflash.distributed.steps import Steps

HEADS, HEADS_KV, HEAD_DIM, MODEL = 32, 8, 128, 4096
OVERLAP, ONE_BLOCK, COMPUTE, SUM = "overlap", "one block", "compute", "sum"
KINDS = (OVERLAP, ONE_BLOCK, COMPUTE, SUM)


@contextmanager
def in_one_block() -> Iterator[None]:
    """Let calls of all ranks within the context have one block of queries; to be entered where no rank is at work."""
    before = tensor_parallel.MOST_BLOCKS
    tensor_parallel.MOST_BLOCKS = 1
    try:
        yield
    finally:
        tensor_parallel.MOST_BLOCKS = before


def call_of(kind: str, comm: Communicator, seqlen: int, xp: Any) -> Callable[[], Any]:
    """One rank's call."""
    heads, heads_kv = HEADS // comm.world, HEADS_KV // comm.world
    shapes = ((1, seqlen, heads, HEAD_DIM), (1, seqlen, heads_kv, HEAD_DIM), (1, seqlen, heads_kv, HEAD_DIM))
    q, k, v, w_out = (
        random(xp, shape, 4 * comm.rank + n) for n, shape in enumerate((*shapes, (heads, HEAD_DIM, MODEL)))
    )
    matrix = w_out.reshape(-1, MODEL)

    def compute() -> Any:
        return product(cuflash.attention(q, k, v, causal=True).reshape(-1, len(matrix)), matrix)

    def steps_of_sum() -> Steps[None]:
        with telling(comm):
            sums = BlockSums(comm, total)
            yield from sums.add(own)
            yield from sums.finish()
            yield from comm.finishing()

    def of_sum() -> Any:
        comm.run(steps_of_sum())
        return total

    if kind == COMPUTE:
        return compute
    if kind == SUM:
        own = compute()
        total = xp.empty(own.shape, q.dtype)
        return of_sum
    return lambda: distributed.attention_allreduce(q, k, v, w_out, comm, causal=True)


def of_rank(kind: str, comm: Communicator, seqlen: int, rounds: int) -> list[float]:
    """This rank's seconds."""
    import cupy

    call = call_of(kind, comm, seqlen, cupy)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        return seconds_of(call, rounds, comm.barrier)


def cell_of(world: int, seqlen: int, times: dict[str, float]) -> dict[str, Any]:
    """The figures of one cell."""
    speed, share = times[ONE_BLOCK] / times[OVERLAP], times[SUM] / times[ONE_BLOCK]
    cell = {"cell": f"{seqlen} tokens on {world} GPUs", "world": world, "seqlen": seqlen, "seconds": times}
    return cell | {"of_one_block": speed, "share_of_sum": share}


def text_of(cell: dict[str, Any]) -> str:
    """One line."""
    times = ", ".join(f"{kind} {1e3 * x:.3f} ms" for kind, x in cell["seconds"].items())
    ratio = f"{cell['of_one_block']:.3f} times as fast as in one block, of which the sum is {cell['share_of_sum']:.2f}"
    return f"{cell['cell']}: {times}; {ratio}"


def main() -> None:
    """Measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks that are threads")
    parser.add_argument("--seqlen", type=int, nargs="+", default=(4096, 8192, 16384), metavar="N")
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    comm = distributed.from_environment() if is_launched(os.environ) else None
    world = args.world if comm is None else comm.world
    if world < 2 or HEADS_KV % world:
        parser.error(f"expected 2 ranks or more that divide {HEADS_KV} KV heads, got {world}")
    recorder = recording.Recorder(args, xp, "allreduce", ranks="threads" if comm is None else "processes")
    cells: list[dict[str, Any]] = []
    for seqlen in args.seqlen:
        times = {}
        for kind in KINDS:

            def work(rank: Communicator, kind: str = kind, seqlen: int = seqlen) -> list[float]:
                return of_rank(kind, rank, seqlen, args.rounds)

            with in_one_block() if kind == ONE_BLOCK else nullcontext():
                found = run(world, work, range(world)) if comm is None else comm.all_gather(work(comm))
            times[kind] = statistics.median(np.max(found, axis=0).tolist())
        cells.append(cell_of(world, seqlen, times))
        if comm is None or comm.rank == 0:
            print(text_of(cells[-1]), flush=True)
            recorder.write(cells)


if __name__ == "__main__":
    main()
