"""The arguments of a launch, which later launches of the kernel use again, and the launches that keep them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Words = memoryview  # its items are words of 8 bytes


class Arguments:
    """The arguments of one launch and the pointers to them."""

    __slots__ = ("address", "begins", "words")

    def __init__(self, values: Sequence[np.ndarray[Any, Any]]) -> None:
        # Each argument begins a cache line.
        sizes = [_LINE * math.ceil(value.nbytes / _LINE) for value in values]
        begins = [sum(sizes[:i]) for i in range(len(values) + 1)]
        buffer = np.zeros(begins[-1] + 8 * len(values) + _LINE, np.uint8)
        aligned = buffer[-buffer.ctypes.data % _LINE :][: begins[-1] + 8 * len(values)]
        for begin, value in zip(begins, values, strict=False):
            aligned[begin : begin + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
        pointers = aligned[begins[-1] :].view(np.uint64)
        pointers[:] = [aligned.ctypes.data + begin for begin in begins[:-1]]
        self.words: Words = aligned.view(np.uint64).data
        self.begins = tuple([begin // 8 for begin in begins[1:-1]])  # first words of the arguments behind the struct
        self.address: int = pointers.ctypes.data


_LINE = 64  # bytes of a cache line


class BoundLaunch:
    """A `replay.Launch`: a kernel bound to its grid, with the arguments of its launches; other launches derive from it.

    `values` are the first launch's arguments, of which the words `pointer_words` receive addresses of arrays; `launch`
    is the function of `LoadedKernel.bound`, or None where the grid is empty.
    """

    def __init__(
        self,
        values: Sequence[np.ndarray[Any, Any]],
        pointer_words: Iterable[int],
        launch: Callable[[int, int], None] | None,
    ) -> None:
        self.pointer_words = tuple(pointer_words)
        self._values = tuple(values)
        self._launch = launch
        # No thread uses these arguments. A thread takes one for a launch and puts it back, each in one atomic step.
        self._free: list[Arguments] = []

    def enqueue(
        self, addresses: Sequence[int], places: Iterable[tuple[int, int]], seed: int | None, stream: int
    ) -> None:
        """Enqueue the kernel: see `replay.Launch`."""
        if self._launch is None:
            return
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = Arguments(self._values)
        words = arguments.words
        for word, place in places:
            words[word] = addresses[place]
        self._fill(arguments, seed, stream)
        self._launch(arguments.address, stream)
        self._free.append(arguments)

    def enqueue_in_order(self, addresses: Sequence[int], seed: int | None, stream: int) -> None:
        """Enqueue the kernel on addresses in the order of `pointer_words`."""
        self.enqueue(addresses, zip(self.pointer_words, range(len(addresses)), strict=True), seed, stream)

    def _fill(self, arguments: Arguments, seed: int | None, stream: int) -> None:
        """Write what else changes between launches, which is nothing here."""
