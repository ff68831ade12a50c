"""Keys and values in host memory, as rows of their sequences or in pools of pages, and where their gradients go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.offload.pooled_rows import PooledRows
from cuflash.offload.stream import Chunk, Outbox
from cuflash.problem.pages import Pages

Array = Any


class HostKeys:
    """Arrays (batch, seqlen_k, num_heads_kv, head_dim or head_dim_v), of which a chunk has a view."""

    is_copied = False  # a chunk's numbers are copies of the host's memory

    def rows(self, x: Array, chunk: Chunk) -> Array:
        """Return a chunk's part of an array of keys, (sequences, keys, ...)."""
        return x[chunk.piece.batches, chunk.keys]

    def scale(self, x: Array | None, chunk: Chunk) -> Array | None:
        """Return a chunk's part of a scale, any of whose axes may have the size 1."""
        if x is None:
            return None
        index = chunk.piece.batches, chunk.keys
        return x[tuple([own if n > 1 else slice(None) for own, n in zip(index, x.shape[:2], strict=True)])]

    def gradients(self, targets: Mapping[str, Array], chunks: Sequence[Chunk], accum: str) -> KeyGradients:
        """Return where dk and dv of some chunks go."""
        return _Rows(self, targets, chunks)


class PooledKeys(HostKeys):
    """Pools (num_pages, page_size, ...), of which a chunk has the rows that the table's entries for its keys name."""

    is_copied = True

    def __init__(self, pages: Pages, table: Array) -> None:
        self._pages, self._table = pages, table  # (batch, max_pages), on the host

    def places(self, chunk: Chunk) -> tuple[Array, Array]:
        """Return (pages, rows within them) of a chunk's keys, (sequences, keys) and (keys,); all of them are in use."""
        keys = np.arange(chunk.first, chunk.stop)
        size = self._pages.page_size
        return self._entries(chunk)[:, keys // size - chunk.first // size], keys % size

    def _entries(self, chunk: Chunk) -> Array:
        """Return the pages that have a chunk's keys, (sequences, pages)."""
        size = self._pages.page_size
        # Only entries of used keys are read; they are clamped, as they come from the caller.
        entries = self._table[chunk.piece.batches, chunk.first // size : -(-chunk.stop // size)]
        return np.clip(entries, 0, max(self._pages.num_pages - 1, 0))

    def rows(self, x: Array, chunk: Chunk) -> PooledRows:
        """Return what a device gathers, a chunk's part of the pool."""
        return PooledRows(x, self._entries(chunk), chunk.first % self._pages.page_size, chunk.stop - chunk.first)

    def scale(self, x: Array | None, chunk: Chunk) -> Array | None:
        """Copy a chunk's part from a scale of the pool."""
        if x is None:
            return None
        shape = self._pages.num_pages, self._pages.page_size, x.shape[2]
        return np.broadcast_to(x, shape)[self.places(chunk)]

    def gradients(self, targets: Mapping[str, Array], chunks: Sequence[Chunk], accum: str) -> KeyGradients:
        """Return sums over the sequences that share a page."""
        return _Pools(self, targets, accum)


class KeyGradients(ABC):
    """Where dk and dv of a pass go; each device that computes chunks posts to a side of its own."""

    @abstractmethod
    def side(self) -> GradientSide:
        """Return the side of one device."""

    @abstractmethod
    def end(self) -> None:
        """Write the caller's arrays, once all sides have posted and their copies are done."""


class GradientSide(ABC):
    """The gradients of one device's chunks."""

    names: tuple[str, ...]  # of those that are wanted, out of k and v

    @abstractmethod
    def post(self, outbox: Outbox, name: str, chunk: Chunk, source: Array | None) -> None:
        """Send a chunk's gradient to the host; None is 0."""


class _Rows(KeyGradients, GradientSide):
    """Arrays of which every row belongs to one chunk, so that the sides write them at once."""

    def __init__(self, keys: HostKeys, targets: Mapping[str, Array], chunks: Sequence[Chunk]) -> None:
        self._keys, self._targets, self.names = keys, targets, tuple(targets)
        for target in targets.values():
            _zero_unseen(target, chunks)

    def side(self) -> GradientSide:
        """Return the same for all."""
        return self

    def post(self, outbox: Outbox, name: str, chunk: Chunk, source: Array | None) -> None:
        """Copy it into the caller's array."""
        target = self._keys.rows(self._targets[name], chunk)
        if source is None:
            target[...] = 0
        else:
            outbox.post(target, source.astype(target.dtype, copy=False))

    def end(self) -> None:
        """Do nothing, as everything is written."""


class _Pools(KeyGradients):
    """Pools, for which each side has sums of its own: added in the order of its chunks, they repeat their bits."""

    def __init__(self, keys: PooledKeys, targets: Mapping[str, Array], accum: str) -> None:
        self._keys, self._targets, self._accum = keys, targets, accum
        self._sides: list[_PoolSums] = []

    def side(self) -> GradientSide:
        """Make new sums."""
        self._sides.append(_PoolSums(self._keys, self._targets, self._accum))
        return self._sides[-1]

    def end(self) -> None:
        """Round the sums of all sides once."""
        for name, target in self._targets.items():
            target[...] = sum(side.sums[name] for side in self._sides)


class _PoolSums(GradientSide):
    """Sums in the arithmetic's dtype for every row of the pools."""

    def __init__(self, keys: PooledKeys, targets: Mapping[str, Array], accum: str) -> None:
        self._keys, self.names = keys, tuple(targets)
        self.sums = {name: np.zeros(x.shape, accum) for name, x in targets.items()}

    def post(self, outbox: Outbox, name: str, chunk: Chunk, source: Array | None) -> None:
        """Copy it into memory of the host, from which it is added to the sums."""
        if source is not None:
            landing = np.empty(source.shape, source.dtype)
            outbox.post(landing, source, lambda: self._add(name, chunk, landing))

    def _add(self, name: str, chunk: Chunk, share: Array) -> None:
        total, (pages, rows) = self.sums[name], self._keys.places(chunk)
        if np.unique(pages * total.shape[1] + rows).size == pages.size:
            total[pages, rows] += share
        else:  # sequences share a page, or one has it twice
            np.add.at(total, (pages, rows), share)


def _zero_unseen(target: Array, chunks: Sequence[Chunk]) -> None:
    """Write the gradient 0 to keys that no chunk has."""
    seen = np.zeros(target.shape[:2], bool)
    for chunk in chunks:
        seen[chunk.piece.batches, chunk.keys] = True
    for batch, of_keys in enumerate(seen):
        # Stretches of keys that nobody sees begin and end where this changes.
        edges = np.flatnonzero(np.diff(of_keys.astype(np.int8), prepend=1, append=1))
        for first, stop in edges.reshape(-1, 2):
            target[batch, first:stop] = 0
