"""Processes of one host put messages into memory that they share, and take them in the thread that waits for them.

Every ordered pair of ranks has a ring of bytes. What finds no room in it goes through the pair's connection, so that no
sender waits for the receiver's program. Numbers say which of both comes next.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import struct
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cuflash.distributed import wire
from cuflash.distributed.byte_ring import ByteRing, ring_bytes
from cuflash.distributed.hosts import host_name
from cuflash.distributed.mesh import OVERFLOW, VALUE, Mesh
from cuflash.distributed.packing import pack, unpack
from cuflash.distributed.wire import HOST

Array = Any
PREFIX = struct.Struct("=QHHI")  # the number of a frame of its pair, its kind, how many arrays, bytes of the value
MOST_RING_BYTES, LEAST_RING_BYTES = 1 << 16, 1 << 12
ALL_RINGS_BYTES = 1 << 24  # containers may have no more than 64 MiB of such memory
MOST_RANKS = 64  # the rings of more would not fit
PROBE_SECONDS = 5.0
# A wait looks for its message all the time at first, and after naps of a share of the time waited then.
SPIN_SECONDS, SHORTEST_NAP, LONGEST_NAP, SHARE_OF_NAPS = 1e-3, 5e-5, 1e-3, 0.05
LONGEST_WAIT = 0.05  # seconds for a connection, from which another thread may take what comes
TURNS = 32  # looks between two at the clock and at the other ranks' health


class SharedMailboxes:
    """One rank's rings from and to all others, which stand for `Mesh.post`, `Mesh.take` and `Mesh.gather`."""

    def __init__(self, mesh: Mesh, memory: memoryview) -> None:
        self._mesh = mesh
        own, ring_size = mesh.rank, ring_bytes(_capacity_of(mesh.world))

        def ring(source: int, to: int) -> ByteRing:
            begin = (source * mesh.world + to) * ring_size
            return ByteRing(memory[begin : begin + ring_size])

        others = [rank for rank in range(mesh.world) if rank != own]
        self._outgoing = {to: ring(own, to) for to in others}
        self._incoming = {source: ring(source, own) for source in others}
        self._behind = {source: mesh.mailbox(source, OVERFLOW) for source in others}
        self._mailboxes: defaultdict[tuple[int, int], deque[tuple[Any, list[Array]]]] = defaultdict(deque)
        self._num_sent = dict.fromkeys(others, 0)
        self._num_taken = dict.fromkeys(others, 0)
        self._num_told = dict.fromkeys(others, 0)  # how many of a rank's frames its ring has told of
        self._early: dict[int, bytes | None] = dict.fromkeys(others)  # frames that another one comes before
        # Several threads of a process may send, and several may wait.
        self._sending = {to: threading.Lock() for to in others}
        self._sorting = {source: threading.Lock() for source in others}

    def post(self, to: int, kind: int, value: Any, arrays: Sequence[Array] = ()) -> None:
        """Send a value, and contiguous NumPy arrays that must not change until they are read."""
        if to == self._mesh.rank:
            self._mesh.post(to, kind, value, arrays)
        else:
            self._post(to, kind, value, pack(value), arrays)

    def take(self, source: int, kind: int, time_limit: float | None = None) -> tuple[Any, list[Array]]:
        """Return the next value of a rank with its arrays; the errors are those of `Mesh.take`."""
        if source == self._mesh.rank:
            return self._mesh.take(source, kind)
        mailbox = self._mailboxes[source, kind]
        while True:
            with suppress(IndexError):  # another thread may be quicker
                return mailbox.popleft()
            self._wait(source, mailbox, self._mesh.time_limit if time_limit is None else time_limit)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by their numbers."""
        own, world = self._mesh.rank, self._mesh.world
        packed = pack(value)
        for distance in range(1, world):
            self._post((own + distance) % world, VALUE, value, packed, ())
        return [unpack(packed) if source == own else self.take(source, VALUE)[0] for source in range(world)]

    def works(self) -> bool:
        """Return whether every other rank's memory is this one's, by a message to and from each."""
        others = list(self._outgoing)
        for to in others:
            self.post(to, VALUE, ("from", self._mesh.rank))
        limit = min(PROBE_SECONDS, self._mesh.time_limit)
        try:
            return all(self.take(source, VALUE, limit) == (("from", source), []) for source in others)
        except TimeoutError:
            return False

    def _post(self, to: int, kind: int, value: Any, packed: bytes, arrays: Sequence[Array]) -> None:
        ring = self._outgoing[to]
        buffers = [wire.bytes_of(x) for x in arrays]
        fits = PREFIX.size + len(packed) + sum([len(part) for part in buffers]) <= ring.longest
        with self._sending[to]:
            number = self._num_sent[to]
            prefix = PREFIX.pack(number, kind, len(arrays), len(packed)) if fits else b""
            if not (fits and ring.put(b"".join((prefix, packed, *buffers)))):
                # A mark lets the receiver wait without turns. It may find no room, either.
                ring.put(PREFIX.pack(number, OVERFLOW, 0, 0))
                self._mesh.post(to, OVERFLOW, (number, kind, value), arrays)
            self._num_sent[to] = number + 1

    def _wait(self, source: int, mailbox: deque[tuple[Any, list[Array]]], time_limit: float) -> None:
        """Wait until something is in a mailbox; a rank that failed is told after what it sent before."""
        ring, behind, pause = self._incoming[source], self._behind[source], select.poll()
        start = time.monotonic()
        while True:
            for _ in range(TURNS):
                if behind or ring.has_news():
                    self._sort(source)
                if mailbox:  # by this thread or another one
                    return
            waited = time.monotonic() - start
            try:
                self._mesh.check(source)
            except RuntimeError:
                self._sort(source)
                if mailbox:
                    return
                raise
            if waited > time_limit:
                raise self._mesh.missing(source)
            if self._num_told[source] > self._num_taken[source]:
                self._mesh.wait(source, OVERFLOW, min(LONGEST_WAIT, time_limit))
            elif waited < SPIN_SECONDS:
                os.sched_yield()  # to another process
                pause.poll(0)  # to another thread of this one
            else:
                time.sleep(min(max(SHARE_OF_NAPS * waited, SHORTEST_NAP), LONGEST_NAP))

    def _sort(self, source: int) -> None:
        """Put what came from a rank into mailboxes, in the order in which it was sent."""
        ring, behind = self._incoming[source], self._behind[source]
        with self._sorting[source]:
            while True:
                frame = self._early[source] or ring.get()
                self._early[source] = None
                if frame is not None:
                    number, kind, num_arrays, length = PREFIX.unpack_from(frame)
                    self._num_told[source] = number + 1
                    if kind == OVERFLOW:
                        continue
                    if number == self._num_taken[source]:
                        value, arrays = _parts_of(frame, num_arrays, length)
                        self._deliver(source, kind, value, arrays)
                        continue
                    self._early[source] = frame
                if not behind or behind[0][0][0] != self._num_taken[source]:
                    return
                (_, kind, value), arrays = behind.popleft()
                self._deliver(source, kind, value, arrays)

    def _deliver(self, source: int, kind: int, value: Any, arrays: list[Array]) -> None:
        self._num_taken[source] += 1
        self._mailboxes[source, kind].append((value, arrays))


def connect(mesh: Mesh) -> SharedMailboxes | None:
    """Return mailboxes that have carried a message between every two ranks; None on every rank where they cannot."""
    if mesh.world == 1:
        return None
    size = ring_bytes(_capacity_of(mesh.world)) * mesh.world**2
    path = _create(size) if mesh.rank == 0 and mesh.world <= MOST_RANKS else None
    try:
        told = mesh.gather((host_name(), path))
        if told[0][1] is None or any(host != told[0][0] for host, _ in told):
            return None
        memory = _open(told[0][1], size)
        if not all(mesh.gather(memory is not None)):
            return None
    finally:
        if path is not None:
            with suppress(OSError):
                os.unlink(path)
    assert memory is not None
    mailboxes = SharedMailboxes(mesh, memory)
    return mailboxes if all(mesh.gather(mailboxes.works())) else None


def _capacity_of(world: int) -> int:
    """Return the bytes of one ring's data."""
    return max(min(ALL_RINGS_BYTES // world**2 // 64 * 64, MOST_RING_BYTES), LEAST_RING_BYTES)


def _create(size: int) -> str | None:
    """Return the path of a file of zeros that only this user can open; None where there can be none."""
    # Windows removes no file that is open, and has neither of the calls by which a wait lets others run.
    if not (hasattr(os, "sched_yield") and hasattr(select, "poll")):
        return None
    for folder in ("/dev/shm", tempfile.gettempdir()):
        path = os.path.join(folder, f"cuflash-{secrets.token_hex(16)}")
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Memory that is not there when a process writes to it would be the end of that process.
                with open(descriptor, "wb") as file:
                    file.write(bytes(size))
            except OSError:
                os.unlink(path)
                continue
            return path
    return None


def _open(path: str, size: int) -> memoryview | None:
    """Map the file that rank 0 made; None where this process cannot."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            return memoryview(mmap.mmap(descriptor, size))
        finally:
            os.close(descriptor)
    return None


def _parts_of(frame: bytes, num_arrays: int, length: int) -> tuple[Any, list[Array]]:
    """Return the value and the NumPy arrays of a frame."""
    view = memoryview(frame)[PREFIX.size :]
    value = unpack(view)
    arrays: list[Array] = []
    if num_arrays:
        begin = length
        for ref in wire.refs_of(value, HOST):
            x = wire.empty(ref)
            wire.bytes_of(x)[:] = view[begin : begin + ref.nbytes]
            arrays.append(x)
            begin += ref.nbytes
    return value, arrays
