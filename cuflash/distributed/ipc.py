"""Copy engines carry arrays between GPUs of one host: a process maps another one's memory and copies from it.

The sender records an event behind the work that makes an array, and sends the event's and the memory's handles; the
receiver's stream waits for the event and copies. No multiprocessor takes part, so that attention goes on meanwhile.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict, deque
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cuflash.distributed.copies import contiguous_strides
from cuflash.distributed.links import GpuLink, Offered
from cuflash.distributed.mesh import Mesh
from cuflash.distributed.wire import GPU, ArrayRef

Array = Any
MAPPED = 64  # other processes' allocations that stay mapped; the one that was read longest ago makes room
PROBE_BYTES = 1 << 12
EVENTS_REST = 4  # calls after which an event is recorded anew
POINTER_ATTRIBUTE_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
HANDLE_BYTES = 64  # of an event, and of an allocation
PLACE = struct.Struct(f"={HANDLE_BYTES}sQQQ")


class Place(NamedTuple):
    """The place where another process finds an array."""

    handle: bytes  # of the allocation
    base: int  # its address in the process that has it
    number: int  # no other allocation of that process has had it
    offset: int  # of the array in it


class IpcLink(GpuLink):
    """A link that copies from the memory of other processes."""

    copies_rows = True

    def __init__(self, mesh: Mesh, device: int) -> None:
        import cupy

        super().__init__(mesh, device)
        self._sent: list[Array] = []
        self._free_events: list[Any] = []
        self._used_events: deque[list[Any]] = deque([[]])  # those of each call, the latest call last
        self._handles: dict[int, bytes] = {}  # of this rank's events
        self._opened_events: dict[bytes, int] = {}
        self._own = _Allocations()
        # An allocation has, by rank and base, its handle, its number and its address here.
        self._mapped: OrderedDict[tuple[int, int], tuple[bytes, int, int]] = OrderedDict()
        # Arrays in memory of other kinds of pools, which has no handle, are copied to memory of this pool.
        self._exportable = cupy.cuda.MemoryPool()

    def now(self) -> Any:
        """Record an event behind what the current stream does so far, which other processes can wait for."""
        import cupy

        with cupy.cuda.Device(self.device):
            return self._recorded()

    def offer(self, arrays: list[Array], to: int, ready: Any = None) -> Any:
        """Return the handle of the event behind the arrays, and the place of each, as bytes."""
        if not arrays:
            return None
        import cupy

        self.check_device(arrays)
        with cupy.cuda.Device(self.device):
            exported = [self._export(x) for x in arrays]
            self._sent += [kept for _, kept in exported]
            is_copied = any(kept is not x for (_, kept), x in zip(exported, arrays, strict=True))
            event = self._recorded() if ready is None or is_copied else ready
            return b"".join([self._handle_of(event), *[PLACE.pack(*place) for place, _ in exported]])

    def bring(self, offered: Offered, into: list[Array] | None, ready: Any) -> tuple[list[Array], Any]:
        """Copy behind the sender's event, while this rank's own work goes on."""
        import cupy

        stream = self.stream
        with cupy.cuda.Device(self.device):
            arrays = [self.empty(ref) for ref in offered.refs] if into is None else into
            cupy.cuda.runtime.streamWaitEvent(stream.ptr, self._open_event(offered.offer[:HANDLE_BYTES]))
            if into is not None:
                stream.wait_event(self._recorded() if ready is None else ready)
            places = PLACE.iter_unpack(offered.offer[HANDLE_BYTES:])
            for ref, told, x in zip(offered.refs, places, arrays, strict=True):
                if ref.nbytes:
                    place = Place(*told)
                    origin = self._map(offered.source, place) + place.offset
                    strides = ref.strides or contiguous_strides(ref.shape, x.itemsize)
                    self.landing.copy(x, origin, strides)
            event = stream.record(cupy.cuda.Event(disable_timing=True))
        self._arrivals.append(event)
        return arrays, event

    def finish(self) -> None:
        """Let the current stream wait for the events behind what the others have copied."""
        import cupy

        with cupy.cuda.Device(self.device):
            event = self._event()
            self.stream.record(event)
            told = self.gather(self._handle_of(event))
            stream = cupy.cuda.get_current_stream()
            for rank, handle in enumerate(told):
                if rank != self.mesh.rank:
                    cupy.cuda.runtime.streamWaitEvent(stream.ptr, self._open_event(handle))
        self._arrivals.clear()
        self.release()

    def release(self) -> None:
        """Forget what was sent, as it has been read; the events of some calls ago may be recorded anew."""
        self._sent.clear()
        self._used_events.append([])
        if len(self._used_events) > EVENTS_REST:
            self._free_events += self._used_events.popleft()

    def abort(self) -> None:
        """Do nothing: copies that wait for an event of a rank that failed end with this process."""

    def close(self) -> None:
        """Unmap what other processes have lent; after a failure that is left to the end of this process."""
        import cupy

        with suppress(RuntimeError, TimeoutError), cupy.cuda.Device(self.device):
            while self._mapped:
                self._unmap_oldest()
        self._sent.clear()

    def _recorded(self) -> Any:
        """Record an event behind what the current stream of this rank's GPU, which is the current one, does so far."""
        import cupy

        event = self._event()
        cupy.cuda.get_current_stream().record(event)
        return event

    def _event(self) -> Any:
        """Return an event that other processes can wait for, and that is not recorded again before some barriers.

        Whoever waits for an event waits for its latest record: with one event for all, the ranks of a ring could come
        to wait for each other.
        """
        import cupy

        event = self._free_events.pop() if self._free_events else None
        if event is None:
            event = cupy.cuda.Event(disable_timing=True, interprocess=True)
        self._used_events[-1].append(event)
        return event

    def _handle_of(self, event: Any) -> bytes:
        import cupy

        handle = self._handles.get(event.ptr)
        if handle is None:
            handle = self._handles[event.ptr] = cupy.cuda.runtime.ipcGetEventHandle(event.ptr)
        return handle

    def _export(self, x: Array) -> tuple[Place, Array]:
        """Return the place of x, and the array to keep alive."""
        import cupy

        if not x.nbytes:
            return Place(b"", 0, 0, 0), x
        try:
            return self._own.place_of(x.data.ptr), x
        except RuntimeError:  # CUDA's runtime and its driver raise different ones
            with cupy.cuda.using_allocator(self._exportable.malloc):
                copy = x.copy()
            return self._own.place_of(copy.data.ptr), copy

    def _map(self, source: int, place: Place) -> int:
        """Return the address here of another process's allocation."""
        import cupy

        kept = self._mapped.pop((source, place.base), None)
        # The other process may have freed the allocation, and allocated anew in its place.
        if kept is not None and kept[:2] != (place.handle, place.number):
            self._unmap(kept[2])
            kept = None
        if kept is None:
            while len(self._mapped) >= MAPPED:
                self._unmap_oldest()
            flags = cupy.cuda.runtime.cudaIpcMemLazyEnablePeerAccess
            kept = place.handle, place.number, cupy.cuda.runtime.ipcOpenMemHandle(place.handle, flags)
        self._mapped[source, place.base] = kept
        return kept[2]

    def _unmap_oldest(self) -> None:
        _, (_, _, pointer) = self._mapped.popitem(last=False)
        self._unmap(pointer)

    def _unmap(self, pointer: int) -> None:
        import cupy

        self.settle()  # copies from there are done
        cupy.cuda.runtime.ipcCloseMemHandle(pointer)

    def _open_event(self, handle: bytes) -> int:
        import cupy

        if handle not in self._opened_events:
            self._opened_events[handle] = cupy.cuda.runtime.ipcOpenEventHandle(handle)
        return self._opened_events[handle]


def connect(mesh: Mesh, device: int) -> tuple[IpcLink | None, str]:
    """Return a link that has carried an array between every two ranks, or None and why; all ranks get the same."""
    import cupy

    link: IpcLink | None = None
    offers: list[Any] = []
    problem = None
    try:
        link = IpcLink(mesh, device)
        own = cupy.asarray(_probe_of(mesh.rank))
        offers = [link.offer([own], to) for to in range(mesh.world)]
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    told = mesh.gather((problem, offers))
    problems = [text for text, _ in told]
    if link is not None and not any(problems):
        problem = _probe(link, [offers[mesh.rank] for _, offers in told])
    problems = mesh.gather(problem)
    for rank, text in enumerate(problems):
        if text is not None:
            if link is not None:
                link.close()
            return None, f"rank {rank}: {text}"
    assert link is not None
    link.release()
    return link, ""


def _probe(link: IpcLink, offers: list[Any]) -> str | None:
    """Return what is wrong with the arrays that every other rank offers; None where nothing is."""
    import cupy

    ref = ArrayRef(GPU, 0, "uint8", (PROBE_BYTES,))
    try:
        for source, offered in enumerate(offers):
            if source != link.mesh.rank:
                (x,), _ = link.bring(Offered(None, [], [ref], offered, source), None, None)
                link.settle()
                if not np.array_equal(cupy.asnumpy(x), _probe_of(source)):
                    return f"GPU {link.device} read something else than what rank {source} wrote"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _probe_of(rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the array that a rank offers first."""
    return np.full(PROBE_BYTES, rank % 256, np.uint8)


class _Allocations:
    """Memory of this process's GPU, as other processes find it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base, self._size, self._number = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        self._targets = [ctypes.byref(x) for x in (self._base, self._size, self._number)]
        self._handles: dict[int, tuple[int, bytes]] = {}  # an allocation's number and handle by its address

    def place_of(self, address: int) -> Place:
        """Return the place of an address; RuntimeError for memory that has no handle."""
        import cupy

        base, number = self._find(address)
        known = self._handles.get(base)
        if known is None or known[0] != number:
            known = self._handles[base] = number, cupy.cuda.runtime.ipcGetMemHandle(base)
        return Place(known[1], base, number, address - base)

    def _find(self, address: int) -> tuple[int, int]:
        """Return where the allocation with an address begins, and its number, as handles are of whole ones.

        An allocation in the place of one that was freed has another number.
        """
        driver = _driver()
        base, size, number = self._targets
        with self._lock:
            status = driver.cuMemGetAddressRange_v2(base, size, address)
            status = status or driver.cuPointerGetAttribute(number, POINTER_ATTRIBUTE_BUFFER_ID, address)
            if not status:
                return self._base.value, self._number.value
        raise RuntimeError(f"expected to learn the allocation of address {address:#x}, got the driver's error {status}")


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuMemGetAddressRange_v2.argtypes = pointer, pointer, ctypes.c_uint64
    driver.cuPointerGetAttribute.argtypes = pointer, ctypes.c_int, ctypes.c_uint64
    return driver
