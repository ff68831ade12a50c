"""Small integer arrays that the host refills, and that a device gets in one copy without anybody waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 32  # elements, so that each array begins a line of memory


class Refilled:
    """Arrays int32 on a device, and their next values on the host.

    The device's arrays stay the same ones. Host memory from which a copy may still be under way is left alone, so that
    the host may be any number of refills ahead.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    shapes : mapping of str to tuple of int
    """

    def __init__(self, xp: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        self._xp, self._shapes = xp, shapes
        sizes = [-(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT for shape in shapes.values()]
        self._begins = np.concatenate(([0], np.cumsum(sizes))).tolist()
        self._on_device = xp.zeros(self._begins[-1], np.int32)
        self.arrays: dict[str, Any] = self._views(self._on_device)
        self._sent: list[tuple[Any, Any]] = []  # an event behind each copy, and its host memory

    def _views(self, flat: Any) -> dict[str, Any]:
        return {
            name: flat[begin : begin + int(np.prod(shape))].reshape(shape)
            for begin, (name, shape) in zip(self._begins, self._shapes.items(), strict=False)
        }

    def refill(self, values: dict[str, Any]) -> None:
        """Enqueue the copy of new values, which broadcast to the arrays, on the current stream."""
        if self._xp is np:
            for name, array in self.arrays.items():
                array[...] = values[name]
            return
        cuda = self._xp.cuda
        size = self._on_device.nbytes
        if size == 0:
            return
        memory, event = self._host_memory(size)
        for name, array in self._views(np.frombuffer(memory, np.int32, size // 4)).items():
            array[...] = values[name]
        stream = cuda.get_current_stream()
        self._on_device.data.copy_from_host_async(memory.ptr, size, stream)
        event.record(stream)
        self._sent.append((event, memory))

    def _host_memory(self, size: int) -> tuple[Any, Any]:
        """Pinned memory that no copy reads any more, and its event."""
        cuda = self._xp.cuda
        for index, (event, _) in enumerate(self._sent):
            if event.done:
                event, memory = self._sent.pop(index)
                return memory, event
        return cuda.alloc_pinned_memory(size), cuda.Event(disable_timing=True)


def table_of(rows: list[NDArray[np.int32]], width: int) -> NDArray[np.int32]:
    """A block table whose rows begin with these pages; -1, which is no page, stands in entries that are not used."""
    table = np.full((len(rows), width), -1, np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return table
