"""The devices that queries can lie on; NumPy's own memory is the simplest: nothing needs to be copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.offload.device import CHUNK_BYTES, Device, Event, Outgoing

Array = Any


class _Done(Outgoing):
    def finish(self) -> None:
        """It was done at once."""


class HostDevice(Device):
    """NumPy's memory: chunks are views of the caller's arrays."""

    xp = np
    is_host = True
    chunk_bytes = 4 * CHUNK_BYTES  # they cost no memory, and each has threads started for it

    def empty(self, count: int, dtype: Any) -> Array:
        """None is needed."""
        return None

    def bring(self, memory: Array, source: Array, after: Event) -> tuple[Array, Event]:
        """The source itself."""
        return source, None

    def take(self, target: Array, source: Array) -> Outgoing:
        """Copied at once."""
        np.copyto(target, source)
        return _Done()

    def mark(self) -> Event:
        """All work is done when its call returns."""

    def wait(self, event: Event) -> None:
        """There is nothing to wait for."""

    def finish(self) -> None:
        """All work is done when its call returns."""

    def put(self, x: Array) -> Array:
        """The array itself."""
        return x

    def get(self, x: Array) -> Array:
        """The array itself."""
        return x

    def close(self) -> None:
        """No copy is under way."""


def device_of(q: Array) -> Device:
    """The device of an array of NumPy or CuPy."""
    if isinstance(q, np.ndarray):
        return HostDevice()
    from cuflash.offload.gpu_device import GpuDevice

    return GpuDevice()
