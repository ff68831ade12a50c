"""Whole arrays become the ranks' parts, and parts become whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import interop
from cuflash.distributed.communicators import Communicator, check_communicator
from cuflash.distributed.order import check_order, length_of, put_part, stretches_of, take_part
from cuflash.typing import ArrayT


def shard(x: ArrayT, comm: Communicator, order: str = "zigzag", axis: int = 1) -> ArrayT:
    """Take this rank's part of a whole array.

    Parameters
    ----------
    x : array
        Of any dtype and rank, and of any library; the same on every rank.
    comm : Communicator
    order : {"zigzag", "plain", "striped"}
        Which tokens a rank holds. "plain": rank r has the r-th stretch. "zigzag": the sequence has 2 * world chunks, of
        which rank r has chunks r and 2 * world - 1 - r, so that causal attention is as much work on every rank.
        "striped": token t is on rank t % world. Nothing is padded: chunk c of C holds tokens ``n * c // C`` to
        ``n * (c + 1) // C - 1``.
    axis : int
        That of the tokens: 1 of (batch, seqlen, ...), 0 of packed arrays.

    Returns
    -------
    array
        A new array of the same library, (..., this rank's tokens, ...).

    Raises
    ------
    TypeError, ValueError
        For an axis that the array has not, or an unknown order.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> comm = cuflash.distributed.threads(2)[1]
    >>> cuflash.distributed.shard(np.arange(8)[None], comm, order="striped")
    array([[1, 3, 5, 7]])
    """
    check_communicator(comm)
    order = check_order(order)
    library = interop.library_of("x", x)
    array = library.adopt("x", x)
    axis = _check_axis(axis, array.ndim)
    stretches = stretches_of(array.shape[axis], comm.rank, comm.world, order)
    with interop.on_stream_of(library, array):
        return library.release(take_part(array, stretches, axis - array.ndim))


def unshard(x: ArrayT, comm: Communicator, order: str = "zigzag", axis: int = 1) -> ArrayT:
    """Undo `shard`: give every rank the whole array.

    Parameters
    ----------
    x : array
        This rank's part.
    comm, order, axis
        As given to `shard`.

    Returns
    -------
    array
        A new array of the same library.

    Raises
    ------
    TypeError, ValueError
        As for `shard`, and ValueError where the ranks' parts are none of one array.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> def rank(comm):
    ...     part = cuflash.distributed.shard(np.arange(8)[None], comm)
    ...     return cuflash.distributed.unshard(part, comm).tolist()
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7]]]
    """
    check_communicator(comm)
    order = check_order(order)
    library = interop.library_of("x", x)
    array = library.adopt("x", x)
    axis = _check_axis(axis, array.ndim)
    with interop.on_stream_of(library, array):
        parts = comm.exchange([array] * comm.world)
        seqlen = sum(part.shape[axis] for part in parts)
        rest = (*array.shape[:axis], seqlen, *array.shape[axis + 1 :])
        whole = interop.namespace_of(array).empty(rest, array.dtype)
        for rank, part in enumerate(parts):
            expected = length_of(seqlen, rank, comm.world, order)
            if part.shape[axis] != expected or part.ndim != array.ndim or part.dtype != array.dtype:
                raise ValueError(
                    f"x: expected {expected} tokens of {seqlen} on rank {rank} by order {order!r}, "
                    f"and the shape and dtype of the others, got {part.shape} of {part.dtype.name}"
                )
            put_part(whole, part, stretches_of(seqlen, rank, comm.world, order), axis - array.ndim)
        comm.barrier()
        return library.release(whole)


def positions(seqlen: int, comm: Communicator, order: str = "zigzag") -> NDArray[np.int64]:
    """Return the positions in the whole sequence of this rank's rows, which rotary embeddings need.

    Parameters
    ----------
    seqlen : int
        Tokens of all ranks together.
    comm : Communicator
    order : {"zigzag", "plain", "striped"}
        As given to `shard`.

    Returns
    -------
    numpy.ndarray
        int64 (this rank's tokens,): row i of this rank is token ``positions[i]`` of the whole.

    Raises
    ------
    TypeError, ValueError
        For a length that is no integer from 0 up, or an unknown order.

    Examples
    --------
    >>> import cuflash
    >>> comm = cuflash.distributed.threads(2)[0]
    >>> cuflash.distributed.positions(8, comm, order="zigzag").tolist()
    [0, 1, 6, 7]
    """
    check_communicator(comm)
    if not isinstance(seqlen, (int, np.integer)) or isinstance(seqlen, bool):
        raise TypeError(f"seqlen: expected an integer, got {type(seqlen).__name__}")
    if seqlen < 0:
        raise ValueError(f"seqlen: expected an integer >= 0, got {seqlen}")
    stretches = stretches_of(int(seqlen), comm.rank, comm.world, check_order(order))
    return np.concatenate([s.first + s.stride * np.arange(s.length, dtype=np.int64) for s in stretches])


def _check_axis(axis: Any, ndim: int) -> int:
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"axis: expected an integer, got {type(axis).__name__}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis: expected one of an array of {ndim} axes, got {axis}")
    return int(axis) % ndim
