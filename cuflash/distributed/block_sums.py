"""Sums over ranks travel block by block while the next block is computed.

A rank sends a part of its block to each other one, which adds what it gets in the order of the ranks, so that all have
the same bits, and sends the sum to everyone. Each of these steps is done after the next block was computed (on a GPU:
enqueued), so that the messages that it needs have had that long to arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from cuflash import interop
from cuflash.distributed.communicators import Communicator, Pending
from cuflash.distributed.pieces import all_of
from cuflash.distributed.steps import Steps
from cuflash.frontend.partial import sum_parts
from cuflash.kept import kept
from cuflash.problem.attention_problem import PartialResult

Array = Any


class _Block(NamedTuple):
    first: int  # the block's first row
    own: Array  # this rank's addend
    made: Any  # the event behind `own` on a GPU; a later event would wait for the next block, too
    edges: list[int]  # rank r adds rows edges[r] to edges[r + 1] - 1 of the block

    def part(self, rank: int) -> slice:
        """Return the rows that a rank adds."""
        return slice(self.edges[rank], self.edges[rank + 1])


class BlockSums:
    """Sums of blocks of rows, which every rank adds in the same order.

    They are written to `total`, an array (rows, columns), in its dtype.
    """

    def __init__(self, comm: Communicator, total: Array) -> None:
        self._comm, self._total = comm, total
        self._row = 0
        self._to_add: deque[_Block] = deque()
        self._to_gather: deque[_Block] = deque()
        self._read_by_others: list[Array] = []  # kept until the barrier at the call's end
        self._stream = None if isinstance(total, np.ndarray) else _stream_behind_this(total.device.id)
        self._xp, self._ready = interop.namespace_of(total), comm.now()

    def add(self, own: Array) -> Steps[None]:
        """Take this rank's addend of the next rows, add the block before, and complete the one before that."""
        comm = self._comm
        made = None if self._stream is None else _current_stream().record()
        block = _Block(self._row, own, made, [len(own) * rank // comm.world for rank in range(comm.world + 1)])
        self._row += len(own)
        self._read_by_others.append(own)
        for to in self._others():
            comm.send(all_of(own[block.part(to)]), to)
        yield True
        yield from self._advance()
        self._to_add.append(block)

    def finish(self) -> Steps[None]:
        """Complete all blocks for the work that follows on the current stream."""
        while self._to_add or self._to_gather:
            yield from self._advance()
        if self._stream is not None:
            _current_stream().wait_event(self._stream.record())

    def _advance(self) -> Steps[None]:
        """Do one step of each of the two oldest blocks; ranks receive in the order in which all of them send."""
        added = (yield from self._add_parts(self._to_add.popleft())) if self._to_add else None
        if self._to_gather:
            yield from self._gather(self._to_gather.popleft())
        if added is not None:
            self._to_gather.append(added)

    def _add_parts(self, block: _Block) -> Steps[_Block]:
        comm = self._comm
        part = block.part(comm.rank)
        own, target = block.own[part], self._rows(block, part)
        with self._beside():
            landings = {source: self._xp.empty_like(own) for source in self._others()}
            ready = comm.now()
        arriving = yield from self._arriving(landings, ready)
        with self._beside():
            if self._stream is not None:
                self._stream.wait_event(block.made)
            for pending in arriving:
                pending.get()
            addends = landings | {comm.rank: own}
            shares = [PartialResult(addends[rank][:, None], None, 0) for rank in range(comm.world)]
            sum_parts(shares, target[:, None])
            made = comm.now()
            for to in self._others():
                comm.send(all_of(target), to, 0, made)
        return block

    def _gather(self, block: _Block) -> Steps[None]:
        rows = {source: self._rows(block, block.part(source)) for source in self._others()}
        arriving = yield from self._arriving(rows, self._ready)
        with self._beside():
            for pending in arriving:
                pending.get()

    def _arriving(self, into: Mapping[int, Array], ready: Any) -> Steps[list[Pending]]:
        """Have an array of each other rank arrive."""
        arriving = []
        for source, x in into.items():
            arriving.append((yield from self._comm.arriving(source, 0, all_of(x), ready)))
        return arriving

    def _rows(self, block: _Block, part: slice) -> Array:
        return self._total[block.first + part.start : block.first + part.stop]

    def _others(self) -> list[int]:
        return [(self._comm.rank + distance) % self._comm.world for distance in range(1, self._comm.world)]

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream


def _current_stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()


def _stream_behind_this(device: int) -> Any:
    """Return the sums' stream, whose next work comes after that of the current stream so far."""
    stream = _stream_of_sums(device)
    stream.wait_event(_current_stream().record())
    return stream


@kept
def _stream_of_sums(device: int) -> Any:
    """Return a GPU's stream of sums, which is made once, because memory stays with the stream that it was taken on."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)
