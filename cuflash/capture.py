"""Scratch memory of calls that are captured into a graph: nobody else may have it, as the graph runs at any time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cuflash.tensor_map import driver

# CUstreamCaptureMode: allocations do not end a capture.
_RELAXED = 2


class Block(NamedTuple):
    """A piece of memory."""

    size: int
    address: int
    memory: Any  # keeps it


# Calls of one capture on one stream come one after the other, and share it.
_free: dict[tuple[int, int], list[Block]] = {}


def take(capture: int, stream: int, size: int, allocate: Callable[[int], tuple[int, Any]]) -> Block:
    """A block of at least `size` bytes for a call that is captured.

    `allocate(size)` gives address and memory: not of a pool, which has only what the call before the capture left, and
    that is for arrays of the caller.
    """
    free = _free.setdefault((capture, stream), [])
    fitting = [block for block in free if block.size >= size]
    if fitting:
        block = min(fitting, key=lambda block: block.size)
        free.remove(block)
        return block
    return Block(size, *allocate(size))


def give_back(capture: int, stream: int, blocks: list[Block]) -> None:
    """Let later calls of the same capture and stream have them."""
    _free.setdefault((capture, stream), []).extend(blocks)  # none where the call took none


def capture_of(stream: int) -> int:
    """The driver's number of the capture that a stream takes part in; 0 if there is none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    nothing = ctypes.c_void_p()
    error = driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), nothing, nothing, nothing
    )
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo: error {error}")
    return number.value if status.value else 0


@contextmanager
def allocations_allowed() -> Iterator[None]:
    """Let this thread allocate memory while streams are captured."""
    mode = ctypes.c_int(_RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
