"""A GPU as `device.Device`, with one stream of copies in and one of copies out besides the caller's current stream.

Pinned memory of the host is copied where it lies. Other memory goes through pinned staging buffers, into which several
threads copy while the GPU works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import cupy
import numpy as np

from cuflash import forks
from cuflash.offload.device import Device, Event, Outgoing
from cuflash.offload.pooled_rows import PooledRows

Array = Any
# Each direction has so many staging buffers, for k and v of two chunks.
_NUM_STAGES = 4
# One thread copies about 10 GB/s, a link takes 55; a copy smaller than this is not worth a thread's wake-up.
_MOST_THREADS = 8
_LEAST_BYTES = 1 << 21
# A copy of so many bytes hides what it costs to begin one; the GPU's own kernel gathers shorter runs of a pool's rows.
_LEAST_RUN = 1 << 20
_HOST_MEMORY = 1  # cudaMemoryTypeHost


class _Stage:
    """A pinned buffer, and the event of the last copy that used it."""

    def __init__(self, num_bytes: int) -> None:
        self.event: Any = None
        self._bytes = np.frombuffer(cupy.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)

    def holds(self, num_bytes: int) -> bool:
        """Return True if the buffer is large enough."""
        return self._bytes.size >= num_bytes

    def like(self, x: Array) -> Array:
        """Return its beginning as an array of x's shape and dtype."""
        return self._bytes[: x.nbytes].view(x.dtype).reshape(x.shape)


class _Copy(Outgoing):
    """A copy to the host on its stream, and the rest of the way on the host."""

    def __init__(self, source: Array, event: Any, then: Callable[[], None] | None) -> None:
        self._source: Array | None = source  # its memory must not be used again before the copy is done
        self._event, self._then = event, then

    def finish(self) -> None:
        """Wait for the stream, then bring the numbers from staging to their place."""
        self._event.synchronize()
        self._source = None
        if self._then is not None:
            self._then()


class GpuDevice(Device):
    """The current device, whose computation runs on the current stream."""

    xp = cupy
    is_host = False

    def __init__(self) -> None:
        self._incoming = cupy.cuda.Stream(non_blocking=True)
        self._outgoing = cupy.cuda.Stream(non_blocking=True)
        self._stages: dict[Any, deque[_Stage]] = {self._incoming: deque(), self._outgoing: deque()}
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "cuflash")

    def empty(self, count: int, dtype: Any) -> Array:
        """Allocate from the current stream's pool; copies wait for an event behind what used the memory before."""
        return cupy.empty(count, dtype)

    def bring(self, memory: Array, source: Array, after: Event) -> tuple[Array, Event]:
        """Copy on the stream of copies in; the host waits only for a staging buffer that is still in use."""
        target = memory[: source.size].reshape(source.shape)
        self._incoming.wait_event(after)
        stage = None
        if not _is_direct(source):
            stage = self._next_stage(self._incoming, source.nbytes)
            staged = stage.like(source)
            self._copy_on_host(staged, source)
            source = staged
        for own, its in zip(target, source, strict=True):
            _copy_async(own.data.ptr, its.ctypes.data, its.nbytes, to_host=False, stream=self._incoming)
        event = _record(self._incoming)
        if stage is not None:
            stage.event = event
        return target, event

    def brings_alone(self, source: Array) -> bool:
        """Return True for pinned memory, from which copies wait for each other on streams alone."""
        return _is_direct(source)

    def take(self, target: Array, source: Array) -> Outgoing:
        """Copy on the stream of copies out, behind the computation so far."""
        self._outgoing.wait_event(self.mark())
        is_direct = _is_direct(target)
        stage = None if is_direct else self._next_stage(self._outgoing, target.nbytes)
        landing = target if stage is None else stage.like(target)
        for own, its in zip(landing, source, strict=True):
            _copy_async(own.ctypes.data, its.data.ptr, its.nbytes, to_host=True, stream=self._outgoing)
        event = _record(self._outgoing)
        if stage is None:
            return _Copy(source, event, None)
        stage.event = event
        return _Copy(source, event, lambda: self._copy_on_host(target, landing))

    def mark(self) -> Event:
        """Record an event on the caller's current stream."""
        return _record(cupy.cuda.get_current_stream())

    def wait(self, event: Event) -> None:
        """Let the current stream wait, and not the host."""
        cupy.cuda.get_current_stream().wait_event(event)

    def finish(self) -> None:
        """Wait for the current stream."""
        cupy.cuda.get_current_stream().synchronize()

    def put(self, x: Array) -> Array:
        """Copy on the current stream."""
        return cupy.asarray(x)

    def get(self, x: Array) -> Array:
        """Copy on the current stream, which the host waits for."""
        return cupy.asnumpy(x)

    def close(self) -> None:
        """Wait for all copies before staging buffers go back to CuPy's pool, which knows no streams."""
        for stream, stages in self._stages.items():
            stream.synchronize()
            stages.clear()
        self._threads.shutdown()

    def _next_stage(self, stream: Any, num_bytes: int) -> _Stage:
        """Return the buffer whose last copy is longest ago, when it is free to be used."""
        stages = self._stages[stream]
        stage = stages.popleft() if len(stages) == _NUM_STAGES else None
        if stage is not None and stage.event is not None:
            stage.event.synchronize()
        if stage is None or not stage.holds(num_bytes):
            stage = _Stage(num_bytes)
        stages.append(stage)
        return stage

    def _copy_on_host(self, target: Array, source: Array) -> None:
        """Copy arrays (batch, keys, heads, dim) by threads, each of which copies some keys of each sequence."""
        # NumPy copies integers without its lock, and other libraries' dtypes with it.
        target, source = (x.view(f"u{x.dtype.itemsize}") for x in (target, source))
        keys = source.shape[1]
        count = max(1, min(_MOST_THREADS, source.nbytes // _LEAST_BYTES, keys))
        edges = [keys * n // count for n in range(count + 1)]
        pieces = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
        copies = [self._threads.submit(np.copyto, target[:, piece], source[:, piece]) for piece in pieces[1:]]
        np.copyto(target[:, pieces[0]], source[:, pieces[0]])
        for copy in copies:
            copy.result()

    def bring_rows(self, memory: Array, source: PooledRows, after: Event) -> tuple[Array, Event]:
        """Let the GPU take rows from a pinned pool itself; threads gather those of other pools into staging buffers."""
        target = memory[: source.size].reshape(source.shape)
        self._incoming.wait_event(after)
        if not _is_direct(source.pool):
            stage = self._next_stage(self._incoming, source.nbytes)
            staged = stage.like(source)
            source.copy_to(staged, self._threads, max(1, min(_MOST_THREADS, source.nbytes // _LEAST_BYTES)))
            _copy_async(target.data.ptr, staged.ctypes.data, staged.nbytes, to_host=False, stream=self._incoming)
            stage.event = _record(self._incoming)
            return target, stage.event
        runs = source.runs() if source.pool.flags.c_contiguous else []
        if 0 < len(runs) * _LEAST_RUN <= source.nbytes:
            for run in runs:
                own, rows = target[run.sequence, run.first : run.stop], source.view(run)
                _copy_async(own.data.ptr, rows.ctypes.data, rows.nbytes, to_host=False, stream=self._incoming)
        else:
            _kernels().gather(target, source.pool, source.pages, source.first, self._incoming.ptr)
        return target, _record(self._incoming)


@cache
def _kernels() -> ModuleType:
    with forks.LOCK:  # a child cannot end an import that another thread of its parent began
        return import_module("cuflash.gpu.host_pages")


def _record(stream: Any) -> Any:
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def _copy_async(target: int, source: int, num_bytes: int, *, to_host: bool, stream: Any) -> None:
    runtime = cupy.cuda.runtime
    kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
    if num_bytes:
        runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)


def _is_direct(x: Array) -> bool:
    """Return True if the GPU can copy x where it lies: it is pinned, and each sequence's chunk is contiguous."""
    if not x.size or not x[0].flags.c_contiguous:
        return False
    try:
        return bool(cupy.cuda.runtime.pointerGetAttributes(x.ctypes.data).type == _HOST_MEMORY)
    except cupy.cuda.runtime.CUDARuntimeError:  # an old driver knows nothing of memory that is not pinned
        return False
