"""quantize_fp8 and hadamard keep every clause of their promises, on every device."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import np_dtype
from devices import Device
from fp8 import numbers_of
from libraries import Exporter
from numpy.typing import NDArray

import cuflash
from cuflash import e4m3

Array = NDArray[Any]

RNG = np.random.default_rng(0)
DTYPES = ("float16", "bfloat16", "float32", "float64")
SHARED = {"tensor": (0, 1, 2), "head": (1,), "token": ()}


def drawn(dtype: str, shape: tuple[int, ...] = (2, 5, 3, 24)) -> Array:
    return (RNG.standard_normal(shape) * 10.0 ** RNG.uniform(-3, 3, shape)).astype(np_dtype(dtype))


def test_every_code_is_ml_dtypes_number() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(e4m3.decode(codes), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_codes_are_the_nearest_even(dtype: str) -> None:
    """Codes are right for numbers of e4m3, for those half way between two, and for their neighbours."""
    finite = np.sort(np.unique(e4m3.VALUES[np.isfinite(e4m3.VALUES)])).astype(dtype)
    middles = (finite[1:] + finite[:-1]) / 2
    np.testing.assert_array_equal(e4m3.decode(e4m3.encode(finite)), finite)
    even = ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(e4m3.encode(middles), middles.astype(even).view(np.uint8))
    for beyond, neighbours in ((np.inf, finite[1:]), (-np.inf, finite[:-1])):
        just_beyond = np.nextafter(middles, np.asarray(beyond, dtype))
        np.testing.assert_array_equal(e4m3.decode(e4m3.encode(just_beyond)), neighbours)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per", SHARED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_and_codes(device: Device, dtype: str, per: str, packed: bool) -> None:
    x = drawn(dtype)
    x[0, :, 1] = 0
    full = x[:1] if packed else x
    codes, scale = device.get(cuflash.quantize_fp8(device.put(full[0] if packed else full), per))
    wide: Any = full.astype(np.float64 if dtype == "float64" else np.float32)
    largest = np.abs(wide).max(axis=(*SHARED[per], 3), keepdims=True)
    expected = np.where(largest == 0, 1, largest / wide.dtype.type(448)).astype(np.float32)
    np.testing.assert_array_equal(scale, expected[0, ..., 0] if packed else expected[..., 0], strict=True)
    rounded = np.clip(wide / expected, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes, rounded[0] if packed else rounded, strict=True)


@pytest.mark.parametrize("per", SHARED)
def test_what_is_not_finite(device: Device, per: str) -> None:
    """A number that is not finite has no part in a scale; inf saturates, NaN stays."""
    x = drawn("float32", (1, 4, 2, 8))
    special = x.copy()
    special[0, 1, 1, :3] = np.inf, -np.inf, np.nan
    x[0, 1, 1, :3] = 0
    codes, scale = device.get(cuflash.quantize_fp8(device.put(special), per))
    clean_codes, clean_scale = device.get(cuflash.quantize_fp8(device.put(x), per))
    np.testing.assert_array_equal(scale, clean_scale)
    np.testing.assert_array_equal(e4m3.decode(codes[0, 1, 1, :3]), [448, -448, np.nan])
    codes[0, 1, 1, :3] = clean_codes[0, 1, 1, :3]
    np.testing.assert_array_equal(codes, clean_codes)


def test_extremes_of_scales(device: Device) -> None:
    """A float64 beyond float32 saturates; where float32 has no normal scale it is 1."""
    x = np.array([1e300, 1e-300, 0.0, 448.0]).reshape(1, 4, 1, 1)
    codes, scale = device.get(cuflash.quantize_fp8(device.put(x), "token"))
    np.testing.assert_array_equal(scale[0, :, 0], np.array([np.finfo(np.float32).max, 1, 1, 1], np.float32))
    np.testing.assert_array_equal(e4m3.decode(codes[0, :, 0, 0]), [448, 0, 0, 448])


def test_strides_do_not_matter(device: Device) -> None:
    whole = drawn("float16", (4, 6, 3, 16))
    for view in (whole[::2], whole[:, ::-1], whole[..., ::2], whole.transpose(0, 2, 1, 3), whole[:, :, :1]):
        for per in SHARED:
            got = device.get(cuflash.quantize_fp8(device.put(view), per))
            for x, y in zip(got, cuflash.quantize_fp8(np.ascontiguousarray(view), per), strict=True):
                np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (0, 2, 8)])
@pytest.mark.parametrize("per", SHARED)
def test_empty_arrays(device: Device, shape: tuple[int, ...], per: str) -> None:
    codes, scale = device.get(cuflash.quantize_fp8(device.put(np.zeros(shape, np.float16)), per))
    assert codes.shape == shape
    assert (scale == 1).all()
    assert scale.ndim == len(shape) - 1


def test_the_default_is_per_tensor() -> None:
    assert cuflash.quantize_fp8(drawn("float32"))[1].shape == (1, 1, 1)


def test_round_trip_is_within_half_a_step() -> None:
    x = drawn("float32")
    codes, scale = cuflash.quantize_fp8(x, "token")
    error = np.abs(numbers_of(codes, scale) - x)
    assert (error <= np.maximum(np.abs(x) / 16, scale[..., None] * 2.0**-10) * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    ("x", "per", "error", "words"),
    [
        (np.zeros((2, 3), np.float32), "tensor", ValueError, ("x", "(batch, seqlen, num_heads, head_dim)", "(2, 3)")),
        (np.zeros((1, 2, 3, 4), np.int32), "tensor", TypeError, ("x", "float16", "int32")),
        (np.zeros((1, 2, 3, 4), np.uint8), "tensor", TypeError, ("x", "float16", "uint8")),
        ([1.0], "tensor", TypeError, ("x", "list")),
        (np.zeros((1, 2, 3, 4), np.float32), "row", ValueError, ("per", "token", "row")),
        (np.zeros((1, 2, 3, 4), np.float32), None, TypeError, ("per", "token", "NoneType")),
    ],
)
def test_wrong_arguments(x: Any, per: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        cuflash.quantize_fp8(x, per)
    assert all(word in str(caught.value) for word in words)


def sylvester(size: int) -> Array:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 6, 64, 96, 80])
def test_hadamard_is_signs_and_blocks(device: Device, dtype: str, columns: int) -> None:
    size = columns & -columns
    identity = np.eye(columns).reshape(1, columns, 1, columns).astype(np_dtype("float64"))
    matrix = device.get(cuflash.hadamard(device.put(identity), 3))[0, :, 0]
    signs = np.sign(matrix[:, ::size].sum(axis=1))  # the first column of every block is positive
    expected = signs[:, None] * np.kron(np.eye(columns // size), sylvester(size))
    np.testing.assert_allclose(matrix, expected, atol=1e-15)
    x = RNG.standard_normal((2, 3, 2, columns)).astype(np_dtype(dtype))
    got = device.get(cuflash.hadamard(device.put(x), 3))
    assert got.dtype == x.dtype
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-21, "float64": 2.0**-50}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), x.astype(np.float64) @ expected, atol=8 * eps, rtol=eps)


def test_signs_come_from_seed_and_column_alone(device: Device) -> None:
    ones = np.ones((1, 1, 1, 45), np.float32)  # blocks of one column
    signs = device.get(cuflash.hadamard(device.put(ones), 2**64 - 1))[0, 0, 0]
    assert set(signs) == {-1, 1}
    stacked = np.ones((3, 45), np.float64)
    np.testing.assert_array_equal(device.get(cuflash.hadamard(device.put(stacked), 2**64 - 1)), [signs] * 3)
    longer = device.get(cuflash.hadamard(device.put(np.ones(63, np.float16)), 2**64 - 1))
    np.testing.assert_array_equal(longer[:45], signs)
    assert (device.get(cuflash.hadamard(device.put(ones), 5))[0, 0, 0] != signs).any()


def test_hadamard_keeps_products(device: Device) -> None:
    q, k = (RNG.standard_normal((1, 5, 2, 96)) for _ in range(2))
    a, b = (device.get(cuflash.hadamard(device.put(x), 11)) for x in (q, k))
    np.testing.assert_allclose(np.einsum("bihd,bjhd->bhij", a, b), np.einsum("bihd,bjhd->bhij", q, k), atol=1e-12)


def test_hadamard_of_strides_and_many_axes(device: Device) -> None:
    x = RNG.standard_normal((2, 3, 2, 2, 2, 32))
    for view in (x, x[:, ::2], x[..., ::2], x[0, 0, 0], x[:, :0]):
        expected = cuflash.hadamard(np.ascontiguousarray(view), 1)
        np.testing.assert_allclose(device.get(cuflash.hadamard(device.put(view), 1)), expected, atol=1e-14)


@pytest.mark.parametrize(
    ("x", "seed", "error", "words"),
    [
        (np.zeros(4, np.float32), -1, ValueError, ("seed", "2**64", "-1")),
        (np.zeros(4, np.float32), 2**64, ValueError, ("seed", "2**64")),
        (np.zeros(4, np.float32), 1.0, TypeError, ("seed", "int", "float")),
        (np.zeros(4, np.float32), True, TypeError, ("seed", "int", "bool")),
        (np.zeros(4, np.uint8), 1, TypeError, ("x", "uint8")),
        (np.zeros((), np.float32), 1, ValueError, ("x", "without axes")),
    ],
)
def test_wrong_arguments_of_hadamard(x: Any, seed: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        cuflash.hadamard(x, seed)
    assert all(word in str(caught.value) for word in words)


def test_arrays_of_other_libraries() -> None:
    x = drawn("float32")
    for got, expected in zip(cuflash.quantize_fp8(Exporter(x), "head"), cuflash.quantize_fp8(x, "head"), strict=True):
        np.testing.assert_array_equal(got, expected, strict=True)
    np.testing.assert_array_equal(cuflash.hadamard(Exporter(x), 1), cuflash.hadamard(x, 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 4, 2, 8).to(getattr(torch, dtype))
    codes, scale = cuflash.quantize_fp8(x, "token")
    assert (codes.dtype, scale.dtype) == (torch.uint8, torch.float32)
    assert cuflash.hadamard(x, 0).dtype == x.dtype
    q = codes.view(torch.float8_e4m3fn)
    got = cuflash.attention(q, q, codes, q_scale=scale, k_scale=scale, v_scale=scale, out_dtype=torch.float32)
    arrays = codes.numpy(), scale.numpy()
    scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), arrays[1])
    expected = cuflash.attention(*[arrays[0]] * 3, **scales, out_dtype="float32")
    np.testing.assert_array_equal(got.numpy(), expected, strict=True)
