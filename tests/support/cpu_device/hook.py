"""The library's NumPy path runs the CUDA kernels on the CPU test device within a context."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import compiling

from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import device as cuda_device
from cuflash.frontend import call, metadata
from cuflash.gpu import backend as gpu_backend
from cuflash.gpu import split
from cuflash.plan import entries

from . import build
from .device import CpuDevice

# NVRTC compiles the kernels in these files by the tables of configurations (tests/kernels/test_mma.py and others).
_OF_PARTS = {entries.file_of(entry) for entry in (split.ROWS, split.CHANNELS)}
_LISTED = set(entries._FILES.values()) - _OF_PARTS


@contextmanager
def kernels_on(device: CpuDevice) -> Iterator[CpuDevice]:
    """Let calls with NumPy arrays launch kernels on ``device`` instead of computing in NumPy, within the context.

    NVRTC, where there is one, compiles each kernel that no table lists as well: the host's compiler takes functions of
    headers that a kernel's file does not include, as it has them from elsewhere.
    """
    metadata._repeats.clear()  # what another device recorded
    backend = mock.patch.object(call, "backend_of", return_value=gpu_backend)
    host = mock.patch.object(metadata, "host_device", device)
    loading = mock.patch.object(cuda_device.Text, "load", _load_checked)
    with backend, host, loading, mock.patch.object(cuda_device, "device_of", return_value=device):
        yield device


_load = cuda_device.Text.load


def _load_checked(text: cuda_device.Text, device: Any, smem_bytes: int) -> cuda_device.LoadedKernel:
    if text.paths not in _LISTED:
        compile_by_nvrtc(text.source, text.function, device.capability)
    return _load(text, device, smem_bytes)


@functools.cache
def compile_by_nvrtc(source: str, function: str, capability: tuple[int, int]) -> None:
    """Compile a kernel for a GPU of a capability, if there is an NVRTC which knows that; RuntimeError if it fails.

    Tests that run side by side meet the same texts, and one of them compiles each, with all of its kernels.
    """
    arch = "sm_{}{}".format(*capability)
    if compiling.has_compiler() and compiling.is_known(arch):
        of_compiler = str(compiling.version()), *cuda_compile.OPTIONS
        build.once(lambda: cuda_compile.compile_for(arch, source, function), source, arch, *of_compiler)
