"""The threads of the CPU path run a call's tasks, each with scratch memory of its own.

BLAS's own threads are off, because they would split sums by their number.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cuflash import forks
from cuflash.cpu.work import Work

T = TypeVar("T")

# The first names (get, set) are those of NumPy's own wheels, the others those of distributions.
_THREAD_FUNCTIONS = (
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
)


@functools.cache
def _blas_functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    extension = importlib.import_module("numpy._core._multiarray_umath").__file__ or ""
    # The library that the module links to is found through the module, but not on Windows.
    found = [] if sys.platform == "win32" else [Path(extension)]
    for path in (*found, *sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"))):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for getter, setter in _THREAD_FUNCTIONS:
            with contextlib.suppress(AttributeError):
                return getattr(library, getter), getattr(library, setter)
    return None


class _BlasThreads:
    """BLAS has one thread within the context; ``with BLAS_THREADS as workers`` gives how many may run instead.

    The setting is the whole process's, and is changed under `forks.LOCK`.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._before = 1
        forks.in_child(self._begin_child)

    def __enter__(self) -> int:
        functions = _blas_functions()
        if functions is None:
            return os.cpu_count() or 1
        get, set_ = functions
        with forks.LOCK:
            if self._calls == 0:
                self._before = get()
                set_(1)
            self._calls += 1
            return self._before

    def __exit__(self, *_: object) -> None:
        functions = _blas_functions()
        with forks.LOCK:
            if self._calls == 1 and functions is not None:
                functions[1](self._before)
            self._calls = max(0, self._calls - 1)  # a child that a call forked in its midst has none

    def _begin_child(self) -> None:
        """Forget the calls of the parent's other threads, which do not run in a child."""
        functions = _blas_functions() if self._calls else None
        if functions is not None:
            functions[1](self._before)
        self._calls = 0


BLAS_THREADS = _BlasThreads()


# A call meets few shapes of tiles again.
_MAX_REMEMBERED = 16
_LINE = 64  # bytes of a cache line


class Workspace:
    """Scratch arrays that last until their name is asked for again, and the pass that they are for."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._memory: dict[tuple[str, str], NDArray[Any]] = {}
        self._remembered: dict[Any, Any] = {}

    def remember(self, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned when `key` was last met, or returns now; nobody may change it."""
        if key not in self._remembered:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = make()
        found: T = self._remembered[key]
        return found

    def array(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return an array with anything in it."""
        size = math.prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.size < size:
            memory = self._memory[name, dtype] = _aligned(size, dtype)
        return memory[:size].reshape(shape)


def _aligned(size: int, dtype: str) -> NDArray[Any]:
    """Allocate memory that begins a cache line."""
    memory = np.empty(size * np.dtype(dtype).itemsize + _LINE, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _LINE  # `memory.ctypes` takes three times as long
    return memory[begin : begin + size * np.dtype(dtype).itemsize].view(dtype)


class InOrder:
    """Runs actions in the order of their numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Callable[[], None]] = {}
        self._next = 0

    def submit(self, number: int, action: Callable[[], None]) -> None:
        """Run `action` when all before it are done; numbers start at 0 and leave no gap."""
        with self._lock:
            self._waiting[number] = action
            while self._next in self._waiting:
                self._waiting.pop(self._next)()
                self._next += 1


def run_tasks(count: int, task: Callable[[int, Workspace], None], parallel: bool, work: Work) -> None:
    """Call ``task(number, workspace)``, a part of `work`, for each number below `count` in order.

    The tasks run on all cores if `parallel`.

    What a task computes must not depend on which worker runs it. The calling thread works alone where no other can be
    started: in handlers of `atexit`, for one.
    """
    if count == 1:
        with BLAS_THREADS, np.errstate(all="ignore"):
            task(0, Workspace(work))
        return
    lock = threading.Lock()
    numbers = iter(range(count))
    errors: list[BaseException] = []

    def worker() -> None:
        workspace = Workspace(work)
        # Hidden elements cause these errors. The setting holds for one thread only.
        with np.errstate(all="ignore"):
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    task(number, workspace)
                except BaseException as error:
                    fail(error)
                    return

    def fail(error: BaseException) -> None:
        with lock:
            # Errors of cancelled tasks come behind the reason.
            errors.append(error)
            work.cancel()
            for _ in numbers:  # nobody starts another task
                pass

    with BLAS_THREADS as workers:
        others = _start(worker, min(workers, count) - 1 if parallel else 0)
        try:
            worker()
        finally:
            for thread in others:
                while thread.is_alive():
                    try:
                        thread.join(work.interval)
                        work.tell()
                    except BaseException as error:  # of the callback, or Ctrl-C
                        fail(error)
    if errors:
        raise errors.pop(0)


def _start(worker: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start as many threads as the system and the interpreter grant."""
    threads: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=worker, name="cuflash")
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    return threads
