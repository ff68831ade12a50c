"""The devices that queries can lie on; NumPy's own memory is the simplest, as nothing needs to be copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.offload.device import CHUNK_BYTES, Device, Event, Outgoing

Array = Any


class _Done(Outgoing):
    def finish(self) -> None:
        """Do nothing, as the copy was made at once."""


class HostDevice(Device):
    """NumPy's memory, where chunks are views of the caller's arrays."""

    xp = np
    is_host = True
    chunk_bytes = 4 * CHUNK_BYTES  # chunks cost no memory here, and threads are started for each

    def empty(self, count: int, dtype: Any) -> Array:
        """Allocate nothing, as no memory is needed."""
        return None

    def bring(self, memory: Array, source: Array, after: Event) -> tuple[Array, Event]:
        """Return the source itself."""
        return source, None

    def take(self, target: Array, source: Array) -> Outgoing:
        """Copy at once."""
        np.copyto(target, source)
        return _Done()

    def mark(self) -> Event:
        """Do nothing, as all work is done when its call returns."""

    def wait(self, event: Event) -> None:
        """Do nothing, as there is nothing to wait for."""

    def finish(self) -> None:
        """Do nothing, as all work is done when its call returns."""

    def put(self, x: Array) -> Array:
        """The array itself."""
        return x

    def get(self, x: Array) -> Array:
        """The array itself."""
        return x

    def close(self) -> None:
        """Do nothing, as no copy is under way."""


def device_of(q: Array) -> Device:
    """Return the device of an array of NumPy or CuPy."""
    if isinstance(q, np.ndarray):
        return HostDevice()
    from cuflash.offload.gpu_device import GpuDevice

    return GpuDevice()
