"""Scratch memory of calls that are captured into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Block(NamedTuple):
    """Memory of captured calls, which nobody else may have: the graph runs at any time."""

    size: int
    address: int
    memory: Any  # keeps it


# Calls of one capture on one stream come one after the other, and share it.
_free: dict[tuple[int, int], list[Block]] = {}


def take(capture: int, stream: int, size: int, allocate: Callable[[int], tuple[int, Any]]) -> Block:
    """A block of at least `size` bytes for a call that is captured: no pool has more than the call before it left."""
    free = _free.setdefault((capture, stream), [])
    fitting = [block for block in free if block.size >= size]
    if fitting:
        block = min(fitting, key=lambda block: block.size)
        free.remove(block)
        return block
    return Block(size, *allocate(size))


def give_back(capture: int, stream: int, blocks: list[Block]) -> None:
    """Let later calls of the same capture and stream have them."""
    _free.setdefault((capture, stream), []).extend(blocks)
