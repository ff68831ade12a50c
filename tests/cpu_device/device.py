"""The CPU test device: compiles CUDA C++ kernels with the system's C++ compiler and runs them as fibers.

It has the launch interface of ``cuflash.kernels``: ``compile(source, options, name)`` gives a module, and
``module.launch(entry, grid, block, args, shared_mem)`` runs a kernel. Arrays are NumPy arrays in host memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
NO_COMPILER = (
    "the CPU test device needs a C++17 compiler for x86-64: install the system's g++ (apt install g++), or set CXX"
)
FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-march=native",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-Wno-attributes",
    "-w",
)
MAX_PARAMETERS = 256


class DeviceError(RuntimeError):
    """A kernel that does not compile, or a defect that the device met while it ran one."""


def compiler() -> str | None:
    """The C++ compiler to use, or None where there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def available() -> bool:
    """Whether this machine can run the CPU test device; else tests skip with ``NO_COMPILER``."""
    return compiler() is not None and platform.machine() in ("x86_64", "AMD64")


@functools.cache
def cuda_include() -> tuple[str, ...]:
    """The folders of the CUDA toolkit's headers: those of the NVIDIA wheels, or of an installed toolkit."""
    try:
        import nvidia

        roots = [Path(p) for p in nvidia.__path__]
    except ImportError:
        roots = []
    found = [h.parent for root in roots for h in root.glob("*/include/cuda_fp16.h")]
    found += [h.parent for root in roots for h in root.glob("*/include/vector_types.h")]
    toolkit = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "include"
    if not found and (toolkit / "cuda_fp16.h").exists():
        found = [toolkit]
    if not found:
        raise DeviceError('the CUDA headers were not found: pip install "cuda-toolkit[nvrtc,cudart,crt,cccl]==13.*"')
    folders = dict.fromkeys(str(p) for p in found)
    return tuple(folders) + tuple(f"{p}/cccl" for p in folders if Path(p, "cccl").exists())


def cache_folder() -> Path:
    """Where compiled modules are kept, outside of the repository."""
    default = Path(tempfile.gettempdir()) / f"cuflash-cpu-device-{os.getuid()}"
    folder = Path(os.environ.get("CUFLASH_CPU_DEVICE_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def headers_digest() -> str:
    """A digest of the device's own sources: it is part of every cache key."""
    files = sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")])
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def build(source: str, flags: Sequence[str], name: str) -> Path:
    """Compile a text into a shared library, or find it in the cache; returns its path."""
    command = [str(compiler()), *FLAGS, *flags, *(f"-I{p}" for p in cuda_include()), f"-I{FOLDER}"]
    key = hashlib.sha256("\0".join([source, headers_digest(), platform.node(), *command]).encode()).hexdigest()[:24]
    library = cache_folder() / f"{name}-{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        text = Path(folder, f"{name}.cpp")
        text.write_text(source)
        out = Path(folder, "out.so")
        run = subprocess.run([*command, "-shared", "-o", str(out), str(text)], capture_output=True, text=True)
        if run.returncode:
            raise DeviceError(f"{name} does not compile:\n{run.stderr[:8000]}")
        os.replace(out, library)
    return library


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library, compiled once; its symbols are visible to the kernels' libraries."""
    source = f'#include "{FOLDER / "runtime.cpp"}"\n'
    library = ctypes.CDLL(str(build(source, ("-O2", "-pthread"), "runtime")), mode=ctypes.RTLD_GLOBAL)
    library.cpu_device_launch.restype = ctypes.c_int
    return library


_COMMENTS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.S)
_HEAD = re.compile(r"__global__([^{;]*)[{;]")  # from __global__ to the body
_ATTRIBUTE = re.compile(r"\b(__\w+__)\s*\(((?:[^()]|\([^()]*\))*)\)")  # __launch_bounds__(...) and the like
_NAME = re.compile(r"(\w+)\s*\(")
_ALIGN = r"(?:(?:__align__|alignas)\s*\(((?:[^()]|\([^()]*\))*)\)\s*)?"
_DYNAMIC = re.compile(r"extern\s+__shared__\s+" + _ALIGN + r"([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"(?:static\s+)?__shared__\s+" + _ALIGN + r"([\w:<>,\s]+?[\w>])\s+(\w+)\s*((?:\[[^\[\]]*\]\s*)*);")


def translate(source: str) -> str:
    """The text with its ``__shared__`` declarations bound to the running block, and launchers behind it."""
    text = _DYNAMIC.sub(r"CPU_DEVICE_DYNAMIC_SHARED(\3, \2);", source)
    text = _STATIC.sub(lambda m: f"CPU_DEVICE_STATIC_SHARED({m[3]}, {m[1] or 16}, {m[2]} {m[4].strip()});", text)
    bare = _COMMENTS.sub(lambda m: m[0] if m[0].startswith('"') else " ", text)
    if "__shared__" in bare:
        at = bare.index("__shared__")
        raise DeviceError(f"a __shared__ declaration of an unknown form: {bare[at : at + 80]!r}")
    launchers = [_launcher(m[1]) for m in _HEAD.finditer(bare)]
    return "\n".join(['#include "cuda_on_cpu.h"', '#line 1 "kernel"', text, *dict.fromkeys(launchers)]) + "\n"


def _launcher(head: str) -> str:
    """The launcher of the kernel whose text between ``__global__`` and the body is ``head``."""
    attributes = dict(_ATTRIBUTE.findall(head))
    name = _NAME.search(_ATTRIBUTE.sub(" ", head))
    if name is None:
        raise DeviceError(f"a kernel without a name: {head!r}")
    cluster = attributes.get("__cluster_dims__", "1").split(",")
    return f"CPU_DEVICE_ENTRY({name[1]}, {', '.join((cluster + ['1', '1'])[:3])})"


class Module:
    """One compiled text. ``launch`` runs a kernel of it and returns when it has finished."""

    def __init__(self, library: Path) -> None:
        runtime()
        self._library = ctypes.CDLL(str(library))

    @functools.cache  # noqa: B019 (modules live as long as the process)
    def _entry(self, entry: str) -> tuple[Any, list[int], list[int]]:
        sizes = (ctypes.c_size_t * MAX_PARAMETERS)()
        try:
            count = getattr(self._library, f"cpu_device_parameters_{entry}")(sizes)
        except AttributeError:
            raise DeviceError(f'no kernel extern "C" __global__ {entry} in this module') from None
        cluster = (ctypes.c_uint * 3).in_dll(self._library, f"cpu_device_cluster_{entry}")
        return getattr(self._library, f"cpu_device_invoke_{entry}"), list(sizes[:count]), list(cluster)

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
            On a deadlock, or a defect that the runtime saw.
        """
        invoke, sizes, cluster = self._entry(entry)
        if len(args) != len(sizes):
            raise TypeError(f"{entry}: {len(sizes)} arguments expected, got {len(args)}")
        values = [_packed(a) for a in args]
        for i, (value, size) in enumerate(zip(values, sizes, strict=True)):
            if value.nbytes != size and not (isinstance(args[i], int) and size <= 8):
                raise TypeError(f"{entry}: argument {i} has {value.nbytes} bytes, the kernel's parameter has {size}")
        shape = [(ctypes.c_uint * 3)(*(list(x) + [1, 1, 1])[:3]) for x in (grid, block, cluster)]
        if any(n == 0 for extent in shape for n in extent):
            raise ValueError(f"{entry}: grid {tuple(grid)} and block {tuple(block)} must not be empty")
        if any(g % c for g, c in zip(shape[0], shape[2], strict=True)):
            raise ValueError(f"{entry}: grid {tuple(grid)} is not a multiple of the cluster {tuple(cluster)}")
        pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
        message = ctypes.create_string_buffer(8192)
        if seed is None:
            seed = int(os.environ.get("CUFLASH_CPU_DEVICE_SEED", "0"))
        workers = min(int(os.environ.get("CUFLASH_CPU_DEVICE_WORKERS", os.cpu_count() or 1)), int(np.prod(shape[0])))
        failed = runtime().cpu_device_launch(
            invoke, pointers, *shape, ctypes.c_size_t(shared_mem), ctypes.c_uint64(seed), ctypes.c_uint(workers),
            message, ctypes.c_size_t(len(message)),
        )  # fmt: skip
        if failed:
            raise DeviceError(f"{entry}: {message.value.decode()}")


def _packed(arg: Any) -> np.ndarray[Any, Any]:
    """One argument as the bytes that the kernel's parameter takes."""
    if arg is None:
        return np.zeros((), np.uint64)
    by_value = not isinstance(arg, np.ndarray) or (arg.dtype.type is np.void and arg.size == 1)
    return np.array(arg) if by_value else np.asarray(arg.ctypes.data, np.uint64)


def compile(source: str, options: Sequence[str] = (), name: str = "kernel") -> Module:
    """Compile one self-contained text of kernels.

    Parameters
    ----------
    source : str
        Constants, headers and entries, as ``cuflash.kernels`` hands it to ``cupy.RawModule``.
    options : sequence of str
        NVRTC options; only ``-D`` has a meaning here.
    name : str
        For messages and the cache.
    """
    if not available():
        raise DeviceError(NO_COMPILER)
    flags = [o for o in options if o.startswith("-D")]
    return Module(build(translate(source), ["-DCUFLASH_CPU_DEVICE", *flags], name))
