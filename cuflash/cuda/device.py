"""A GPU under CuPy, whose kernels are loaded and launched here and nowhere else."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from cuflash import forks
from cuflash.cuda import ahead, refusals
from cuflash.cuda.compile import OPTIONS
from cuflash.cuda.driver import driver, encode_tensor_map
from cuflash.cuda.source import Constants, source_of
from cuflash.kept import Kept, kept

Array = Any
# Files whose path says that they use wgmma are compiled with this option.
_NEEDS_WGMMA, _OWN_ARCH = "sm90", ("-arch=sm_90a",)
# Older versions of NVRTC take CuPy's -arch next to ours for an error.
OWN_ARCH_SINCE = (12, 9)
# Tests set this variable, with which Hopper takes the kernels of other GPUs.
WITHOUT_WGMMA = "CUFLASH_WITHOUT_WGMMA"
_DEFAULT_SMEM_BYTES = 48 * 1024
# These are a CUlaunchAttributeID, and the first driver that captures such a launch.
_PROGRAMMATIC_STREAM_SERIALIZATION, _EARLY_SINCE = 6, 12030
# Allocations do not end a capture in this CUstreamCaptureMode.
_RELAXED = 2


class LoadedKernel:
    """A loaded entry of a kernel; the tests' kernels run on the CPU."""

    def __init__(self, cupy: Any, index: int, function: Any, local_bytes: int) -> None:
        self._cupy, self._index, self._function = cupy, index, function
        self.local_bytes = local_bytes  # of a thread: spilled registers, and arrays that are indexed at run time

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch the kernel with so many bytes of dynamic shared memory."""
        self._function(grid, block, args, shared_mem=shared_mem)

    def bound(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        sizes: Sequence[int],
        smem_bytes: int,
        begins_early: bool = False,
    ) -> Callable[[int, int], None]:
        """Return a function (address of the arguments' addresses, stream) that launches the kernel on a grid.

        `sizes` are the arguments' bytes, `smem_bytes` the dynamic shared memory of a thread block.
        """
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
    """One GPU under CuPy; the tests' device is the CPU."""

    def __init__(self, index: int) -> None:
        import cupy

        self.namespace = cupy  # the array module
        self.index = index
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.name: str = properties["name"].decode()
        self.num_sms: int = properties["multiProcessorCount"]
        self.smem_limit: int = properties["sharedMemPerBlockOptin"]  # bytes that one thread block may use
        self.capability: tuple[int, int] = (properties["major"], properties["minor"])
        self.has_wgmma = (  # the GPU runs the kernels of cuda_src/sm90
            self.capability == (9, 0)
            and cupy.cuda.nvrtc.getVersion() >= OWN_ARCH_SINCE
            and not os.environ.get(WITHOUT_WGMMA)
        )
        # These make machine code of a source, the driver where NVRTC does not know the GPU. The text is empty on the
        # tests' devices, which have no registers to spill.
        versions = *cupy.cuda.nvrtc.getVersion(), cupy.cuda.runtime.driverGetVersion()
        self.compiler = "sm_{}{}, NVRTC {}.{}, driver {}".format(*self.capability, *versions)
        # This makes an empty array of a shape and dtype, quicker than cupy.empty; a third argument may be memory of
        # `scratch`.
        self.empty: Callable[..., Array] = cupy.ndarray
        self._alloc = cupy.cuda.alloc
        self._current_device = cupy.cuda.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing

    def tensor_map(self, address: int, *description: Any, once: bool = False) -> Array:
        """Describe an array for TMA, as `driver.encode_tensor_map` does."""
        if not self.namespace.cuda.driver.ctxGetCurrent():
            _begin_thread(self.namespace, self.index)
        return encode_tensor_map(address, *description, once=once)

    def load(self, source: str, entry: str, smem_bytes: int, options: tuple[str, ...] = ()) -> LoadedKernel:
        """Compile `source`, or take it from a cache, and return its entry for the current device."""
        cupy = self.namespace
        try:
            with _begin_compiler():
                kernel = cupy.RawModule(code=source, options=OPTIONS + options).get_function(entry)
        except cupy.cuda.compiler.CompileException as error:
            raise RuntimeError(f"cuflash: kernel {entry} does not compile:\n{error}") from error
        if smem_bytes > _DEFAULT_SMEM_BYTES:
            kernel.max_dynamic_shared_size_bytes = smem_bytes
        # A RawKernel looks for its device at each launch.
        return LoadedKernel(cupy, self.index, kernel.kernel, kernel.local_size_bytes)

    def begin_thread(self) -> None:
        """Let a thread load kernels for this device, also while others capture graphs."""
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
        _begin_thread(self.namespace, self.index)

    def scratch(self, size: int) -> tuple[int, Any]:
        """Return the address of so many uninitialised bytes, and the object that keeps them; quicker than an array."""
        memory = self._alloc(size)
        return memory.ptr, memory

    def lasting(self, size: int) -> tuple[int, Any]:
        """Return the address of bytes that are no pool's, and their keeper; a stream may be captured meanwhile."""
        cuda = self.namespace.cuda
        mode = ctypes.c_int(_RELAXED)
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            memory = cuda.MemoryPointer(cuda.Memory(size), 0)
        finally:
            driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return memory.ptr, memory

    def pointer(self, x: Array) -> int:
        """Return the address of an array's first element."""
        return x.data.ptr

    def is_current(self) -> bool:
        """Return True if this is the current device."""
        return self._current_device() == self.index

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return self._current_stream(self.index).ptr

    def capture(self, stream: int) -> int:
        """Return a number of the capture into a graph that a stream's work goes to; 0 if there is none."""
        # The legacy default stream is never captured.
        return _capture_of(stream) if stream != 0 and self._is_capturing(stream) else 0


@contextmanager
def _begin_compiler() -> Iterator[None]:
    """Let the first compilation of a process be alone: two threads cannot load NVRTC's built-ins at once."""
    if _first.is_done:
        yield
        return
    with _first.lock:
        yield
        _first.is_done = True


class _First:
    """The lock under which NVRTC compiles for the first time, and whether it has."""

    def __init__(self) -> None:
        self.lock, self.is_done = threading.Lock(), False


_first = _First()
forks.in_child(_first.__init__)  # type: ignore[misc]


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
    """Return what does as `driver.launchKernel` with this shape, for a kernel that begins early."""
    launch = driver().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4

    @kept
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
    """Give a new thread a current context, which calls of the driver want."""
    cupy.cuda.runtime.setDevice(index)
    cupy.cuda.runtime.memGetInfo()  # makes the context


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
    """Return the device of an array."""
    return _device(x.data.device_id)


class Text(NamedTuple):
    """A kernel before it is compiled: a function of some files of cuda_src, as `source_of` joins them."""

    paths: str
    function: str
    constants: Constants
    generated: Mapping[str, str] = {}

    def key(self, device: Device) -> Any:
        """Return what tells the loaded kernel from all others."""
        return self.paths, self.function, tuple(self.constants.items()), tuple(self.generated.values()), device

    def load(self, device: Device, smem_bytes: int) -> LoadedKernel:
        """Compile the kernel for a device; `get` does it once."""
        own_arch = _OWN_ARCH if _NEEDS_WGMMA in self.paths else ()
        return device.load(self.source, self.function, smem_bytes, own_arch)

    @property
    def source(self) -> str:
        """The text for the compiler."""
        return source_of(self.paths, self.constants, self.generated)


def get(
    paths: str,
    function: str,
    constants: Constants,
    device: Device | None = None,
    smem_bytes: int = 0,
    generated: Mapping[str, str] | None = None,
) -> LoadedKernel:
    """Load a function of some files of cuda_src, once per process and device (the current GPU).

    `paths`, `constants` and `generated` are those of `source_of`; `smem_bytes` is the dynamic shared memory of a block.
    """
    if device is None:
        import cupy

        device = _device(cupy.cuda.runtime.getDevice())
    text = Text(paths, function, constants, generated or {})
    return _kernels.get(text.key(device)) or _load_once(text, device, smem_bytes)


def _load_once(text: Text, device: Device, smem_bytes: int) -> LoadedKernel:
    """Load a kernel, or wait for the thread that is loading it."""
    key = text.key(device)
    ended = threading.Event()
    other = _loading.setdefault(key, ended)
    if other is not ended:
        other.wait()
        # Where the other thread has failed, this one meets the error itself.
        return _kernels.get(key) or text.load(device, smem_bytes)
    try:
        with ahead.compiling():
            kernel = _kernels[key] = text.load(device, smem_bytes)
    finally:
        _loading.pop(key, None)
        ended.set()
    return kernel


def spilled_bytes(text: Text, device: Device, smem_bytes: int, by_design: int, words: str) -> int:
    """Return the bytes of local memory of a kernel beyond those it has `by_design`: 0 where it spills no registers.

    The kernel is loaded, unless this or an earlier process has found that it spills; `words` tell users which it is.
    """
    key = text.key(device)
    found = _spilled.get(key)
    if found is None:
        found = _spilled[key] = _find_spilled(text, device, smem_bytes, by_design, words)
    return found


def _find_spilled(text: Text, device: Device, smem_bytes: int, by_design: int, words: str) -> int:
    key = text.key(device)
    source = text.source if key not in _kernels else ""
    if source and (noted := refusals.known(source, device.compiler)):
        return noted
    local_bytes = (_kernels.get(key) or _load_once(text, device, smem_bytes)).local_bytes
    if local_bytes <= by_design:
        return 0
    refusals.note(source or text.source, refusals.Refusal(words, device.compiler, local_bytes))
    return local_bytes


_kernels: Kept[Any, LoadedKernel] = Kept()
_spilled: Kept[Any, int] = Kept()
_loading: dict[Any, threading.Event] = {}  # of kernels that a thread is loading
forks.in_child(_loading.clear)
