"""Attention refuses wrong FP8 arrays, scales and out_dtypes by messages that say what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import np_dtype
from devices import Device
from numpy.typing import NDArray

import cuflash

Array = NDArray[Any]


def codes(*shape: int) -> Array:
    return np.zeros(shape, np.uint8)


def halves(*shape: int, dtype: str = "float16") -> Array:
    return np.zeros(shape, np_dtype(dtype))


Q, K, V = (1, 3, 2, 8), (1, 5, 1, 8), (1, 5, 1, 8)
ONE = np.ones((1, 1, 1), np.float32)
WRONG: dict[str, tuple[tuple[Array, Array, Array], dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "k alone": ((halves(*Q), codes(*K), halves(*V)), {}, TypeError, ("v", "uint8", "float16")),
    "v alone": ((halves(*Q), halves(*K), codes(*V)), {}, TypeError, ("k", "uint8", "float16")),
    "q alone": ((codes(*Q), halves(*K), halves(*V)), {}, TypeError, ("k", "uint8", "float16")),
    "int8": ((codes(*Q).view(np.int8),) * 3, {}, TypeError, ("q", "int8")),
    "float32 queries": ((halves(*Q, dtype="float32"), codes(*K), codes(*V)), {}, TypeError, ("q", "16", "float32")),
    "float64 queries": ((halves(*Q, dtype="float64"), codes(*K), codes(*V)), {}, TypeError, ("q", "float64")),
    "q_scale of halves": ((halves(*Q), codes(*K), codes(*V)), {"q_scale": ONE}, ValueError, ("q_scale", "float16")),
    "k_scale of halves": ((halves(*Q), halves(*K), halves(*V)), {"k_scale": ONE}, ValueError, ("k_scale", "float16")),
    "v_scale of halves": ((halves(*Q), halves(*K), halves(*V)), {"v_scale": ONE}, ValueError, ("v_scale", "float16")),
    "scale's dtype": (
        (codes(*Q), codes(*K), codes(*V)),
        {"k_scale": ONE.astype(float)},
        TypeError,
        ("k_scale", "float64"),
    ),
    "scale's axes": (
        (codes(*Q), codes(*K), codes(*V)),
        {"k_scale": ONE[0]},
        ValueError,
        ("k_scale", "(1, 5, 1)", "(1, 1)"),
    ),
    "scale's axis": (
        (codes(*Q), codes(*K), codes(*V)),
        {"q_scale": np.ones((1, 5, 1), np.float32)},
        ValueError,
        ("q_scale", "(1, 3, 2)", "(1, 5, 1)"),
    ),
    "scale of four axes": (
        (codes(*Q), codes(*K), codes(*V)),
        {"v_scale": ONE[..., None]},
        ValueError,
        ("v_scale", "(1, 5, 1)"),
    ),
    "scale is a number": ((codes(*Q), codes(*K), codes(*V)), {"v_scale": 2.0}, TypeError, ("v_scale", "float")),
    "bias of halves": (
        (codes(*Q), codes(*K), codes(*V)),
        {"bias": halves(3, 5)},
        TypeError,
        ("bias", "float32", "float16"),
    ),
    "float64 result": (
        (codes(*Q), codes(*K), codes(*V)),
        {"out_dtype": "float64"},
        TypeError,
        ("out_dtype", "bfloat16"),
    ),
    "FP8 result": ((codes(*Q), codes(*K), codes(*V)), {"out_dtype": "uint8"}, TypeError, ("out_dtype", "uint8")),
    "no dtype": ((halves(*Q), halves(*K), halves(*V)), {"out_dtype": "half-ish"}, TypeError, ("out_dtype", "half-ish")),
    "float64 of halves": (
        (halves(*Q), halves(*K), halves(*V)),
        {"out_dtype": "float64"},
        TypeError,
        ("out_dtype", "float64"),
    ),
    "float16 of float32": (
        tuple(halves(*s, dtype="float32") for s in (Q, K, V)),  # type: ignore[dict-item]
        {"out_dtype": "float16"},
        TypeError,
        ("out_dtype", "float32", "float16"),
    ),
    "float32 of float64": (
        tuple(halves(*s, dtype="float64") for s in (Q, K, V)),  # type: ignore[dict-item]
        {"out_dtype": "float32"},
        TypeError,
        ("out_dtype", "float64", "float32"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(device: Device, name: str) -> None:
    arrays, options, error, words = WRONG[name]
    with pytest.raises(error) as caught:
        cuflash.attention(*device.put(arrays), **device.put(options))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("option", ["q_scale", "k_scale", "v_scale", "out_dtype", "arrays"])
def test_ranks_take_no_fp8(option: str) -> None:
    comm = cuflash.distributed.threads(1)[0]
    arrays = [np.zeros((1, 4, 1, 8), np.uint8 if option == "arrays" else np.float16)] * 3
    options: dict[str, Any] = {} if option == "arrays" else {option: "float32" if option == "out_dtype" else ONE}
    ring_attention: Any = cuflash.distributed.ring_attention
    with pytest.raises(NotImplementedError, match="FP8"):
        ring_attention(*arrays, comm, **options)
