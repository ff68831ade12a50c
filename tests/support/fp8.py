"""Helpers of the tests of FP8: codes as numbers, plain attention with rounded weights, and inputs by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import benchmark_scripts  # noqa: F401 (it names the folder of the next)
import fp8_check as check
import ml_dtypes
import numpy as np
from cases import np_dtype
from fp8_check import CODES, WEIGHT_FACTOR, Exact, numbers_of
from numpy.typing import NDArray
from tolerance import EPS

import cuflash

__all__ = [
    "CODES", "KEY_TILE", "RMS_FACTOR", "WEIGHT_FACTOR", "Exact", "Quantized", "assert_near", "exact", "inputs", "naive",
    "numbers_of", "options_for", "quantized", "rms",
]  # fmt: skip
Array = NDArray[Any]

# A kernel's tile has so many keys, whose scales share a largest.
KEY_TILE = 128
# The rms error may be so many times that of plain attention whose weights are rounded.
RMS_FACTOR = 1.01
CONVERTING = ("numpy", "sm_75")  # devices of `devices` on which weights are float32


def exact(device: str, queries: str, numbers: Sequence[Array], *edges: Array, **options: Any) -> Exact:
    """Compute attention as the benchmark's check does; the rounding is 0 on devices where weights are float32."""
    found = check.exact(queries, numbers, *edges, **options)
    return found._replace(rounding=np.zeros_like(found.rounding)) if device in CONVERTING else found


def assert_near(actual: Array, expected: Exact) -> None:
    """Assert equality within rounding to the result's dtype, float32's arithmetic, and the rounding of weights."""
    size = np.abs(expected.out)
    error = np.abs(actual.astype(np.float64) - expected.out)
    most = expected.rounding + EPS[actual.dtype.name] * (size + expected.rounding) + 2e-6 * min(size.max(), 1)
    assert (error <= most).all(), f"{np.max(error / most)} times the most that rounding may do"


class Quantized(NamedTuple):
    """An array in FP8: codes, float32 scales, and the numbers that both are, in float64."""

    codes: Array
    scale: Array
    numbers: Array


def quantized(x: Array, per: str) -> Quantized:
    """Quantise an array by `cuflash.quantize_fp8`."""
    codes, scale = cuflash.quantize_fp8(x, per)
    return Quantized(codes, scale, numbers_of(codes, scale))


def inputs(kind: str, seed: int, seqlens: tuple[int, int] = (160, 400), heads: tuple[int, int] = (4, 2)) -> list[Array]:
    """Draw float32 q, k, v (1, seqlen, heads, 64) of a kind.

    "gaussian", "outliers" (one element in a thousand N(0, 100) on top) or "sharp" (q and k N(0, 9)).
    """
    rng = np.random.default_rng(seed)
    shapes = [(1, n, h, 64) for n, h in zip((seqlens[0], seqlens[1], seqlens[1]), (*heads, heads[1]), strict=True)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    if kind == "outliers":
        for x in arrays:
            x += (rng.random(x.shape) < 1e-3) * rng.standard_normal(x.shape) * 10
    elif kind == "sharp":
        arrays[0] *= 3
        arrays[1] *= 3
    else:
        assert kind == "gaussian"
    return [x.astype(np.float32) for x in arrays]


def naive(
    q: Array, k: Array, v: Quantized, out_dtype: str, weights: str, key_tile: int = KEY_TILE, from_last: bool = False
) -> Array:
    """Compute plain attention on dequantised inputs, key tile by key tile, with rounded weights.

    `weights` "float8_e4m3fn": p times its value's scale over the largest of the key tile, times 2^8, against the
    running maximum; a 16-bit dtype: p alone. The denominator sums the weights before they are rounded. Tiles are
    visited from the first to the last, or `from_last`.
    """
    group = q.shape[2] // k.shape[2]
    dtype = ml_dtypes.float8_e4m3fn if weights == "float8_e4m3fn" else np_dtype(weights)
    by_head = [np.repeat(x, group if x.shape[2] < q.shape[2] else 1, axis=2).swapaxes(1, 2) for x in (q, k, v.numbers)]
    scale = np.repeat(np.broadcast_to(v.scale, v.codes.shape[:-1]), group, axis=2).swapaxes(1, 2).astype(np.float64)
    scores = by_head[0] @ by_head[1].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    top = np.full((*scores.shape[:-1], 1), -np.inf)
    total, sums = np.zeros(top.shape), np.zeros((*top.shape[:-1], v.codes.shape[-1]))
    begins = range(0, scores.shape[-1], key_tile)
    for begin in reversed(begins) if from_last else begins:
        keys = slice(begin, begin + key_tile)
        new_top = np.maximum(top, scores[..., keys].max(axis=-1, keepdims=True))
        p = np.exp(scores[..., keys] - new_top)
        own_scale = scale[:, :, None, keys] if weights == "float8_e4m3fn" else np.ones((1, 1, 1, 1))
        unit = own_scale.max(axis=-1, keepdims=True) / WEIGHT_FACTOR
        rounded = (p * (own_scale / unit)).astype(np.float32).astype(dtype).astype(np.float64)
        values = by_head[2][:, :, keys] / np.swapaxes(own_scale, -1, -2)
        rescale = np.exp(top - new_top)
        total = total * rescale + p.sum(axis=-1, keepdims=True)
        sums = sums * rescale + unit * (rounded @ values)
        top = new_top
    return (sums / total).swapaxes(1, 2).astype(np.float32).astype(np_dtype(out_dtype)).astype(np.float64)


def rms(x: Array) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def options_for(rng: np.random.Generator, lengths: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Return options by name, one and all together, of two sequences of so many queries of four heads, and keys."""
    blocks = np.kron(rng.random((10, 13)) < 0.4, np.ones((16, 16), bool))
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (30, 10)},
        "narrow window": {"window": (3, 0)},
        "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
        "negative scale": {"softmax_scale": -0.2},
        "bias": {"bias": rng.standard_normal((2, 1, *lengths)).astype(np.float32)},
        "bias that hides": {"bias": np.where(rng.random((1, 4, *lengths)) < 0.2, -np.inf, 0).astype(np.float32)},
        "mask": {"mask": rng.random((4, *lengths)) < 0.7},
        "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.06], np.float32)},
        "sink": {"sink": np.array([0.0, 1, -1, 2], np.float32), "causal": True},
        "lengths": {
            "q_lengths": np.array([lengths[0], 20], np.int32),
            "kv_lengths": np.array([61, 0], np.int32),
            "causal": True,
        },
        "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
        "block mask": {"block_mask": rng.random(lengths) < 0.8, "window": (170, 20)},
        "blocks": {"block_mask": blocks[: lengths[0], : lengths[1]]},
        "rules": {
            "score_mod": lambda s, b, h, i, j, table: s + table[h] * abs(i - j),
            "mask_mod": lambda b, h, i, j, table: (7 * i + 3 * j + h) % 5 != 0,
            "operands": (np.array([0.1, -0.05, 0.02, 0.0], np.float32),),
        },
    }  # fmt: skip
    together = ("bias", "mask", "alibi", "sink", "lengths", "dropout")
    found["all"] = {"softcap": 3.0} | {name: x for one in together for name, x in found[one].items()}
    return found
