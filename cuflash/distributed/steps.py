"""A rank's share of a call is a generator that yields where it waits for other ranks.

Ranks that are processes or threads with NumPy arrays wait within such a step themselves. Threads with GPUs do not, as
Python runs one thread at a time: one of them takes the steps of all ranks in turn (`rank_threads`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
# It yields True where others may go on although this rank need not wait, and False where it waits.
Steps = Generator[bool, None, T]


def taken(steps: Steps[T]) -> T:
    """Take all steps, each of which waits itself, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
