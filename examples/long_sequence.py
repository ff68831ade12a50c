"""Attention and its gradients over a long sequence on the CPU, with a bar that tells how far they are, or over GPUs.

    python examples/long_sequence.py                     # 8192 queries and keys
    python examples/long_sequence.py --seqlen 32k        # 16 times the work, the same scratch memory
    python examples/long_sequence.py --seqlen 1M --heads 16 --head-dim 128 --ranks 4    # a ring of four GPUs

Ctrl-C stops within a tile. With tqdm installed the bar is tqdm's. With ``--ranks`` the sequence is spread over so many
GPUs, in bfloat16, or with ``--device cpu`` over threads with NumPy arrays, in float32; each rank makes its own tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

import cuflash
from cuflash import distributed
from cuflash.distributed.__main__ import run
from cuflash.distributed.communicators import Communicator
from cuflash.distributed.environment import num_gpus
from cuflash.distributed.plan import parse_count

WIDTH = 40  # characters of a plain bar


@contextmanager
def bar(label: str) -> Iterator[None]:
    """Within, one pass shows its progress on the standard error stream."""
    try:
        from tqdm import tqdm
    except ImportError:
        with cuflash.progress(_plain(label)):
            yield
        return
    with tqdm(desc=label, unit=" scores", unit_scale=True) as shown:

        def show(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        with cuflash.progress(show):
            yield


def _plain(label: str) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        full = WIDTH * done // total
        line = f"\r{label:8} [{'#' * full}{'.' * (WIDTH - full)}] {done / total:4.0%}"
        print(line, end="" if done < total else "\n", file=sys.stderr, flush=True)

    return show


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 130 where Ctrl-C stopped it."""
    args = _parser().parse_args(argv)
    if args.ranks:
        return on_ranks(args)
    shape = 1, args.seqlen, args.heads, args.head_dim
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    start = time.perf_counter()
    try:
        with bar("forward"):
            out, backward = cuflash.attention_vjp(q, k, v, causal=True)
        with bar("backward"):
            backward(out)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    print(f"{args.seqlen} queries and keys, {args.heads} heads: {time.perf_counter() - start:.1f} s")
    return 0


def on_ranks(args: argparse.Namespace) -> int:
    """Compute both passes twice, of which the first one may compile kernels, in a ring of ranks that are threads."""
    on_cpu = args.device == "cpu"
    if not on_cpu and num_gpus() < args.ranks:
        print(f"--ranks: expected at most the {num_gpus()} GPUs that are here, or --device cpu", file=sys.stderr)
        return 2

    def rank(comm: Communicator) -> float:
        xp: Any = np if on_cpu else import_module("cupy")
        # NumPy knows bfloat16 by the package ml_dtypes.
        dtype = cuflash.offload.pinned_empty(0, "float32" if on_cpu else "bfloat16").dtype
        own = len(distributed.positions(args.seqlen, comm))
        rng = xp.random.default_rng(comm.rank)
        shape = 1, own, args.heads, args.head_dim
        q, k, v = (rng.standard_normal(shape, dtype="float32").astype(dtype) for _ in range(3))
        for _ in range(2):
            comm.barrier()
            start = time.perf_counter()
            out, backward = distributed.ring_attention_vjp(q, k, v, comm, causal=True)
            backward(out)
            comm.barrier()
        return time.perf_counter() - start

    seconds = max(run(args.ranks, rank, None if on_cpu else range(args.ranks)))
    flops = 3.5 * 2.0 * args.heads * args.head_dim * args.seqlen**2
    where = "threads" if on_cpu else "GPUs"
    rate = flops / seconds / args.ranks / 1e12
    print(
        f"{args.seqlen} tokens, {args.heads} heads, {args.ranks} {where}: {seconds:.2f} s, {rate:.3g} TFLOP/s of each"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=parse_count, default=8192, help="such as 32k (default %(default)s)")
    parser.add_argument("--heads", type=parse_count, default=4, help="default %(default)s")
    parser.add_argument("--head-dim", type=parse_count, default=64, help="default %(default)s")
    parser.add_argument("--ranks", type=parse_count, help="spread the sequence over so many GPUs")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="of --ranks (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
