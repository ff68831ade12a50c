"""A GPU gathers rows of pages in host memory by one kernel, for any page size, rows of any bytes and any first key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from cpu_device import device as cpu_device
from cpu_device import hook
from numpy.typing import NDArray

from cuflash import offload
from cuflash.gpu import host_pages

Array = NDArray[Any]
DTYPES = ("uint8", "float16", "bfloat16", "float32", "float64")
ROWS = ((1, 1), (2, 5), (3, 8), (2, 64))  # heads and columns


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def gathering(place: str) -> Iterator[Callable[..., Array]]:
    """Give a function that gathers on a device, and returns a copy of all of the target's memory."""
    if place == "cpu":
        if not cpu_device.available():
            pytest.skip(cpu_device.NO_COMPILER)

        def on_cpu(memory: Array, cut: Callable[[Any], Any], pool: Array, pages: Array, first: int) -> Array:
            host_pages.gather(cut(memory), pool, pages, first, 0)
            return memory

        with hook.kernels_on(cpu_device.CpuDevice((9, 0), 3)):
            yield on_cpu
        return
    import cupy

    def on_gpu(memory: Array, cut: Callable[[Any], Any], pool: Array, pages: Array, first: int) -> Array:
        its = cupy.asarray(memory.view(f"u{memory.itemsize}"))
        host_pages.gather(cut(its), pool, pages, first, cupy.cuda.get_current_stream().ptr)
        found: Array = cupy.asnumpy(its).view(memory.dtype)
        return found

    yield on_gpu


def pool_of(num_pages: int, page_size: int, row: tuple[int, ...], dtype: str) -> Array:
    """Return a pool in pinned memory, where there is a GPU."""
    rng = np.random.default_rng(page_size)
    shape = num_pages, page_size, *row
    pool: Array = offload.pinned_empty(shape, dtype)
    pool[...] = rng.integers(0, 256, shape) if dtype == "uint8" else gaussian(rng, shape, dtype)
    return pool


def check(gather: Callable[..., Array], pool: Array, pages: Array, first: int, keys: int, shift: int = 0) -> None:
    """Compare with NumPy; `shift` numbers before the target, and one behind it, stay as they are."""
    row = pool.shape[2:]
    shape = len(pages), keys, *row
    memory = np.zeros(shift + np.prod(shape) + 1, pool.dtype)
    memory.view(np.uint8).fill(0x5A)
    expected = memory.copy()
    rows = pool[pages].reshape(len(pages), -1, *row)[:, first : first + keys]
    expected[shift:-1] = rows.ravel()
    found = gather(memory, lambda x: x[shift:-1].reshape(shape), pool, pages, first)
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_drawn_pages(place: str, dtype: str, row: tuple[int, int], page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    pool = pool_of(7, page_size, row, dtype)
    with gathering(place) as gather:
        for sequences, count in ((1, 1), (1, 5), (3, 4)):
            pages = rng.integers(0, 7, (sequences, count)).astype(np.int32)
            for first in {0, page_size // 2, page_size - 1}:
                for left in {0, 1, page_size - 1}:  # rows of the last page behind the last key
                    keys = count * page_size - first - left
                    if keys > (count - 1) * page_size - first and keys > 0:
                        check(gather, pool, pages, first, keys)
                        check(gather, pool, pages, first, keys, shift=3)


@pytest.mark.parametrize(("sequences", "count"), [(1, 2100), (2, 1000), (3, 992), (4, 500), (7, 300)])
def test_more_pages_than_a_launch_has(place: str, sequences: int, count: int) -> None:
    rng = np.random.default_rng(count)
    pool = pool_of(50, 2, (2, 4), "float32")
    pages = rng.integers(0, 50, (sequences, count)).astype(np.int32)
    with gathering(place) as gather:
        check(gather, pool, pages, 1, 2 * count - 2)
        check(gather, pool, pages, 0, 2 * count)


def test_pages_with_others_between_them(place: str) -> None:
    """Keys and values may lie in one pool, and pages in any order."""
    both = pool_of(5, 2 * 16, (2, 8), "float16").reshape(5, 2, 16, 2, 8)
    pages = np.array([[3, 0, 4], [1, 1, 2]], np.int32)
    with gathering(place) as gather:
        for pool in (both[:, 0], both[:, 1], both[::-1, 1], both[::2, 0]):
            check(gather, pool, np.minimum(pages, len(pool) - 1), 5, 40)


def test_large_rows_take_several_rounds_of_the_thread_blocks(place: str) -> None:
    pool = pool_of(6, 16, (8, 128), "bfloat16")
    pages = np.random.default_rng(0).integers(0, 6, (1, 80)).astype(np.int32)
    with gathering(place) as gather:
        check(gather, pool, pages, 7, 80 * 16 - 9)


def test_indices_of_64_bits(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "_MOST_INDEX", 0)
    pool = pool_of(6, 16, (2, 8), "float16")
    with gathering(place) as gather:
        check(gather, pool, np.array([[5, 0, 3], [2, 2, 1]], np.int32), 3, 41)
