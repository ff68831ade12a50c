"""The CPU test device runs CUDA C++ kernels as fibers, with checks that a GPU does not make.

``compile(source, options, name)`` gives a module and ``module.launch(entry, grid, block, args, shared_mem)`` runs a
kernel of it. ``CpuDevice`` is the same as a ``cuflash.cuda.device.Device``. Arrays are NumPy arrays in host memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import tensor_map
from .build import (
    NO_COMPILER,
    Check,
    DeviceError,
    available,
    build_kernels,
    kernel_flags,
    obstacle,
    runtime,
    with_lines,
)
from .translate import translate

__all__ = ["NO_COMPILER", "Check", "CpuDevice", "DeviceError", "Module", "available", "compile"]

MAX_PARAMETERS = 256
DEFAULT_SMEM_BYTES = 48 * 1024  # a kernel may use so much without asking for more
_STORAGE_ALIGNMENT = 1024  # of structs of shared memory, at most
_Extent = ctypes.c_uint * 3
# A sum of 16-bit products keeps so many bits below its largest term's exponent, of so many products (cut_sums.h).
SUMS = {"plain": (0, 0), "ampere": (24, 8), "hopper": (25, 16)}


class _LaunchRequest(ctypes.Structure):
    """The struct of launch.cpp."""

    _fields_ = [
        ("invoke", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("grid", _Extent),
        ("block", _Extent),
        ("cluster", _Extent),
        ("workers", ctypes.c_uint),
        ("sum_bits", ctypes.c_int),
        ("sum_depth", ctypes.c_int),
        ("dynamic_shared", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("checked", ctypes.c_uint64),
        ("timeout_s", ctypes.c_double),
        ("red_zones", ctypes.c_void_p),
        ("num_red_zones", ctypes.c_uint64),
        ("padding", ctypes.c_void_p),
        ("num_padding", ctypes.c_uint64),
        ("error", ctypes.c_char_p),
        ("error_capacity", ctypes.c_uint64),
    ]


def _from_environment(name: str, default: Any) -> str:
    return os.environ.get(f"CUFLASH_CPU_DEVICE_{name}", str(default))


class _Storage(NamedTuple):
    """A kernel's structs of shared memory: their bytes in all, and ranges of these as pairs of offset and bytes."""

    size: int
    red_zones: np.ndarray[Any, Any]  # between members
    padding: np.ndarray[Any, Any]  # inside of members: copied with them, and never written


def _storage_of(library: ctypes.CDLL, entry: str) -> _Storage:
    size, count = (ctypes.c_uint64 * 2).in_dll(library, f"cpu_device_storage_{entry}")
    num_zones = ctypes.c_uint.in_dll(library, f"cpu_device_num_red_zones_{entry}").value
    table = ((ctypes.c_uint64 * 2) * num_zones).in_dll(library, f"cpu_device_red_zones_{entry}")
    buffer = np.full(size + _STORAGE_ALIGNMENT, 1, np.uint8)
    one = buffer[-buffer.ctypes.data % _STORAGE_ALIGNMENT :][:size]
    getattr(library, f"cpu_device_clear_padding_{entry}")(ctypes.c_void_p(one.ctypes.data))
    zones = [(begin, end - begin) for begin, end in table]
    edges = np.flatnonzero(np.diff(one == 0, prepend=False, append=False)).reshape(-1, 2)
    padding = [(begin, end - begin) for begin, end in edges.tolist()]

    def of_all(ranges: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
        pairs = [(i * size + offset, length) for i in range(count) for offset, length in ranges]
        return np.array(pairs, np.uint64).reshape(-1, 2)

    return _Storage(size * count, of_all(zones), of_all(padding))


class Module:
    """One compiled text. ``launch`` runs a kernel of it and returns when it has finished."""

    def __init__(self, library: ctypes.CDLL, check: Check) -> None:
        self._library = library
        self._check = check
        self._entries: dict[str, tuple[int, list[int], list[int]]] = {}
        self._storages: dict[str, _Storage] = {}

    def _storage(self, entry: str) -> _Storage:
        """Return what lies where in a kernel's dynamic shared memory, as far as its text says it."""
        if entry not in self._storages:
            storage = _Storage(0, np.zeros((0, 2), np.uint64), np.zeros((0, 2), np.uint64))
            if hasattr(self._library, f"cpu_device_storage_{entry}"):
                storage = _storage_of(self._library, entry)
            self._storages[entry] = storage
        return self._storages[entry]

    def _entry(self, entry: str) -> tuple[int, list[int], list[int]]:
        """Return the address of the launcher, the sizes of the parameters and the cluster dimensions."""
        if entry not in self._entries:
            sizes = (ctypes.c_size_t * MAX_PARAMETERS)()
            try:
                count = getattr(self._library, f"cpu_device_parameters_{entry}")(sizes)
            except AttributeError:
                raise DeviceError(f'no kernel extern "C" __global__ {entry} in this module') from None
            invoke = ctypes.cast(getattr(self._library, f"cpu_device_invoke_{entry}"), ctypes.c_void_p).value or 0
            cluster = _Extent.in_dll(self._library, f"cpu_device_cluster_{entry}")
            self._entries[entry] = (invoke, list(sizes[:count]), list(cluster))
        return self._entries[entry]

    def launch(
        self,
        entry: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
        *,
        seed: int | None = None,
    ) -> None:
        """Run a kernel over a grid.

        Parameters
        ----------
        entry : str
            Name of an ``extern "C" __global__`` function.
        grid, block : sequence of 1 to 3 int
        args : sequence
            NumPy arrays go as pointers, NumPy scalars and size-one structured (or void) arrays by value, Python
            numbers as 8 bytes, None as a null pointer.
        shared_mem : int
            Bytes of dynamic shared memory.
        seed : int, optional
            Of the order in which threads run; default ``CUFLASH_CPU_DEVICE_SEED`` or 0.

        Raises
        ------
        DeviceError
            On a defect that the device saw; it names the line.
        """
        values = _packed_arguments(entry, args, self._entry(entry)[1])
        pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
        self.launch_at(entry, grid, block, ctypes.addressof(pointers), shared_mem, seed=seed)

    def sizes(self, entry: str) -> list[int]:
        """Return the bytes of a kernel's parameters."""
        return self._entry(entry)[1]

    def launch_at(
        self,
        entry: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: int,
        shared_mem: int = 0,
        *,
        seed: int | None = None,
    ) -> None:
        """Do as ``launch`` with the address of the arguments' addresses, as the driver's interface has it."""
        invoke, _, cluster = self._entry(entry)
        extents = [_Extent(*[*x, 1, 1][:3]) for x in (grid, block, cluster)]
        if any(n == 0 for extent in extents for n in extent):
            raise ValueError(f"{entry}: grid {tuple(grid)} and block {tuple(block)} must not be empty")
        if any(g % c for g, c in zip(extents[0], extents[2], strict=True)):
            raise ValueError(f"{entry}: grid {tuple(grid)} is not a multiple of the cluster {tuple(cluster)}")
        if seed is None:
            seed = int(_from_environment("SEED", 0))
        message = ctypes.create_string_buffer(8192)
        storage = self._storage(entry)
        sum_bits, sum_depth = SUMS[_from_environment("SUMS", "plain")]
        request = _LaunchRequest(
            invoke=invoke,
            args=arguments,
            grid=extents[0],
            block=extents[1],
            cluster=extents[2],
            workers=min(int(_from_environment("WORKERS", os.cpu_count() or 1)), math.prod(extents[0])),
            sum_bits=sum_bits,
            sum_depth=sum_depth,
            dynamic_shared=max(shared_mem, storage.size),
            seed=seed,
            checked=self._check is Check.SHARED,
            timeout_s=float(_from_environment("TIMEOUT", 60)),
            red_zones=storage.red_zones.ctypes.data,
            num_red_zones=len(storage.red_zones),
            padding=storage.padding.ctypes.data,
            num_padding=len(storage.padding),
            error=ctypes.cast(message, ctypes.c_char_p),
            error_capacity=len(message),
        )
        if runtime(self._check is Check.ADDRESS).cpu_device_launch(ctypes.byref(request)):
            raise DeviceError(f"{entry}: {with_lines(message.value.decode())}")


def _packed_arguments(entry: str, args: Sequence[Any], sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Return the arguments as the bytes that the kernel's parameters take, in 64-byte aligned memory."""
    if len(args) != len(sizes):
        raise TypeError(f"{entry}: {len(sizes)} arguments expected, got {len(args)}")
    values = []
    for i, (arg, size) in enumerate(zip(args, sizes, strict=True)):
        if arg is None:
            value = np.zeros((), np.uint64)
        elif isinstance(arg, np.ndarray) and not (arg.dtype.type is np.void and arg.size == 1):
            value = np.array(arg.ctypes.data, np.uint64)
        else:
            value = np.array(arg)
        if value.nbytes != size and not (isinstance(arg, int) and size < value.nbytes):
            raise TypeError(f"{entry}: argument {i} has {value.nbytes} bytes, the kernel's parameter has {size}")
        buffer = np.zeros(value.nbytes + 64, np.uint8)
        aligned = buffer[-buffer.ctypes.data % 64 :][: value.nbytes]
        aligned[:] = np.frombuffer(value.tobytes(), np.uint8)
        values.append(aligned)
    return values


def compile(source: str, options: Sequence[str] = (), name: str = "kernel", check: Check | None = None) -> Module:
    """Compile one self-contained text of kernels.

    Parameters
    ----------
    source : str
        Constants, headers and entries, as ``cuflash.cuda.device`` hands it to ``cupy.RawModule``.
    options : sequence of str
        NVRTC options; only ``-D`` has a meaning here.
    name : str
        For messages and the cache.
    check : Check, optional
        What to look for; default ``CUFLASH_CPU_DEVICE_CHECK`` or none.
    """
    if not available():
        raise DeviceError(obstacle())
    if check is None:
        check = Check(_from_environment("CHECK", Check.NONE.value))
    flags = ["-DCUFLASH_CPU_DEVICE", *kernel_flags(check), *(o for o in options if o.startswith("-D"))]
    return _load(translate(source, red_zones=check is not Check.NONE), tuple(flags), name, check)


@functools.cache
def _load(text: str, flags: tuple[str, ...], name: str, check: Check) -> Module:
    runtime(check is Check.ADDRESS)
    return Module(ctypes.CDLL(str(build_kernels(text, flags, name))), check)


# CuPy's memory pool aligns as much.
_SCRATCH_ALIGNMENT = 512
# Every byte of memory that nobody has written is this one, which makes NaN in all floating-point formats.
_POISON = 0xFF
# Bytes of shared memory that one block may use, by compute capability.
SMEM_LIMITS = {
    (7, 0): 98304,
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 8): 101376,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (11, 0): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}


class CpuDevice:
    """The CPU as a ``cuflash.cuda.device.Device`` of some compute capability.

    Parameters
    ----------
    capability : tuple of int
        Which kernels the plan chooses: a key of ``SMEM_LIMITS``.
    num_sms : int
        As many blocks a persistent kernel launches.
    check : Check, optional
        What to look for; default ``CUFLASH_CPU_DEVICE_CHECK`` or none.
    """

    namespace = np
    compiler = ""  # the CPU's has no registers of a GPU to spill

    def __init__(self, capability: tuple[int, int], num_sms: int = 2, check: Check | None = None) -> None:
        self.capability = capability
        self.num_sms = num_sms
        self.smem_limit = SMEM_LIMITS[capability]
        self.has_wgmma = capability == (9, 0)
        self.name = f"CPU as sm_{capability[0]}{capability[1]}"
        self.tensor_map = lambda *description, once=False: tensor_map.encode(*description)
        self._check = check

    def begin_thread(self) -> None:
        """Do nothing, as all threads are alike."""

    def load(self, source: str, entry: str, smem_bytes: int, options: Sequence[str] = ()) -> Any:
        """Compile ``source`` and return its entry: call it with grid, block, args and shared_mem."""
        if smem_bytes > self.smem_limit:
            raise ValueError(f"{entry}: {smem_bytes} bytes of shared memory, {self.name} has {self.smem_limit}")
        return CpuKernel(compile(source, options, entry, self._check), entry, max(smem_bytes, DEFAULT_SMEM_BYTES))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array that nobody has written, of NaN or -1."""
        x = np.empty(shape, dtype)
        x.reshape(-1).view(np.uint8)[...] = _POISON
        return x

    def scratch(self, size: int) -> tuple[int, np.ndarray[Any, Any]]:
        """Return the address of so many uninitialised bytes, and what keeps them."""
        memory = np.full(size + _SCRATCH_ALIGNMENT, _POISON, np.uint8)
        return memory.ctypes.data + -memory.ctypes.data % _SCRATCH_ALIGNMENT, memory

    lasting = scratch

    def pointer(self, x: np.ndarray[Any, Any]) -> int:
        """Return the address of an array's first element."""
        return x.ctypes.data

    def is_current(self) -> bool:
        """Return True, as there is no other device."""
        return True

    def stream(self) -> int:
        """Return the only stream."""
        return 0

    def capture(self, stream: int) -> int:
        """Return 0, as there are no graphs."""
        return 0


class CpuKernel:
    """An entry of a module as a ``cuflash.cuda.device.LoadedKernel``."""

    local_bytes = 0  # the host's compiler has no registers that a kernel could run out of

    def __init__(self, module: Module, entry: str, smem_bytes: int) -> None:
        self._module, self._entry, self._smem_bytes = module, entry, smem_bytes

    def _check(self, smem_bytes: int) -> None:
        if smem_bytes > self._smem_bytes:
            raise ValueError(
                f"{self._entry}: a launch with {smem_bytes} bytes of shared memory, {self._smem_bytes} announced"
            )

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch it."""
        self._check(shared_mem)
        self._module.launch(self._entry, grid, block, args, shared_mem)

    def bound(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        sizes: Sequence[int],
        smem_bytes: int,
        begins_early: bool = False,
    ) -> Callable[[int, int], None]:
        """Return a function (address of the arguments' addresses, stream) that launches with arguments of these sizes.

        Kernels run one after the other, also those that may begin early.
        """
        self._check(smem_bytes)
        expected = self._module.sizes(self._entry)
        if list(sizes) != expected:
            raise TypeError(f"{self._entry}: arguments of {list(sizes)} bytes, the kernel's parameters have {expected}")
        return lambda arguments, stream: self._module.launch_at(self._entry, grid, block, arguments, smem_bytes)
