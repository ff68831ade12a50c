"""The stream on which messages land on a GPU, while other streams compute, and the memory that they land in."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.distributed import copies
from cuflash.distributed.pieces import Pieces, enqueue_moves, moves_between, new_arrays, whole_arrays

Array = Any


class Landing:
    """A GPU's stream for what arrives, and the memory of that stream."""

    def __init__(self, device: int) -> None:
        import cupy

        self.device = device
        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def wait(self, event: Any) -> None:
        """Let what arrives later wait for an event."""
        self.stream.wait_event(event)

    def now(self) -> Any:
        """Record an event behind what arrives so far."""
        import cupy

        with cupy.cuda.Device(self.device):
            return self.stream.record(cupy.cuda.Event(disable_timing=True))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array that receives, and that the current stream reads.

        Its memory is used again only behind what the current stream does until the array is forgotten.
        """
        import cupy

        with cupy.cuda.Device(self.device):
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            if not nbytes:
                return cupy.empty(shape, dtype)
            current = cupy.cuda.get_current_stream()
            with self.stream:
                memory = cupy.cuda.alloc(nbytes)
            lease = _Lease(memory, self.stream, current)
            held = cupy.cuda.UnownedMemory(memory.ptr, nbytes, lease, self.device)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(held, 0))

    def copy(self, target: Array, source: int, strides: tuple[int, ...]) -> None:
        """Copy what lies at an address of some GPU, in rows that are wide, to an array with other strides."""
        import cupy

        rows = copies.rows_of(target.shape, target.itemsize, target.strides, strides)
        if rows is not None:
            copies.enqueue(rows, target.data.ptr, source, self.stream.ptr)
            return
        with cupy.cuda.Device(self.device), self.stream:
            whole = cupy.empty(target.shape, target.dtype)
            rows = copies.rows_of(target.shape, target.itemsize, whole.strides, strides)
            assert rows is not None
            copies.enqueue(rows, whole.data.ptr, source, self.stream.ptr)
            target[...] = whole

    def copy_of(self, x: Array) -> Array:
        """Copy an array of some GPU to new memory."""
        target = self.empty(x.shape, x.dtype)
        self.copy(target, x.data.ptr, x.strides)
        return target

    def new_pieces(self, message: Pieces) -> list[Array]:
        """Copy pieces to new arrays."""
        shapes = new_arrays(message.layouts(), message.cuts)
        dtypes = [message.arrays[cut.array].dtype for cut in message.cuts]
        arrays = [self.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self.copy_pieces(Pieces(tuple(arrays), whole_arrays(shapes, message.cuts)), message)
        return arrays

    def copy_pieces(self, into: Pieces, message: Pieces | Sequence[Array]) -> None:
        """Copy what came as pieces, or as arrays for each piece."""
        if isinstance(message, Pieces):
            moves = moves_between(message.layouts(), message.cuts, into.layouts(), into.cuts)
            if moves is not None:
                enqueue_moves(moves, message, into, self.stream.ptr)
                return
            message = message.views()
        for view, x in zip(into.views(), message, strict=True):
            self.copy(view, x.data.ptr, x.strides)


class _Lease:
    """Memory of the arrivals' stream, which goes back to it behind the work of the stream that read it."""

    def __init__(self, memory: Any, arrivals: Any, reader: Any) -> None:
        self._memory, self._arrivals, self._reader = memory, arrivals, reader

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        import cupy

        with cupy.cuda.Device(self._memory.device_id):
            self._arrivals.wait_event(self._reader.record(cupy.cuda.Event(disable_timing=True)))
