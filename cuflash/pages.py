"""Which pages of a pool each sequence has, and which of them share one: bookkeeping on the host, in NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int32]


class Copy(NamedTuple):
    """A page that has to be copied before a sequence writes into it, because others share it."""

    source: int
    target: int


class Held:
    """A sequence: its length and its pages, in the order of its positions."""

    def __init__(self, pages: _Ints, count: int, length: int) -> None:
        self.length = length
        self._count = count
        self._room = pages

    @property
    def pages(self) -> _Ints:
        """The numbers of its pages; they may be written."""
        return self._room[: self._count]

    def add(self, pages: Sequence[int]) -> None:
        """Append pages."""
        count = self._count + len(pages)
        if count > len(self._room):
            self._room = np.concatenate((self.pages, np.empty(max(count, 8), np.int32)))
        self._room[self._count : count] = pages
        self._count = count

    def keep(self, count: int) -> _Ints:
        """Keep the first pages alone, and return the others."""
        others = self.pages[count:].copy()
        self._count = min(self._count, count)
        return others

    def copy(self) -> Held:
        """Another sequence with the same pages."""
        return Held(self.pages.copy(), self._count, self.length)


class Pages:
    """A pool's pages, and the sequences that hold them by number.

    Every method that raises has changed nothing. A sequence of a length holds as many pages as it fills or begins, so
    that only its last page is ever written again.
    """

    def __init__(self, num_pages: int, page_size: int, max_pages: int) -> None:
        self.page_size, self.max_pages = page_size, max_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is taken first
        self._holders = np.zeros(num_pages, np.int32)  # sequences that hold each page
        self._held: dict[Any, Held] = {}
        self._next = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def __getitem__(self, sequence: Any) -> Held:
        try:
            return self._held[sequence]
        except (KeyError, TypeError):  # the latter of what has no hash
            raise KeyError(
                f"sequence: expected one that add or fork returned and that is not freed, got {sequence!r}"
            ) from None

    def add(self) -> int:
        """A new sequence without positions."""
        return self._enter(Held(np.empty(0, np.int32), 0, 0))

    def fork(self, sequence: int) -> int:
        """A new sequence with the pages of another."""
        copy = self[sequence].copy()
        self._holders[copy.pages] += 1
        return self._enter(copy)

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        self._release(self[sequence].pages)
        del self._held[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the positions of a sequence from `length` on."""
        held = self[sequence]
        if not 0 <= length <= held.length:
            raise ValueError(f"length: expected 0 <= length <= {held.length}, the sequence's own, got {length}")
        self._release(held.keep(self._pages_of(length)))
        held.length = length

    def reserve(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Copy]:
        """Make sequences longer, and return the pages that must be copied before the new positions are written."""
        held = [self[sequence] for sequence in sequences]
        if len(set(map(id, held))) < len(held):
            twice = next(s for i, s in enumerate(sequences) if s in sequences[:i])
            raise ValueError(f"sequences: expected each one once, got {twice} twice")
        for sequence, own, count in zip(sequences, held, counts, strict=True):
            if self._pages_of(own.length + count) > self.max_pages:
                raise ValueError(
                    f"sequence {sequence}: expected at most max_pages_per_sequence * page_size = "
                    f"{self.max_pages} * {self.page_size} positions, got {own.length} + {count}"
                )
        shared = self._to_be_copied(held, counts)
        added = [self._pages_of(own.length + n) - len(own.pages) for own, n in zip(held, counts, strict=True)]
        wanted = len(shared) + sum(added)
        if wanted > self.num_free:
            raise MemoryError(f"PagedCache: {wanted} pages are wanted for this step, {self.num_free} are free")
        copies = []
        for own in shared:
            source, (target,) = int(own.pages[-1]), self._take(1)
            self._holders[source] -= 1
            own.pages[-1] = target
            copies.append(Copy(source, target))
        for own, count, pages in zip(held, counts, added, strict=True):
            own.add(self._take(pages))
            own.length += count
        return copies

    def _to_be_copied(self, held: Sequence[Held], counts: Sequence[int]) -> list[Held]:
        """Those that write into a page that somebody else holds, when those before them have copies of their own."""
        found, copied = [], dict[int, int]()
        for own, count in zip(held, counts, strict=True):
            if count == 0 or own.length % self.page_size == 0:
                continue
            page = int(own.pages[-1])
            if self._holders[page] - copied.get(page, 0) > 1:
                copied[page] = copied.get(page, 0) + 1
                found.append(own)
        return found

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _enter(self, held: Held) -> int:
        sequence, self._next = self._next, self._next + 1
        self._held[sequence] = held
        return sequence

    def _take(self, count: int) -> list[int]:
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        self._holders[taken] = 1
        return taken

    def _release(self, pages: _Ints) -> None:
        self._holders[pages] -= 1
        self._free.extend(reversed([int(page) for page in pages if self._holders[page] == 0]))
