"""Rows of a pool of pages, which are gathered on their way to where they are computed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Array = Any
# A thread that writes new memory waits for the system more than for the copy, so that several are faster by their
# number; less than this is not worth a thread's start.
_MOST_THREADS = 8
_LEAST_BYTES = 1 << 23


class Run(NamedTuple):
    """Keys of a sequence whose rows follow each other in the pool, though they may lie in several pages."""

    sequence: int
    first: int
    stop: int
    row: int  # the first key's, where rows are counted through all pages


@dataclass(frozen=True)
class PooledRows:
    """Equally many keys of some sequences, like an array (sequences, keys, ...) that no memory holds yet."""

    pool: Array  # (num_pages, page_size, ...), on the host
    pages: Array  # integers (sequences, pages): those that have the keys, all of them in the pool
    first: int  # the first key's row within its page
    num_keys: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return (len(self.pages), self.num_keys, *self.pool.shape[2:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numbers' dtype."""
        return np.dtype(self.pool.dtype)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return self.size * self.dtype.itemsize

    def runs(self) -> list[Run]:
        """Return the keys in stretches, each as long as pages follow each other."""
        size, found = self.pool.shape[1], []
        for sequence, pages in enumerate(self.pages):
            cuts = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
            for place, end in pairwise((0, *cuts, len(pages))):
                key = max(0, place * size - self.first)
                stop = min(self.num_keys, end * size - self.first)
                row = int(pages[place]) * size + (0 if place else self.first)
                found.append(Run(sequence, key, stop, row))
        return found

    def view(self, run: Run) -> Array:
        """Return a run's rows (keys, ...) where they lie in a contiguous pool."""
        rows = self.pool.reshape(-1, *self.pool.shape[2:])
        return rows[run.row : run.row + run.stop - run.first]

    def gathered(self) -> Array:
        """Return the rows as an array: a view of a contiguous pool where they are one run, or else a copy."""
        if len(self.pages) == 1 and self.pool.flags.c_contiguous and len(runs := self.runs()) == 1:
            return self.view(runs[0])[None]
        rows = np.empty(self.shape, self.dtype)
        count = min(_MOST_THREADS, os.cpu_count() or 1, self.nbytes // _LEAST_BYTES)
        if count > 1:
            with contextlib.suppress(RuntimeError), ThreadPoolExecutor(count, "cuflash") as threads:
                self.copy_to(rows, threads, count)
                return rows
        self._copy(rows, 0, self.num_keys)  # also where no thread can be started
        return rows

    def copy_to(self, target: Array, threads: ThreadPoolExecutor, count: int) -> None:
        """Copy into a contiguous array of this shape; each of `count` threads has some keys of all sequences."""
        edges = [self.num_keys * n // count for n in range(count + 1)]
        first, *others = pairwise(edges)
        copies = [threads.submit(self._copy, target, *keys) for keys in others]
        self._copy(target, *first)
        for copy in copies:
            copy.result()

    def _copy(self, target: Array, key: int, stop: int) -> None:
        # NumPy copies integers without its lock, and other libraries' dtypes with it.
        pool, target = (x.view(f"u{self.dtype.itemsize}") for x in (self.pool, target))
        for pages, rows in zip(self.pages, target, strict=True):
            for first, last, place, row in self._stretches(key, stop):
                own = rows[first:last]
                if row is not None:
                    own[...] = pool[pages[place], row : row + last - first]
                    continue
                whole = own.reshape(-1, *pool.shape[1:])
                numbers = pages[place : place + len(whole)]
                if pool.flags.c_contiguous:  # of others `take` makes a copy
                    np.take(pool, numbers, axis=0, out=whole, mode="clip")  # in another mode `out` is written last
                else:
                    whole[...] = pool[numbers]

    def _stretches(self, key: int, stop: int) -> Iterator[tuple[int, int, int, int | None]]:
        """Yield keys (first, stop), the place of their page, and their row in it; None of keys that fill pages."""
        size = self.pool.shape[1]
        begin, end = self.first + key, self.first + stop  # rows behind the beginning of the first page
        first_whole, last_whole = -(-begin // size) * size, end // size * size
        if first_whole > last_whole:  # within one page
            yield key, stop, begin // size, begin % size
            return
        if begin < first_whole:
            yield key, first_whole - self.first, begin // size, begin % size
        if first_whole < last_whole:
            yield first_whole - self.first, last_whole - self.first, first_whole // size, None
        if last_whole < end:
            yield last_whole - self.first, stop, last_whole // size, 0
