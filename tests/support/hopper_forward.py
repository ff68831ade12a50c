"""Hopper's forward kernel on the CPU device and a GPU, compared with the NumPy path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import devices
import numpy as np
import pytest
from cpu_device import device, hook
from devices import Device

import cuflash
from cuflash.gpu import launch
from cuflash.plan.sm90 import grid as sm90_grid

Array = np.ndarray[Any, Any]
no_compiler = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)
PLACES = [pytest.param("cpu device", marks=no_compiler), pytest.param("gpu", marks=pytest.mark.gpu)]


@contextmanager
def large_grids() -> Iterator[None]:
    """Let the small problems of tests take the kernels of large ones, however many multiprocessors there are."""
    with mock.patch.object(sm90_grid, "MANY_WAVES", 0), mock.patch.object(sm90_grid, "_FULL", math.inf):
        sm90_grid.for_grid.cache_clear()
        yield
    sm90_grid.for_grid.cache_clear()


def place_of(name: str) -> Device:
    """Return a device to run the kernel on, with few multiprocessors, so that each takes several tiles."""
    if name == "gpu":
        import cupy

        if cupy.cuda.Device().compute_capability != "90":
            pytest.skip("no Hopper GPU")
        return Device("cupy", cupy)
    return Device("sm_90", np, lambda: hook.kernels_on(device.CpuDevice((9, 0), num_sms=3)))


def rows(x: Array) -> Array:
    """Return the array with rows of a multiple of 16 bytes and NaN behind each."""
    missing = -x.shape[-1] % 8
    return np.pad(x, ((0, 0),) * 3 + ((0, missing),), constant_values=np.nan)[..., : x.shape[-1]] if missing else x


def both(
    place: Device, q: Array, k: Array, v: Array, hidden: Any = None, lse_error: float = 2e-5, **options: Any
) -> None:
    """Compare out and lse with the NumPy path in float64; keys `hidden` hold NaN on the device."""
    bad_k, bad_v = k.copy(order="K"), v.copy(order="K")
    if hidden is not None:
        bad_k[:, hidden], bad_v[:, hidden] = np.nan, np.inf
    devices.forget_launches()
    poisoned = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    with place.active():
        there = place.put({"q": rows(q), "k": rows(bad_k), "v": rows(bad_v), "out": poisoned, **options})
        out, lse = place.get(cuflash.attention(**there, return_lse=True))
    assert next(iter(launch._launches.values())).kernel.entry == "forward_sm90"
    wide: dict[str, Any] = {
        name: x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
        for name, x in options.items()
    }
    expected, expected_lse = cuflash.attention(*(x.astype(np.float64) for x in (q, k, v)), return_lse=True, **wide)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=4e-3, rtol=4e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=lse_error, rtol=2e-5)
