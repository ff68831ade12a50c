"""Daemon threads compile kernels while a call goes on: those it needs next, and those that later calls will need.

Nothing that happens here reaches a call, and a process ends as soon as what is being compiled is done: the compiler's
own threads would crash if the process ended under them. What waits is dropped.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from cuflash import forks

# This variable switches the threads off with 0: calls then compile the kernels that they need themselves.
SWITCH = "CUFLASH_COMPILE_AHEAD"
THREADS = min(4, os.cpu_count() or 1)
# A job that nobody waits for begins when nothing was compiled for so many seconds, as a call may follow at once.
IDLE_SECONDS = 1.0
Job = Callable[[], object]


class _Pool:
    """Threads that end when nothing waits, and what waits.

    What nobody has asked for yet is done by one thread at a time, some time after all others have compiled.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._later: deque[Job] = deque()
        self._workers: set[threading.Thread] = set()
        self._busy = 0  # threads that compile, those of calls among them
        self._idle_since = time.monotonic()
        self._is_ending = False

    def submit(self, job: Job, later: bool) -> None:
        with self._changed:
            if self._is_ending:
                return
            (self._later if later else self._waiting).append(job)
            self._changed.notify()
            if len(self._workers) < THREADS:
                worker = threading.Thread(target=self._work, name="cuflash compiles ahead", daemon=True)
                self._workers.add(worker)
                worker.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and self._later and (seconds := self._seconds_of_others()):
                    self._changed.wait(seconds)
                if not self._waiting and not self._later:
                    self._workers.discard(threading.current_thread())
                    self._changed.notify_all()
                    return
                job = (self._waiting or self._later).popleft()
                self._busy += 1
            try:
                job()
            except BaseException:  # the call that needs the kernel meets the error itself
                pass
            finally:
                self._end_busy()

    def _seconds_of_others(self) -> float:
        """Return the seconds for which what nobody has asked for has to wait at least."""
        return IDLE_SECONDS if self._busy else max(self._idle_since + IDLE_SECONDS - time.monotonic(), 0.0)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        if threading.current_thread() in self._workers:
            if self._is_ending:
                raise SystemExit
            yield
            return
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            self._end_busy()

    def _end_busy(self) -> None:
        with self._changed:
            self._busy -= 1
            self._idle_since = time.monotonic()
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._workers)

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._waiting.clear()
            self._later.clear()
            self._changed.notify_all()
        self.wait()


_pool = _Pool()


def is_on() -> bool:
    """Return True unless the user has switched it off."""
    return os.environ.get(SWITCH, "1") != "0"


def submit(job: Job, later: bool = False) -> None:
    """Let a daemon thread do a job, or do it `later`, once nobody compiles what calls need; its errors are dropped."""
    _pool.submit(job, later)


def compiling() -> AbstractContextManager[None]:
    """Return the context in which a thread compiles; a job of this module ends there if the process is about to end."""
    return _pool.compiling()


def wait() -> None:
    """Return when no job is left."""
    _pool.wait()


def _begin_anew() -> None:
    global _pool
    _pool = _Pool()  # no thread of the parent's runs here


forks.in_child(_begin_anew)
atexit.register(lambda: _pool.end())
