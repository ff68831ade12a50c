"""Attention and its gradients over a long sequence on the CPU, with a bar that tells how far they are.

    python examples/long_sequence.py                     # 8192 queries and keys
    python examples/long_sequence.py --seqlen 32k        # 16 times the work, the same scratch memory

Ctrl-C stops within a tile. With tqdm installed the bar is tqdm's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

import cuflash
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=parse_count, default=8192, help="such as 32k (default %(default)s)")
    parser.add_argument("--heads", type=parse_count, default=4, help="default %(default)s")
    parser.add_argument("--head-dim", type=parse_count, default=64, help="default %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
