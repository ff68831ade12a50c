"""Links carry CuPy arrays from process to process; connections carry everything else."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from cuflash import interop
from cuflash.distributed.mesh import MESSAGE, Mesh
from cuflash.distributed.wire import ArrayRef

Array = Any
SPIN_SECONDS, NAP_SECONDS = 1e-3, 1e-4  # a wait for the GPU asks without a pause at first, then after naps


class Link(ABC):
    """The way of one rank's GPU arrays to the others and back."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @abstractmethod
    def offer(self, arrays: list[Array], to: int) -> Any:
        """Have contiguous arrays sent; the returned value travels with the message to the other's `bring`."""

    @abstractmethod
    def bring(self, refs: list[ArrayRef], offered: Any, source: int) -> tuple[list[Array], Any]:
        """Return the arrays that a rank offered, and the event behind their arrival."""

    def take(self, source: int) -> tuple[Any, list[Array], list[Array], Any]:
        """Return the next message of a rank, its NumPy arrays, its CuPy arrays, and the event behind these.

        The event is None where they are ready for the current stream.
        """
        (offered, message, refs), host = self.mesh.take(source, MESSAGE)
        if not refs:
            return message, host, [], None
        return message, host, *self.bring(refs, offered, source)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return self.mesh.gather(value)

    def barrier(self) -> None:
        """Wait until every rank is here and has read what it received."""
        self.gather(None)

    @abstractmethod
    def abort(self) -> None:
        """End work that another rank may never join."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class HostLink(Link):
    """The link of a rank without a GPU."""

    def offer(self, arrays: list[Array], to: int) -> Any:
        """Raise an error for CuPy arrays, which have no way from here."""
        if arrays:
            raise ValueError(
                "message: expected NumPy arrays, as this communicator has no GPU, got CuPy arrays; from_environment "
                "takes a GPU where it finds one, or by device="
            )

    def bring(self, refs: list[ArrayRef], offered: Any, source: int) -> tuple[list[Array], Any]:
        """Raise an error for CuPy arrays, for which this rank has no place."""
        raise ValueError(f"message: expected NumPy arrays of rank {source}, as this rank has no GPU, got CuPy arrays")

    def abort(self) -> None:
        """Do nothing, as nothing runs."""

    def close(self) -> None:
        """Do nothing, as nothing is held."""


class GpuLink(Link):
    """The base of links between GPUs, whose arrays arrive on a stream of their own while attention goes on."""

    def __init__(self, mesh: Mesh, device: int) -> None:
        import cupy

        super().__init__(mesh)
        self.device = device
        self._arrivals: deque[Any] = deque()  # events behind arrivals since the last barrier
        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def check_device(self, arrays: list[Array]) -> None:
        """Raise ValueError for arrays of another GPU."""
        for x in arrays:
            if x.device.id != self.device:
                raise ValueError(f"message: expected arrays on this rank's GPU {self.device}, got GPU {x.device.id}")

    def mark(self) -> Any:
        """Record an event behind what the current stream does so far."""
        import cupy

        with cupy.cuda.Device(self.device):
            return cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))

    def arrival(self) -> Any:
        """Record an event behind what arrives so far."""
        import cupy

        with cupy.cuda.Device(self.device):
            arrived = self.stream.record(cupy.cuda.Event(disable_timing=True))
        self._arrivals.append(arrived)
        return arrived

    def join(self) -> None:
        """Have the current stream go on behind what arrives so far."""
        import cupy

        with cupy.cuda.Device(self.device):
            cupy.cuda.get_current_stream().wait_event(self.arrival())

    def landing(self, ref: ArrayRef) -> Array:
        """Allocate an array that receives on `stream`.

        Its memory is used again only behind what the current stream does until the array is forgotten.
        """
        import cupy

        dtype = interop.dtype_of(ref.dtype)
        with cupy.cuda.Device(self.device):
            if not ref.nbytes:
                return cupy.empty(ref.shape, dtype)
            current = cupy.cuda.get_current_stream()
            with self.stream:
                memory = cupy.cuda.alloc(ref.nbytes)
            lease = _Lease(memory, self.stream, current)
            held = cupy.cuda.UnownedMemory(memory.ptr, ref.nbytes, lease, self.device)
            return cupy.ndarray(ref.shape, dtype, cupy.cuda.MemoryPointer(held, 0))

    def barrier(self) -> None:
        """Wait for the arrivals, with which a rank has read what it received, and for every rank."""
        self.settle()
        self.gather(None)
        self.release()

    def release(self) -> None:
        """Forget what was sent, which every rank has by now."""

    def settle(self) -> None:
        """Wait for `stream` and watch the other ranks, as what they do not send never arrives.

        The time limit holds for each arrival, because all steps of a ring are issued long before the first is done.
        """
        import cupy

        with cupy.cuda.Device(self.device):
            self._arrivals.append(self.stream.record(cupy.cuda.Event(disable_timing=True)))
        start = time.monotonic()
        while self._arrivals:
            if self._arrivals[0].done:
                self._arrivals.popleft()
                start = time.monotonic()
                continue
            self.mesh.check()
            waited = time.monotonic() - start
            if waited > self.mesh.time_limit:
                raise TimeoutError(
                    f"rank {self.mesh.rank}: expected the other GPUs' arrays within {self.mesh.time_limit:g} s, "
                    f"got none of the last {len(self._arrivals)}"
                )
            if waited > SPIN_SECONDS:
                time.sleep(NAP_SECONDS)


class _Lease:
    """Memory of the arrivals' stream, which goes back to it behind the work of the stream that read it."""

    def __init__(self, memory: Any, arrivals: Any, reader: Any) -> None:
        self._memory, self._arrivals, self._reader = memory, arrivals, reader

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        import cupy

        with cupy.cuda.Device(self._memory.device_id):
            self._arrivals.wait_event(self._reader.record(cupy.cuda.Event(disable_timing=True)))
