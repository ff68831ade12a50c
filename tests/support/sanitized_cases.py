"""A small set of problems for compute-sanitizer: every family of kernels, plain, with some options, and with all.

The names of some may be given as arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cupy as cp
import numpy as np

import cuflash

RNG = np.random.default_rng(0)
BATCH, HEADS, HEADS_KV, ROWS, KEYS = 2, 4, 2, 150, 130  # several tiles each way, all ragged


def gaussian(*shape: int, dtype: Any) -> Any:
    return cp.asarray(RNG.standard_normal(shape).astype(dtype))


def run(dtype: Any, dim: int, dim_v: int | None = None, rows: int = ROWS, keys: int = KEYS, **options: Any) -> None:
    """Run both passes of a padded problem."""
    sizes = (BATCH, rows, HEADS, dim), (BATCH, keys, HEADS_KV, dim), (BATCH, keys, HEADS_KV, dim_v or dim)
    out, backward = cuflash.attention_vjp(*(gaussian(*size, dtype=dtype) for size in sizes), **options)
    backward(out)
    cp.cuda.Device().synchronize()


def run_packed(dtype: Any, dim: int, **options: Any) -> None:
    """Run both passes of packed sequences, one of them empty, with padding behind."""
    ends = cp.asarray(np.array([0, 60, 60, 140], np.int32))
    q, k, v = (gaussian(ROWS, heads, dim, dtype=dtype) for heads in (HEADS, HEADS_KV, HEADS_KV))
    out, backward = cuflash.attention_varlen_vjp(q, k, v, ends, ends, **options)
    backward(out)
    cp.cuda.Device().synchronize()


def everything(dtype: Any) -> None:
    """Run all options at once, with head dims that no tile has."""
    accum = np.float64 if dtype == np.float64 else np.float32
    run(
        dtype,
        40,
        24,
        softcap=2.0,
        bias=gaussian(ROWS, KEYS, dtype=dtype),
        alibi_slopes=cp.asarray(np.ones(HEADS, accum)),
        sink=cp.asarray(np.ones(HEADS, accum)),
        mask=cp.asarray(RNG.random((ROWS, KEYS)) < 0.5),
        dropout_p=0.2,
        dropout_seed=3,
        block_mask=cuflash.BlockMask.random(ROWS, KEYS, 0.5, seed=0, block_size=(16, 16)),
        kv_lengths=cp.asarray(np.array([100, KEYS], np.int32)),
    )


def blocks() -> None:
    """Run block masks by elements, with partial blocks."""
    run(np.float16, 64, keys=ROWS, block_mask=cuflash.BlockMask.strided(ROWS, 20, ROWS - 1, causal=True))


def bias() -> None:
    """Run a bias and its gradient."""
    run(np.float16, 64, bias=gaussian(ROWS, KEYS, dtype=np.float16))


def mask() -> None:
    """Run a mask of elements."""
    run(np.float16, 64, mask=cp.asarray(RNG.random((ROWS, KEYS)) < 0.5))


CASES: dict[str, Callable[[], None]] = {
    "half": partial(run, np.float16, 64, causal=True),
    "half 128": partial(run, np.float16, 128),
    "half 192": partial(run, np.float16, 192, 128, causal=True),
    "half 256": partial(run, np.float16, 256, causal=True),
    "packed": partial(run_packed, np.float16, 64, causal=True),
    "window": partial(run, np.float16, 128, window=(20, 0)),
    "blocks": blocks,
    "bias": bias,
    "mask": mask,
    "dropout": partial(run, np.float16, 64, dropout_p=0.2, dropout_seed=3),
    "deterministic": partial(run, np.float16, 64, deterministic=True),
    "one query": partial(run, np.float16, 128, rows=1, keys=600),
    "half, everything": partial(everything, np.float16),
    "float": partial(run, np.float32, 64),
    "tf32": partial(run, np.float32, 64, precision="tf32", causal=True),
    "float 192": partial(run, np.float32, 192),
    "float, everything": partial(everything, np.float32),
    "double": partial(run, np.float64, 64, causal=True),
    "double 256": partial(run, np.float64, 256),
    "double, window": partial(run, np.float64, 40, window=(20, 10)),
    "double, everything": partial(everything, np.float64),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
