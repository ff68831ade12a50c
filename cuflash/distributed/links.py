"""Links carry CuPy arrays from process to process; connections, or memory of one host, carry everything else."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

from cuflash import interop
from cuflash.distributed.landing import Landing
from cuflash.distributed.mesh import MESSAGE, Mesh
from cuflash.distributed.shared_mailboxes import SharedMailboxes
from cuflash.distributed.wire import ArrayRef

Array = Any
SPIN_SECONDS, NAP_SECONDS = 1e-3, 1e-4  # a wait for the GPU asks without a pause at first, then after naps


class Offered(NamedTuple):
    """A message of another rank, whose CuPy arrays are offered, or have been brought with it."""

    message: Any  # with an `ArrayRef` for each array
    host: list[Array]
    refs: list[ArrayRef]  # of the CuPy arrays
    offer: Any  # what `bring` needs
    source: int
    arrays: list[Array] | None = None  # those that have been brought


class Link(ABC):
    """The way of one rank's GPU arrays to the others and back."""

    copies_rows = False  # whether arrays with wide rows need not be contiguous

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.mailboxes: Mesh | SharedMailboxes = mesh  # for messages, without the GPUs' arrays, and for values

    def post(self, to: int, offered: Any, message: Any, refs: list[ArrayRef], host: list[Array]) -> None:
        """Send a message with places for arrays: CuPy's, which have been offered and have `refs`, and NumPy's."""
        self.mailboxes.post(to, MESSAGE, (offered, message, refs), host)

    @abstractmethod
    def offer(self, arrays: list[Array], to: int, ready: Any = None) -> Any:
        """Have arrays sent that are complete behind `ready`; the returned value goes to the other rank's `bring`."""

    @abstractmethod
    def bring(self, offered: Offered, into: list[Array] | None, ready: Any) -> tuple[list[Array], Any]:
        """Return the arrays that a rank offered, and the event behind their arrival; None where they are here.

        They arrive in `into`, behind `ready`, or in new memory.
        """

    def now(self) -> Any:
        """Return what stands for the work that was enqueued so far; None where it is done at once."""
        return None

    def take(self, source: int) -> Offered:
        """Return the next message of a rank."""
        (offer, message, refs), host = self.mailboxes.take(source, MESSAGE)
        return Offered(message, host, refs, offer, source)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return self.mailboxes.gather(value)

    def barrier(self) -> None:
        """Wait until every rank is here and has read what it received."""
        self.gather(None)

    def finish(self) -> None:
        """Let what follows on the current stream wait until every rank has read what it received."""
        self.barrier()

    @abstractmethod
    def abort(self) -> None:
        """End work that another rank may never join."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class HostLink(Link):
    """The link of a rank without a GPU."""

    def offer(self, arrays: list[Array], to: int, ready: Any = None) -> Any:
        """Raise an error for CuPy arrays, which have no way from here."""
        if arrays:
            raise ValueError(
                "message: expected NumPy arrays, as this communicator has no GPU, got CuPy arrays; from_environment "
                "takes a GPU where it finds one, or by device="
            )

    def bring(self, offered: Offered, into: list[Array] | None, ready: Any) -> tuple[list[Array], Any]:
        """Raise an error for CuPy arrays, for which this rank has no place."""
        raise ValueError(
            f"message: expected NumPy arrays of rank {offered.source}, as this rank has no GPU, got CuPy arrays"
        )

    def abort(self) -> None:
        """Do nothing, as nothing runs."""

    def close(self) -> None:
        """Do nothing, as nothing is held."""


class GpuLink(Link):
    """The base of links between GPUs, whose arrays arrive on a stream of their own while attention goes on."""

    def __init__(self, mesh: Mesh, device: int) -> None:
        super().__init__(mesh)
        self.device = device
        self._arrivals: deque[Any] = deque()  # events behind arrivals since the last barrier
        self.landing = Landing(device)
        self.stream = self.landing.stream

    def check_device(self, arrays: list[Array]) -> None:
        """Raise ValueError for arrays of another GPU."""
        for x in arrays:
            device = x.data.device_id
            if device != self.device:
                raise ValueError(f"message: expected arrays on this rank's GPU {self.device}, got GPU {device}")

    def now(self) -> Any:
        """Record an event behind what the current stream does so far."""
        import cupy

        with cupy.cuda.Device(self.device):
            return cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))

    def arrival(self) -> Any:
        """Record an event behind what arrives so far."""
        self._arrivals.append(self.landing.now())
        return self._arrivals[-1]

    def join(self) -> None:
        """Have the current stream go on behind what arrives so far."""
        import cupy

        with cupy.cuda.Device(self.device):
            cupy.cuda.get_current_stream().wait_event(self.arrival())

    def empty(self, ref: ArrayRef) -> Array:
        """Allocate an array that receives."""
        return self.landing.empty(ref.shape, interop.dtype_of(ref.dtype))

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
        self._arrivals.append(self.landing.now())
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
