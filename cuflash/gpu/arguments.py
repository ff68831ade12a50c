"""The arguments of a launch, which later launches of the kernel use again."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
