"""Rows of pools are those of the pages, whether threads copy them or they are a view, and from whatever row on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cases import gaussian
from numpy.typing import NDArray

from cuflash.offload import pooled_rows
from cuflash.offload.pooled_rows import PooledRows

Array = NDArray[Any]


def expected_of(rows: PooledRows) -> Array:
    whole = rows.pool[rows.pages].reshape(len(rows.pages), -1, *rows.pool.shape[2:])
    found: Array = whole[:, rows.first : rows.first + rows.num_keys]
    return found


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float64"])
def test_rows_are_gathered(dtype: str, is_contiguous: bool, page_size: int) -> None:
    rng = np.random.default_rng(0)
    pool = gaussian(rng, (9, page_size, 2, 6), "float64").astype("float32" if dtype == "uint8" else dtype)
    pool = pool.view("uint8") if dtype == "uint8" else gaussian(rng, pool.shape, dtype)
    if not is_contiguous:
        pool = pool[:, :, :, 1:]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(60):
            sequences, count = int(rng.integers(1, 4)), int(rng.integers(1, 6))
            pages = rng.integers(0, 9, (sequences, count)).astype(np.int32)
            last = int(rng.integers(page_size)) + (count - 1) * page_size
            first = min(int(rng.integers(page_size)), last)
            rows = PooledRows(pool, pages, first, last + 1 - first)
            expected = expected_of(rows)
            assert rows.shape == expected.shape
            assert (rows.size, rows.nbytes, rows.dtype) == (expected.size, expected.nbytes, expected.dtype)
            found = [rows.gathered()]
            for number in (1, 2, 5):
                found.append(np.empty(expected.shape, expected.dtype))
                rows.copy_to(found[-1], threads, number)
            for x in found:
                np.testing.assert_array_equal(x.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))
            if is_contiguous:
                parts: list[list[Array]] = [[] for _ in range(sequences)]
                for run in rows.runs():
                    assert run.first == sum(map(len, parts[run.sequence]))
                    parts[run.sequence].append(rows.view(run))
                for own, its in zip(parts, expected, strict=True):
                    np.testing.assert_array_equal(np.concatenate(own), its)


def test_pages_that_follow_each_other_are_no_copy() -> None:
    pool = np.arange(9 * 4 * 2.0).reshape(9, 4, 2)
    rows = PooledRows(pool, np.array([[3, 4, 5]], np.int32), 1, 10)
    assert len(rows.runs()) == 1
    found = rows.gathered()
    assert np.shares_memory(found, pool)
    np.testing.assert_array_equal(found, expected_of(rows))
    assert not np.shares_memory(PooledRows(pool, np.array([[3, 5]], np.int32), 1, 6).gathered(), pool)
    assert not np.shares_memory(PooledRows(pool, np.array([[3, 4], [5, 6]], np.int32), 1, 6).gathered(), pool)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_gather_many_rows(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """They do where threads can be started, and the caller's own does all where none can."""
    monkeypatch.setattr(pooled_rows, "_LEAST_BYTES", 64)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    started: list[int] = []
    submit = ThreadPoolExecutor.submit

    def noted(self: ThreadPoolExecutor, *args: Any) -> Any:
        started.append(len(args))
        if fails and len(started) == 2:
            raise RuntimeError("can't start new thread")
        return submit(self, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)
    pool = np.arange(9 * 4 * 2.0).reshape(9, 4, 2)
    rows = PooledRows(pool, np.array([[3, 1, 5], [0, 0, 8]], np.int32), 1, 9)
    np.testing.assert_array_equal(rows.gathered(), expected_of(rows))
    assert len(started) == 2
