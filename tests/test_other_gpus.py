"""Every row of the tables of kernels that other GPUs than this one choose, run on this one.

A row's text is compiled to PTX of its own architecture (or the oldest that NVRTC knows), which the driver assembles for
this GPU. Rows of this and of newer GPUs, whose PTX it does not take, are compiled for it, with their tiles and flags.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import rows
import test_numerics
from cases import Case
from devices import Device

from cuflash import hardware
from cuflash.cuda import compile as cuda_compile
from cuflash.cuda import device as cuda_device
from cuflash.frontend import metadata
from cuflash.plan import portable as plan_portable
from cuflash.plan import sm80_backward, sm80_forward, sm80_wide
from cuflash.plan.config import KernelConfig

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

ARCHITECTURES = (
    *("sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90"),
    *("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
)
_WITHOUT_TENSOR_CORES = (7, 0)
_SIZES = [2**n for n in range(9, 24)]  # of blocks full of NaN that results and work space are made of


class Row(NamedTuple):
    arch: str
    capability: tuple[int, int]  # by which its table is planned
    config: KernelConfig
    dtype: str


def all_rows() -> Iterator[Row]:
    """The kernels with the fewest and the most options of each row that no older GPU has, and of each table's first.

    The former are of a table's first dtype (float16 of the 16 bits), the latter of its last.
    """
    seen: set[tuple[Any, ...]] = set()
    for arch in ARCHITECTURES:
        own, limit = hardware.capability_of(arch), hardware.smem_limit(arch)
        mma = (sm80_forward.table, sm80_backward.table, sm80_wide.table)
        tables = [(_WITHOUT_TENSOR_CORES, plan_portable.table(limit)), *((own, table(own, limit)) for table in mma)]
        for capability, table in tables:
            for number, row in enumerate(rows.rows_of(table)):
                of_row = rows.identity(row[0][0])
                if number == 0 or of_row not in seen:
                    seen.add(of_row)
                    for kernel in (row[0], row[-1])[: len(row)]:
                        yield Row(arch, capability, *kernel)


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

    def load(self, source: str, entry: str, smem_bytes: int, options: tuple[str, ...] = ()) -> cuda_device.LoadedKernel:
        assert smem_bytes <= self.smem_limit
        if self._ptx_arch is None:
            return super().load(source, entry, smem_bytes, options)
        kernel = cupy.RawModule(path=str(ptx_file(source, self._ptx_arch))).get_function(entry)
        if smem_bytes > cuda_device._DEFAULT_SMEM_BYTES:
            kernel.max_dynamic_shared_size_bytes = smem_bytes
        return cuda_device.LoadedKernel(cupy, self.index, kernel.kernel)


def ptx_file(source: str, arch: str) -> Path:
    """PTX of a text, beside CuPy's cache."""
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
    """What NVRTC is asked for."""
    return [f"-arch={arch}", *cuda_compile.OPTIONS, "-ftz=true"]


def ptx_of(source: str, arch: str) -> bytes:
    """PTX of a text."""
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
    """Calls with CuPy arrays take the kernels of `gpu`, and no later one repeats them."""
    blocks = [cupy.full(size, 0xFF, np.uint8) for size in _SIZES]
    del blocks
    with mock.patch.object(cuda_device, "device_of", return_value=gpu):
        yield
    metadata._repeats.clear()


@pytest.mark.parametrize("row", list(all_rows()), ids=lambda row: rows.name_of(row.arch, row.config))
def test_row(row: Row) -> None:
    gpu = other_gpu(row.arch, row.capability)
    rows.run(row.config, row.dtype, Device(row.arch, cupy, partial(kernels_on, gpu)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", test_numerics.INPUTS, ids=test_numerics.NAMES)
def test_error_rule_of_float32_by_mma(make: Callable[[str], Case], causal: bool) -> None:
    gpu = other_gpu("sm_90", (9, 0))
    with test_numerics.forward_by("parts_forward", Device("sm_90", cupy, partial(kernels_on, gpu))) as device:
        test_numerics._assert_error_rule(device, make("float32").with_options(causal=causal))
