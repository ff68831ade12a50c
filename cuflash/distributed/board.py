"""A board is what ranks that are threads share: mailboxes, and one thread that takes the steps of all."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cuflash.distributed.steps import Steps

T = TypeVar("T")


@dataclass
class Gathering:
    """The values that the threads bring to one call of `all_gather`."""

    values: dict[int, Any] = field(default_factory=dict)
    is_complete: bool = False


@dataclass
class Share(Generic[T]):
    """One rank's share of a call that one thread runs for all."""

    steps: Steps[T]
    rank: int
    device: int | None  # the rank's GPU
    stream: Any  # the rank's current stream; None without a GPU
    result: T | None = None
    error: BaseException | None = None

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        """Make the rank's GPU and stream the current ones."""
        if self.stream is None:
            yield
            return
        import cupy

        with cupy.cuda.Device(self.device), self.stream:
            yield

    def step(self) -> bool | None:
        """Take one step; return whether others may go on, or None where the share has ended."""
        try:
            with self._at_home():
                return next(self.steps)
        except StopIteration as end:
            self.result = end.value
        except Exception as error:  # an interruption is that of the thread which leads
            self.error = error
        return None

    def stop(self, error: BaseException) -> None:
        """Let the step that waits raise an error."""
        try:
            with self._at_home():
                self.steps.throw(error)
            self.error = error  # steps that go on after an error have nobody who takes them
        except BaseException as raised:
            self.error = raised


@dataclass
class Meeting:
    """The shares that the threads bring to one call."""

    shares: dict[int, Share[Any]] = field(default_factory=dict)
    is_over: bool = False


class Board:
    """The mailboxes that the threads of one group share, and their first failure."""

    def __init__(self, world: int, devices: Sequence[int] | None, is_led: bool) -> None:
        self.world, self.devices = world, devices
        self.is_led = is_led  # one thread takes the steps of all
        self.condition = threading.Condition()
        self.mailboxes: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)  # (source, to, tag)
        self.failure: tuple[int, str] | None = None
        self.gathering = Gathering()
        self.meeting = Meeting()
        self.leader: int | None = None  # the thread that takes the steps of all ranks now
        self.progress = 0  # counts what may let a rank go on that waits

    def lead(self, shares: Sequence[Share[Any]]) -> None:
        """Take the steps of all ranks in turn until each has a result or an error."""
        self.leader, waiting = threading.get_ident(), list(shares)
        try:
            while waiting:
                before, count = self.progress, len(waiting)
                taken_steps = [(share, share.step()) for share in waiting]
                waiting = [share for share, is_free in taken_steps if is_free is not None]
                if self.progress == before and len(waiting) == count and not any(free for _, free in taken_steps):
                    for share in waiting:
                        share.stop(RuntimeError(f"rank {share.rank}: expected a message of another rank, got none"))
                    waiting, self.gathering = [], Gathering()
        finally:
            for share in waiting:  # this thread was interrupted
                if share.result is None and share.error is None:
                    share.stop(RuntimeError(f"rank {share.rank}: the thread that took all ranks' steps ended"))
            self.leader = None
