"""Decode with a cache of keys that no GPU could hold: keys and values stay in host memory.

    python examples/long_decode.py                                # small, on NumPy arrays alone
    python examples/long_decode.py --keys 4M --dtype bfloat16     # queries on the GPU where there is one

Each step attends one new query a sequence to all keys so far and appends its own. The cache is one array in pinned
memory, of which every step takes a longer view. ``--check`` compares the last step with `cuflash.attention` on NumPy
arrays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import cuflash
from cuflash.distributed.plan import parse_count

Array = Any
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
# Keys are drawn so many at a time, or random numbers would need more memory than the cache.
DRAWN_AT_ONCE = 1 << 14


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 where `--check` finds a difference."""
    args = _parser().parse_args(argv)
    xp, where = _queries_home(args.device)
    rng = np.random.default_rng(0)
    shape = 1, args.keys + args.steps, args.kv_heads, args.head_dim
    k, v = (cuflash.offload.pinned_empty(shape, args.dtype) for _ in range(2))
    for first in range(0, args.keys, DRAWN_AT_ONCE):
        rows = slice(first, min(first + DRAWN_AT_ONCE, args.keys))
        for x in (k, v):
            x[:, rows] = rng.standard_normal(x[:, rows].shape, dtype=np.float32)
    print(f"{args.keys} keys of {args.kv_heads} heads, {(k.nbytes + v.nbytes) / 1e9:.3g} GB on the host, {where}")
    q: Array = None
    out: Array = None
    for step in range(args.steps):
        stop = args.keys + step + 1
        for x in (k, v):
            x[:, stop - 1] = rng.standard_normal(x[:, stop - 1].shape, dtype=np.float32)
        q = rng.standard_normal((1, 1, args.heads, args.head_dim), dtype=np.float32).astype(k.dtype)
        own = xp.asarray(q)
        start = time.perf_counter()
        out = cuflash.offload.attention(own, k[:, :stop], v[:, :stop], causal=True, share=args.share)
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()
        seconds = time.perf_counter() - start
        read = (k[:, :stop].nbytes + v[:, :stop].nbytes) / 1e9
        print(f"step {step}: {seconds * 1e3:.1f} ms, {read / seconds:.1f} GB/s of keys and values")
    if not args.check:
        return 0
    expected = cuflash.attention(q, k, v, causal=True).astype(np.float32)
    found = (out if xp is np else xp.asnumpy(out)).astype(np.float32)
    error = float(np.abs(found - expected).max())
    print(f"largest difference from one call on the CPU: {error:.1e}")
    return int(not error <= TOLERANCES[args.dtype])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=parse_count, default=1 << 14, help="such as 4M (default %(default)s)")
    parser.add_argument("--steps", type=parse_count, default=3)
    parser.add_argument("--heads", type=parse_count, default=32)
    parser.add_argument("--kv-heads", type=parse_count, default=8)
    parser.add_argument("--head-dim", type=parse_count, default=64)
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="auto: the GPU where there is one")
    parser.add_argument("--share", type=_share, default="auto", help="the CPU's share of the keys, 0 to 1")
    parser.add_argument("--check", action="store_true", help="compare the last step with one call on the CPU")
    return parser


def _share(text: str) -> str | float:
    return text if text == "auto" else float(text)


def _queries_home(device: str) -> tuple[Any, str]:
    """The namespace of the queries' arrays, and where that is in words."""
    if device == "auto":
        try:
            import cupy
        except ImportError:
            pass
        else:
            if cupy.cuda.is_available():
                return cupy, "queries on the GPU"
    return np, "queries there, too"


if __name__ == "__main__":
    sys.exit(main())
