"""Progress of long calls: who is told in the current context, and how often."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Callback = Callable[[int, int], object]
INTERVAL = 0.05  # the least seconds between two reports within a pass


class Reporter:
    """The callback of a context, and when it was last called."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._last = float("-inf")

    def is_due(self, begin: float = float("-inf")) -> bool:
        """Return True if the last report, and a time by the monotonic clock, are long enough ago."""
        return time.monotonic() - max(self._last, begin) >= INTERVAL

    def tell(self, done: int, total: int) -> None:
        """Call back; what the callback computes itself is not reported."""
        token = _current.set(None)
        try:
            self._callback(done, total)
        finally:
            _current.reset(token)
            self._last = time.monotonic()


# Every thread and every task of asyncio has its own.
_current: ContextVar[Reporter | None] = ContextVar("cuflash.progress", default=None)


def current() -> Reporter | None:
    """Return who is told of work that begins now."""
    return _current.get()


def progress(callback: Callback) -> AbstractContextManager[None]:
    """Let calls on NumPy arrays within a ``with`` block report how far they are.

    Each pass of attention, forward or backward, that computes on the CPU calls ``callback(done, total)`` from the
    thread that made the call: some 20 times a second at most, and once more when the pass is complete. Passes that take
    less than 50 ms are reported at their end alone, and only if that long has passed since the last report. Results are
    the same bits as without.

    The context holds for the thread, or task of asyncio, that enters it, and not for threads that this one starts; a
    context within another takes its place. Calls on a GPU return before their work is done and report nothing.

    Parameters
    ----------
    callback : callable
        Gets two integers: how many scores (pairs of a query and a key in a head, of tiles that are visited) are done,
        and how many the pass has in all; the last call of a pass gets the same number twice. An exception that it
        raises cancels the call: all threads stop within the tile that they compute, and the exception comes out of the
        call. Arrays that were given as `out` then hold anything.

    Raises
    ------
    TypeError
        If `callback` is not callable.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x, shares = np.ones((1, 512, 4, 64), np.float32), []
    >>> with cuflash.progress(lambda done, total: shares.append(done / total)):
    ...     out, backward = cuflash.attention_vjp(x, x, x, causal=True)
    >>> all(0 < share <= 1 for share in shares)
    True
    """
    if not callable(callback):
        raise TypeError(f"callback: expected a callable (done, total), got {type(callback).__name__}")
    return _reporting(callback)


@contextmanager
def _reporting(callback: Callback) -> Iterator[None]:
    token = _current.set(Reporter(callback))
    try:
        yield
    finally:
        _current.reset(token)
