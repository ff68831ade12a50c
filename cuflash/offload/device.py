"""The device that streaming asks for: flat memory, copies during the computation, and events to order both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

from cuflash.offload.pooled_rows import PooledRows

Array = Any
Event = Any  # a device orders its work by it
# One chunk of keys and values has so many bytes that a launch and a merge, some 50 us, cost little compared with its
# 1.2 ms on a link of 55 GB/s, and that two chunks leave a GPU's memory to others.
CHUNK_BYTES = 64 << 20


class Outgoing(ABC):
    """A copy to the host that was begun."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the host's array is written."""


class Device(ABC):
    """The place of the queries, where chunks are computed; it is a context, whose end waits for all copies."""

    xp: ModuleType  # the namespace of its arrays
    is_host: bool  # it is the CPU itself, with which the CPU's share could only compete
    chunk_bytes: int = CHUNK_BYTES

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def empty(self, count: int, dtype: Any) -> Array:
        """Allocate memory for `count` numbers of a chunk."""

    @abstractmethod
    def bring(self, memory: Array, source: Array, after: Event) -> tuple[Array, Event]:
        """Begin to copy the host's `source` into `memory` once `after` is done; return the array and its event."""

    def brings_alone(self, source: Array) -> bool:
        """Return True if `bring` enqueues copies of the host's array that need nothing more of the host."""
        return False

    @abstractmethod
    def take(self, target: Array, source: Array) -> Outgoing:
        """Begin to copy `source`, made by the work so far, to the host's `target`."""

    @abstractmethod
    def mark(self) -> Event:
        """Record an event behind the computation that was enqueued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let computation that is enqueued from now on come after the event."""

    @abstractmethod
    def finish(self) -> None:
        """Let the host wait for the computation so far."""

    @abstractmethod
    def put(self, x: Array) -> Array:
        """Copy a small array of the host to the device."""

    @abstractmethod
    def get(self, x: Array) -> Array:
        """Copy a small array of the device to the host."""

    @abstractmethod
    def close(self) -> None:
        """Wait until no copy reads or writes the host's memory."""

    def bring_rows(self, memory: Array, source: PooledRows, after: Event) -> tuple[Array, Event]:
        """Do as `bring` with rows of a pool, which a device may gather on their way."""
        return self.bring(memory, source.gathered(), after)
