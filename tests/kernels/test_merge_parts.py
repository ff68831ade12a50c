"""Partial results become one in a launch, whatever the number of columns, rows that parts lack, and the dtypes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from cpu_device import device as cpu_device
from cpu_device import hook
from devices import Device
from numpy.typing import NDArray

from cuflash.frontend.partial import merge_parts, sum_parts
from cuflash.problem.attention_problem import PartialResult

Array = NDArray[Any]
BATCH, ROWS, HEADS = 2, 7, 3


def parts_of(rng: np.random.Generator, count: int, columns: int, accum: str) -> list[PartialResult]:
    """Draw parts, each with some of the rows, in some of which it has seen nothing, where its values are NaN."""
    parts = []
    for _ in range(count):
        first = int(rng.integers(0, ROWS))
        rows = int(rng.integers(1, ROWS - first + 1))
        x = gaussian(rng, (BATCH, rows, HEADS, columns), accum)
        lse = gaussian(rng, (BATCH, HEADS, rows), accum)
        hidden = rng.random(lse.shape) < 0.2
        lse[hidden] = -np.inf
        x[np.swapaxes(hidden, 1, 2)] = np.nan
        parts.append(PartialResult(x, lse, first))
    return parts


def expected_of(parts: list[PartialResult], columns: int, *, weighted: bool) -> tuple[Array, Array]:
    """Merge or add in float64."""
    totals = np.zeros((BATCH, ROWS, HEADS, columns))
    lses = np.full((len(parts), BATCH, HEADS, ROWS), -np.inf)
    for n, part in enumerate(parts):
        assert part.lse is not None
        lses[n, :, :, part.first_row : part.first_row + part.x.shape[1]] = part.lse
    lse = np.logaddexp.reduce(lses, axis=0)
    for n, part in enumerate(parts):
        rows = slice(part.first_row, part.first_row + part.x.shape[1])
        weight = np.ones(lses[n].shape)
        if weighted:
            weight = np.where(lses[n] == -np.inf, 0, np.exp(lses[n] - np.where(lse == -np.inf, 0, lse)))
        weight = np.swapaxes(weight[:, :, rows], 1, 2)[..., None]
        totals[:, rows] += np.where(weight == 0, 0, part.x.astype(np.float64)) * weight
    return totals, lse


def check(
    columns: int, accum: str, result: str, limit: float, put: Callable[..., Any], get: Callable[..., Any]
) -> None:
    """Compare with float64; `put` and `get` bring arrays to a device and back."""
    rng = np.random.default_rng(columns)
    for count in (0, 1, 2, 5, 16, 19):
        parts = parts_of(rng, count, columns, accum)
        poison = np.full((BATCH, ROWS, HEADS, columns), np.nan, gaussian(rng, (), result).dtype)
        out, lse = put(poison), put(np.full((BATCH, HEADS, ROWS), np.nan, accum))
        merge_parts([PartialResult(put(p.x), put(p.lse), p.first_row) for p in parts], out, lse)
        expected, expected_lse = expected_of(parts, columns, weighted=True)
        np.testing.assert_allclose(get(out).astype(np.float64), expected, rtol=limit, atol=limit)
        np.testing.assert_allclose(get(lse), expected_lse, rtol=limit, atol=limit)
        total = put(poison)
        finite = [part._replace(x=np.nan_to_num(part.x)) for part in parts]
        sum_parts([PartialResult(put(p.x), None, p.first_row) for p in finite], total)
        expected, _ = expected_of(finite, columns, weighted=False)
        np.testing.assert_allclose(get(total).astype(np.float64), expected, rtol=limit, atol=16 * limit)


CASES = (
    ("float32", "float32", 2e-6),
    ("float32", "bfloat16", 2e-2),
    ("float32", "float16", 2e-3),
    ("float64", "float64", 1e-14),
)


@pytest.mark.parametrize("columns", [1, 3, 64, 100, 132, 257])
@pytest.mark.parametrize(("accum", "result", "limit"), CASES)
def test_parts_become_one(device: Device, columns: int, accum: str, result: str, limit: float) -> None:
    check(columns, accum, result, limit, lambda x: device.put([x])[0], device.get)


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
@pytest.mark.parametrize("columns", [1, 3, 64, 100, 132, 257])
@pytest.mark.parametrize(("accum", "result", "limit"), CASES)
def test_the_kernel_makes_parts_one(columns: int, accum: str, result: str, limit: float) -> None:
    with hook.kernels_on(cpu_device.CpuDevice((9, 0), 3)):
        check(columns, accum, result, limit, np.ascontiguousarray, np.asarray)
