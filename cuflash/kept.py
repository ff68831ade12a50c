"""The one bounded cache that all caches are: a dictionary, or the results of a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

K = TypeVar("K")
V = TypeVar("V")

# The bound of what is kept by the metadata of calls: a program may come with ever new shapes.
MOST_KEPT = 4096


class Kept(dict[K, V]):
    """A dictionary of at most `most` entries, which begins anew when it is full.

    A look-up costs no more than a dictionary's, as entries do not remember when they were last used. Threads may share
    one; at worst an entry is made twice.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


def kept(function: Callable[..., V]) -> _lru_cache_wrapper[V]:
    """The same function, which remembers its latest `MOST_KEPT` results."""
    return lru_cache(maxsize=MOST_KEPT)(function)
