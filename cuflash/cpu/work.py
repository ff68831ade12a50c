"""The work of a pass on the CPU: how much of it is done, who is told, and whether it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from cuflash import reporting


class _HasSize(Protocol):
    @property
    def size(self) -> int: ...


T = TypeVar("T", bound=_HasSize)


class CancelledError(Exception):
    """The end of a task because another one has failed."""


class Work:
    """The work of one pass. Any thread does it; the one that made this object, at the beginning of the pass, reports.

    `count` gives the number of scores in all. It is called only where somebody is told, as it visits all tiles.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._reporter = reporting.current()
        self._lock = threading.Lock()
        self._caller = threading.get_ident()
        self._total = 0 if self._reporter is None else count()
        self._done = 0
        self._begin = time.monotonic()
        self._has_told = False
        self._is_cancelled = False

    @property
    def interval(self) -> float | None:
        """The seconds after which a thread that waits for others should `tell`; None if it need not."""
        return None if self._reporter is None else reporting.INTERVAL

    def cancel(self) -> None:
        """Let every thread end after the tile that it computes."""
        self._is_cancelled = True

    def each(self, tiles: Iterable[T]) -> Iterator[T]:
        """Yield the same tiles, each of which counts as done when the next one is asked for."""
        for tile in tiles:
            yield tile
            if self._is_cancelled:
                raise CancelledError
            if self._reporter is not None:
                with self._lock:
                    self._done += tile.size
                self.tell()

    def tell(self) -> None:
        """Report, if this is the caller's thread, the work goes on, and it is time to."""
        if self._reporter is None or threading.get_ident() != self._caller:
            return
        done = self._done  # once: other threads go on
        if not self._is_cancelled and done < self._total and self._reporter.is_due(self._begin):
            self._has_told = True
            self._reporter.tell(done, self._total)

    def end(self) -> None:
        """Report that all is done, unless it was done before anybody could have asked."""
        if self._reporter is not None and self._total and (self._has_told or self._reporter.is_due()):
            self._reporter.tell(self._total, self._total)
