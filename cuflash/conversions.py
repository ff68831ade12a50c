"""Conversions of arrays that other libraries of attention pass around to those that cuflash takes, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.typing import AnyArray, ArrayT

__all__ = ["from_base2_lse", "from_csr", "to_base2_lse"]

Array = Any


def from_csr(
    indptr: ArrayT, indices: AnyArray, last_page_len: AnyArray, page_size: int, max_pages: int | None = None
) -> tuple[ArrayT, ArrayT]:
    """The block table and lengths of a page table in compressed rows, as FlashInfer has it.

    Parameters
    ----------
    indptr : int32 array (batch + 1,)
        The pages of sequence b are ``indices[indptr[b] : indptr[b + 1]]``.
    indices : int32 array (num_indices,)
    last_page_len : int32 array (batch,)
        Positions in use of each sequence's last page.
    page_size : int
    max_pages : int, optional
        Columns of the table. By default those of the longest sequence, which are read from `indptr`: on a GPU that
        waits for the device, so give a number in a loop.

    Returns
    -------
    block_table : int32 array (batch, max_pages)
        -1 stands in entries that are not used.
    kv_lengths : int32 array (batch,)

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> indptr, indices, last = (np.array(x, np.int32) for x in ([0, 2, 3], [5, 1, 4], [3, 16]))
    >>> table, lengths = cuflash.conversions.from_csr(indptr, indices, last, page_size=16)
    >>> table.tolist(), lengths.tolist()
    ([[5, 1], [4, -1]], [19, 16])
    """
    library = interop.library_of("indptr", indptr)
    given = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    arrays = interop.adopt_all(library, given)
    for name, x in arrays.items():
        if x.dtype.name != "int32":
            raise TypeError(f"{name}: expected dtype int32, got {x.dtype.name}")
        if x.ndim != 1:
            raise ValueError(f"{name}: expected one axis, got shape {tuple(x.shape)}")
    begins, pages, last = arrays.values()
    if len(begins) != len(last) + 1:
        raise ValueError(f"indptr: expected shape (batch + 1,) = ({len(last) + 1},), got {tuple(begins.shape)}")
    xp = interop.namespace_of(begins)
    with interop.on_stream_of(library, begins):
        counts = begins[1:] - begins[:-1]
        if max_pages is None:
            max_pages = int(counts.max()) if len(last) else 0
        columns = xp.arange(max_pages)
        used = columns < counts[:, None]
        places = xp.clip(begins[:-1, None] + columns, 0, max(len(pages) - 1, 0))
        found = pages[places] if len(pages) else xp.zeros(places.shape, np.int32)
        table = xp.where(used, found, -1).astype(np.int32)
        lengths = xp.where(counts > 0, (counts - 1) * page_size + last, 0).astype(np.int32)
        return library.release(table), library.release(lengths)


def from_base2_lse(lse: ArrayT) -> ArrayT:
    """FlashInfer's lse, to base 2 and (total_q, num_heads_q), as cuflash's: natural and (num_heads_q, total_q).

    Padded (batch, seqlen_q, num_heads_q) becomes (batch, num_heads_q, seqlen_q). The inverse is `to_base2_lse`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> lse = np.ones((3, 2), np.float32)  # three rows of two heads, of a sum of 2
    >>> natural = cuflash.conversions.from_base2_lse(lse)
    >>> natural.shape, round(float(natural[0, 0]), 4)
    ((2, 3), 0.6931)
    """
    return _converted(lse, math.log(2))


def to_base2_lse(lse: ArrayT) -> ArrayT:
    """The inverse of `from_base2_lse`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> lse = np.log(np.full((2, 3), 8, np.float32))  # two heads of three rows, of a sum of 8
    >>> cuflash.conversions.to_base2_lse(lse).round(4).tolist()
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    return _converted(lse, 1 / math.log(2))


def _converted(lse: ArrayT, factor: float) -> ArrayT:
    library = interop.library_of("lse", lse)
    array = interop.adopt_all(library, {"lse": lse})["lse"]
    if array.dtype.name not in ("float32", "float64"):
        raise TypeError(f"lse: expected dtype float32 or float64, got {array.dtype.name}")
    if array.ndim not in (2, 3):
        raise ValueError(
            f"lse: expected two axes (packed) or three, rows and heads the last ones, got {tuple(array.shape)}"
        )
    xp = interop.namespace_of(array)
    with interop.on_stream_of(library, array):
        return library.release(xp.ascontiguousarray(array.swapaxes(-1, -2)) * array.dtype.type(factor))


def __dir__() -> list[str]:
    """The public names alone, so that completion shows nothing else."""
    return sorted(__all__)
