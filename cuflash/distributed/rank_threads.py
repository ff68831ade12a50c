"""Ranks that are threads of one process, with NumPy arrays or with a GPU each.

Python runs one thread at a time, so that threads which enqueue work for GPUs would wait for each other at every call of
the driver. Instead the thread that comes last to a call takes the steps of all ranks in turn, and the others sleep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from cuflash.distributed.board import Board, Gathering, Meeting, Share
from cuflash.distributed.communicators import DEFAULT_TIME_LIMIT, Arriving, Communicator, Pending, written
from cuflash.distributed.copies import has_wide_rows
from cuflash.distributed.landing import Landing
from cuflash.distributed.pieces import Pieces, have_wide_rows, viewed
from cuflash.distributed.steps import Steps, taken
from cuflash.kept import kept
from cuflash.typing import Message

Array = Any
T = TypeVar("T")
_PER_THREAD = 2  # cudaStreamPerThread, the handle of every thread's own default stream


class ThreadCommunicator(Communicator):
    """A rank that is a thread of this process, with arrays of NumPy or on a GPU of its own."""

    def __init__(self, board: Board, rank: int, time_limit: float, check: bool) -> None:
        super().__init__(rank, board.world, time_limit, check)
        self.device = None if board.devices is None else int(board.devices[rank])  # the GPU's number
        self._board = board
        self._is_open = True
        # This GPU copies these arrays of others, and other GPUs copy those of this one, until the copies are done.
        self._borrowed: list[Any] = []
        self._lent: list[Any] = []
        self._landing: Landing | None = None  # brings messages to this rank's GPU
        self._copied: Any = None  # the event behind the latest copies
        self._reads_in_place = False  # messages of a rank on the same GPU are not copied
        self._substitute: Any = None  # a stream in place of the thread's default one

    def run(self, steps: Steps[T]) -> T:
        """Take this rank's steps of a call; with GPUs the last thread takes those of all ranks."""
        self._check_open()
        board = self._board
        if not board.is_led:
            return taken(steps)
        stream: Any = None if self.device is None else _current_stream(self.device)
        own_stream = stream
        if stream is not None and stream.ptr == _PER_THREAD:
            own_stream = self._stream_for_others(stream)
        share = Share(steps, self.rank, self.device, own_stream)
        with board.condition:
            meeting = board.meeting
            meeting.shares[self.rank] = share
            if len(meeting.shares) < self.world:
                try:
                    self._wait(lambda: len(meeting.shares) == self.world, lambda: _missing(meeting.shares, self.world))
                except BaseException:
                    if board.meeting is meeting:  # nobody has begun to take the steps
                        meeting.shares.pop(self.rank, None)
                    raise
                while not meeting.is_over:
                    board.condition.wait()
            else:
                board.meeting = Meeting()
                board.condition.notify_all()
        if not meeting.is_over:
            try:
                board.lead([meeting.shares[rank] for rank in range(self.world)])
            finally:
                with board.condition:
                    meeting.is_over = True
                    board.condition.notify_all()
        if own_stream is not stream:
            self._rejoin(stream)
        if share.error is not None:
            raise share.error
        result: Any = share.result
        return result

    def _stream_for_others(self, stream: Any) -> Any:
        """Return a stream behind this thread's default one, which means another stream in another thread."""
        import cupy

        with cupy.cuda.Device(self.device):
            if self._substitute is None:
                self._substitute = cupy.cuda.Stream(non_blocking=True)
            self._substitute.wait_event(stream.record())
        return self._substitute

    def _rejoin(self, stream: Any) -> None:
        """Let this thread's default stream go on behind the one that stood in for it."""
        import cupy

        with cupy.cuda.Device(self.device):
            stream.wait_event(self._substitute.record())

    def send(self, message: Any, to: int, tag: int = 0, ready: Any = None) -> None:
        """Hand over references, as threads share memory; a copy engine takes arrays as they lie, if it can."""
        self._check_open()
        board = self._board
        if self.device is not None and board.devices is not None and (arrays := _arrays(message)):
            other = int(board.devices[to])
            has_way = other == self.device or all(_enable_peer(other, x.device.id) for x in arrays)
            if not has_way or not _can_be_copied(message):
                message, ready = _mapped(viewed(message), lambda x: x.copy(order="C")), None
            ready = _record(self.device) if ready is None else ready
            self._lent.append(message)
        with board.condition:
            board.mailboxes[self.rank, to, tag].append((message, ready))
            board.progress += 1
            board.condition.notify_all()

    def now(self) -> Any:
        """Record an event behind what the current stream does so far."""
        return None if self.device is None else _record(self.device)

    def receive(self, source: int, tag: int = 0) -> Message:
        """Return the next message of another thread; arrays of another GPU are copied to this one's."""
        received: Message = taken(self.arriving(source, tag)).get()
        return received

    def arriving(self, source: int, tag: int = 0, into: Pieces | None = None, ready: Any = None) -> Steps[Pending]:
        """Return the next message; a GPU's copy engine brings it while this GPU computes what is enqueued later."""
        self._check_open()
        mailbox = self._board.mailboxes[source, self.rank, tag]
        yield from self._until(lambda: bool(mailbox), lambda: source)
        message, made = mailbox.popleft()
        if self.device is not None and made is not None:
            return self._bring(message, made, into, ready)
        return Arriving(written(message, into), None)

    def _until(self, is_here: Callable[[], bool], missing: Callable[[], int]) -> Steps[None]:
        """Wait for what other threads bring, of which `missing` is one, or yield until it is here."""
        board = self._board
        if board.leader == threading.get_ident():
            while not is_here():
                self._raise_failure()
                yield False
            board.progress += 1
        elif not is_here():
            with board.condition:
                self._wait(is_here, missing)

    def _wait(self, is_here: Callable[[], bool], missing: Callable[[], int]) -> None:
        """Wait for what other threads bring; the caller holds the board's condition."""
        deadline = time.monotonic() + self.time_limit
        while not is_here():
            self._raise_failure()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"rank {self.rank}: expected a message of rank {missing()} within {self.time_limit:g} s, got none"
                )
            self._board.condition.wait(left)

    def _raise_failure(self) -> None:
        if self._board.failure is not None:
            rank, text = self._board.failure
            raise RuntimeError(f"rank {rank} failed: {text}")

    def _bring(self, message: Any, made: Any, into: Pieces | None, ready: Any) -> Pending:
        """Copy a message's arrays to this rank's GPU on a stream of their own, while other streams compute."""
        if into is None and all(x.device.id == self.device for x in _arrays(message)):
            self._reads_in_place = True
            return Arriving(viewed(message), made)
        assert self.device is not None
        if self._landing is None:
            self._landing = Landing(self.device)
        landing = self._landing
        self._borrowed.append(message)
        landing.wait(made)
        if into is not None:
            landing.wait(_record(self.device) if ready is None else ready)
            landing.copy_pieces(into, message)
            self._copied = landing.now()
            return Arriving(into, self._copied)
        brought = landing.new_pieces(message) if isinstance(message, Pieces) else _mapped(message, landing.copy_of)
        self._copied = landing.now()
        return Arriving(brought, self._copied)

    def barrier(self) -> None:
        """Wait until every rank is here and, on GPUs, has read what it received."""
        if self.device is not None:
            import cupy

            with cupy.cuda.Device(self.device):
                cupy.cuda.get_current_stream().synchronize()
            if self._landing is not None:
                self._landing.stream.synchronize()
        super().barrier()
        self._forget()

    def finishing(self) -> Steps[None]:
        """Let what follows on this rank's stream wait for the copies of what it sent."""
        has_read = self.now() if self._reads_in_place else self._copied
        told = yield from self.gathering(has_read)
        if self.device is not None:
            import cupy

            stream = cupy.cuda.get_current_stream()
            for rank, event in enumerate(told):
                if event is not None and rank != self.rank:
                    stream.wait_event(event)
        self._forget()

    def _forget(self) -> None:
        self._borrowed.clear()
        self._lent.clear()
        self._copied, self._reads_in_place = None, False

    def all_gather(self, value: T) -> list[T]:
        """Pass values as they are, and wait for the last thread."""
        return taken(self.gathering(value))

    def gathering(self, value: T) -> Steps[list[T]]:
        """Take the steps of `all_gather`."""
        self._check_open()
        board = self._board
        with board.condition:
            own = board.gathering
            own.values[self.rank] = value
            if len(own.values) == self.world:
                own.is_complete = True
                board.gathering = Gathering()
                board.condition.notify_all()
            board.progress += 1
        yield from self._until(lambda: own.is_complete, lambda: _missing(own.values, self.world))
        return [own.values[rank] for rank in range(self.world)]

    def fail(self, error: BaseException) -> None:
        """Note the first failure, which the others hear of."""
        with self._board.condition:
            if self._board.failure is None:
                self._board.failure = self.rank, f"{type(error).__name__}: {error}"
            self._board.progress += 1
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
    return make_threads(int(world), devices, time_limit, check, is_led=devices is not None)


def make_threads(
    world: int, devices: Sequence[int] | None, time_limit: float, check: bool, *, is_led: bool
) -> list[Communicator]:
    """Make the communicators of `threads`; with `is_led` one thread takes the steps of all."""
    board = Board(world, devices, is_led)
    return [ThreadCommunicator(board, rank, time_limit, check) for rank in range(world)]


def _missing(values: dict[int, Any], world: int) -> int:
    """Return the first rank that is not there."""
    return min(set(range(world)) - values.keys(), default=0)


def _arrays(message: Any) -> list[Array]:
    """Return a message's arrays of GPUs."""
    if isinstance(message, Pieces):
        return [x for x in message.arrays if type(x).__module__ == "cupy"]
    if isinstance(message, (tuple, list)):
        return [x for part in message for x in _arrays(part)]
    return [message] if type(message).__module__ == "cupy" else []


def _mapped(message: Any, change: Callable[[Array], Array]) -> Any:
    """Change every array of GPUs in a message."""
    if isinstance(message, (tuple, list)):
        return type(message)([_mapped(part, change) for part in message])
    return change(message) if type(message).__module__ == "cupy" else message


def _can_be_copied(message: Any) -> bool:
    """Return True if copy engines can take a message's arrays as they lie."""
    if isinstance(message, Pieces):
        return have_wide_rows(message.layouts(), message.cuts)
    return all(has_wide_rows(x.shape, x.itemsize, x.strides) for x in _arrays(message))


def _record(device: int) -> Any:
    """Record an event behind what the current stream of a GPU does so far."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))


def _current_stream(device: int) -> Any:
    """Return this thread's current stream of a GPU, which another thread can use, too."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.cuda.get_current_stream()


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
