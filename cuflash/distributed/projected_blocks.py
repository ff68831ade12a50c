"""Blocks of attention's rows are projected over all ranks' heads while the next block is computed.

A sum over ranks of ``out @ w_out`` is one product: its rows have all ranks' heads, its matrix all ranks' rows of
the projection. So a rank gets its share of a block's rows of out from all others, in out's dtype, multiplies, and sends
the result to everyone. No partial sum travels or is added, and all ranks have the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from cuflash import interop
from cuflash.distributed.communicators import Communicator, Pending
from cuflash.distributed.pieces import Piece, Pieces, all_of, copy_here
from cuflash.distributed.products import product
from cuflash.distributed.steps import Steps

Array = Any
# Messages are of these kinds, any of which may overtake the others.
_WEIGHTS, _OUT, _ROWS = 0, 1, 2


class _Block(NamedTuple):
    first: int  # the block's first row
    edges: list[int]  # rank r multiplies rows edges[r] to edges[r + 1] - 1 of the block
    out: Array  # (rows that this rank multiplies, heads of all ranks, head_dim_v)
    pending: list[Pending]  # what other ranks' heads add to it

    def rows(self, rank: int) -> slice:
        """Return a rank's rows among those of all blocks."""
        return slice(self.first + self.edges[rank], self.first + self.edges[rank + 1])


class ProjectedBlocks:
    """The projection of one rank's call.

    `heads` are the numbers of query heads of all ranks, `w_out` (heads, head_dim_v, model) is this rank's part of the
    projection, and the projected rows are written to `y` (rows, model).
    """

    def __init__(self, comm: Communicator, heads: Sequence[int], w_out: Array, y: Array) -> None:
        self._comm, self._y, self._own_weights = comm, y, w_out
        self._heads = list(accumulate(heads, initial=0))
        self._xp, self._ready = interop.namespace_of(y), comm.now()
        self._weights: Array = None  # of all ranks
        self._weights_pending: list[Pending] = []
        self._row = 0
        self._to_multiply: deque[_Block] = deque()
        self._to_gather: deque[_Block] = deque()
        self._read_by_others: list[Array] = []  # kept until the end of the call

    def begin(self) -> Steps[None]:
        """Have all ranks' parts of the projection arrive, while the first block is computed."""
        comm, own = self._comm, self._own_weights
        for to in self._comm.others:
            comm.send(Pieces((own,), (_rows(0, len(own)),)), to, _WEIGHTS, self._ready)
        self._weights = self._xp.empty((self._heads[-1], *own.shape[1:]), own.dtype)
        ready = comm.now()
        for source in self._comm.others:
            into = Pieces((self._weights,), (_rows(*self._heads_of(source)),))
            self._weights_pending.append((yield from comm.arriving(source, _WEIGHTS, into, ready)))
        copy_here(Pieces((own,), (_rows(0, len(own)),)), Pieces((self._weights,), (_rows(*self._heads_of(comm.rank)),)))

    def add(self, own: Array) -> Steps[None]:
        """Take this rank's heads (rows, heads, head_dim_v) of the next rows, and multiply the block before."""
        comm, made = self._comm, self._comm.now()
        edges = [len(own) * rank // comm.world for rank in range(comm.world + 1)]
        self._read_by_others.append(own)
        for to in self._comm.others:
            comm.send(Pieces((own,), (_rows(edges[to], edges[to + 1]),)), to, _OUT, made)
        count = edges[comm.rank + 1] - edges[comm.rank]
        block = _Block(self._row, edges, self._xp.empty((count, self._heads[-1], own.shape[-1]), own.dtype), [])
        self._row += len(own)
        ready = comm.now()
        its = Pieces((own,), (_rows(edges[comm.rank], edges[comm.rank + 1]),))
        copy_here(its, Pieces((block.out,), (_rows(0, count, self._heads_of(comm.rank)),)))
        yield True
        for source in self._comm.others:
            into = Pieces((block.out,), (_rows(0, count, self._heads_of(source)),))
            block.pending.append((yield from comm.arriving(source, _OUT, into, ready)))
        self._to_multiply.append(block)
        if len(self._to_multiply) > 1:
            yield from self._advance()

    def finish(self) -> Steps[None]:
        """Complete all blocks for the work that follows on the current stream."""
        while self._to_multiply or self._to_gather:
            yield from self._advance()

    def _advance(self) -> Steps[None]:
        """Do one step of each of the two oldest blocks; ranks receive in the order in which all of them send."""
        multiplied = self._to_multiply.popleft() if self._to_multiply else None
        if multiplied is not None:
            self._multiply(multiplied)
            yield True
        if self._to_gather:
            yield from self._gather(self._to_gather.popleft())
        if multiplied is not None:
            self._to_gather.append(multiplied)

    def _multiply(self, block: _Block) -> None:
        for pending in (*block.pending, *self._weights_pending):
            pending.get()
        self._weights_pending.clear()
        rows = self._y[block.rows(self._comm.rank)]
        with np.errstate(all="ignore"):
            weights = self._weights.reshape(-1, self._weights.shape[-1])
            product(block.out.reshape(len(block.out), len(weights)), weights, out=rows)
        made = self._comm.now()
        for to in self._comm.others:
            self._comm.send(all_of(rows), to, _ROWS, made)

    def _gather(self, block: _Block) -> Steps[None]:
        arriving = []
        for source in self._comm.others:
            rows = all_of(self._y[block.rows(source)])
            arriving.append((yield from self._comm.arriving(source, _ROWS, rows, self._ready)))
        for pending in arriving:
            pending.get()

    def _heads_of(self, rank: int) -> tuple[int, int]:
        return self._heads[rank], self._heads[rank + 1]


def _rows(begin: int, end: int, heads: tuple[int, int] | None = None) -> Piece:
    """Return some rows, of some heads or all, of an array (rows, heads, columns)."""
    return Piece(0, (begin, end - begin, 1), heads, rows_last=False)
