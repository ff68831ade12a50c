"""This GPU with the kernels of another one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from cuflash import hardware
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import device as cuda_device
from cuflash.frontend import metadata

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

_SIZES = [2**n for n in range(9, 24)]  # of blocks full of NaN that results and work space are made of


class OtherGpu(cuda_device.Device):
    """This GPU, with the kernels and the shared memory of another."""

    def __init__(self, arch: str, capability: tuple[int, int]) -> None:
        super().__init__(cupy.cuda.runtime.getDevice())
        number, own = (10 * major + minor for major, minor in (hardware.capability_of(arch), self.capability))
        if hardware.smem_limit(arch) > self.smem_limit or number >= 90 > own:
            pytest.skip("more shared memory than this GPU has, or instructions that it lacks")
        known = [x for x in cupy.cuda.nvrtc.getSupportedArchs() if number <= x < own]
        self._ptx_arch = f"compute_{min(known)}" if known else None
        self.capability, self.smem_limit, self.has_wgmma = capability, hardware.smem_limit(arch), False
        # The net under spills is off, as without a compiler: what the driver's assembler, or NVRTC for this GPU, spills
        # of a kernel says nothing of the other GPU's code, and a later candidate would run in the row's place.
        self.compiler = ""

    def load(self, source: str, entry: str, smem_bytes: int, options: tuple[str, ...] = ()) -> cuda_device.LoadedKernel:
        assert smem_bytes <= self.smem_limit
        if self._ptx_arch is None:
            return super().load(source, entry, smem_bytes, options)
        kernel = cupy.RawModule(path=str(ptx_file(source, self._ptx_arch))).get_function(entry)
        if smem_bytes > cuda_device._DEFAULT_SMEM_BYTES:
            kernel.max_dynamic_shared_size_bytes = smem_bytes
        return cuda_device.LoadedKernel(cupy, self.index, kernel.kernel, kernel.local_size_bytes)


def ptx_file(source: str, arch: str) -> Path:
    """Return the file for PTX of a text, next to CuPy's cache."""
    number = hashlib.sha256(f"{cupy.cuda.nvrtc.getVersion()} {ptx_options(arch)} {source}".encode()).hexdigest()
    folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
    file = folder / f"{number}.ptx"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{number}.{os.getpid()}"
        own.write_bytes(ptx_of(source, arch))
        own.replace(file)
    return file


def ptx_options(arch: str) -> list[str]:
    """Return the options for NVRTC."""
    return [f"-arch={arch}", *cuda_compile.OPTIONS, "-ftz=true"]


def ptx_of(source: str, arch: str) -> bytes:
    """Compile a text to PTX."""
    from cuda.pathfinder import find_nvidia_header_directory
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    nvrtc.compileProgram(program, [*ptx_options(arch), f"-I{find_nvidia_header_directory('cudart')}"])
    ptx: bytes = nvrtc.getPTX(program).rstrip(b"\0")
    nvrtc.destroyProgram(program)
    return ptx


@cache
def other_gpu(arch: str, capability: tuple[int, int]) -> OtherGpu:
    return OtherGpu(arch, capability)


@contextmanager
def kernels_on(gpu: OtherGpu) -> Iterator[None]:
    """Let calls with CuPy arrays take the kernels of `gpu`, which no later one repeats."""
    blocks = [cupy.full(size, 0xFF, np.uint8) for size in _SIZES]
    del blocks
    with mock.patch.object(cuda_device, "device_of", return_value=gpu):
        yield
    metadata._repeats.clear()
