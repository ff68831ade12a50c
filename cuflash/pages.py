"""Which pages of a pool each sequence has, and which of them share one: bookkeeping on the host, in NumPy alone.

Pages may lie in two memories: numbers below `Pages.num_pages` are those of the device, the others those of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int32]


class Copy(NamedTuple):
    """A page that has to be copied: others share it and a sequence is to write into it, or it moves to other memory."""

    source: int
    target: int


class Reserved(NamedTuple):
    """A step asks for copies, in the order in which they must be made; pages that moved have new numbers."""

    copies: list[Copy]
    renamed: _Ints | None  # the number of every page after the step; None where no page moved


class Held:
    """A sequence: its length and its pages, in the order of its positions."""

    def __init__(self, pages: _Ints, count: int, length: int, last_use: int = 0) -> None:
        self.length = length
        self.last_use = last_use  # the number of the latest step that had it
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
        return Held(self.pages.copy(), self._count, self.length, self.last_use)


class Pages:
    """A pool's pages, and the sequences that hold them by number.

    Every method that raises has changed nothing. A sequence of a length holds as many pages as it fills or begins, so
    that only its last page is ever written again.

    Where the device has too few pages for a step, its coldest ones move to the host: full pages of sequences that the
    step does not have, the longest unused first, then full pages of its own, then pages that other sequences have only
    begun; of one sequence the oldest positions first. Where device pages are left over behind a step, the newest pages
    of its sequences come back.
    """

    def __init__(self, num_pages: int, page_size: int, max_pages: int, host_pages: int = 0) -> None:
        self.num_pages, self.page_size, self.max_pages = num_pages, page_size, max_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is taken first
        self._free_on_host = list(range(num_pages + host_pages - 1, num_pages - 1, -1))
        self._holders = np.zeros(num_pages + host_pages, np.int32)  # sequences that hold each page
        self._held: dict[Any, Held] = {}
        self._next = 0
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Pages of the device that nobody holds."""
        return len(self._free)

    @property
    def num_free_on_host(self) -> int:
        """Pages of the host that nobody holds."""
        return len(self._free_on_host)

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

    def reserve(self, sequences: Sequence[int], counts: Sequence[int]) -> Reserved:
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
        if wanted > self.num_free + self.num_free_on_host:
            free = f"{self.num_free} are free"
            if len(self._holders) > self.num_pages:
                free = f"{self.num_free} of the device and {self.num_free_on_host} of the host are free"
            raise MemoryError(f"PagedCache: {wanted} pages are wanted for this step, {free}")
        self._clock += 1
        for own in held:
            own.last_use = self._clock
        copies: list[Copy] = []
        renamed = None
        if len(self._holders) > self.num_pages:
            copies, renamed = self._move(held, counts, wanted)
        # The pages that are still short lie on the host: the positions that are farthest from their sequence's end.
        on_host = _coldest_of(held, shared, added, wanted - self.num_free)
        for own in shared:
            index = len(own.pages) - 1
            source, (target,) = int(own.pages[-1]), self._take([(id(own), index) in on_host])
            self._holders[source] -= 1
            own.pages[-1] = target
            copies.append(Copy(source, target))
        for own, count, pages in zip(held, counts, added, strict=True):
            first = len(own.pages)
            own.add(self._take([(id(own), first + n) in on_host for n in range(pages)]))
            own.length += count
        return Reserved(copies, renamed)

    def _move(self, held: Sequence[Held], counts: Sequence[int], wanted: int) -> tuple[list[Copy], _Ints | None]:
        """Move pages to the host as the device is short of them, or back where it is not."""
        outs = self._moved_out(held, counts, wanted)
        away = self._rename(outs)
        ins = self._moved_in(held, counts, self.num_free - wanted)
        back = self._rename(ins)
        return outs + ins, away if back is None else back if away is None else back[away]

    def _moved_out(self, held: Sequence[Held], counts: Sequence[int], wanted: int) -> list[Copy]:
        """Choose the pages of the device that have to leave it for a step, and take their new places."""
        written = [
            own.pages[own.length // self.page_size :] if count else own.pages[:0]
            for own, count in zip(held, counts, strict=True)
        ]
        # A page that is written should lie on the device; one that others share gets a copy there anyway.
        recalled = sum(int(((x >= self.num_pages) & (self._holders[x] == 1)).sum()) for x in written)
        short = min(wanted + recalled - self.num_free, self.num_free_on_host)
        if short <= 0:
            return []
        size = len(self._holders)
        is_begun, heat, position = np.zeros(size, bool), np.zeros(size, np.int64), np.zeros(size, np.int64)
        for own in sorted(self._held.values(), key=lambda x: x.last_use):
            pages = own.pages
            heat[pages] = own.last_use
            position[pages] = np.arange(len(pages))
            if own.length % self.page_size:
                is_begun[pages[-1]] = True
        is_candidate = self._holders > 0
        is_candidate[self.num_pages :] = False
        for pages in written:
            is_candidate[pages] = False
        for own in held:
            is_candidate[own.pages] &= ~is_begun[own.pages]
        candidates = np.flatnonzero(is_candidate)
        order = np.lexsort((position[candidates], heat[candidates], is_begun[candidates]))
        return [Copy(int(page), self._free_on_host.pop()) for page in candidates[order[:short]]]

    def _moved_in(self, held: Sequence[Held], counts: Sequence[int], room: int) -> list[Copy]:
        """Choose the pages of the host that come back to the device, where room is left for them."""
        if room <= 0:
            return []
        found: dict[int, tuple[bool, int]] = {}
        for own, count in zip(held, counts, strict=True):
            for index in np.flatnonzero(own.pages >= self.num_pages).tolist():
                rank = (not count or index < own.length // self.page_size, len(own.pages) - index)
                page = int(own.pages[index])
                found[page] = min(found.get(page, rank), rank)
        chosen = sorted(found, key=lambda page: found[page])[:room]
        return [Copy(page, self._free.pop()) for page in chosen]

    def _rename(self, moves: Sequence[Copy]) -> _Ints | None:
        """Give pages that move their new numbers, in all sequences, and free the old ones."""
        if not moves:
            return None
        renamed = np.arange(len(self._holders), dtype=np.int32)
        sources, targets = (np.array(x, np.int32) for x in zip(*moves, strict=True))
        renamed[sources] = targets
        for own in self._held.values():
            own.pages[:] = renamed[own.pages]
        holders = self._holders[sources]
        self._holders[sources] = 0
        self._holders[targets] = holders
        self._add_free(sources.tolist())
        return renamed

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

    def _take(self, on_host: Sequence[bool]) -> list[int]:
        """Take a page for each entry, of the host where it is True."""
        taken = [self._free_on_host.pop() if is_on_host else self._free.pop() for is_on_host in on_host]
        self._holders[taken] = 1
        return taken

    def _release(self, pages: _Ints) -> None:
        self._holders[pages] -= 1
        self._add_free([int(page) for page in pages if self._holders[page] == 0])

    def _add_free(self, pages: Sequence[int]) -> None:
        self._free.extend(page for page in reversed(pages) if page < self.num_pages)
        self._free_on_host.extend(page for page in reversed(pages) if page >= self.num_pages)


def _coldest_of(
    held: Sequence[Held], shared: Sequence[Held], added: Sequence[int], number: int
) -> set[tuple[int, int]]:
    """Return those `number` of the pages that a step wants which are farthest from the end of their sequences.

    Each is a sequence's identity and the page's place in it; `shared` get a copy of their last page, all `added` pages.
    """
    if number <= 0:
        return set()
    are_shared = set(map(id, shared))
    wanted = []
    for own, pages in zip(held, added, strict=True):
        first = -1 if id(own) in are_shared else 0
        wanted += [(pages - n, id(own), len(own.pages) + n) for n in range(first, pages)]
    wanted.sort(key=lambda x: -x[0])
    return {(own, index) for _, own, index in wanted[:number]}
