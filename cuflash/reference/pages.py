"""Paged keys are put one behind the other for each sequence, and their gradients are added to the pages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def used_rows(pool: Array, block_table: Any, kv_lengths: Any) -> list[tuple[Array, Array]]:
    """Return the pages, and rows within them, of each sequence's keys in use; entries are clamped to the pool."""
    table = np.asarray(block_table)
    num_pages, page_size = pool.shape[:2]
    lengths = np.clip(np.asarray(kv_lengths, np.int64), 0, table.shape[1] * page_size)
    places = []
    for entries, length in zip(table, lengths, strict=True):
        j = np.arange(length)
        places.append((np.clip(entries[j // page_size], 0, num_pages - 1), j % page_size))
    return places


def unpaged(pool: Array, block_table: Any, kv_lengths: Any) -> Array:
    """Return (batch, max_pages * page_size, num_heads_kv, dim), with zeros beyond the keys in use."""
    batch, max_pages = np.shape(block_table)
    rows = np.zeros((batch, max_pages * pool.shape[1], *pool.shape[2:]), pool.dtype)
    for b, (pages, within) in enumerate(used_rows(pool, block_table, kv_lengths)):
        rows[b, : len(pages)] = pool[pages, within]
    return rows


def paged(rows: Array, pool: Array, block_table: Any, kv_lengths: Any) -> Array:
    """Undo `unpaged` for gradients: rows of the pool are sums over all uses."""
    total = np.zeros(pool.shape, rows.dtype)
    for b, at in enumerate(used_rows(pool, block_table, kv_lengths)):
        np.add.at(total, at, rows[b, : len(at[0])])
    return total
