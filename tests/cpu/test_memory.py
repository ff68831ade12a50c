"""Memory on the CPU grows with the sequence length and not with its square, and no input is copied."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cases import np_dtype
from devices import threads_of_cpu_path
from numpy.typing import NDArray

import cuflash

Array = NDArray[Any]

MEGABYTE = 2**20
SEQLEN = 4096
# SCORES is one float32 score matrix of one head; every bound below is a fraction of it.
SCORES = 4 * SEQLEN**2


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Run with two threads, for which the bounds hold, as each has tiles of its own."""
    with threads_of_cpu_path(2):
        yield


def peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that NumPy and Python hold at a time during `work`, beyond those before.

    NumPy reports its allocations to tracemalloc, in whichever thread they are made.
    """
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = work()
        top = tracemalloc.get_traced_memory()[1]
        del result
        return top - before
    finally:
        tracemalloc.stop()


def test_peak_sees_a_score_matrix() -> None:
    """The measure sees that plain attention has at least two arrays of scores at a time."""
    q = np.ones((SEQLEN, 64), np.float32)
    assert peak(lambda: np.exp(q @ q.T)) >= 2 * SCORES


def inputs(seqlen: int, dtype: str, dim: int = 64) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, seqlen, 1, dim)).astype(np_dtype(dtype)) for _ in range(4))
    return q, k, v, dout


def quadratic_views(seqlen: int) -> dict[str, dict[str, Any]]:
    """Return options whose arrays look quadratic and take a line of memory."""
    line = np.zeros((1, seqlen), np.float32)
    blocks = np.tril(np.ones((seqlen // 128, seqlen // 128), bool))
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (100, 3)},
        "softcap": {"softcap": 20.0},
        "bias": {"bias": np.broadcast_to(line, (seqlen, seqlen))},
        "mask": {"mask": np.broadcast_to(line == 0, (seqlen, seqlen))},
        "alibi": {"alibi_slopes": np.full(1, 0.1, np.float32)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 0},
        "block mask": {"block_mask": cuflash.BlockMask.from_blocks(blocks, seqlen, seqlen)},
        "lengths": {"kv_lengths": np.full(1, seqlen - 7, np.int32)},
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(quadratic_views(128)))
def test_forward_and_backward_are_linear(name: str, dtype: str) -> None:
    """The forward pass takes at most a quarter of a score matrix, the backward pass half of one (without dbias)."""
    options = quadratic_views(SEQLEN)[name]
    q, k, v, dout = inputs(SEQLEN, dtype)
    assert peak(lambda: cuflash.attention(q, k, v, **options)) < SCORES / 4
    (out, lse), _ = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    options["grads"] = ("q", "k", "v")
    top = peak(lambda: cuflash.attention_backward(dout, q, k, v, out, lse, **options))
    assert top < SCORES / 2


def test_twice_the_length_takes_twice_the_memory() -> None:
    """One thread computes, as a second one may find nothing left to do in the shorter call."""
    peaks = []
    for seqlen in (SEQLEN, 2 * SEQLEN):
        q, k, v, dout = inputs(seqlen, "float32")
        with threads_of_cpu_path(1):
            forward = peak(lambda q=q, k=k, v=v: cuflash.attention_vjp(q, k, v, causal=True))  # type: ignore[misc]
            _, backward = cuflash.attention_vjp(q, k, v, causal=True)
            peaks.append((forward, peak(lambda backward=backward, dout=dout: backward(dout))))  # type: ignore[misc]
    for short, long in zip(*peaks, strict=True):
        assert long <= 2.2 * short + MEGABYTE


def test_an_unwanted_bias_gradient_is_not_made() -> None:
    """A constant bias costs no quadratic gradient; a wanted one is the only quadratic array."""
    seqlen = 3072
    q, k, v, dout = inputs(seqlen, "float32")
    scores = 4 * seqlen**2
    bias = np.zeros((seqlen, seqlen), np.float32)
    _, backward = cuflash.attention_vjp(q, k, v, bias=bias)
    assert peak(lambda: backward(dout, grads=("q", "k", "v"))) < 0.75 * scores
    assert scores <= peak(lambda: backward(dout)) < 1.75 * scores


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_no_input_is_copied_or_widened_whole(dtype: str) -> None:
    """A few queries over 16 MB of keys and values that lie heads first take little memory."""
    size = 2**24 // np_dtype(dtype).itemsize
    stored = np.zeros((1, 4, size // 256, 64), np_dtype(dtype))
    k = v = stored.swapaxes(1, 2)
    q = np.zeros((1, 3, 4, 64), np_dtype(dtype))
    assert peak(lambda: cuflash.attention(q, k, v)) < 2**24 / 2
