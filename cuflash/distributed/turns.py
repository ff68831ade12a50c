"""Turns of threads that enqueue work for GPUs.

Python runs one thread at a time. Threads that each enqueue work for a GPU would wait for each other at every call of
the driver; with turns they change at the points that the work chooses.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that goes to the thread that has waited longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold the turn within the context."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def leave(self) -> Iterator[None]:
        """Let others have the turn within the context, in which this thread waits for something."""
        self._release()
        try:
            yield
        finally:
            self._acquire()

    def pass_on(self) -> None:
        """Let every thread that waits have the turn once."""
        if self._waiting:
            with self.leave():
                pass

    def _acquire(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            own = threading.Lock()
            own.acquire()
            self._waiting.append(own)
        own.acquire()  # until `_release` hands the turn over

    def _release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
