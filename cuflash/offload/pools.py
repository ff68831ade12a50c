"""Pages in host memory that belong to the pools of a device, and the copies of pages between the two.

Copies are enqueued on the current stream, where whatever made a page's numbers is before them and whatever uses its
memory again comes behind them. The host itself reads and writes its pages behind `HostPools.finish` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.offload.pinned import pinned_empty

Array = Any
# cudaMemcpy2D takes no larger pitch.
_MOST_PITCH = (1 << 31) - 1


class Mover(ABC):
    """The way of a device's pages to host memory and back; arrays are (num_layers, pages, ...) without gaps."""

    @abstractmethod
    def to_host(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        """Begin to copy `count` pages of all layers, from page `at` of the device's source on."""

    @abstractmethod
    def to_device(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        """Begin to copy pages of the host, which may change behind `finish` only."""

    @abstractmethod
    def finish(self) -> None:
        """Let the host wait until the copies so far are done."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return True if the current stream records a graph."""


class HostMover(Mover):
    """NumPy's memory on both sides, where copies are done at once."""

    def to_host(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        """Copy at once."""
        target[:, to : to + count] = source[:, at : at + count]

    def to_device(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        """Copy at once."""
        target[:, to : to + count] = source[:, at : at + count]

    def finish(self) -> None:
        """Do nothing, as all copies are done."""

    def is_capturing(self) -> bool:
        """Return False, as there are no graphs."""
        return False


class GpuMover(Mover):
    """A GPU, which copies pinned memory on the current stream."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._event: Any = None

    def to_host(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        """Copy on the current stream."""
        self._copy(target, target.ctypes.data, to, source, source.data.ptr, at, count, to_host=True)

    def to_device(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        """Copy on the current stream."""
        self._copy(target, target.data.ptr, to, source, source.ctypes.data, at, count, to_host=False)

    def _copy(
        self,
        target: Array,
        target_ptr: int,
        to: int,
        source: Array,
        source_ptr: int,
        at: int,
        count: int,
        to_host: bool,
    ) -> None:
        runtime, stream = self._cuda.runtime, self._cuda.get_current_stream()
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        layers, page = source.shape[0], source[0, 0].nbytes
        pitches = target.shape[1] * page, source.shape[1] * page
        begin, end, width = target_ptr + to * page, source_ptr + at * page, count * page
        if max(pitches) <= _MOST_PITCH:
            runtime.memcpy2DAsync(begin, pitches[0], end, pitches[1], width, layers, kind, stream.ptr)
        else:
            for layer in range(layers):
                runtime.memcpyAsync(begin + layer * pitches[0], end + layer * pitches[1], width, kind, stream.ptr)
        if self._event is None:
            self._event = self._cuda.Event(disable_timing=True)
        self._event.record(stream)

    def finish(self) -> None:
        """Wait for the event behind the latest copy."""
        if self._event is not None:
            self._event.synchronize()

    def is_capturing(self) -> bool:
        """Ask the current stream; the null stream cannot be captured, and asking it disturbs others' captures."""
        stream = self._cuda.get_current_stream()
        return bool(stream.ptr != 0 and stream.is_capturing())


def mover_for(xp: Any) -> Mover:
    """Return the mover between memory of a namespace's arrays and the host's."""
    return HostMover() if xp is np else GpuMover()


class HostPools:
    """The host's pages of a cache, whose numbers follow those of the device's pages.

    Attributes
    ----------
    k, v : NumPy array (num_layers, num_pages, page_size, num_heads_kv, head_dim or head_dim_v)
        Pinned, where there is a GPU; rows that were never written hold anything.
    """

    def __init__(self, pools: Sequence[Array], num_pages: int, xp: Any) -> None:
        self._first = pools[0].shape[1]
        self._on_device = [x.view(f"u{x.dtype.itemsize}") for x in pools]
        self.k, self.v = (pinned_empty((x.shape[0], num_pages, *x.shape[2:]), x.dtype) for x in pools)
        self._on_host = [x.view(f"u{x.dtype.itemsize}") for x in (self.k, self.v)]
        self._mover = mover_for(xp)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies of pages (source, target) in their order, of k and v and of all layers."""
        for source, target, count in _runs(copies, self._first):
            is_from_host, is_to_host = source >= self._first, target >= self._first
            at, to = (x - self._first if x >= self._first else x for x in (source, target))
            if is_from_host and is_to_host:
                self.finish()
            for device, host in zip(self._on_device, self._on_host, strict=True):
                if is_from_host and is_to_host:
                    host[:, to : to + count] = host[:, at : at + count]
                elif is_to_host:
                    self._mover.to_host(host, device, to, at, count)
                elif is_from_host:
                    self._mover.to_device(device, host, to, at, count)
                else:
                    device[:, to : to + count] = device[:, at : at + count]

    def finish(self) -> None:
        """Let the host wait until all pages are where they belong, before it reads or writes its own."""
        self._mover.finish()

    def is_capturing(self) -> bool:
        """Return True if the current stream records a graph."""
        return self._mover.is_capturing()


def _runs(copies: Sequence[tuple[int, int]], first_of_host: int) -> list[tuple[int, int, int]]:
    """Join copies of pages that follow each other on both sides: (source, target, pages)."""
    runs: list[tuple[int, int, int]] = []
    for source, target in copies:
        if runs:
            a, b, count = runs[-1]
            follows = source == a + count and target == b + count
            stays = (source < first_of_host) == (a < first_of_host) and (target < first_of_host) == (b < first_of_host)
            if follows and stays:
                runs[-1] = a, b, count + 1
                continue
        runs.append((source, target, 1))
    return runs
