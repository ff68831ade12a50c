"""Paged keys on the CPU: a tile gathers its rows from pages, and sums over keys are added to the pages' gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.problem.operands import Operands
from cuflash.problem.pages import Pages

Array = NDArray[Any]


def places(pages: Pages, operands: Operands, batch: int, key: int, key_stop: int) -> tuple[Array, Array]:
    """Return (pages, rows within them) of a sequence's keys, all of which are in use."""
    keys = np.arange(key, key_stop)
    return _used_entries(pages, operands, batch, keys // pages.page_size), keys % pages.page_size


def gather(pool: Array, at: tuple[Array, Array], heads: slice) -> Array:
    """Gather rows of a pool, (1, keys, KV heads, dim)."""
    rows: Array = pool[:, :, heads][at]
    return rows[None]


def gather_pages(pages: Pages, operands: Operands, pool: Array, batch: int, keys: slice, heads: slice) -> Array:
    """Gather a sequence's keys by whole pages, (keys, KV heads, dim)."""
    size = pages.page_size
    first, stop = keys.start // size, -(-keys.stop // size)
    entries = _used_entries(pages, operands, batch, slice(first, stop))
    rows = pool[entries, :, heads]
    return rows.reshape(-1, *rows.shape[2:])[keys.start - first * size : keys.stop - first * size]


def _used_entries(pages: Pages, operands: Operands, batch: int, columns: Any) -> Array:
    """Return entries of the table that are in use, clamped, as they come from the caller."""
    table: Any = operands.block_table
    entries: Array = np.minimum(np.maximum(table[batch, columns], 0), max(pages.num_pages - 1, 0))
    return entries


class PoolSums:
    """Sums in the arithmetic's type for every row of the pools, rounded once when all are added."""

    def __init__(self, pages: Pages, operands: Operands, grads: dict[str, Array], accum: str) -> None:
        self._pages, self._operands = pages, operands
        self._grads = grads
        self._sums = {name: np.zeros(x.shape, accum) for name, x in grads.items()}

    def add(self, name: str, batch: int, heads: slice, part: Array) -> None:
        """Add (KV heads, keys, dim) of one sequence; the order of the calls is that of the sums."""
        own = self._sums[name][:, :, heads]
        at = places(self._pages, self._operands, batch, 0, part.shape[1])
        terms = part.swapaxes(0, 1)
        if np.unique(at[0] * self._pages.page_size + at[1]).size == part.shape[1]:
            own[at] += terms
        else:  # a page that stands twice in one row of the table
            np.add.at(own, at, terms)

    def write(self) -> None:
        """Round the sums into the gradients."""
        for name, total in self._sums.items():
            self._grads[name][...] = total
