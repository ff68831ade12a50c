"""Communicators let ranks reach each other; one that waits longer than the time limit raises, so that nothing hangs."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from cuflash.distributed.turns import Turns
from cuflash.kept import kept
from cuflash.typing import Message

Array = Any
T = TypeVar("T")
DEFAULT_TIME_LIMIT = 60.0


class Pending(ABC):
    """A message that is on its way."""

    @abstractmethod
    def get(self) -> Any:
        """Return the message, ready for the current stream."""


class Communicator(ABC):
    """One rank's way to the others.

    Attributes
    ----------
    rank, world : int
        This rank's number, and how many there are.
    time_limit : float
        Seconds after which a rank that waits for another one raises TimeoutError.
    check : bool
        Whether the arguments of every call are compared over the ranks.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> def rank(comm):
    ...     return comm.all_gather(comm.rank), comm.sum(np.full(2, comm.rank + 1)).tolist()
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(rank, cuflash.distributed.threads(2)))
    [([0, 1], [3, 3]), ([0, 1], [3, 3])]
    """

    def __init__(self, rank: int, world: int, time_limit: float, check: bool) -> None:
        self.rank = rank
        self.world = world
        self.time_limit = time_limit
        self.check = check

    def __repr__(self) -> str:
        limits = f"time_limit={self.time_limit:g}, check={self.check}"
        return f"{type(self).__name__}(rank={self.rank}, world={self.world}, {limits})"

    @abstractmethod
    def send(self, message: Any, to: int, tag: int = 0) -> None:
        """Hand arrays to another rank; they must not change before `barrier`."""

    @abstractmethod
    def receive(self, source: int, tag: int = 0) -> Message:
        """Return the next message of another rank with this tag, on this rank's device."""

    def receive_soon(self, source: int, tag: int = 0) -> Pending:
        """Return the next message of another rank, which may arrive while this one computes."""
        return Later(self, source, tag)

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks by their numbers; they are small and no arrays."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, so that a rank which waits for it raises."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds; it cannot be used again."""

    def turn(self) -> AbstractContextManager[None]:
        """Return the context in which a rank enqueues work; ranks of one process take turns."""
        return nullcontext()

    def pass_turn(self) -> None:  # noqa: B027 - ranks that are processes take no turns
        """Let the other ranks of the process enqueue work."""

    def barrier(self) -> None:
        """Wait until every rank is here and has read what was sent to it."""
        self.all_gather(None)

    def sum(self, x: T) -> T:
        """Sum an array over all ranks in the order of their numbers, so that each has the same bits."""
        total: Any = None
        part: Any
        for part in self.exchange([x] * self.world):
            total = part.copy() if total is None else total + part
        result: T = total
        return result

    def exchange(self, messages: Sequence[T]) -> list[T]:
        """Send the n-th message to rank n, and return what each rank sent here."""
        for distance in range(1, self.world):
            to = (self.rank + distance) % self.world
            self.send(messages[to], to)
        received: list[Any] = [messages[self.rank]] * self.world
        for distance in range(1, self.world):
            source = (self.rank - distance) % self.world
            received[source] = self.receive(source)
        return received


class Group(Communicator):
    """Some ranks of a communicator, with numbers of their own; each call is made by all of them.

    They hear of failures, wait at barriers and take turns with the ranks of the whole.
    """

    def __init__(self, whole: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(list(ranks).index(whole.rank), len(ranks), whole.time_limit, whole.check)
        self._whole, self._ranks = whole, tuple(ranks)

    def send(self, message: Any, to: int, tag: int = 0) -> None:
        """Hand arrays to another rank of the group."""
        self._whole.send(message, self._ranks[to], tag)

    def receive(self, source: int, tag: int = 0) -> Message:
        """Return the next message of another rank of the group."""
        return self._whole.receive(self._ranks[source], tag)

    def receive_soon(self, source: int, tag: int = 0) -> Pending:
        """Return the next message of another rank of the group, which may arrive while this one computes."""
        return self._whole.receive_soon(self._ranks[source], tag)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of the group's ranks; all ranks of the whole take part."""
        told = self._whole.all_gather(value)
        return [told[rank] for rank in self._ranks]

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of the whole."""
        self._whole.fail(error)

    def close(self) -> None:
        """Leave the whole open, which holds everything."""

    def turn(self) -> AbstractContextManager[None]:
        """Return the whole's context."""
        return self._whole.turn()

    def pass_turn(self) -> None:
        """Let the other ranks of the process enqueue work."""
        self._whole.pass_turn()

    def barrier(self) -> None:
        """Wait until every rank of the whole is here."""
        self._whole.barrier()


def check_communicator(comm: object) -> None:
    """Raise TypeError for what is no rank's communicator, such as the list of all that `threads` returns."""
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"comm: expected the communicator of one rank, of cuflash.distributed.threads or from_environment, "
            f"got {type(comm).__name__}"
        )


@dataclass(frozen=True)
class Later(Pending):
    """A message that is received when it is asked for."""

    comm: Communicator
    source: int
    tag: int

    def get(self) -> Any:
        """Wait for the message."""
        return self.comm.receive(self.source, self.tag)


@dataclass(frozen=True)
class Arriving(Pending):
    """A message of another GPU, which another stream brings."""

    message: Any
    done: Any  # the event behind the copies; None without copies

    def get(self) -> Any:
        """Let the current stream wait for the copy."""
        if self.done is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(self.done)
        return self.message


@dataclass
class _Gathering:
    """The values that the threads bring to one call of `all_gather`."""

    values: dict[int, Any] = field(default_factory=dict)
    is_complete: bool = False


class _Board:
    """The mailboxes that the threads of one group share, and their first failure."""

    def __init__(self, world: int) -> None:
        self.condition = threading.Condition()
        self.mailboxes: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)  # (source, to, tag)
        self.failure: tuple[int, str] | None = None
        self.gathering = _Gathering()
        self.turns = Turns()


class ThreadCommunicator(Communicator):
    """A rank that is a thread of this process, with arrays of NumPy or on a GPU of its own."""

    def __init__(
        self, board: _Board, rank: int, world: int, device: int | None, time_limit: float, check: bool
    ) -> None:
        super().__init__(rank, world, time_limit, check)
        self.device = device  # the GPU's number; None for NumPy arrays
        self._board = board
        self._is_open = True
        # This GPU copies these arrays of others, whose memory must not be used again before the copies are done.
        self._borrowed: list[Any] = []
        self._stream: Any = None  # copies messages
        self._has_turn = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one thread at a time enqueue work for GPUs; NumPy's threads compute at once."""
        if self.device is None or self._has_turn:
            yield
            return
        with self._board.turns.take():
            self._has_turn = True
            try:
                yield
            finally:
                self._has_turn = False

    def pass_turn(self) -> None:
        """Let each other thread enqueue some work."""
        if self._has_turn:
            self._board.turns.pass_on()

    def _waiting(self) -> AbstractContextManager[None]:
        """Return the context in which this thread waits, and others have the turn."""
        return self._board.turns.leave() if self._has_turn else nullcontext()

    def send(self, message: Any, to: int, tag: int = 0) -> None:
        """Hand over references, as threads share memory; arrays that another GPU copies become contiguous."""
        self._check_open()
        if self.device is not None:
            message = _contiguous(message)
        event = _record(message)
        with self._board.condition:
            self._board.mailboxes[self.rank, to, tag].append((message, event))
            self._board.condition.notify_all()

    def receive(self, source: int, tag: int = 0) -> Message:
        """Return the next message of another thread; arrays of another GPU are copied to this one's."""
        return self._copied(*self._take(source, tag)).get()

    def receive_soon(self, source: int, tag: int = 0) -> Pending:
        """Return the next message; a GPU's copy engine brings it while this GPU computes what is enqueued later."""
        if self.device is None:
            return super().receive_soon(source, tag)
        return self._copied(*self._take(source, tag))

    def _take(self, source: int, tag: int) -> tuple[Any, Any]:
        """Return the next message of another thread, and the event behind the work that makes it."""
        self._check_open()
        board, mailbox = self._board, self._board.mailboxes[source, self.rank, tag]
        if not mailbox:
            with self._waiting(), board.condition:
                self._wait(lambda: bool(mailbox), lambda: source)
        message, event = mailbox.popleft()
        return message, event

    def _wait(self, is_here: Callable[[], bool], missing: Callable[[], int]) -> None:
        """Wait for what other threads bring, of which `missing` is one; the caller holds the board's condition."""
        board = self._board
        deadline = time.monotonic() + self.time_limit
        while not is_here():
            if board.failure is not None:
                rank, text = board.failure
                raise RuntimeError(f"rank {rank} failed: {text}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"rank {self.rank}: expected a message of rank {missing()} within {self.time_limit:g} s, got none"
                )
            board.condition.wait(left)

    def _copied(self, message: Any, event: Any) -> Pending:
        """Copy a message's arrays to this rank's GPU on a stream of their own, while other streams compute."""
        if event is None or self.device is None:
            return Arriving(message, None)
        import cupy

        self._borrowed.append(message)
        if self._stream is None:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        stream = self._stream
        stream.wait_event(event)
        device = self.device
        copies: list[tuple[Any, Any]] = []

        def here(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(here(part) for part in x)
            if type(x).__module__ != "cupy" or x.device.id == device:
                return x
            copies.append((cupy.empty(x.shape, x.dtype), x))
            return copies[-1][0]

        brought = here(message)
        # Work that was enqueued before may still use the copies' memory.
        stream.wait_event(cupy.cuda.get_current_stream().record())
        for to, x in copies:
            _enable_peer(device, x.device.id)
            cupy.cuda.runtime.memcpyPeerAsync(to.data.ptr, device, x.data.ptr, x.device.id, x.nbytes, stream.ptr)
        return Arriving(brought, stream.record())

    def barrier(self) -> None:
        """Wait until every rank is here and, on GPUs, has read what it received."""
        if self.device is not None:
            import cupy

            with self._waiting():
                cupy.cuda.get_current_stream().synchronize()
        super().barrier()
        self._borrowed.clear()

    def all_gather(self, value: T) -> list[T]:
        """Pass values as they are, and wait for the last thread."""
        self._check_open()
        board = self._board
        with self._waiting(), board.condition:
            own = board.gathering
            own.values[self.rank] = value
            if len(own.values) == self.world:
                own.is_complete = True
                board.gathering = _Gathering()
                board.condition.notify_all()
            self._wait(lambda: own.is_complete, lambda: min(set(range(self.world)) - own.values.keys()))
        return [own.values[rank] for rank in range(self.world)]

    def fail(self, error: BaseException) -> None:
        """Note the first failure, which the others hear of."""
        with self._board.condition:
            if self._board.failure is None:
                self._board.failure = self.rank, f"{type(error).__name__}: {error}"
            self._board.condition.notify_all()

    def close(self) -> None:
        """Forget what was not received."""
        self._is_open = False
        with self._board.condition:
            for (source, *_), mailbox in self._board.mailboxes.items():
                if source == self.rank:
                    mailbox.clear()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"rank {self.rank}: expected an open communicator, got one that was closed")


def threads(
    world: int, *, devices: Sequence[int] | None = None, time_limit: float = DEFAULT_TIME_LIMIT, check: bool = True
) -> list[Communicator]:
    """Make communicators for ranks that are threads of this process.

    Parameters
    ----------
    world : int
        How many ranks there are; each thread takes one of the communicators, and makes all its calls with it.
    devices : sequence of int, optional
        The GPU of each rank, whose arrays are CuPy's; by default arrays are NumPy's.
    time_limit : float
        Seconds that a rank waits for another one before it raises TimeoutError.
    check : bool
        Whether the arguments of every call are compared over the ranks. Without it a rank that disagrees is found by
        the time limit, if at all.

    Returns
    -------
    list of Communicator
        By rank.

    Raises
    ------
    TypeError, ValueError
        For arguments that are no such numbers.

    Examples
    --------
    >>> import cuflash
    >>> comms = cuflash.distributed.threads(2)
    >>> [(comm.rank, comm.world) for comm in comms]
    [(0, 2), (1, 2)]
    >>> for comm in comms:
    ...     comm.close()
    """
    if not isinstance(world, (int, np.integer)) or isinstance(world, bool):
        raise TypeError(f"world: expected an integer, got {type(world).__name__}")
    if world < 1:
        raise ValueError(f"world: expected at least one rank, got {world}")
    if devices is not None and len(devices) != world:
        raise ValueError(f"devices: expected one for each of the {world} ranks, got {len(devices)}")
    if not isinstance(time_limit, (int, float)) or isinstance(time_limit, bool):
        raise TypeError(f"time_limit: expected seconds, got {type(time_limit).__name__}")
    if not time_limit > 0:
        raise ValueError(f"time_limit: expected more than 0 seconds, got {time_limit}")
    board = _Board(int(world))
    return [
        ThreadCommunicator(board, rank, int(world), None if devices is None else int(devices[rank]), time_limit, check)
        for rank in range(world)
    ]


def _arrays(message: Any) -> list[Array]:
    if isinstance(message, (tuple, list)):
        return [x for part in message for x in _arrays(part)]
    return [message] if type(message).__module__ == "cupy" else []


def _contiguous(message: Any) -> Any:
    if isinstance(message, (tuple, list)):
        return type(message)(_contiguous(part) for part in message)
    if type(message).__module__ != "cupy" or message.flags.c_contiguous:
        return message
    return message.copy(order="C")


def _record(message: Any) -> Any:
    """Record an event behind the work that makes a message's arrays; None where they are not on a GPU."""
    arrays = _arrays(message)
    if not arrays:
        return None
    import cupy

    with cupy.cuda.Device(arrays[0].device.id):
        return cupy.cuda.get_current_stream().record()


@kept
def _enable_peer(device: int, other: int) -> bool:
    """Let a GPU read another one's memory directly; without it copies go by way of the host."""
    import cupy

    runtime = cupy.cuda.runtime
    if not runtime.deviceCanAccessPeer(device, other):
        return False
    with cupy.cuda.Device(device):
        try:
            runtime.deviceEnablePeerAccess(other)
        except runtime.CUDARuntimeError as error:
            if "AlreadyEnabled" not in str(error):
                raise
    return True
