"""A mean of finite values is finite on the CPU, however near they are to the largest number of their type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import gaussian, np_dtype, same_bits
from ml_dtypes import finfo
from numpy.typing import NDArray

import cuflash
from cuflash import reference

Array = NDArray[Any]

# Sums of these overflow the type that they are computed in; float16's do not.
DTYPES = ["bfloat16", "float32", "float64"]
EPS = {"bfloat16": 2.0**-8, "float32": 2.0**-20, "float64": 2.0**-48}


def largest(dtype: str) -> float:
    return float(finfo(np_dtype(dtype)).max)


def inputs(dtype: str, rows: int, keys: int, heads: tuple[int, int] = (4, 2)) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(rows + keys)
    q, k, v = ((2, rows, heads[0], 16), (2, keys, heads[1], 16), (2, keys, heads[1], 8))
    return gaussian(rng, q, dtype), gaussian(rng, k, dtype), gaussian(rng, v, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_five_large_values(dtype: str) -> None:
    v = np.full((1, 5, 1, 4), largest(dtype) / 2, np_dtype(dtype))
    q = np.zeros((1, 3, 1, 4), v.dtype)
    for x in (v, -v, np.full_like(v, largest(dtype))):
        out = cuflash.attention(q, np.zeros_like(v), x)
        np.testing.assert_allclose(out / x[:, :1], np.ones(q.shape), rtol=EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        (3, 5, {}),
        (1, 300, {"softcap": 3.0}),
        (900, 1000, {"causal": True}),
        (700, 900, {"window": (100, 10), "sink": True}),
        (40, 60, {"mask": True}),
    ],
)
def test_means_of_large_values(dtype: str, rows: int, keys: int, options: dict[str, Any]) -> None:
    """Means are those of small values times a power of two, in one tile and over many, with columns of any size."""
    rng = np.random.default_rng(0)
    q, k, v = inputs(dtype, rows, keys)
    options = dict(options)
    if "mask" in options:
        options["mask"] = rng.random((2, 1, rows, keys)) < 0.7
    if "sink" in options:
        options["sink"] = np.ones(4, np.float64 if dtype == "float64" else np.float32)
    exponent = int(np.log2(largest(dtype))) - 4  # of normal numbers, of which few reach 16
    large = v.copy()
    large[..., :4] = np.clip(np.abs(v[..., :4]).astype(np.float64), 0.5, 15.0)
    expected: Array = np.asarray(reference.attention(q, k, large, **options)[0])
    with np.errstate(over="raise"):
        large[..., :4] *= v.dtype.type(2.0**exponent)
    out = cuflash.attention(q, k, large, **options).astype(np.longdouble)
    assert np.isfinite(out).all()
    scale = np.where(np.arange(8) < 4, np.longdouble(2.0) ** exponent, 1)
    np.testing.assert_allclose(out / scale, expected, rtol=EPS[dtype], atol=EPS[dtype])
    # Columns whose sums are finite keep their bits.
    small = large.copy()
    small[..., :4] = 1
    kept = cuflash.attention(q, k, small, **options)
    assert same_bits(cuflash.attention(q, k, large, **options)[..., 4:], kept[..., 4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_stay_so(dtype: str) -> None:
    q, k, v = inputs(dtype, 6, 50)
    v[0, 7, 0, 2], v[0, 9, 1, 3], v[1, 0, 0, 0] = np.inf, np.nan, -np.inf
    v[..., 5] = largest(dtype)
    out = cuflash.attention(q, k, v)
    assert np.isposinf(out[0, :, :2, 2]).all() and np.isnan(out[0, :, 2:, 3]).all()
    assert np.isneginf(out[1, :, :2, 0]).all()
    np.testing.assert_allclose(out[..., 5] / v.dtype.type(largest(dtype)), np.ones((2, 6, 4)), rtol=EPS[dtype])
    finite = np.ones(out.shape, bool)
    finite[0, :, :2, 2], finite[0, :, 2:, 3], finite[1, :, :2, 0] = False, False, False
    assert np.isfinite(out[finite]).all()


def test_dropout_may_overflow() -> None:
    """Weights of kept values are larger than 1, so a mean is inf where, and only where, it is not representable."""
    q, k, _ = inputs("float32", 4, 64)
    for size, is_finite in ((1e38, True), (3e38, False)):
        v = np.full((2, 64, 2, 8), size, np.float32)
        small = cuflash.attention(q, k, np.ones_like(v), dropout_p=0.5, dropout_seed=3)
        out = cuflash.attention(q, k, v, dropout_p=0.5, dropout_seed=3)
        exact = small.astype(np.float64) * size
        fits = exact < float(np.finfo(np.float32).max) * (1 - 1e-6)
        assert fits.all() == is_finite
        np.testing.assert_allclose(out[fits], exact[fits], rtol=1e-5)
        assert np.isposinf(out[~fits & (exact > 3.5e38)]).all()
