"""Connections between every two processes of a group fill mailboxes, and a failure ends all waiting.

A thread for each connection reads whatever comes, so that no sender waits for the receiver's program. Small messages
are written by the caller; large ones, and those behind them, by a second thread, so that rings are full duplex.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cuflash.distributed import wire

Array = Any
# Kinds of frames.
VALUE, MESSAGE, FAILURE, GOODBYE, OVERFLOW = range(5)  # the last for what finds no room in shared memory
HEADER = struct.Struct("!BIQ")  # kind, bytes of the text, bytes of the arrays behind it
DIRECT_BYTES = 64 << 10  # frames up to this size fit the system's buffers and need no thread
FAREWELL_SECONDS = 1.0
LOST = "its connection ended: the process died, or the network did"

_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Peer:
    """The connection to one other rank."""

    def __init__(self, rank: int, connection: socket.socket, time_limit: float) -> None:
        self.rank = rank
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(time_limit)
        self._condition = threading.Condition()
        self._queue: deque[list[memoryview]] = deque()
        self._writer: threading.Thread | None = None
        self._is_writing = False
        self._is_finished = False

    def post(self, parts: list[memoryview]) -> None:
        """Send a frame; a thread of its own sends a large one, and those behind it."""
        with self._condition:
            if self._is_finished:
                return
            is_small = sum(len(part) for part in parts) <= DIRECT_BYTES
            if is_small and not self._queue and not self._is_writing:
                self._write(parts)
                return
            self._queue.append(parts)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_queue, name=f"to rank {self.rank}", daemon=True)
                self._writer.start()
            self._condition.notify_all()

    def finish(self, goodbye: list[memoryview], time_limit: float) -> None:
        """Send what is queued and a last frame; nothing can be sent behind it."""
        self.post(goodbye)
        with self._condition:
            self._is_finished = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queue and not self._is_writing, time_limit)
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def _write_queue(self) -> None:
        while True:
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._queue or self._is_finished)
                if not self._queue:
                    return
                parts = self._queue.popleft()
                self._is_writing = True
            self._write(parts)

    def _write(self, parts: list[memoryview]) -> None:
        """Write a frame, and shut a broken connection, of which the reader meets the end and says so.

        A connection that takes nothing is tried again for as long as somebody may wait for the other rank, which has a
        time limit of its own.
        """
        try:
            for part in parts:
                begin = 0
                while begin < len(part):
                    with suppress(TimeoutError):
                        begin += self.socket.send(part[begin:])
                        continue
                    if self._is_finished or threading.current_thread() is not self._writer:
                        raise OSError("the other process takes nothing")
        except OSError:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Mesh:
    """One process's connections to all others.

    Attributes
    ----------
    rank, world : int
        This process's number, and how many there are.
    time_limit : float
        Seconds that `take` and `gather` wait.
    """

    def __init__(self, rank: int, world: int, connections: Mapping[int, socket.socket], time_limit: float) -> None:
        self.rank, self.world, self.time_limit = rank, world, time_limit
        self._condition = threading.Condition()
        self._mailboxes: defaultdict[tuple[int, int], deque[tuple[Any, list[Array]]]] = defaultdict(deque)
        self._failure: tuple[int, str] | None = None
        self._gone: dict[int, str] = {}  # ranks that closed their communicators
        self._is_open = True
        self._process = os.getpid()  # a fork has the connections, but no right to them
        self._peers = {other: Peer(other, connection, time_limit) for other, connection in connections.items()}
        for peer in self._peers.values():
            threading.Thread(target=self._read, args=(peer,), name=f"from rank {peer.rank}", daemon=True).start()
        _open_meshes.add(self)

    def post(self, to: int, kind: int, value: Any, arrays: Sequence[Array] = ()) -> None:
        """Send a value, and contiguous NumPy arrays that must not change until they are read."""
        if to == self.rank:
            with self._condition:
                self._mailboxes[to, kind].append((wire.decode(wire.encode(value)), list(arrays)))
            return
        text = wire.encode(value)
        buffers = [wire.bytes_of(x) for x in arrays]
        header = HEADER.pack(kind, len(text), sum(len(part) for part in buffers))
        self._peers[to].post([memoryview(header + text), *buffers])

    def take(self, source: int, kind: int) -> tuple[Any, list[Array]]:
        """Return the next value of a rank with its arrays.

        Raises
        ------
        RuntimeError
            Where a rank failed, died, or has closed its communicator.
        TimeoutError
            After the time limit.
        """
        deadline = time.monotonic() + self.time_limit
        with self._condition:
            mailbox = self._mailboxes[source, kind]
            while not mailbox:
                self.check(source)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.missing(source)
                self._condition.wait(left)
            return mailbox.popleft()

    def wait(self, source: int, kind: int, seconds: float) -> None:
        """Wait for a value of a rank, but not longer than some seconds, and no longer than until something comes."""
        with self._condition:
            if not self._mailboxes[source, kind]:
                self._condition.wait(seconds)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by their numbers."""
        for distance in range(self.world):
            self.post((self.rank + distance) % self.world, VALUE, value)
        return [self.take(source, VALUE)[0] for source in range(self.world)]

    def mailbox(self, source: int, kind: int) -> deque[tuple[Any, list[Array]]]:
        """Return where the values of a rank arrive with their arrays, for a program that takes them itself."""
        with self._condition:
            return self._mailboxes[source, kind]

    def check(self, source: int | None = None) -> None:
        """Raise RuntimeError where a rank failed, or the source of a message has closed its communicator."""
        if self._failure is not None:
            rank, text = self._failure
            raise RuntimeError(f"rank {rank} failed: {text}")
        if source in self._gone:
            raise RuntimeError(f"rank {source} failed: {self._gone[source]}")

    def missing(self, source: int) -> TimeoutError:
        """Return the error of a message that does not come."""
        return TimeoutError(
            f"rank {self.rank}: expected a message of rank {source} within {self.time_limit:g} s, got none"
        )

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless the failure is theirs."""
        with self._condition:
            if self._failure is not None or not self._is_open:
                return
            text = f"{type(error).__name__}: {error}"
            self._failure = self.rank, text
            self._condition.notify_all()
        for other in self._peers:
            self.post(other, FAILURE, text)

    def close(self) -> None:
        """Send what is still to be sent, and leave; the others need not be there."""
        with self._condition:
            if not self._is_open or self._process != os.getpid():
                return
            self._is_open = False
            self._mailboxes.clear()
        header = memoryview(HEADER.pack(GOODBYE, 0, 0))
        # Nobody waits after a failure for more than the news of it.
        limit = self.time_limit if self._failure is None else min(self.time_limit, FAREWELL_SECONDS)
        for peer in self._peers.values():
            peer.finish([header], limit)

    def _read(self, peer: Peer) -> None:
        """Put what a rank sends into mailboxes until its connection ends."""
        text = LOST
        try:
            while self._read_frame(peer):
                pass
        except OSError:
            pass
        except Exception as error:  # the bytes were no frame
            text = f"it sent what cannot be read: {type(error).__name__}: {error}"
        with self._condition:
            if peer.rank not in self._gone and self._failure is None and self._is_open:
                self._failure = peer.rank, text
            self._condition.notify_all()
        peer.socket.close()

    def _read_frame(self, peer: Peer) -> bool:
        """Read one frame, and say whether it was not the connection's end."""
        header = bytearray(HEADER.size)
        if not _fill(peer.socket, memoryview(header)):
            return False
        kind, length, _ = HEADER.unpack(header)
        text = bytearray(length)
        if not _fill(peer.socket, memoryview(text)):
            return False
        value = wire.decode(bytes(text)) if text else None
        arrays = []
        if kind in (MESSAGE, OVERFLOW):
            arrays = [wire.empty(ref) for ref in wire.refs_of(value, wire.HOST)]
            for x in arrays:
                if not _fill(peer.socket, wire.bytes_of(x)):
                    return False
        with self._condition:
            if kind == FAILURE:
                if self._failure is None:
                    self._failure = peer.rank, str(value)
            elif kind == GOODBYE:
                self._gone[peer.rank] = "it closed its communicator, or its program ended"
            elif self._is_open:
                self._mailboxes[peer.rank, kind].append((value, arrays))
            self._condition.notify_all()
        return True


def _fill(connection: socket.socket, buffer: memoryview) -> bool:
    """Read into a whole buffer; False where the connection ends before."""
    begin = 0
    while begin < len(buffer):
        try:
            count = connection.recv_into(buffer[begin:])
        except TimeoutError:  # a rank may be silent for as long as nobody waits for it
            continue
        if not count:
            return False
        begin += count
    return True


@atexit.register
def _close_all() -> None:
    for mesh in list(_open_meshes):
        mesh.close()
