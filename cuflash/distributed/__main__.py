"""``python -m cuflash.distributed --selftest`` tests that ranks reach each other and compute what one device does.

``python -m cuflash.distributed plan --gpus 1024 --seqlen 16M --heads 32`` predicts times, links and memory.

Under torchrun, mpiexec or variables of one's own the command is one process of several, and rank 0 prints. Ranks are
threads otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

import cuflash
from cuflash.distributed import plan, ring_attention_vjp, shard, threads, ulysses_attention_vjp, unshard
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.environment import from_environment, is_launched, num_gpus
from cuflash.distributed.order import ORDERS
from cuflash.distributed.processes import TRANSPORTS

Array = Any
Work = Callable[[Communicator], Any]
Runner = Callable[[Work], list[Any]]  # returns the results that some work gives on every rank
SCHEMES: dict[str, Callable[..., Any]] = {"ring": ring_attention_vjp, "heads": ulysses_attention_vjp}
# The links are measured by messages of so many bytes.
MESSAGE_BYTES = 64 << 20
TOLERANCE = 1e-4  # of float32 on any device


def heads_of_grid(world: int) -> int:
    """Return how many ranks deal heads in the squarest grid of some ranks; 1 where no grid but a row has so many."""
    return max(heads for heads in range(1, world + 1) if world % heads == 0 and heads * heads <= world)


class Row(NamedTuple):
    """One line of the table."""

    scheme: str
    order: str
    error: float
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every rank's results are those of one device, 1 if not, 2 for wrong use or something missing."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["plan"]:
        return plan.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m cuflash.distributed", description=__doc__)
    parser.add_argument("--selftest", action="store_true", required=True, help="check links and results")
    parser.add_argument("--world", type=int, help="threads (default: as many as GPUs are here, else 4)")
    parser.add_argument("--device", choices=("gpu", "cpu"), help="default: gpu where there are two or more")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="between processes' GPUs")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds for which processes wait for each other")
    parser.add_argument("--seqlen", type=int, default=1024, help="tokens of all ranks (default %(default)s)")
    args = parser.parse_args(argv)
    gpus = num_gpus()
    if args.device == "gpu" and not gpus:
        print("no GPU here: CuPy is not installed, or finds none; --device cpu needs none", file=sys.stderr)
        return 2
    if is_launched(os.environ):
        return _as_process(args)
    on_gpu = args.device == "gpu" or (args.device is None and gpus > 1)
    world = args.world or (gpus if on_gpu else 4)
    if world < 1 or (on_gpu and world > gpus):
        print(f"--world: expected 1 to {gpus if on_gpu else 'any number of'} ranks, got {world}", file=sys.stderr)
        return 2
    print(f"{world} ranks, each {'a GPU' if on_gpu else 'a thread with NumPy arrays'}, {args.seqlen} tokens\n")
    devices = range(world) if on_gpu else None
    return _report(partial(run, world, devices=devices), on_gpu, args.seqlen, print)


def _as_process(args: argparse.Namespace) -> int:
    """Run as one process of several, all of which compute and the first of which prints."""
    try:
        device: Literal["auto"] | None = None if args.device == "cpu" else "auto"
        comm = from_environment(time_limit=args.time_limit, transport=args.transport, device=device)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    on_gpu = comm.transport != "tcp"
    show: Callable[[str], None] = print if comm.rank == 0 else lambda _: None
    kind = f"with a GPU, by {comm.transport}" if on_gpu else "with NumPy arrays, by tcp"
    show(f"{comm.world} ranks, each a process {kind}, {args.seqlen} tokens\n")
    try:
        return _report(lambda work: comm.all_gather(work(comm)), on_gpu, args.seqlen, show)
    except BaseException as error:
        comm.fail(error)
        raise
    finally:
        comm.close()


def _report(runner: Runner, on_gpu: bool, seqlen: int, show: Callable[[str], None]) -> int:
    """Show links and results, and return 0 where these are good."""
    show(f"link from one rank to the next: {_link(runner, on_gpu):.1f} GB/s a rank, all at once\n")
    show(f"{'scheme':8} {'order':8} {'largest error':>14} {'seconds':>9}")
    rows = _results(runner, on_gpu, seqlen)
    for row in rows:
        show(f"{row.scheme:8} {row.order:8} {row.error:14.1e} {row.seconds:9.3f}")
    is_good = all(row.error <= TOLERANCE for row in rows)
    show("\nevery rank computes what one device does" if is_good else f"\nerrors above {TOLERANCE:g}")
    return 0 if is_good else 1


def run(world: int, work: Work, devices: Sequence[int] | None = None, **options: Any) -> list[Any]:
    """Do some work in a thread for each rank, on its GPU, and return the results; the first rank's error is raised.

    `options` are those of `threads`.
    """
    return run_threads(threads(world, devices=devices, **options), work, devices)


def run_threads(comms: Sequence[Communicator], work: Work, devices: Sequence[int] | None = None) -> list[Any]:
    """Do some work in a thread for each communicator."""
    world = len(comms)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def rank(comm: Communicator) -> None:
        try:
            if devices is not None:
                import cupy

                cupy.cuda.Device(devices[comm.rank]).use()
            results[comm.rank] = work(comm)
        except BaseException as error:
            errors[comm.rank] = error

    ranks = [threading.Thread(target=rank, args=(comm,)) for comm in comms]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


def _link(runner: Runner, on_gpu: bool) -> float:
    """Measure GB/s of a message from each rank to the next, the best of five; NumPy's is handed over and copied."""

    def work(comm: Communicator) -> float:
        x = _namespace(on_gpu).zeros(MESSAGE_BYTES, np.uint8)
        best = np.inf
        for _ in range(5):
            comm.barrier()
            _wait(on_gpu)
            start = time.perf_counter()
            comm.send(x, (comm.rank + 1) % comm.world)
            received: Any = comm.receive((comm.rank - 1) % comm.world)
            if not on_gpu:
                received = received.copy()
            _wait(on_gpu)
            best = min(best, time.perf_counter() - start)
        return MESSAGE_BYTES / best / 1e9

    return float(min(runner(work)))


def _results(runner: Runner, on_gpu: bool, seqlen: int) -> list[Row]:
    rng = np.random.default_rng(0)
    heads, head_dim = 8, 64
    host = [rng.standard_normal((1, seqlen, heads, head_dim), dtype=np.float32) for _ in range(4)]
    out, backward = cuflash.attention_vjp(*host[:3], causal=True)
    expected = [out, *backward(host[3])]
    rows = []
    schemes = dict(SCHEMES)
    dealing = heads_of_grid(runner(lambda comm: comm.world)[0])
    if dealing > 1:
        schemes["grid"] = partial(ring_attention_vjp, heads=dealing)
    for scheme, make in schemes.items():
        for order in ORDERS:

            def work(comm: Communicator, make: Any = make, order: str = order) -> tuple[float, float]:
                xp = _namespace(on_gpu)
                q, k, v, dout = (shard(xp.asarray(x), comm, order) for x in host)
                comm.barrier()
                start = time.perf_counter()
                own, own_backward = make(q, k, v, comm, order=order, causal=True)
                grads = own_backward(dout)
                _wait(on_gpu)
                seconds = time.perf_counter() - start
                whole = [unshard(x, comm, order) for x in (own, *grads)]
                pairs = zip(whole, expected, strict=True)
                return max(float(abs(xp.asarray(a) - xp.asarray(b)).max()) for a, b in pairs), seconds

            found = runner(work)
            rows.append(Row(scheme, order, max(error for error, _ in found), max(seconds for _, seconds in found)))
    return rows


def _namespace(on_gpu: bool) -> Any:
    if not on_gpu:
        return np
    import cupy

    return cupy


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        _namespace(on_gpu).cuda.get_current_stream().synchronize()


if __name__ == "__main__":
    sys.exit(main())
