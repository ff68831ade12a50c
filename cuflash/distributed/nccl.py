"""NCCL carries arrays between GPUs, as bytes, so that every dtype travels.

NCCL's sends and receives of one rank run one group after the other, and a group waits for its counterparts: ranks
whose groups do not fit wait for each other for ever. Therefore `send` does not send arrays. Where a rank receives, or
waits for all, the ranks tell each other what each wants and has, and all issue what fits, in one group: a round.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any, NamedTuple

from cuflash.distributed.links import GpuLink, Offered
from cuflash.distributed.mesh import MESSAGE, Mesh
from cuflash.distributed.wire import ArrayRef

Array = Any


class Pending(NamedTuple):
    """A message that waits for its receiver, and the event behind the work that makes its arrays."""

    arrays: list[Array]
    event: Any


class NcclLink(GpuLink):
    """A link by the sends and receives of one NCCL communicator."""

    def __init__(self, mesh: Mesh, device: int, comm: Any) -> None:
        super().__init__(mesh, device)
        self._comm = comm
        self._pending: list[deque[Pending]] = [deque() for _ in range(mesh.world)]
        self._sent: list[Array] = []

    def offer(self, arrays: list[Array], to: int, ready: Any = None) -> Any:
        """Keep the arrays until their receiver is there; messages without arrays keep their place, too."""
        self.check_device(arrays)
        self._pending[to].append(Pending(arrays, (self.now() if ready is None else ready) if arrays else None))

    def take(self, source: int) -> Offered:
        """Take part in rounds until the message is in one of them."""
        while True:
            pairs, _ = self._round(source, None)
            if source in (sender for sender, receiver in pairs if receiver == self.mesh.rank):
                break
            self._transfer(pairs, [], source)
        # The text has arrived, because it was sent before the sender told that it has a message.
        (_, message, refs), host = self.mesh.take(source, MESSAGE)
        return Offered(message, host, refs, None, source, self._transfer(pairs, refs, source))

    def bring(self, offered: Offered, into: list[Array] | None, ready: Any) -> tuple[list[Array], Any]:
        """Return the arrays that came with their message, as all ranks bring arrays together."""
        assert offered.arrays is not None
        for target, x in zip(into or (), offered.arrays, strict=False):
            target[...] = x
        return into or offered.arrays, None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks when each of them is here; the others' rounds go on until then."""
        while True:
            pairs, told = self._round(None, value)
            if all(wanted is None for wanted, _, _ in told):
                return [theirs for _, _, theirs in told]
            self._transfer(pairs, [], self.mesh.rank)

    def barrier(self) -> None:
        """Take part in rounds until every rank is here; what this one sent is read once its own stream is done."""
        self.gather(None)
        self.settle()
        self._sent.clear()

    def abort(self) -> None:
        """End the kernels that wait for a rank that failed."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def close(self) -> None:
        """Destroy the communicator."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()

    def _round(self, wanted: int | None, value: Any) -> tuple[list[tuple[int, int]], list[Any]]:
        """Return (sender, receiver) of what every rank issues now, and (wanted, counts, value) of each rank.

        Raises
        ------
        RuntimeError
            On every rank, where ranks wait for messages that nobody sends.
        """
        told = self.mesh.gather((wanted, [len(queue) for queue in self._pending], value))
        pairs = [
            (sender, receiver)
            for receiver, (sender, _, _) in enumerate(told)
            if sender is not None and told[sender][1][receiver]
        ]
        waiting = [f"rank {rank} for rank {sender}" for rank, (sender, _, _) in enumerate(told) if sender is not None]
        if waiting and not pairs:
            raise RuntimeError(f"expected a message for each rank that waits, got none: {', '.join(waiting)}")
        return pairs, told

    def _transfer(self, pairs: list[tuple[int, int]], refs: list[ArrayRef], source: int) -> list[Array]:
        """Issue this rank's share of a round, and return the arrays that arrive in it from one rank."""
        outgoing = [(x, to) for sender, to in pairs if sender == self.mesh.rank for x in self._next(to)]
        arrays = [self.empty(ref) for ref in refs]
        sends, receives = (
            [(x, rank) for x, rank in ends if x.nbytes] for ends in (outgoing, [(x, source) for x in arrays])
        )
        if sends or receives:
            self._issue(sends, receives)
        return arrays

    def _issue(self, sends: list[tuple[Array, int]], receives: list[tuple[Array, int]]) -> None:
        """Issue one group of sends and receives; the current stream goes on behind what arrives."""
        import cupy

        nccl = cupy.cuda.nccl
        if self._comm is None:
            raise RuntimeError(f"rank {self.mesh.rank}: expected NCCL to go on, but an earlier failure has ended it")
        with cupy.cuda.Device(self.device):
            nccl.groupStart()
            for x, rank in sends:
                self._comm.send(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, rank, self.stream.ptr)
            for x, rank in receives:
                self._comm.recv(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, rank, self.stream.ptr)
            nccl.groupEnd()
        if receives:
            self.join()

    def _next(self, to: int) -> list[Array]:
        """Return the arrays of the next message to a rank, which the link's stream waits for."""
        arrays, event = self._pending[to].popleft()
        if event is not None:
            self.stream.wait_event(event)
        self._sent += arrays
        return arrays


def connect(mesh: Mesh, device: int) -> tuple[NcclLink | None, str]:
    """Return a link, or None and why there is none; all ranks get the same."""
    # NVLink's multicast fails where the host does not let containers have it, and sends and receives do not use it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    problem, unique_id, gpu = None, b"", ""
    try:
        from cupy.cuda import Device, nccl

        if nccl.available:
            gpu = Device(device).pci_bus_id
            unique_id = nccl.get_unique_id() if mesh.rank == 0 else b""
        else:
            problem = "CuPy finds no NCCL, which the package nvidia-nccl-cu13 (for CUDA 12 nvidia-nccl-cu12) brings"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    told = mesh.gather((problem, os.uname().nodename, gpu, unique_id))
    places: dict[tuple[str, str], int] = {}
    for rank, (text, host, of_rank, _) in enumerate(told):
        if text is not None:
            return None, f"rank {rank}: {text}"
        if (host, of_rank) in places:
            return None, f"ranks {places[host, of_rank]} and {rank} share GPU {of_rank}, which NCCL refuses"
        places[host, of_rank] = rank
    comm, problem = _initialized(mesh, device, told[0][3])
    problems = mesh.gather(problem)
    for rank, text in enumerate(problems):
        if text is not None:
            return None, f"rank {rank}: {text}"
    return NcclLink(mesh, device, comm), ""


def _initialized(mesh: Mesh, device: int, unique_id: bytes) -> tuple[Any, str | None]:
    """Make NCCL's communicator in a thread, where a rank that dies would leave this one; or return the problem."""
    import cupy

    found: list[Any] = []
    problems: list[str] = []

    def initialize() -> None:
        try:
            cupy.cuda.Device(device).use()
            found.append(cupy.cuda.nccl.NcclCommunicator(mesh.world, unique_id, mesh.rank))
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=initialize, name="NCCL", daemon=True)
    thread.start()
    thread.join(mesh.time_limit)
    if thread.is_alive():
        return None, f"NCCL: expected to start within {mesh.time_limit:g} s"
    return (found[0], None) if found else (None, problems[0])
