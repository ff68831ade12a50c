"""The CPU test device compiles by the system's C++ compiler, with a cache, and with flags for each kind of check."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HEADER = "cuda_on_cpu.h"
# CUDA has these in the wheels for the run-time library, the compiler's own part, and the C++ library.
HEADERS = ("vector_types.h", "cuda_fp16.h", "crt/host_defines.h", "nv/target")


class DeviceError(RuntimeError):
    """A kernel that does not compile, or a defect that the device met while it ran one."""


class Check(Enum):
    """The defects that the device looks for besides deadlocks, divergence and wrong operands of instructions."""

    NONE = "none"  # nothing more: the fastest
    SHARED = "shared"  # races, uninitialised reads, red zones in shared memory; undefined behaviour
    ADDRESS = "address"  # accesses beyond global arrays, local arrays and shared arrays (AddressSanitizer)


BASE_FLAGS = ("-std=c++17", "-march=native", "-fPIC", "-fno-strict-aliasing", "-w")
# Lines are for messages alone and take a third of the compile time, so kernels have none until a message needs them.
# The code is the same. addr2line knows DWARF 4.
_LINES = ("-g1", "-gdwarf-4")
# Kernels find the C library's functions through the runtime, which is loaded before them. The linker need not read its
# libraries for each, which takes a tenth of the time of most.
_NO_LIBRARIES = "-nodefaultlibs"
# The checks that double the compile time and find what the others find are left out.
_UNDEFINED = (
    "-fsanitize=alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow,unreachable,return,bool,enum"
)
_KERNEL_FLAGS = {
    Check.NONE: ("-Og", "-fwrapv", "-fno-sanitize=all"),
    Check.SHARED: ("-Og", "-fsanitize=thread", _UNDEFINED),
    # AddressSanitizer writes its messages itself.
    Check.ADDRESS: ("-O1", "-fno-omit-frame-pointer", "-fsanitize=address", _UNDEFINED, *_LINES),
}
# Nobody looks at floating-point exceptions, without which the compiler cuts off vectors of numbers.
RUNTIME_FLAGS = {
    False: ("-O3", "-fno-trapping-math", "-pthread", "-fno-sanitize=all", *_LINES),
    True: ("-O1", "-pthread", "-fsanitize=address", *_LINES),
}
RUNTIME_PARTS = (
    "fibers", "sync", "shared", "shadow", "undefined", "mbarrier", "copies", "tensor_map", "fragments", "wgmma",
    "launch",
)  # fmt: skip


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler; empty where there is none."""
    if "CXX" in os.environ:
        return tuple(shlex.split(os.environ["CXX"]))
    found = shutil.which("g++") or shutil.which("clang++")
    if found:
        return (found,)
    return (sys.executable, "-m", "ziglang", "c++") if importlib.util.find_spec("ziglang") else ()


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return the folders of the CUDA headers: those of the NVIDIA wheels, then those of an installed toolkit.

    Parts may have folders of their own, which come behind the run-time library's, whose version counts.
    """
    try:
        import nvidia

        wheels = [folder for root in nvidia.__path__ for folder in Path(root).glob("*/include")]
    except ImportError:
        wheels = []
    toolkit = Path(os.environ.get("CUDA_PATH") or Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").parents[1])
    found = sorted((*wheels, toolkit / "include"), key=lambda folder: not (folder / HEADERS[0]).exists())
    return tuple(str(f) for folder in found for f in (folder, folder / "cccl") if f.is_dir())


@functools.cache
def obstacle() -> str:
    """Say why this machine cannot run the CPU test device; empty if it can."""
    if not compiler() or platform.machine() != "x86_64" or platform.system() != "Linux":
        return (
            "the CPU test device needs a C++17 compiler on x86-64 Linux: the system's package (apt install g++), "
            "or pip install ziglang (without the sanitizers), or set CXX"
        )
    absent = [name for name in HEADERS if not any(Path(folder, name).exists() for folder in _folders())]
    if absent:
        return f'the CPU test device needs CUDA\'s headers ({", ".join(absent)}): pip install "cuflash[test,cuda13]"'
    return ""


# These say why tests on the device are skipped where it is not available, and those that need sanitizers.
NO_COMPILER = obstacle()
NO_SANITIZERS = NO_COMPILER or "ziglang has no sanitizers that can be loaded: install the system's g++"


def available() -> bool:
    """Return True if this machine can run the CPU test device; tests skip with ``NO_COMPILER`` if not."""
    return not obstacle()


def has_sanitizers() -> bool:
    """Return True if the compiler brings AddressSanitizer and calls own handlers for undefined behaviour."""
    return available() and "ziglang" not in compiler()


@functools.cache
def is_gnu() -> bool:
    """Return True if the compiler is g++, which alone tells where a struct has padding."""
    if not available():
        return False
    run = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True)
    return "Free Software Foundation" in run.stdout


def kernel_flags(check: Check) -> tuple[str, ...]:
    """Return the flags of kernels that are compiled for a kind of check."""
    flags = _KERNEL_FLAGS[check]
    if is_gnu() and check is not Check.ADDRESS:
        return (*flags, _NO_LIBRARIES)
    if has_sanitizers():
        return flags
    # It links handlers of its own, which end the process.
    return (*(f for f in flags if f != _UNDEFINED), "-fno-sanitize=undefined")


@functools.cache
def sanitizer_library() -> str:
    """Return AddressSanitizer's library, which must be preloaded into the process that launches kernels under it."""
    run = subprocess.run([*compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def cuda_include() -> tuple[str, ...]:
    """Return the folders of the CUDA headers."""
    if not available():
        raise DeviceError(obstacle())
    return _folders()


@functools.cache
def cache_folder() -> Path:
    """Return the folder of compiled libraries, which lies outside of the repository."""
    default = Path(tempfile.gettempdir()) / f"cuflash-cpu-device-{os.getuid()}"
    folder = Path(os.environ.get("CUFLASH_CPU_DEVICE_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _digest() -> str:
    """Digest the device's sources, CUDA's headers, the compiler and the machine, for every cache key."""
    own = [Path(folder) for folder in cuda_include() if Path(folder, HEADERS[0]).exists()]
    headers = [f for pattern in ("cuda_*16.h*", "vector_*.h*") for f in own[0].glob(pattern)]
    parts = [f.read_bytes() for f in (*sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")]), *sorted(headers))]
    parts.append(subprocess.run([*compiler(), "--version"], capture_output=True, check=True).stdout)
    parts.append(Path("/proc/cpuinfo").read_bytes().partition(b"\n\n")[0].partition(b"flags")[2].partition(b"\n")[0])
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build(texts: Mapping[str, str], flags: Sequence[str]) -> Path:
    """Compile texts, by name, into one shared library, or find it in the cache; returns its path."""
    library = cache_folder() / f"{_key(*texts.values(), *flags)}.so"
    if not library.exists():
        with _alone(library.name):
            if not library.exists():  # another process may have built it
                _build(library, texts, flags)
    return library


def once(action: Callable[[], object], *parts: str) -> None:
    """Do what the parts tell, unless it has been done before, by any process that has this cache."""
    mark = cache_folder() / f"{_key(*parts)}.done"
    if not mark.exists():
        with _alone(mark.name):
            if not mark.exists():
                action()
                mark.touch()


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keep other processes from building what has this name, as tests side by side want the same things first."""
    import fcntl  # there is none where the device does not run

    with open(cache_folder() / f"{name[:2]}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(library: Path, texts: Mapping[str, str], flags: Sequence[str]) -> None:
    # The runtime has its own handlers for all sanitizers but AddressSanitizer, so no library of theirs is linked.
    link_flags = [f for f in flags if f in ("-fsanitize=address", "-pthread", _NO_LIBRARIES)]
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        for part, text in texts.items():
            Path(folder, f"{part}.cpp").write_text(text)
        # The runtime has many parts, and whoever runs tests beside this one waits for it.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda part: _run([*_compile_command(flags), "-c", f"{part}.cpp"], folder), texts))
        objects = [f"{part}.o" for part in texts]
        libraries = "-lgcc" if _NO_LIBRARIES in flags else "-ldl"
        _run([*compiler(), "-shared", *link_flags, "-o", "out.so", *objects, libraries], folder)
        os.replace(Path(folder, "out.so"), library)


# Each library has a function that compiles its text again, with lines.
_with_lines: dict[str, Callable[[], Path]] = {}


def build_kernels(text: str, flags: Sequence[str], name: str) -> Path:
    """Compile a text that begins with ``HEADER``, which is precompiled, as it is half of the work."""
    library = _build_kernels(text, flags, name)
    _with_lines[str(library)] = functools.partial(_build_kernels, text, (*flags, *_LINES), name)
    return library


def _build_kernels(text: str, flags: Sequence[str], name: str) -> Path:
    precompiled = cache_folder() / f"header-{_key(*flags)}"
    with _alone("header"):
        if not precompiled.exists():
            _precompile_header(precompiled, flags)
    return build({name: text}, (*flags, f"-I{precompiled}"))


def _precompile_header(precompiled: Path, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        out = f"{HEADER}.gch"
        _run([*_compile_command(flags), "-x", "c++-header", "-o", out, str(FOLDER / HEADER)], folder)
        os.rename(folder, precompiled)
        os.mkdir(folder)  # for TemporaryDirectory


def _compile_command(flags: Sequence[str]) -> list[str]:
    return [*compiler(), *BASE_FLAGS, *flags, f"-I{FOLDER}", *(f"-I{f}" for f in cuda_include())]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join([*parts, _digest(), *BASE_FLAGS]).encode()).hexdigest()[:24]


def _run(command: Sequence[str], folder: str) -> None:
    # A compiler under AddressSanitizer would only be slow.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if run.returncode:
        raise DeviceError(f"{command[-1]} does not compile:\n{run.stderr[:8000]}")


@functools.cache
def runtime(address_sanitizer: bool) -> ctypes.CDLL:
    """Load the runtime library, compiled once; its symbols are visible to the kernels' libraries."""
    if address_sanitizer and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise DeviceError(f"AddressSanitizer is not loaded: start Python with LD_PRELOAD={sanitizer_library()}")
    texts = {part: f"#include <{part}.cpp>\n" for part in RUNTIME_PARTS}
    library = ctypes.CDLL(str(build(texts, RUNTIME_FLAGS[address_sanitizer])), mode=ctypes.RTLD_GLOBAL)
    library.cpu_device_launch.restype = ctypes.c_int
    return library


def with_lines(message: str) -> str:
    """Replace each ``{library+offset}`` in a message by the lines of source that it stands for."""

    def line(match: re.Match[str]) -> str:
        again = _with_lines.get(match[1])
        command = ["addr2line", "-i", "-e", str(again()) if again else match[1], match[2]]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return match[0]
        places = [place.split(" (")[0] for place in run.stdout.splitlines()]
        # The compiler puts its folder in front of the names that #line gives.
        return ", inlined at ".join(re.sub(rf"^{re.escape(str(cache_folder()))}/\w+/", "", place) for place in places)

    return re.sub(r"\{([^{}+]+)\+(0x[0-9a-f]+)\}", line, message)
