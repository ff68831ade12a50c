"""FP8 attention is near to exact attention on the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import np_dtype
from devices import Device, device_of
from fp8 import CODES, RMS_FACTOR, Quantized, inputs, naive, numbers_of, quantized, rms
from numpy.typing import NDArray

import cuflash
from cuflash import reference

Array = NDArray[Any]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("queries", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("kind", ["gaussian", "outliers", "sharp"])
def test_error_is_that_of_plain_attention(
    device: Device, kind: str, per: str, queries: str, rotated: bool, seed: int
) -> None:
    q, k, v = inputs(kind, seed)
    if rotated:
        q, k = cuflash.hadamard(q, 1), cuflash.hadamard(k, 1)
    q8, k8, v8 = (quantized(x, per) for x in (q, k, v))
    scales = {"k_scale": k8.scale, "v_scale": v8.scale}
    given, numbers = q8.codes, q8.numbers
    if queries == "bfloat16":
        given = q.astype(np_dtype("bfloat16"))
        numbers = given.astype(np.float64)
    else:
        scales["q_scale"] = q8.scale
    exact = reference.attention(numbers, k8.numbers, v8.numbers)[0]
    plain = naive(numbers, k8.numbers, v8, "bfloat16", queries)
    out = device.get(cuflash.attention(*device.put((given, k8.codes, v8.codes)), **device.put(scales)))
    assert rms(out.astype(np.float64) - exact) <= RMS_FACTOR * rms(plain - exact)


@pytest.mark.parametrize("begin", [1, 2, 3])
def test_codes_at_odd_addresses(device: Device, begin: int) -> None:
    """Rows of codes that no vector can load; scores differ by tens, so that few keys of a row have all the weight."""
    memory = np.random.default_rng(2).integers(0, 120, (1, 40, 2, 67), np.uint8)
    columns = slice(begin, begin + 64)
    arrays = [device.put(memory)[..., columns]] * 3
    out = device.get(cuflash.attention(*arrays, softmax_scale=1e-4, out_dtype="float32"))
    codes = memory[..., columns]
    k = numbers_of(codes)
    v = Quantized(codes, np.ones((1, 1, 1), np.float32), k)
    q = k * 1e-4 * np.sqrt(codes.shape[-1])  # so that the scale is the default
    exact = reference.attention(q, k, k)[0]
    plain = naive(q, k, v, "float32", CODES)
    assert rms(out - exact) <= RMS_FACTOR * rms(plain - exact)


@pytest.mark.parametrize("seed", range(3))
def test_hadamard_pays_with_outliers(seed: int) -> None:
    q, k, v = inputs("outliers", seed)
    q[..., 5] *= 20  # a column of outliers, as trained models have
    exact = reference.attention(q, k, v)[0]

    def error(a: Array, b: Array) -> float:
        return rms(reference.attention(quantized(a, "head").numbers, quantized(b, "head").numbers, v)[0] - exact)

    assert error(cuflash.hadamard(q, 2), cuflash.hadamard(k, 2)) < 0.7 * error(q, k)


def assert_finds_the_needle(device: Device, seqlen: int) -> None:
    """Assert that the result is half of a key's value, as it alone of many matters and a sink has as much weight."""
    rng = np.random.default_rng(seqlen)
    q = np.full((1, 3, 1, 64), 2.0, np.float32)
    k = rng.standard_normal((1, seqlen, 1, 64)).astype(np.float32) * 0.05
    v = rng.standard_normal((1, seqlen, 1, 64)).astype(np.float32)
    k[0, seqlen // 3] = 1.5
    score = 64 * 2.0 * 1.5 / 8
    q8, k8, v8 = (quantized(x, "token") for x in (q, k, v))
    options: dict[str, Any] = {"sink": np.array([score], np.float32), "out_dtype": "float32"}
    options |= {"q_scale": q8.scale, "k_scale": k8.scale, "v_scale": v8.scale}
    out = device.get(cuflash.attention(*device.put((q8.codes, k8.codes, v8.codes)), **device.put(options)))
    sink = np.array([score])
    expected = reference.attention(q8.numbers, k8.numbers, v8.numbers, sink=sink)[0]
    assert np.abs(out - expected).max() <= 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(expected, np.broadcast_to(v8.numbers[:, seqlen // 3] / 2, out.shape), atol=0.05)


def test_needle(device: Device) -> None:
    assert_finds_the_needle(device, 4096)


@pytest.mark.gpu
def test_long_needle() -> None:
    assert_finds_the_needle(device_of("cupy"), 128 * 1024)
