"""Attention over the GPUs of one host beside one GPU's on the same work.

    python examples/benchmarks/ring.py [--world 4] [--tokens 8192 32768] [--commit COMMIT] [--json FILE]
    torchrun --nproc-per-node 4 examples/benchmarks/ring.py

Every GPU has so many tokens; 16 heads of 128 columns, causal, bfloat16. The ideal is one GPU that computes all tokens
of its share of the heads, measured in the same run. A time is that of the slowest rank, the median of all calls;
figures are TFLOP/s a GPU. Ranks are threads, or the processes of a launcher. It needs two GPUs or more.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import recording

import cuflash
from cuflash import distributed
from cuflash.distributed.__main__ import run
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.environment import is_launched

HEADS, HEAD_DIM, WARM_UP = 16, 128, 3
SCHEMES: dict[str, tuple[Any, str]] = {
    "ring zigzag": (distributed.ring_attention_vjp, "zigzag"),
    "ring striped": (distributed.ring_attention_vjp, "striped"),
    "ulysses": (distributed.ulysses_attention_vjp, "plain"),
}


def random(xp: Any, shape: tuple[int, ...], seed: int) -> Any:
    """Normal numbers in bfloat16."""
    import ml_dtypes

    return xp.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(ml_dtypes.bfloat16)


def seconds_of(call: Callable[[], Any], rounds: int, meet: Callable[[], None]) -> list[float]:
    """Wall times of calls that all ranks begin together and that end when their GPU is done."""
    import cupy

    times = []
    for number in range(WARM_UP + rounds):
        cupy.cuda.get_current_stream().synchronize()
        meet()
        start = time.perf_counter()
        call()
        cupy.cuda.get_current_stream().synchronize()
        if number >= WARM_UP:
            times.append(time.perf_counter() - start)
    return times


def of_rank(comm: Communicator, tokens: int, name: str, rounds: int) -> dict[str, list[float]]:
    """This rank's seconds of both passes."""
    import cupy

    make, order = SCHEMES[name]
    arrays = [random(cupy, (1, tokens, HEADS, HEAD_DIM), 4 * comm.rank + i) for i in range(4)]
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    cupy.cuda.Device().synchronize()

    def forward() -> Any:
        return make(*arrays[:3], comm, order=order, causal=True)

    _, backward = forward()
    times = {"forward": seconds_of(forward, rounds, comm.barrier)}
    times["backward"] = seconds_of(lambda: backward(arrays[3]), rounds, comm.barrier)
    cupy.cuda.Stream.null.use()
    return times


def slowest(found: list[dict[str, list[float]]]) -> dict[str, float]:
    """Each call's slowest rank, the median of all calls."""
    return {
        direction: statistics.median(max(times) for times in zip(*(own[direction] for own in found), strict=True))
        for direction in ("forward", "backward")
    }


def ideal(world: int, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of one GPU on all tokens of its share of the heads."""
    import cupy

    arrays = [random(cupy, (1, world * tokens, HEADS // world, HEAD_DIM), i) for i in range(4)]
    out, backward = cuflash.attention_vjp(*arrays[:3], causal=True)
    calls = {
        "forward": lambda: cuflash.attention(*arrays[:3], causal=True, out=out),
        "backward": lambda: backward(arrays[3]),
    }
    return {direction: statistics.median(seconds_of(call, rounds, lambda: None)) for direction, call in calls.items()}


def main() -> None:
    """Measure, print and record."""
    parser = recording.parser_of(__doc__)
    parser.add_argument("--world", type=int, nargs="+", default=(4,), metavar="N")
    parser.add_argument("--tokens", type=int, nargs="+", default=(8192, 32768), metavar="N", help="of each GPU")
    parser.add_argument("--schemes", nargs="+", default=tuple(SCHEMES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    xp = recording.gpu_of(parser)
    comm = distributed.from_environment() if is_launched(os.environ) else None
    record = recording.Recorder(args, xp, "ring", ranks="threads" if comm is None else "processes")
    cells: list[dict[str, Any]] = []
    for world in args.world if comm is None else (comm.world,):
        for tokens in args.tokens:
            best = ideal(world, tokens, args.rounds)
            for name in args.schemes:

                def work(rank: Communicator, tokens: int = tokens, name: str = name) -> dict[str, list[float]]:
                    return of_rank(rank, tokens, name, args.rounds)

                found = run(world, work, range(world)) if comm is None else comm.all_gather(work(comm))
                cells.append(
                    cell_of(f"{name} on {world} GPUs, {tokens} tokens each", world, tokens, slowest(found), best)
                )
                if comm is None or comm.rank == 0:
                    print(text_of(cells[-1]), flush=True)
    if comm is None or comm.rank == 0:
        record.write(cells)


def cell_of(name: str, world: int, tokens: int, times: dict[str, float], best: dict[str, float]) -> dict[str, Any]:
    """The figures of one cell."""
    flops = 2.0 * HEADS * HEAD_DIM * (world * tokens) ** 2 / world
    cell: dict[str, Any] = {"cell": name}
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        rates = {"cuflash": times[direction], "one_gpu": best[direction]}
        cell[direction] = {key: factor * flops / t / 1e12 for key, t in rates.items()}
        cell[direction]["of_ideal"] = best[direction] / times[direction]
    return cell


def text_of(cell: dict[str, Any]) -> str:
    """One line."""
    shares = ", ".join(
        f"{d} {cell[d]['cuflash']:.0f} of {cell[d]['one_gpu']:.0f} TFLOP/s ({cell[d]['of_ideal']:.3f})"
        for d in ("forward", "backward")
    )
    return f"{cell['cell']}: {shares}"


if __name__ == "__main__":
    main()
