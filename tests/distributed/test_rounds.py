"""NCCL's groups are issued in rounds; here groups of threads stand for NCCL's, and wait as those do."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuflash.distributed import wire
from cuflash.distributed.mesh import Mesh
from cuflash.distributed.nccl import NcclLink
from cuflash.distributed.processes import ProcessCommunicator

Array = Any
LIMIT = 5.0


class Groups:
    """Groups of sends and receives that wait for their counterparts, as NCCL's do, before anything in them is done."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.sent: dict[tuple[int, int], list[Array]] = {}
        self.count = 0

    def issue(self, rank: int, sends: list[tuple[Array, int]], receives: list[tuple[Array, int]]) -> None:
        with self.condition:
            self.count += 1
            for x, to in sends:
                self.sent.setdefault((rank, to), []).append(x)
            self.condition.notify_all()
            for x, source in receives:
                queue = self.sent.setdefault((source, rank), [])
                assert self.condition.wait_for(lambda queue=queue: queue, LIMIT), f"rank {rank} waits for {source}"  # type: ignore[misc]
                x[...] = queue.pop(0)
                self.condition.notify_all()
            for _, to in sends:
                left = self.sent[rank, to]
                assert self.condition.wait_for(lambda left=left: not left, LIMIT), f"rank {to} does not take"  # type: ignore[misc]


class Link(NcclLink):
    """NCCL's link with NumPy arrays in place of CuPy's."""

    def __init__(self, mesh: Mesh, groups: Groups) -> None:
        self.mesh, self.groups = mesh, groups
        self._comm = None
        self._pending = [deque() for _ in range(mesh.world)]
        self._sent = []

    def check_device(self, arrays: list[Array]) -> None:
        pass

    def now(self) -> Any:
        return None

    def empty(self, ref: wire.ArrayRef) -> Array:
        return wire.empty(ref)

    def settle(self) -> None:
        pass

    def _issue(self, sends: list[tuple[Array, int]], receives: list[tuple[Array, int]]) -> None:
        self.groups.issue(self.mesh.rank, sends, receives)


class Comm(ProcessCommunicator):
    """A communicator that takes NumPy arrays for CuPy's."""

    def send(self, message: Any, to: int, tag: int = 0, ready: Any = None) -> None:
        if to == self.rank:
            super().send(message, to, tag, ready)
            return
        detached, host, *_ = wire.detach((tag, message))
        detached = wire.mapped(
            detached, lambda x: wire.ArrayRef("gpu", x.index, x.dtype, x.shape) if isinstance(x, wire.ArrayRef) else x
        )
        offered = self._link.offer(host, to)
        self._mesh.post(to, 1, (offered, detached, wire.refs_of(detached, wire.GPU)))


def run(world: int, work: Callable[[Comm], Any]) -> list[Any]:
    """Run each rank in a thread, and return what it returns or raises."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for a in range(world):
        for b in range(a):
            ends[a][b], ends[b][a] = connected()
    groups = Groups()
    comms = []
    for rank in range(world):
        mesh = Mesh(rank, world, ends[rank], LIMIT)
        comms.append(Comm(mesh, Link(mesh, groups), "nccl", local_rank=rank, device=None, check=True))
    results: list[Any] = [None] * world

    def end(comm: Comm) -> None:
        try:
            results[comm.rank] = work(comm)
        except Exception as error:
            comm.fail(error)
            results[comm.rank] = error

    threads = [threading.Thread(target=end, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    return results


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        return a, listener.accept()[0]


def pattern(comm: Comm) -> Array:
    return np.arange(4) + 100 * comm.rank


def around(comm: Comm) -> Any:
    """Call in the backward pass's order, with two messages on their way before the first is received."""
    to, source = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    kv: Any = pattern(comm)
    sums: Any = np.zeros(4, int)
    result: Any
    for step in range(comm.world):
        if step + 1 < comm.world:
            comm.send((kv, kv), to)
        if step:
            sums = comm.receive(source)
        sums = sums + kv
        comm.send(sums, to)
        if step + 1 < comm.world:
            received: Any = comm.receive(source)
            kv, _ = received
    result = comm.receive(source)
    comm.barrier()
    return result.tolist()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_ring(world: int) -> None:
    # The sums follow the keys, which are all rank r's.
    assert run(world, around) == [(world * (np.arange(4) + 100 * rank)).tolist() for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_to_all(world: int) -> None:
    def work(comm: Comm) -> Any:
        found = comm.exchange([pattern(comm) + 10 * to for to in range(comm.world)])
        comm.barrier()
        return [x.tolist() for x in found]

    expected = [
        [(np.arange(4) + 100 * source + 10 * rank).tolist() for source in range(world)] for rank in range(world)
    ]
    assert run(world, work) == expected


def test_one_answers_the_other() -> None:
    """A rank may receive before it sends, with values and messages without arrays between."""

    def work(comm: Comm) -> Any:
        found: Any
        if comm.rank == 0:
            comm.send(pattern(comm), 1)
            found = comm.receive(1)
        elif comm.rank == 1:
            found = comm.receive(0)
            found = found + 1
            comm.send(found, 0)
            comm.send("text", 2)
        else:
            found = np.array([comm.receive(1) == "text"])
        told = comm.all_gather(comm.rank)
        comm.barrier()
        return found.tolist(), told

    ones = [1, 2, 3, 4]
    assert run(3, work) == [(ones, [0, 1, 2]), (ones, [0, 1, 2]), ([True], [0, 1, 2])]


def test_what_is_never_received_waits_for_nobody() -> None:
    def work(comm: Comm) -> Any:
        comm.send(pattern(comm), 1 - comm.rank)
        comm.barrier()
        received: Any = comm.receive(1 - comm.rank)
        return received.tolist()

    assert run(2, work) == [[100, 101, 102, 103], [0, 1, 2, 3]]


def test_ranks_that_wait_for_what_nobody_sends() -> None:
    """All ranks raise at once where some wait for what nobody sends."""
    start = time.monotonic()
    for error in run(3, lambda comm: comm.receive((comm.rank + 1) % 3)):
        assert isinstance(error, RuntimeError)
        assert "expected a message for each rank that waits, got none: rank 0 for rank 1, rank 1 for rank 2" in str(
            error
        )
    assert time.monotonic() - start < LIMIT


def test_a_rank_that_fails_ends_the_rounds() -> None:
    def work(comm: Comm) -> Any:
        if comm.rank == 2:
            raise MemoryError("no memory left")
        return comm.receive(1 - comm.rank)

    first, second, third = run(3, work)
    assert isinstance(third, MemoryError)
    for error in (first, second):
        assert isinstance(error, RuntimeError) and "rank 2 failed: MemoryError: no memory left" in str(error)
