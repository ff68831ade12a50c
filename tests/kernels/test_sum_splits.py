"""Shares of dk and dv over splits of the queries are added up in a fixed order, on the CPU device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_device import device, hook

from cuflash.gpu import query_splits

needs_compiler = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)
RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def target(shape: tuple[int, ...], dtype: Any, strides: str) -> Array:
    """Return an array that nobody has written, whose rows or columns are apart."""
    *rows, columns = shape
    if strides == "rows apart":
        return np.full((*rows, columns + 6), np.nan, dtype)[..., 3:-3]
    if strides == "columns apart":
        return np.full((*rows, 2 * columns), np.nan, dtype)[..., ::2]
    return np.full(shape, np.nan, dtype)


def added(shares: dict[str, Array], results: dict[str, Array], splits: int, check: device.Check) -> None:
    """Let the kernel write the sums of shares to results."""
    query_splits._launches.clear()
    own = device.CpuDevice((9, 0), check=check)

    def enqueue(launch: Any, arrays: dict[str, Array]) -> None:
        launch.enqueue_in_order([x.ctypes.data for x in arrays.values()], None, 0)

    work: Any = SimpleNamespace(device=own, enqueue=enqueue)
    with hook.kernels_on(own):
        query_splits.add(work, shares, results, splits)


# Shapes of dk and dv, and splits of them.
SIZES = {
    "many splits of few vectors": ((3, 7, 1, 48), (3, 7, 1, 48), 40),
    "as many splits as lanes": ((1, 5, 3, 8), (1, 5, 3, 16), 16),
    "heads of other dims": ((2, 9, 2, 72), (2, 9, 2, 24), 19),
    "two splits": ((1, 33, 2, 40), (1, 33, 2, 40), 2),
    "packed": ((21, 2, 64), (21, 2, 64), 9),
    "many vectors": ((2, 600, 4, 128), (2, 600, 4, 128), 5),
}


@needs_compiler
@pytest.mark.parametrize("strides", ["contiguous", "rows apart", "columns apart"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", SIZES)
def test_sums(name: str, dtype: str, strides: str) -> None:
    """Sums are right in all dtypes and strides, and a second run repeats their bits."""
    ml_dtypes = pytest.importorskip("ml_dtypes") if dtype == "bfloat16" else None
    own_dtype = np.dtype(dtype if ml_dtypes is None else ml_dtypes.bfloat16)
    *shapes, splits = SIZES[name]
    shares, exact = {}, {}
    for gradient, shape in zip(("dk", "dv"), shapes, strict=True):
        sizes = shape if len(shape) > 3 else (1, *shape)
        x = RNG.standard_normal((splits, *sizes)).astype(np.float32)
        shares[gradient] = x.reshape(splits * sizes[0], *sizes[1:])
        exact[gradient] = x.astype(np.float64).sum(0).reshape(shape)
    check = device.Check.SHARED if name == "many splits of few vectors" else device.Check.NONE
    runs = [{key: target(x.shape, own_dtype, strides) for key, x in exact.items()} for _ in range(2)]
    for results in runs:
        added(shares, results, splits, check)
    for gradient, x in exact.items():
        first, again = (results[gradient] for results in runs)
        unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-18}[dtype]
        np.testing.assert_allclose(first.astype(np.float64), x, rtol=unit, atol=1e-5)
        assert first.tobytes() == again.tobytes()


@needs_compiler
@pytest.mark.parametrize("wanted", ["dk", "dv"])
def test_one_gradient(wanted: str) -> None:
    """Where only one gradient is wanted, nothing is written for the other."""
    shares = RNG.standard_normal((30, 5, 2, 16)).astype(np.float32)
    results = {wanted: np.full((1, 5, 2, 16), np.nan, np.float32)}
    added({wanted: shares}, results, 30, device.Check.SHARED)
    np.testing.assert_allclose(results[wanted][0], shares.astype(np.float64).sum(0), atol=1e-5)


def test_lanes_share_the_splits_of_few_vectors() -> None:
    """Each lane then has a few splits, and all lanes together are no more threads than fill the GPU."""
    assert query_splits.lanes_of(9144, 40) == 16
    assert query_splits.lanes_of(9144, 4) == 1
    assert query_splits.lanes_of(9144, 9) == 4
    assert query_splits.lanes_of(78_000, 40) == 2
    assert query_splits.lanes_of(1_000_000, 40) == 1
