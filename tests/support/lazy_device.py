"""NumPy's memory as a device whose copies are done as late as they may be, and which holds streaming to its order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.offload.device import Device, Event, Outgoing

Array = NDArray[Any]


@dataclass
class Copy(Outgoing):
    """A copy that waits to be done; for copies to the host the array on the device is the source."""

    device: LazyDevice
    target: Array
    source: Array
    is_done: bool = False

    def finish(self) -> None:
        """Copy now, with what the source holds now."""
        if not self.is_done:
            self.is_done = True
            self.target[...] = self.source


def _spoil(memory: Array) -> None:
    memory.fill(0x7F if memory.dtype == np.uint8 else np.nan)  # e4m3's NaN


@dataclass
class LazyDevice(Device):
    """A device whose memory is NumPy's, with NaN in place of copies that were not waited for.

    A copy into a buffer must come after an event behind the last computation that could read the buffer.
    """

    chunk_bytes: int = 1 << 10
    memory: int = 0  # bytes of buffers for chunks
    brought: int = 0  # bytes from the host
    taken: int = 0  # bytes to the host
    most_outgoing: int = 0
    clock: int = 0
    is_closed: bool = False
    copies: list[Copy] = field(default_factory=list)
    outgoing: list[Copy] = field(default_factory=list)
    last_read: dict[int, int] = field(default_factory=dict)  # by the buffer's address: when it was last made ready

    xp = np
    is_host = False

    def empty(self, count: int, dtype: Any) -> Array:
        memory = np.empty(count, dtype)
        _spoil(memory)
        self.memory += memory.nbytes
        return memory

    def bring(self, memory: Array, source: Array, after: Event) -> tuple[Array, Event]:
        assert after >= self.last_read.get(memory.ctypes.data, 0), "the buffer is still being read"
        _spoil(memory)
        target = memory[: source.size].reshape(source.shape)
        self.copies.append(Copy(self, target, source))
        self.brought += source.nbytes
        return target, self.copies[-1]

    def take(self, target: Array, source: Array) -> Outgoing:
        assert source.flags.c_contiguous
        self.taken += source.nbytes
        self.outgoing = [copy for copy in self.outgoing if not copy.is_done]
        self.outgoing.append(Copy(self, target, source))
        self.most_outgoing = max(self.most_outgoing, len(self.outgoing))
        return self.outgoing[-1]

    def mark(self) -> Event:
        self.clock += 1
        return self.clock

    def wait(self, event: Event) -> None:
        assert isinstance(event, Copy)
        event.finish()
        self.clock += 1
        self.last_read[event.target.ctypes.data] = self.clock

    def finish(self) -> None:
        """Do nothing, as computation is done at once."""

    def put(self, x: Array) -> Array:
        return x.copy()

    def get(self, x: Array) -> Array:
        return x.copy()

    def close(self) -> None:
        for copy in self.copies:
            copy.finish()
        self.is_closed = True
