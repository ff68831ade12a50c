"""Attention whose projected sums over ranks travel behind it, beside the same with NCCL's all-reduce at the end.

    python examples/benchmarks/allreduce.py [--world 2] [--seqlen 4096 8192 16384] [--commit COMMIT] [--json FILE]
    torchrun --nproc-per-node 2 examples/benchmarks/allreduce.py

`attention_allreduce` of one causal sequence in bfloat16: 32 query heads and 8 KV heads of 128 columns over all ranks,
and a projection to 4096 columns. `overlap` is this function; `in turn` is attention, the projection and NCCL's
all-reduce in 16 bits, one after the other; `compute` is attention and the projection of a rank alone, `sum` the
all-reduce alone, whose share of `in turn` is given. A time is that of the slowest rank, the median of all calls. Ranks
are threads, or the processes of a launcher. It needs two GPUs or more, and NCCL.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import recording
from ring import random, seconds_of

import cuflash
from cuflash import distributed
from cuflash.distributed.__main__ import run
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.environment import is_launched
from cuflash.distributed.products import product

HEADS, HEADS_KV, HEAD_DIM, MODEL = 32, 8, 128, 4096
OVERLAP, IN_TURN, COMPUTE, SUM = "overlap", "in turn", "compute", "sum"
KINDS = (OVERLAP, IN_TURN, COMPUTE, SUM)


def all_reduce_of(comm: Communicator, xp: Any) -> Callable[[Any], Any]:
    """A sum over ranks in place: NCCL's, of 16-bit addends; on NumPy arrays the communicator's."""
    if xp is np:
        return comm.sum
    from cupy.cuda import nccl

    unique_id = comm.all_gather(nccl.get_unique_id() if comm.rank == 0 else b"")[0]
    of_nccl = nccl.NcclCommunicator(comm.world, unique_id, comm.rank)

    def summed(x: Any) -> Any:
        stream = xp.cuda.get_current_stream().ptr
        of_nccl.allReduce(x.data.ptr, x.data.ptr, x.size, nccl.NCCL_BFLOAT16, nccl.NCCL_SUM, stream)
        return x

    return summed


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

    if kind == COMPUTE:
        return compute
    if kind == OVERLAP:
        return lambda: distributed.attention_allreduce(q, k, v, w_out, comm, causal=True)
    reduced, addend = all_reduce_of(comm, xp), compute()
    return (lambda: reduced(addend)) if kind == SUM else lambda: reduced(compute())


def of_rank(kind: str, comm: Communicator, seqlen: int, rounds: int) -> list[float]:
    """This rank's seconds."""
    import cupy

    call = call_of(kind, comm, seqlen, cupy)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        return seconds_of(call, rounds, comm.barrier)


def cell_of(world: int, seqlen: int, times: dict[str, float]) -> dict[str, Any]:
    """The figures of one cell."""
    speed, share = times[IN_TURN] / times[OVERLAP], times[SUM] / times[IN_TURN]
    cell = {"cell": f"{seqlen} tokens on {world} GPUs", "world": world, "seqlen": seqlen, "seconds": times}
    return cell | {"of_in_turn": speed, "share_of_sum": share}


def text_of(cell: dict[str, Any]) -> str:
    """One line."""
    times = ", ".join(f"{kind} {1e3 * x:.3f} ms" for kind, x in cell["seconds"].items())
    ratio = f"{cell['of_in_turn']:.3f} times as fast as in turn, of which the sum is {cell['share_of_sum']:.2f}"
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

            found = run(world, work, range(world)) if comm is None else comm.all_gather(work(comm))
            times[kind] = statistics.median(np.max(found, axis=0).tolist())
        cells.append(cell_of(world, seqlen, times))
        if comm is None or comm.rank == 0:
            print(text_of(cells[-1]), flush=True)
            recorder.write(cells)


if __name__ == "__main__":
    main()
