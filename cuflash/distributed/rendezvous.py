"""Processes find each other: rank 0 listens, the others come, and each two of them get a connection.

Both ends of a connection prove that they know the group's token before anything else is read, so that a stranger, or a
rank of another job on the same port, is refused.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from cuflash.distributed import wire

GREETING = b"cuflash1"
NONCE_BYTES, PROOF_BYTES = 16, 32
ANSWER = struct.Struct(f"!8s{NONCE_BYTES}s{PROOF_BYTES}s")
LENGTH = struct.Struct("!I")
LONGEST_TEXT = 1 << 20
HANDSHAKE_SECONDS = 5.0  # a stranger can keep others waiting for so long
RETRY_SECONDS = 0.05


class Meeting(NamedTuple):
    """The place and the terms on which the ranks of one group meet."""

    host: str
    ports: Sequence[int]  # rank 0 listens on the first that is free
    token: bytes
    rank: int
    world: int
    time_limit: float


class Refused(Exception):
    """The reason that rank 0 tells the ranks that came, where the group cannot be."""


def meet(meeting: Meeting) -> dict[int, socket.socket]:
    """Return connections to all other ranks by their numbers.

    Raises
    ------
    TimeoutError
        Where a rank does not come within the time limit.
    ValueError
        Where ranks do not agree how many there are, or two have one number.
    OSError
        Where no port is free.
    """
    if meeting.world == 1:
        return {}
    deadline = time.monotonic() + meeting.time_limit
    with ExitStack() as undo:
        connections: dict[int, socket.socket] = {}
        undo.callback(_close_all, connections)
        try:
            if meeting.rank == 0:
                _wait_for_all(meeting, deadline, connections)
            else:
                _come(meeting, deadline, connections)
        except Refused as refused:
            kind, text = refused.args
            raise (TimeoutError if kind == "TimeoutError" else ValueError)(text) from None
        undo.pop_all()
        return connections


def _close_all(connections: Mapping[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def _wait_for_all(meeting: Meeting, deadline: float, connections: dict[int, socket.socket]) -> None:
    """Take every rank in, as rank 0, and tell each where the others listen."""
    addresses: list[tuple[str, int] | None] = [None] * meeting.world
    try:
        with _listener(meeting.host, meeting.ports) as listener:
            while len(connections) < meeting.world - 1:
                connection, address, told = _accept(listener, meeting, deadline, connections)
                rank, world, port = told
                error = _inconsistency(meeting, connections, rank, world)
                if error is not None:
                    _tell(connection, ("ValueError", error))
                    connection.close()
                    raise Refused("ValueError", error)
                connections[rank] = connection
                addresses[rank] = ("" if _is_loopback(address) else address), port
    except Refused as refused:
        for connection in connections.values():
            _tell(connection, refused.args)
        raise
    for connection in connections.values():
        _tell(connection, ("here", addresses))


def _inconsistency(meeting: Meeting, connections: Mapping[int, socket.socket], rank: int, world: int) -> str | None:
    if world != meeting.world:
        return f"world: expected the same on every rank, got {meeting.world} on rank 0 and {world} on rank {rank}"
    if rank in connections or not 0 < rank < world:
        return f"rank: expected each of 0 to {world - 1} once, got {rank} twice"
    return None


def _come(meeting: Meeting, deadline: float, connections: dict[int, socket.socket]) -> None:
    """Go to rank 0, as another rank, then to those of lower numbers, and wait for those of higher ones."""
    with _listener(meeting.host, (0,)) as listener:
        where = f"{meeting.host}, ports {', '.join(map(str, meeting.ports))}"
        first = connections[0] = _connect(
            meeting, [(meeting.host, port) for port in meeting.ports], deadline, f"rank 0 at {where}"
        )
        _write_value(first, (meeting.rank, meeting.world, listener.getsockname()[1]))
        # Rank 0 waits for the others as long as its own time limit, and says when that is over.
        first.settimeout(max(deadline - time.monotonic(), 0) + HANDSHAKE_SECONDS)
        try:
            verdict, told = _read_value(first)
        except TimeoutError:
            raise TimeoutError(
                f"rank {meeting.rank}: expected all {meeting.world} ranks within {meeting.time_limit:g} s"
            ) from None
        except (OSError, EOFError):
            raise RuntimeError(f"rank 0 failed before all {meeting.world} ranks were there") from None
        if verdict != "here":
            raise Refused(verdict, told)
        for other in range(1, meeting.rank):
            host, port = told[other]
            connection = _connect(meeting, [(host or meeting.host, port)], deadline, f"rank {other}")
            connections[other] = connection
            _write_value(connection, meeting.rank)
        while len(connections) < meeting.world - 1:
            connection, _, rank = _accept(listener, meeting, deadline, connections)
            connections[rank] = connection


def _listener(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first free port; on this machine alone where the group has no other."""
    bound = "127.0.0.1" if host == "localhost" or _is_loopback(host) else ""
    problem: OSError | None = None
    for port in ports:
        try:
            if not bound and socket.has_dualstack_ipv6():
                with suppress(OSError):
                    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server((bound, port))
        except OSError as error:
            problem = error
    raise OSError(
        f"rank 0: expected a free port among {', '.join(map(str, ports))}, got none ({problem}); set MASTER_PORT or "
        "CUFLASH_PORT"
    )


def _accept(
    listener: socket.socket, meeting: Meeting, deadline: float, connections: dict[int, socket.socket]
) -> tuple[socket.socket, str, Any]:
    """Return the next connection of a rank of this group, its address and its words; strangers are refused."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            missing = [rank for rank in range(meeting.world) if rank not in connections and rank != meeting.rank]
            raise Refused(
                "TimeoutError",
                f"rank {meeting.rank}: expected all {meeting.world} ranks within {meeting.time_limit:g} s, "
                f"got none of {', '.join(map(str, missing))}",
            )
        listener.settimeout(left)
        try:
            connection, address = listener.accept()
        except TimeoutError:
            continue
        if _handshake(connection, _prove_as_listener, meeting.token):
            try:
                return connection, str(address[0]), _read_value(connection)
            except (OSError, EOFError):  # the other end went away
                connection.close()


def _connect(meeting: Meeting, addresses: Sequence[tuple[str, int]], deadline: float, whom: str) -> socket.socket:
    """Connect to a rank of this group that listens at one of some addresses, as soon as it does."""
    met = "nobody listens"
    while True:
        for address in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"rank {meeting.rank}: expected {whom} within {meeting.time_limit:g} s, got nobody ({met})"
                )
            try:
                connection = socket.create_connection(address, timeout=min(left, HANDSHAKE_SECONDS))
            except OSError as error:
                met = met if isinstance(error, ConnectionRefusedError) else f"{address[0]}: {error}"
                continue
            # A system may connect a socket to itself where nobody listens on a port of its own range.
            if connection.getsockname() != connection.getpeername():
                if _handshake(connection, _prove_as_comer, meeting.token):
                    return connection
                met = f"port {address[1]} has another program, or a job with another token"
            else:
                connection.close()
        time.sleep(RETRY_SECONDS)


def _handshake(connection: socket.socket, prove: Callable[[socket.socket, bytes], bool], token: bytes) -> bool:
    """Return True if the other end knows the token; the connection is closed if not."""
    connection.settimeout(HANDSHAKE_SECONDS)
    with suppress(OSError, EOFError):
        if prove(connection, token):
            return True
    connection.close()
    return False


def _prove_as_listener(connection: socket.socket, token: bytes) -> bool:
    nonce = os.urandom(NONCE_BYTES)
    connection.sendall(GREETING + nonce)
    greeting, others, proof = ANSWER.unpack(_read(connection, ANSWER.size))
    if greeting != GREETING or not hmac.compare_digest(proof, _proof(token, b"comes", nonce, others)):
        return False
    connection.sendall(_proof(token, b"listens", nonce, others))
    return True


def _prove_as_comer(connection: socket.socket, token: bytes) -> bool:
    greeted = _read(connection, len(GREETING) + NONCE_BYTES)
    if not greeted.startswith(GREETING):
        return False
    others, nonce = greeted[len(GREETING) :], os.urandom(NONCE_BYTES)
    connection.sendall(ANSWER.pack(GREETING, nonce, _proof(token, b"comes", others, nonce)))
    return hmac.compare_digest(_read(connection, PROOF_BYTES), _proof(token, b"listens", others, nonce))


def _proof(token: bytes, role: bytes, listeners: bytes, comers: bytes) -> bytes:
    return hmac.digest(token, role + listeners + comers, "sha256")


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the connection ended")
        data += part
    return bytes(data)


def _read_value(connection: socket.socket) -> Any:
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if length > LONGEST_TEXT:
        raise OSError(f"expected at most {LONGEST_TEXT} bytes, got {length}")
    return wire.decode(_read(connection, length))


def _tell(connection: socket.socket, value: Any) -> None:
    """Write to a rank that may be dead by now, which its connection's next reader finds."""
    with suppress(OSError):
        _write_value(connection, value)


def _write_value(connection: socket.socket, value: Any) -> None:
    text = wire.encode(value)
    connection.sendall(LENGTH.pack(len(text)) + text)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")
