"""Constants + headers + entry -> one source text -> a loaded module -> launch. Nothing else compiles or launches.

Every header is inlined: CuPy's disk cache is keyed by source text and options.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from cuflash.block_store import CONSTANTS
from cuflash.params import driver, encode_tensor_map, layout_asserts
from cuflash.problem import MOST_KEPT

Array = Any
OPTIONS = ("--std=c++17",)
_OWN_ARCH = {"sm90": ("-arch=sm_90a",)}  # with wgmma
# Before, NVRTC takes CuPy's -arch beside ours for an error.
OWN_ARCH_SINCE = (12, 9)
# Set for tests: Hopper takes the kernels of other GPUs.
WITHOUT_WGMMA = "CUFLASH_WITHOUT_WGMMA"
_INCLUDE = re.compile(r'^#include "([^"]+)"[ \t]*$', re.MULTILINE)
_PRELUDE = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#define DEVICE __device__ __forceinline__\n"
_DEFAULT_SMEM_BYTES = 48 * 1024
# CUlaunchAttributeID, and the first driver that captures such a launch.
_PROGRAMMATIC_STREAM_SERIALIZATION, _EARLY_SINCE = 6, 12030
# CUstreamCaptureMode: allocations do not end a capture.
_RELAXED = 2


class LoadedKernel:
    """A loaded entry; the tests have theirs on the CPU."""

    def __init__(self, cupy: Any, index: int, function: Any) -> None:
        self._cupy, self._index, self._function = cupy, index, function

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch it; `shared_mem` is dynamic, in bytes."""
        self._function(grid, block, args, shared_mem=shared_mem)

    def bound(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        sizes: Sequence[int],
        smem_bytes: int,
        begins_early: bool = False,
    ) -> Callable[[int, int], None]:
        """Its launch with arguments of these sizes: call it with the address of their addresses, and a stream."""
        driver = self._cupy.cuda.driver
        launch: Callable[..., Any] = driver.launchKernel
        shape: tuple[int, ...] = (self._function.ptr, *(*grid, 1, 1)[:3], *(*block, 1, 1)[:3], smem_bytes)
        if begins_early and self._cupy.cuda.runtime.driverGetVersion() >= _EARLY_SINCE:
            shape, launch = (), _early_launch(shape, driver.CUDADriverError)

        def enqueue(arguments: int, stream: int) -> None:
            try:
                launch(*shape, stream, arguments, 0)
            except driver.CUDADriverError:
                if driver.ctxGetCurrent():
                    raise
                _begin_thread(self._cupy, self._index)
                launch(*shape, stream, arguments, 0)

        return enqueue


class Device:
    """One GPU under CuPy; the tests have theirs on the CPU."""

    def __init__(self, index: int) -> None:
        import cupy

        self.namespace = cupy  # the array module
        self.index = index
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.name: str = properties["name"].decode()
        self.num_sms: int = properties["multiProcessorCount"]
        self.smem_limit: int = properties["sharedMemPerBlockOptin"]  # bytes that one thread block may use
        self.capability: tuple[int, int] = (properties["major"], properties["minor"])
        self.has_wgmma = (  # runs the kernels of cuda_src/sm90
            self.capability == (9, 0)
            and cupy.cuda.nvrtc.getVersion() >= OWN_ARCH_SINCE
            and not os.environ.get(WITHOUT_WGMMA)
        )
        # cupy.empty, quicker: of shape, dtype, and memory of `scratch` if it is to lie there.
        self.empty: Callable[..., Array] = cupy.ndarray
        self._alloc = cupy.cuda.alloc
        self._current_device = cupy.cuda.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing

    def tensor_map(self, address: int, *description: Any, once: bool = False) -> Array:
        """Describe an array for TMA: `params.encode_tensor_map`."""
        if not self.namespace.cuda.driver.ctxGetCurrent():
            _begin_thread(self.namespace, self.index)
        return encode_tensor_map(address, *description, once=once)

    def load(self, source: str, entry: str, smem_bytes: int, options: tuple[str, ...] = ()) -> LoadedKernel:
        """Compile `source`, or take it from a cache, and return its entry for the current device."""
        cupy = self.namespace
        try:
            kernel = cupy.RawModule(code=source, options=OPTIONS + options).get_function(entry)
        except cupy.cuda.compiler.CompileException as error:
            raise RuntimeError(f"cuflash: kernel {entry} does not compile:\n{error}") from error
        if smem_bytes > _DEFAULT_SMEM_BYTES:
            kernel.max_dynamic_shared_size_bytes = smem_bytes
        return LoadedKernel(cupy, self.index, kernel.kernel)  # a RawKernel looks for its device at each launch

    def scratch(self, size: int) -> tuple[int, Any]:
        """The address of so many uninitialised bytes, and what keeps them; quicker than an array."""
        memory = self._alloc(size)
        return memory.ptr, memory

    def lasting(self, size: int) -> tuple[int, Any]:
        """As `scratch`, of memory that is no pool's, also while a stream is captured."""
        cuda = self.namespace.cuda
        mode = ctypes.c_int(_RELAXED)
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            memory = cuda.MemoryPointer(cuda.Memory(size), 0)
        finally:
            driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return memory.ptr, memory

    def pointer(self, x: Array) -> int:
        """Address of an array's first element."""
        return x.data.ptr

    def is_current(self) -> bool:
        """Whether it is the current device."""
        return self._current_device() == self.index

    def stream(self) -> int:
        """Handle of the current stream."""
        return self._current_stream(self.index).ptr

    def capture(self, stream: int) -> int:
        """A number of the capture into a graph that a stream's work goes to; 0 if there is none."""
        # The legacy default stream is never captured.
        return _capture_of(stream) if stream != 0 and self._is_capturing(stream) else 0


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, and behind it the one attribute that it points to."""

    _fields_ = (
        ("shape", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
        ("attribute", ctypes.c_uint64 * 9),
    )


def _early_launch(shape: tuple[int, ...], failure: type[Exception]) -> Callable[[int, int, int], None]:
    """`driver.launchKernel` behind its shape, of a kernel that begins early."""
    launch = driver().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4

    @lru_cache(maxsize=MOST_KEPT)
    def config(stream: int) -> tuple[int, Any]:
        made = _LaunchConfig(shape[1:], stream, None, 1, (_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        made.attributes = ctypes.addressof(made) + _LaunchConfig.attribute.offset
        return ctypes.addressof(made), made

    def enqueue(stream: int, arguments: int, _: int) -> None:
        status = launch(config(stream)[0], shape[0], arguments, None)
        if status:
            raise failure(status)

    return enqueue


def _begin_thread(cupy: Any, index: int) -> None:
    """Give a new thread what calls of the driver want: a current context."""
    cupy.cuda.runtime.setDevice(index)
    cupy.cuda.runtime.memGetInfo()  # makes it


def _capture_of(stream: int) -> int:
    status, number = ctypes.c_int(), ctypes.c_uint64()
    nothing = ctypes.c_void_p()
    error = driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), nothing, nothing, nothing
    )
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo: error {error}")
    return number.value if status.value else 0


_device = cache(Device)


def device_of(x: Array) -> Device:
    """The device of an array."""
    return _device(x.data.device_id)


def get(entry_file: str, entry: str, constants: Any, device: Device | None = None, smem_bytes: int = 0) -> LoadedKernel:
    """The function `entry` of cuda_src/<entry_file>.cu, loaded once per process and device (the current GPU).

    Of the constants ``block_m=64`` becomes ``constexpr int BLOCK_M = 64;``, a str a type alias.
    """
    if device is None:
        import cupy

        device = _device(cupy.cuda.runtime.getDevice())
    key = (entry_file, entry, tuple(constants.items()) if isinstance(constants, Mapping) else constants, device)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = device.load(
            source_of(entry_file, constants), entry, smem_bytes, _OWN_ARCH.get(entry_file.partition("/")[0], ())
        )
    return kernel


_kernels: dict[Any, LoadedKernel] = {}


@dataclass(frozen=True)
class Report:
    """What the assembler says of one kernel."""

    registers: int
    spill_bytes: int
    static_smem_bytes: int
    warnings: tuple[str, ...]
    seconds: float
    cubin: bytes


def compile_for(arch: str, source: str, name: str) -> Report:
    """Compile for `arch` (``"sm_90a"``, ...) by NVRTC alone; RuntimeError with the log if it fails."""
    from cuda.pathfinder import find_nvidia_header_directory
    from cupy.cuda import nvrtc

    headers = find_nvidia_header_directory("cudart")
    include = () if headers is None else (f"-I{headers}",)
    start = time.perf_counter()
    program = nvrtc.createProgram(source, f"{name}.cu", (), ())
    try:
        # -ftz=true is what CuPy adds behind the options of a RawModule.
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS, "-ftz=true", "--ptxas-options=-v", *include))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{name} does not compile for {arch}:\n{nvrtc.getProgramLog(program)}") from error
    log: str = nvrtc.getProgramLog(program)
    cubin = nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
    return Report(
        registers=max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        static_smem_bytes=max((int(n) for n in re.findall(r"(\d+) bytes smem", log)), default=0),
        # Deprecated is an architecture, not the kernel.
        warnings=tuple(
            line
            for line in log.splitlines()
            if ("warning" in line.lower() and "deprecated" not in line) or "(C75" in line
        ),
        seconds=time.perf_counter() - start,
        cubin=cubin,
    )


def source_of(entry_file: str, constants: Any) -> str:
    """A kernel's source text."""
    paths = entry_file if "." in entry_file else f"{entry_file}.cu"
    text = _PRELUDE + _constants_text(constants) + inlined(paths)
    return text + (layout_asserts() if "struct AttentionParams" in text else "") + "\n"


def _constants_text(constants: Any) -> str:
    if is_dataclass(constants):
        values = {f.name: getattr(constants, f.name) for f in fields(constants) if f.name != "entry"} | CONSTANTS
    else:
        values = dict(constants)
    lines = []
    for name, value in values.items():
        if isinstance(value, bool):
            lines.append(f"[[maybe_unused]] constexpr bool {name.upper()} = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"[[maybe_unused]] constexpr int {name.upper()} = {value};")
        elif isinstance(value, str):
            lines.append(f"using {name.title().replace('_', '')} = {value};")
        else:
            raise TypeError(f"constant {name}: expected bool, int or str, got {type(value).__name__}")
    return "\n".join(lines) + "\n"


def inlined(paths: str) -> str:
    """The text of some files, every quoted include inlined where it is first met."""
    seen: set[str] = set()
    return "".join(_inlined(path, seen) for path in paths.split())


def _inlined(path: str, seen: set[str]) -> str:
    seen.add(path)
    text = _read(path)
    folder = path.rpartition("/")[0]
    pieces = [f'#line 1 "cuda_src/{path}"\n']
    end = 0
    for match in _INCLUDE.finditer(text):
        pieces.append(text[end : match.start()])
        target = f"{folder}/{match[1]}" if folder and not match[1].startswith("../") else match[1].removeprefix("../")
        if target not in seen:
            pieces.append(_inlined(target, seen))
        end = match.end()
        line = text.count("\n", 0, end) + 1
        pieces.append(f'\n#line {line} "cuda_src/{path}"')
    pieces.append(text[end:])
    return "".join(pieces)


def _read(path: str) -> str:
    return files("cuflash.cuda_src").joinpath(*path.split("/")).read_text(encoding="utf-8")
