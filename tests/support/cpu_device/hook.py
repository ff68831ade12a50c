"""The library's NumPy path runs the CUDA kernels on the CPU test device within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cuflash.cuda import device as cuda_device
from cuflash.frontend import call, metadata
from cuflash.gpu import backend as gpu_backend

from .device import CpuDevice


@contextmanager
def kernels_on(device: CpuDevice) -> Iterator[CpuDevice]:
    """Let calls with NumPy arrays launch kernels on ``device`` instead of computing in NumPy, within the context."""
    metadata._repeats.clear()  # what another device recorded
    backend = mock.patch.object(call, "backend_of", return_value=gpu_backend)
    host = mock.patch.object(metadata, "host_device", device)
    with backend, host, mock.patch.object(cuda_device, "device_of", return_value=device):
        yield device
