"""Scratch memory of calls that are captured into a graph; `replay` takes it where no memory pool can serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Block(NamedTuple):
    """Memory that belongs to captured calls for good, because their graph may run at any time."""

    size: int  # bytes
    address: int
    memory: Any  # keeps the memory alive


# Free blocks lie here by (capture, stream): calls of one capture on one stream run one after the other, and share them.
_free: dict[tuple[int, int], list[Block]] = {}


def take(capture: int, stream: int, size: int, allocate: Callable[[int], tuple[int, Any]]) -> Block:
    """Take a block of at least `size` bytes for a captured call: a free one, or a new one by `allocate`.

    A memory pool does not serve, as it has no more than the call before the capture left.
    """
    free = _free.setdefault((capture, stream), [])
    fitting = [block for block in free if block.size >= size]
    if fitting:
        block = min(fitting, key=lambda block: block.size)
        free.remove(block)
        return block
    return Block(size, *allocate(size))


def give_back(capture: int, stream: int, blocks: list[Block]) -> None:
    """Let later calls of the same capture and stream take these blocks."""
    _free.setdefault((capture, stream), []).extend(blocks)


def forget() -> None:
    """Free the memory of all captured calls, for a process that launches none of its graphs any more."""
    _free.clear()
