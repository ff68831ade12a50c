"""Caches with pages in host memory beside caches that have room for all; every copy is as late as it may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lazy_device import LazyDevice
from numpy.typing import NDArray

from cuflash import PagedCache
from cuflash.offload import pools, tiers
from cuflash.offload.pools import Mover

Array = NDArray[Any]
RNG = np.random.default_rng(0)
LAYERS, HEADS_Q, HEADS_KV, DIM, DIM_V, PAGE = 2, 4, 2, 8, 5, 4
WIDTH = 15  # pages of the longest sequence


class LazyMover(Mover):
    """Copies on a stream whose work is done as late as it may be.

    What the host reads too early is NaN, and it must not write pages that are still being read.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Array, Array]] = []
        self.being_read: list[tuple[Array, Array]] = []
        self.is_in_capture = False
        self.finished = 0

    def to_host(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        view = target[:, to : to + count]
        self._do_all()
        self.being_read = []  # their reads come before this on the stream
        self.pending.append((view, source[:, at : at + count].copy()))
        view.fill(np.iinfo(view.dtype).max)

    def to_device(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        self._do_all()
        view = source[:, at : at + count]
        target[:, to : to + count] = view
        self.being_read.append((view, view.copy()))

    def _do_all(self) -> None:
        for view, values in self.being_read:
            np.testing.assert_array_equal(view, values, err_msg="a page was written while it was read")
        for view, values in self.pending:
            view[...] = values
        self.pending = []

    def finish(self) -> None:
        self.finished += 1
        self._do_all()
        self.being_read = []

    def is_capturing(self) -> bool:
        return self.is_in_capture


class Run:
    """A run holds the lazy devices and movers that a test has made."""

    def __init__(self) -> None:
        self.devices: list[LazyDevice] = []
        self.mover = LazyMover()

    def device_of(self, q: Array) -> LazyDevice:
        self.devices.append(LazyDevice())
        return self.devices[-1]


def cache_of(num_pages: int, host_pages: int = 0, dtype: str = "float64", **more: Any) -> PagedCache:
    sizes = {"page_size": PAGE, "max_pages_per_sequence": WIDTH, **more}
    return PagedCache(
        LAYERS, num_pages, num_heads_kv=HEADS_KV, head_dim=DIM, dtype=dtype, xp=np, head_dim_v=DIM_V,
        host_pages=host_pages, **sizes,
    )  # fmt: skip


def rows(*shape: int, dtype: str = "float64") -> tuple[Array, Array, Array]:
    dims = ((HEADS_Q, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V))
    q, k, v = (RNG.normal(size=(*shape, *own)).astype(dtype) for own in dims)
    return q, k, v


class Pair:
    """A cache with host pages, and one of the same sequences that has room for all on its device."""

    def __init__(self, num_pages: int, host_pages: int, dtype: str = "float64", **more: Any) -> None:
        self.dtype = dtype
        self.small, self.large = cache_of(num_pages, host_pages, dtype, **more), cache_of(200, 0, dtype, **more)

    @property
    def both(self) -> tuple[PagedCache, PagedCache]:
        return self.small, self.large

    def add(self) -> int:
        first, second = (cache.add() for cache in self.both)
        assert first == second
        return first

    def step(self, sequences: list[int], counts: int | list[int]) -> tuple[Any, Any]:
        step = self.small.step(sequences, counts)
        return step, self.large.step(sequences, counts)

    def append(
        self, steps: tuple[Any, Any], counts: int | list[int], batch: int, layer: int = 0, **options: Any
    ) -> Array:
        """Append the same new rows to both, and return q."""
        shape = (batch, counts) if isinstance(counts, int) else (sum(counts),)
        q, k, v = rows(*shape, dtype=self.dtype if self.dtype != "float8_e4m3fn" else "float32")
        rotated = [step.append(layer, q, k, v, **options) for step in steps]
        np.testing.assert_array_equal(*rotated)
        found: Array = rotated[0]
        return found

    def grow(self, sequences: list[int], counts: int | list[int], **options: Any) -> None:
        """Make a step of all layers, whose results are compared."""
        steps = self.step(sequences, counts)
        for layer in range(LAYERS):
            q = self.append(steps, counts, len(sequences), layer)
            compare(steps, q, layer, **options)


def compare(steps: tuple[Any, Any], q: Array, layer: int = 0, share: Any = 0.4, **options: Any) -> None:
    out, lse = steps[0].attend(layer, q, share=share, return_lse=True, **options)
    expected, expected_lse = steps[1].attend(layer, q, return_lse=True, **options)
    tolerance = {"float64": 1e-12, "float32": 2e-5}.get(expected_lse.dtype.name)
    assert tolerance is not None
    assert out.dtype == expected.dtype
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=tolerance)


def filled(counts: int | list[int], num_pages: int = 12) -> tuple[Pair, tuple[Any, Any], Array]:
    """Return two long sequences that end in a step of these counts, and its queries."""
    pair = Pair(num_pages, 30)
    a, b = pair.add(), pair.add()
    pair.grow([a, b], [46, 53])
    steps = pair.step([a, b], counts)
    return pair, steps, pair.append(steps, counts, 2)


def late(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Let every pass and every copy be late, and begin the numbers of `rows` anew."""
    monkeypatch.setattr(f"{__name__}.RNG", np.random.default_rng(0))
    made = Run()
    monkeypatch.setattr(tiers, "device_of", made.device_of)

    def mover_for(xp: Any) -> LazyMover:
        made.mover = LazyMover()
        return made.mover

    monkeypatch.setattr(pools, "mover_for", mover_for)
    return made


def state(cache: PagedCache) -> tuple[Any, ...]:
    pages = cache._pages
    held = {number: (own.length, own.pages.tolist(), own.last_use) for number, own in pages._held.items()}
    return held, pages._holders.tolist(), list(pages._free), list(pages._free_on_host), pages._clock
