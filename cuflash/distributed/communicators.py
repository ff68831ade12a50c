"""Communicators let ranks reach each other; one that waits longer than the time limit raises, so that nothing hangs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cuflash.distributed.pieces import Pieces, viewed
from cuflash.distributed.steps import Steps, taken
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

    @property
    def others(self) -> list[int]:
        """The other ranks, in such an order that no two ranks begin with the same one."""
        return [(self.rank + distance) % self.world for distance in range(1, self.world)]

    @abstractmethod
    def send(self, message: Any, to: int, tag: int = 0, ready: Any = None) -> None:
        """Hand arrays, or pieces of some, to another rank; they must not change before `barrier`.

        `ready` is what `now` gave when they were complete, by default now.
        """

    @abstractmethod
    def receive(self, source: int, tag: int = 0) -> Message:
        """Return the next message of another rank with this tag, on this rank's device."""

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks by their numbers; they are small and no arrays."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, so that a rank which waits for it raises."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds; it cannot be used again."""

    def barrier(self) -> None:
        """Wait until every rank is here and has read what was sent to it."""
        self.all_gather(None)

    def sum(self, x: T) -> T:
        """Sum an array over all ranks in the order of their numbers, so that each has the same bits."""
        return self.run(self.summing(x))

    def exchange(self, messages: Sequence[T]) -> list[T]:
        """Send the n-th message to rank n, and return what each rank sent here."""
        return self.run(self.exchanging(messages))

    def run(self, steps: Steps[T]) -> T:
        """Take this rank's steps of a call, which all ranks make."""
        return taken(steps)

    # The following are for steps. Here they wait themselves; where they cannot, they yield.

    def gathering(self, value: T) -> Steps[list[T]]:
        """Take the steps of `all_gather`."""
        yield from ()
        return self.all_gather(value)

    def now(self) -> Any:
        """Return what stands for the work that was enqueued so far; None where work is done at once."""
        return None

    def arriving(self, source: int, tag: int = 0, into: Pieces | None = None, ready: Any = None) -> Steps[Pending]:
        """Return the next message of another rank, which may arrive while this one computes.

        `into` has a piece for each one of the message, in which it arrives. They may be written from `ready` on, which
        is what `now` gave, by default from now on.
        """
        yield from ()
        return Later(self, source, tag, into)

    def finishing(self) -> Steps[None]:
        """Let what follows wait until every rank has read what was sent to it."""
        yield from ()
        self.barrier()

    def summing(self, x: T) -> Steps[T]:
        """Take the steps of `sum`."""
        total: Any = None
        parts: list[Any] = yield from self.exchanging([x] * self.world)
        for part in parts:
            total = part.copy() if total is None else total + part
        result: T = total
        return result

    def exchanging(self, messages: Sequence[T]) -> Steps[list[T]]:
        """Take the steps of `exchange`."""
        for to in self.others:
            self.send(messages[to], to)
        received: list[Any] = [messages[self.rank]] * self.world
        for distance in range(1, self.world):
            source = (self.rank - distance) % self.world
            pending = yield from self.arriving(source)
            received[source] = pending.get()
        return received


class Group(Communicator):
    """Some ranks of a communicator, with numbers of their own; each call is made by all of them.

    They hear of failures and wait at barriers with the ranks of the whole.
    """

    def __init__(self, whole: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(list(ranks).index(whole.rank), len(ranks), whole.time_limit, whole.check)
        self._whole, self._ranks = whole, tuple(ranks)

    def send(self, message: Any, to: int, tag: int = 0, ready: Any = None) -> None:
        """Hand arrays to another rank of the group."""
        self._whole.send(message, self._ranks[to], tag, ready)

    def receive(self, source: int, tag: int = 0) -> Message:
        """Return the next message of another rank of the group."""
        return self._whole.receive(self._ranks[source], tag)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of the group's ranks; all ranks of the whole take part."""
        told = self._whole.all_gather(value)
        return [told[rank] for rank in self._ranks]

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of the whole."""
        self._whole.fail(error)

    def close(self) -> None:
        """Leave the whole open, which holds everything."""

    def run(self, steps: Steps[T]) -> T:
        """Take the steps as the whole does."""
        return self._whole.run(steps)

    def gathering(self, value: T) -> Steps[list[T]]:
        """Take the steps of `all_gather`."""
        told = yield from self._whole.gathering(value)
        return [told[rank] for rank in self._ranks]

    def now(self) -> Any:
        """Return what stands for the work that was enqueued so far."""
        return self._whole.now()

    def arriving(self, source: int, tag: int = 0, into: Pieces | None = None, ready: Any = None) -> Steps[Pending]:
        """Return the next message of another rank of the group, which may arrive while this one computes."""
        return (yield from self._whole.arriving(self._ranks[source], tag, into, ready))

    def finishing(self) -> Steps[None]:
        """Let what follows wait until every rank of the whole has read what was sent to it."""
        yield from self._whole.finishing()

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
    into: Pieces | None = None

    def get(self) -> Any:
        """Wait for the message."""
        return written(self.comm.receive(self.source, self.tag), self.into)


def written(message: Any, into: Pieces | None) -> Any:
    """Return a message, or the pieces that get its values."""
    message = viewed(message)
    if into is None:
        return message
    for target, x in zip(into.views(), message, strict=True):
        target[...] = x
    return into


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
