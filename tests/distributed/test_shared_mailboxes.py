"""Messages between processes of one host arrive whole and in order, whatever their size, and nobody waits for ever."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_programs import launch, plain

from cuflash.distributed import shared_mailboxes, wire
from cuflash.distributed.byte_ring import HEADER, LINE, ByteRing, ring_bytes
from cuflash.distributed.mesh import MESSAGE, OVERFLOW, VALUE, Mesh
from cuflash.distributed.shared_mailboxes import SharedMailboxes, connect

Array = Any
LIMIT = 5.0


def ends(capacity: int = 256) -> tuple[ByteRing, ByteRing, memoryview]:
    """Return a ring's end that writes, the one that reads, and their memory."""
    memory = memoryview(bytearray(ring_bytes(capacity)))
    return ByteRing(memory), ByteRing(memory), memory


# Rings.


@given(st.lists(st.binary(max_size=120) | st.none(), max_size=60), st.sampled_from([64, 256, 264]))
def test_a_ring_is_a_queue(actions: list[bytes | None], capacity: int) -> None:
    """Frames of any sizes are read in order, across the end of the memory too; None stands for a read."""
    writer, reader, _ = ends(capacity)
    queue: deque[bytes] = deque()
    for frame in actions:
        if frame is None:
            assert reader.has_news() == bool(queue)
            assert reader.get() == (queue.popleft() if queue else None)
            continue
        room = capacity - sum(-(-(HEADER.size + len(x)) // 8) * 8 for x in queue)
        assert writer.put(frame) == (HEADER.size + len(frame) <= room)
        if HEADER.size + len(frame) <= room:
            queue.append(frame)
    assert [reader.get() for _ in queue] == list(queue)
    assert reader.get() is None and not reader.has_news()


def test_two_of_the_longest_frames_fit() -> None:
    writer, reader, _ = ends(1000)
    frame = bytes(range(200)) * 3
    longest = frame[: writer.longest]
    for _ in range(20):
        assert writer.put(longest) and writer.put(longest) and not writer.put(b"x")
        assert reader.get() == reader.get() == longest


def test_threads_that_hammer_a_ring() -> None:
    writer, reader, _ = ends(512)
    rng = np.random.default_rng(0)
    frames = [bytes(rng.integers(0, 256, size, np.uint8)) for size in rng.integers(0, 250, 20_000)]

    def write() -> None:
        for frame in frames:
            while not writer.put(frame):
                time.sleep(0)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    for frame in frames:
        while (found := reader.get()) is None:
            assert time.monotonic() < deadline
            time.sleep(0)
        assert found == frame
    thread.join()


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_torn_frame_is_tried_again(frame: bytes, data: st.DataObject) -> None:
    """A reader may see the count of what was written, and not all the bytes."""
    writer, reader, memory = ends()
    assert writer.put(b"before" * 10)
    assert reader.get() is not None
    begin = 2 * LINE + 72
    before = bytes(memory[begin:])
    assert writer.put(frame)
    after = bytes(memory[begin:])
    seen = data.draw(st.integers(0, HEADER.size + len(frame) - 1))
    memory[begin + seen :] = before[seen:]
    if bytes(memory[begin:]) != after:
        for _ in range(3):
            assert reader.get() is None and reader.has_news()
    memory[begin:] = after
    assert reader.get() == frame


@pytest.mark.parametrize("frame", [b"", b"same"])
def test_a_frame_of_the_round_before_is_not_read_again(frame: bytes) -> None:
    """The bytes of an earlier round, or zeros of before the first one, fit no later position."""
    writer, reader, memory = ends(64)
    size = 8 + -(-len(frame) // 8) * 8
    for count in range(0, 640, size):
        before = bytes(memory[2 * LINE :])
        assert writer.put(frame)
        after = bytes(memory[2 * LINE :])
        memory[2 * LINE :] = before
        assert reader.get() is None, count
        memory[2 * LINE :] = after
        assert reader.get() == frame


# Mailboxes, of ranks that are threads here.


@contextmanager
def meshes(world: int, time_limit: float = LIMIT) -> Iterator[list[Mesh]]:
    """Connect ranks by sockets."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for a in range(world):
            for b in range(a):
                connections[a][b] = socket.create_connection(listener.getsockname())
                connections[b][a] = listener.accept()[0]
    found = [Mesh(rank, world, connections[rank], time_limit) for rank in range(world)]
    try:
        yield found
    finally:
        for mesh in found:
            mesh.close()


@contextmanager
def pair(time_limit: float = LIMIT) -> Iterator[tuple[SharedMailboxes, SharedMailboxes, Mesh, Mesh]]:
    """Give two ranks mailboxes in the memory of this process."""
    memory = memoryview(bytearray(1 << 20))
    with meshes(2, time_limit) as (a, b):
        yield SharedMailboxes(a, memory), SharedMailboxes(b, memory), a, b


def on_all(found: list[Mesh], work: Callable[[Mesh], Any]) -> list[Any]:
    """Return what each rank's thread returns or raises."""
    results: list[Any] = [None] * len(found)

    def run(mesh: Mesh) -> None:
        try:
            results[mesh.rank] = work(mesh)
        except Exception as error:
            results[mesh.rank] = error

    threads = [threading.Thread(target=run, args=(mesh,), name=f"rank {mesh.rank}") for mesh in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_messages_of_all_sizes_stay_in_order() -> None:
    """Messages that find no room in the ring go through the connection, and arrive in their turn."""
    rng = np.random.default_rng(1)
    sizes = [int(size) for size in rng.choice([0, 3, 1000, 20_000, 40_000, 100_000], 300)]
    with pair() as (a, b, _, mesh):
        for n, size in enumerate(sizes):
            arrays = [np.full(size // 8, n), np.zeros((0, 2), bool)] if n % 3 == 0 else []
            refs = [wire.ArrayRef("host", i, x.dtype.str, x.shape) for i, x in enumerate(arrays)]
            a.post(1, n % 2, (n, "x" * size, refs), arrays)
        mesh.wait(0, OVERFLOW, LIMIT)
        assert mesh.mailbox(0, OVERFLOW)  # some went there
        for kind in (VALUE, MESSAGE):
            for n in range(kind, len(sizes), 2):
                (number, text, refs), arrays = b.take(0, kind)
                assert number == n and len(text) == sizes[n]
                assert len(arrays) == len(refs) == (2 if n % 3 == 0 else 0)
                if arrays:
                    assert arrays[0].tolist() == [n] * (sizes[n] // 8) and arrays[1].shape == (0, 2)


def test_a_rank_has_messages_for_itself() -> None:
    with pair() as (a, _, _, _):
        a.post(0, MESSAGE, (1, [2]))
        assert a.take(0, MESSAGE) == ((1, [2]), [])


def test_a_full_ring_makes_nobody_wait() -> None:
    """Both send much more than fits before either takes anything."""
    with meshes(2) as found:
        memory = memoryview(bytearray(1 << 20))
        both = [SharedMailboxes(mesh, memory) for mesh in found]

        def work(mesh: Mesh) -> Any:
            own, other = both[mesh.rank], 1 - mesh.rank
            for n in range(3000):
                own.post(other, MESSAGE, (n, b"x" * (n % 200)))
            return [own.take(other, MESSAGE)[0][0] for _ in range(3000)] == list(range(3000))

        assert on_all(found, work) == [True, True]


def test_a_message_that_never_comes() -> None:
    with pair(0.3) as (a, b, _, _):
        b.post(0, VALUE, 1)  # of another kind
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"^rank 0: expected a message of rank 1 within 0\.3 s, got none$"):
            a.take(1, MESSAGE)
        assert 0.3 <= time.monotonic() - start < 3
        assert a.take(1, VALUE) == (1, [])


ENDINGS: dict[str, tuple[Callable[[Mesh], Any], str]] = {
    "dies": (lambda mesh: mesh._peers[0].socket.shutdown(socket.SHUT_RDWR), "rank 1 failed: its connection ended"),
    "fails": (lambda mesh: mesh.fail(MemoryError("none left")), "rank 1 failed: MemoryError: none left"),
    "closes": (lambda mesh: mesh.close(), "rank 1 failed: it closed its communicator, or its program ended"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("num_messages", [0, 3, 2000])
def test_a_rank_that_ends(ending: str, num_messages: int) -> None:
    """Messages of a rank arrive before its end does, whether the ring was full or somebody waited."""
    end, text = ENDINGS[ending]
    with pair(60) as (a, b, _, mesh):

        def leave() -> None:
            time.sleep(0.05)
            for n in range(num_messages):
                b.post(0, MESSAGE, (n, b"x" * 100))
            time.sleep(0.05)
            end(mesh)

        thread = threading.Thread(target=leave)
        thread.start()
        if num_messages > 3:
            thread.join()  # nobody has taken anything
            time.sleep(0.1)
        start = time.monotonic()
        assert [a.take(1, MESSAGE)[0][0] for _ in range(num_messages)] == list(range(num_messages))
        with pytest.raises(RuntimeError, match=text):
            a.take(1, MESSAGE)
        assert time.monotonic() - start < 30
        thread.join()
        a.post(1, MESSAGE, "nobody takes it")


def test_a_rank_that_fails_in_another_thread() -> None:
    with pair(60) as (a, _, own, _):
        timer = threading.Timer(0.1, lambda: own.fail(ValueError("another thread's")))
        timer.start()
        with pytest.raises(RuntimeError, match="rank 0 failed: ValueError: another thread's"):
            a.take(1, VALUE)
        timer.join()


def test_several_threads_send_and_take() -> None:
    with pair() as (a, b, _, _):
        taken: list[tuple[int, int]] = []

        def send(k: int) -> None:
            for n in range(400):
                a.post(1, MESSAGE, (k, n, b"x" * (40_000 if n % 20 == k else 300)))

        senders = [threading.Thread(target=send, args=(k,)) for k in range(3)]
        takers = [
            threading.Thread(target=lambda: taken.extend(b.take(0, MESSAGE)[0][:2] for _ in range(400)))
            for _ in range(3)
        ]
        for thread in senders + takers:
            thread.start()
        for thread in senders + takers:
            thread.join()
        assert sorted(taken) == [(k, n) for k in range(3) for n in range(400)]


# How mailboxes come about.


def files() -> set[str]:
    """Return the names of files of shared memory."""
    with suppress(OSError):
        return {path.name for path in Path("/dev/shm").glob("cuflash-*")}
    return set()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_of_one_host_share_memory(world: int) -> None:
    before = files()

    def work(mesh: Mesh) -> Any:
        mailboxes = connect(mesh)
        return None if mailboxes is None else [mailboxes.gather((mesh.rank, np.int64(n))) for n in range(500)]

    with meshes(world) as found:
        expected = [[(rank, n) for rank in range(world)] for n in range(500)]
        assert on_all(found, work) == ([None] if world == 1 else [expected] * world)
    assert files() <= before


def no_file(*_: Any) -> None:
    """Find no file."""


def own_memory(path: str, size: int) -> memoryview:
    """Return memory that no other rank has."""
    return memoryview(bytearray(size))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("host_name", lambda: threading.current_thread().name),
        ("_create", no_file),
        ("_open", lambda path, size: None if "1" in threading.current_thread().name else own_memory(path, size)),
        ("_open", own_memory),
        ("MOST_RANKS", 1),
    ],
)
def test_ranks_that_cannot_share_memory(monkeypatch: pytest.MonkeyPatch, name: str, instead: Any) -> None:
    """All of them go on without, and no file stays."""
    before = files()
    monkeypatch.setattr(shared_mailboxes, name, instead)
    monkeypatch.setattr(shared_mailboxes, "PROBE_SECONDS", 0.3)
    with meshes(3) as found:
        assert on_all(found, connect) == [None] * 3
        assert on_all(found, lambda mesh: mesh.gather(mesh.rank)) == [[0, 1, 2]] * 3
    assert files() <= before


def test_a_file_is_the_users_own(tmp_path: Path) -> None:
    path = shared_mailboxes._create(4096)
    assert path is not None
    try:
        assert os.stat(path).st_mode & 0o777 == 0o600 and os.stat(path).st_size == 4096
        assert shared_mailboxes._open(path, 4096) is not None
        assert shared_mailboxes._open(path, 1 << 20) is None
        assert shared_mailboxes._open(path + "0", 4096) is None
        (tmp_path / "link").symlink_to(path)
        assert shared_mailboxes._open(str(tmp_path / "link"), 4096) is None
    finally:
        os.unlink(path)


# Processes.


@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_hammer_each_other(world: int) -> None:
    for one in launch("hammer", plain(world), {"count": 400}, time_limit=60):
        assert one.status == 0, one.printed + one.errors
        assert one.result is True, "the ranks share no memory"


@pytest.mark.parametrize("full", [False, True])
def test_a_process_that_is_killed(full: bool) -> None:
    """Its end is told to one that waits for it, also to one that has sent it more than the ring holds."""
    first, killed = launch("die_in_the_middle", plain(2), {"full": full}, time_limit=60)
    assert killed.status == -9
    assert first.seconds < 30
    assert first.result["error"] == "RuntimeError"
    assert "rank 1 failed: its connection ended" in first.result["text"]
