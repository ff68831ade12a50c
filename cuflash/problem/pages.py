"""Paged keys: the pools and tables that a call may have, and the options that split keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = Any


class Pages(NamedTuple):
    """The sizes of paged keys: pools (num_pages, page_size, ...) and a table (batch, max_pages)."""

    num_pages: int
    page_size: int
    max_pages: int  # pages of one sequence at most

    @property
    def capacity(self) -> int:
        """The most keys of one sequence, which is the length of its logical keys."""
        return self.max_pages * self.page_size


def check_pages(table: Array, batch: int, pool: tuple[int, ...], kv_lengths: Array | None) -> Pages:
    """Return the sizes of a block table (batch, max_pages) and of the pools, of this shape, that it points into."""
    if table.dtype.name != "int32":
        raise TypeError(f"block_table: expected dtype int32, got {table.dtype.name}")
    if len(table.shape) != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table: expected (batch, max_pages) = ({batch}, *), got {tuple(table.shape)}")
    if kv_lengths is None:
        raise ValueError("kv_lengths: expected an int32 array (batch,), as a block_table is given, got None")
    pages = Pages(pool[0], pool[1], table.shape[1])
    if pages.page_size == 0:
        raise ValueError(f"k: expected a page_size of at least 1, got a pool of shape {pool}")
    if pages.num_pages == 0 and batch and pages.max_pages:
        raise ValueError(f"k: expected at least one page, as block_table is {tuple(table.shape)}, got a pool {pool}")
    return pages


def check_cu_seqlens_k(cu_seqlens_k: Array | None, block_table: Array | None) -> None:
    """Check that packed queries have cu_seqlens_k, unless pages hold their keys, whose lengths tell the same."""
    if block_table is None and cu_seqlens_k is None:
        raise TypeError("cu_seqlens_k: expected an int32 array (batch + 1,), got None")
    if block_table is not None and cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k: expected None, as a block_table is given and kv_lengths count the keys in use, "
            f"got {type(cu_seqlens_k).__name__}"
        )


def check_splits(num_splits: object, split_size: object) -> tuple[int | None, int | None]:
    """Return the number of splits of the keys and the keys of a split, of which at most one is given."""
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"split_size: expected None, as num_splits = {num_splits} is given (one of them decides), got {split_size}"
        )
    return _count("num_splits", num_splits), _count("split_size", split_size)


def _count(name: str, x: object) -> int | None:
    if x is None:
        return None
    if not isinstance(x, (int, np.integer)) or isinstance(x, bool):
        raise TypeError(f"{name}: expected an int >= 1 or None, got {type(x).__name__}")
    if x < 1:
        raise ValueError(f"{name}: expected an int >= 1 or None, got {x}")
    return int(x)
