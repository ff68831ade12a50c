"""What streaming asks of a device: flat memory, copies beside the computation, and events to order both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

Array = Any
Event = Any  # what a device gives to order its work by
# Keys and values of one chunk: so many that a launch and a merge, some 50 us, cost little beside their 1.2 ms on a
# link of 55 GB/s, and that two of them leave a GPU's memory to others.
CHUNK_BYTES = 64 << 20


class Outgoing(ABC):
    """A copy to the host that was begun."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the host's array is written."""


class Device(ABC):
    """Where queries lie and chunks are computed; used as a context, whose end waits for all copies."""

    xp: ModuleType  # the namespace of its arrays
    is_host: bool  # it is the CPU itself, with which the CPU's share could only compete
    chunk_bytes: int = CHUNK_BYTES

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def empty(self, count: int, dtype: Any) -> Array:
        """Memory for `count` numbers of a chunk."""

    @abstractmethod
    def bring(self, memory: Array, source: Array, after: Event) -> tuple[Array, Event]:
        """Begin to copy the host's `source` into `memory` once `after` is done; the array there, ready at the event."""

    @abstractmethod
    def take(self, target: Array, source: Array) -> Outgoing:
        """Begin to copy `source`, made by the work so far, to the host's `target`."""

    @abstractmethod
    def mark(self) -> Event:
        """An event behind the computation that was enqueued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Computation that is enqueued from now on comes after the event."""

    @abstractmethod
    def finish(self) -> None:
        """The host waits for the computation so far."""

    @abstractmethod
    def put(self, x: Array) -> Array:
        """A small array of the host, on the device."""

    @abstractmethod
    def get(self, x: Array) -> Array:
        """A small array of the device, on the host."""

    @abstractmethod
    def close(self) -> None:
        """Wait until no copy reads or writes the host's memory."""
