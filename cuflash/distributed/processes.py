"""Communicators of ranks that are processes, of one host or of several."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, TypeVar

from cuflash.distributed import ipc, nccl, shared_mailboxes, wire
from cuflash.distributed.communicators import Arriving, Communicator, Later, Pending, written
from cuflash.distributed.links import HostLink, Link, Offered
from cuflash.distributed.mesh import Mesh
from cuflash.distributed.pieces import viewed
from cuflash.distributed.steps import Steps
from cuflash.typing import Message

T = TypeVar("T")
TRANSPORTS = ("auto", "ipc", "nccl")


class ProcessCommunicator(Communicator):
    """A rank that is a process. NumPy arrays travel with their message, CuPy arrays by the link between GPUs.

    Attributes
    ----------
    local_rank : int
        This rank's number among those of its host.
    device : int or None
        The number of its GPU.
    transport : str
        What carries arrays: "tcp" without GPUs, else "ipc" or "nccl".
    """

    def __init__(
        self,
        mesh: Mesh,
        link: Link,
        transport: str,
        *,
        local_rank: int,
        device: int | None,
        check: bool,
    ) -> None:
        super().__init__(mesh.rank, mesh.world, mesh.time_limit, check)
        self.local_rank, self.device, self.transport = local_rank, device, transport
        self._mesh, self._link = mesh, link
        self._is_open = True
        # Messages wait here by (source, tag): those to this rank itself, and those before one with another tag.
        self._here: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def send(self, message: Any, to: int, tag: int = 0, ready: Any = None) -> None:
        """Hand arrays to another process; they must not change before `barrier`."""
        self._check_rank("to", to)
        message = viewed(message)
        if to == self.rank:
            self._here[to, tag].append(message)
            return
        detached, host, gpu, refs = wire.detach((tag, message), copies_rows=self._link.copies_rows)
        offered = self._link.offer(gpu, to, ready)
        self._link.post(to, offered, detached, refs, host)

    def receive(self, source: int, tag: int = 0) -> Message:
        """Return the next message of another process in new arrays, CuPy's on this rank's GPU."""
        received: Message = self._next(source, tag, None, None).get()
        return received

    def now(self) -> Any:
        """Return what stands for the work that was enqueued so far."""
        return self._link.now()

    def arriving(self, source: int, tag: int = 0, into: Any = None, ready: Any = None) -> Steps[Pending]:
        """Return the next message; copy engines bring it while this rank's GPU computes what is enqueued later."""
        yield from ()
        if self._link.copies_rows:
            return self._next(source, tag, into, ready)
        return Later(self, source, tag, into)

    def finishing(self) -> Steps[None]:
        """Let what follows on the current stream wait until every rank has read what was sent to it."""
        yield from ()
        self._check_open()
        self._link.finish()

    def _next(self, source: int, tag: int, into: Any, ready: Any) -> Pending:
        """Return the next message of this tag; messages of other tags that come before it are kept."""
        self._check_rank("source", source)
        while not self._here[source, tag]:
            if source == self.rank:
                raise RuntimeError(f"rank {self.rank}: expected a message to itself, got none")
            offered = self._link.take(source)
            its, _ = offered.message
            self._here[source, its].append(offered)
        found = self._here[source, tag].popleft()
        if not isinstance(found, Offered):  # this rank's own
            return Arriving(written(found, into), None)
        if not found.refs:
            _, message = wire.attach(found.message, found.host, [])
            return Arriving(written(message, into), None)
        arrays, event = self._link.bring(found, None if into is None else into.views(), ready)
        if into is not None:
            return Arriving(into, event)
        _, message = wire.attach(found.message, found.host, arrays)
        return Arriving(message, event)

    def all_gather(self, value: T) -> list[T]:
        """Return all ranks' values: None, bools, numbers, strings, bytes, and small tuples, lists and dicts of such."""
        self._check_open()
        try:
            return self._link.gather(value)
        except TypeError as error:
            self.fail(error)
            raise

    def barrier(self) -> None:
        """Wait until every rank is here and has read what it received."""
        self._check_open()
        self._link.barrier()

    def fail(self, error: BaseException) -> None:
        """End the others' waiting, and the work of this rank's GPU that waits for them."""
        self._mesh.fail(error)
        self._link.abort()

    def close(self) -> None:
        """Send what is still to be sent, and leave. A program that ends does so, too."""
        if not self._is_open:
            return
        self._is_open = False
        self._here.clear()
        self._mesh.close()
        self._link.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"rank {self.rank}: expected an open communicator, got one that was closed")

    def _check_rank(self, name: str, rank: int) -> None:
        self._check_open()
        if not 0 <= rank < self.world:
            raise ValueError(f"{name}: expected a rank from 0 to {self.world - 1}, got {rank}")


def choose_link(mesh: Mesh, device: int | None, transport: str) -> tuple[Link, str]:
    """Return the link that carries arrays between these ranks, and its name. Every rank comes to the same choice.

    Raises
    ------
    ValueError
        Where ranks do not agree about the transport, or only some have a GPU.
    RuntimeError
        Where the transport that was asked for does not work here, or none does.
    """
    told = mesh.gather((transport, device is not None))
    for rank, (asked, has_gpu) in enumerate(told):
        if asked != told[0][0]:
            raise ValueError(
                f"transport: expected the same on every rank, got {told[0][0]} on rank 0 and {asked} on rank {rank}"
            )
        if has_gpu != told[0][1]:
            one, none = (rank, 0) if has_gpu else (0, rank)
            raise ValueError(f"device: expected a GPU on every rank or on none, got one on {one} and none on {none}")
    link: Link | None
    if device is None:
        link = HostLink(mesh)
        link.mailboxes = shared_mailboxes.connect(mesh) or mesh
        return link, "tcp"
    problems = []
    for name, connect in (("ipc", ipc.connect), ("nccl", nccl.connect)):
        if transport in ("auto", name):
            link, problem = connect(mesh, device)
            if link is not None:
                if name == "ipc":
                    link.mailboxes = shared_mailboxes.connect(mesh) or mesh
                return link, name
            problems.append(f"{name}: {problem}")
    raise RuntimeError(f"transport: expected a way between the ranks' GPUs, got none ({'; '.join(problems)})")
