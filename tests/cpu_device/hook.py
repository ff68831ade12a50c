"""Makes the library's NumPy path run the CUDA kernels on the CPU test device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash import call, gpu_backend, kernels, recording

from .device import CpuDevice


@contextmanager
def kernels_on(device: CpuDevice) -> Iterator[CpuDevice]:
    """While the context lives, calls with NumPy arrays launch kernels on ``device`` instead of computing in NumPy."""
    recording._repeats.clear()  # what another device recorded
    backend = mock.patch.object(call.Call, "_backend", new=property(lambda self: gpu_backend))
    host = mock.patch.object(recording, "host_device", device)
    with backend, host, mock.patch.object(kernels, "device_of", return_value=device):
        yield device
