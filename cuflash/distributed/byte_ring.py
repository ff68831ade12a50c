"""Rings of bytes in memory that two processes share: one of them writes frames, and the other one reads them.

Nothing is assumed about the order in which one processor sees what another one writes, but for 8 aligned bytes, which
are whole. A frame has its length and a checksum, which its position in the ring is part of; a reader that finds them
unfit has come too early and tries again.
"""

from __future__ import annotations

import struct
import zlib

LINE = 128  # bytes; processors fetch lines of 64 bytes, some of them in pairs
HEADER = struct.Struct("=II")  # bytes of the frame, its checksum
ALIGNMENT = 8
_MASK = (1 << 32) - 1


class ByteRing:
    """One end of a ring, in a process that either writes or reads.

    The memory begins with the count of bytes that were ever written and the count of those that were read, each in
    cache lines of its own. Zeros are an empty ring.
    """

    def __init__(self, memory: memoryview) -> None:
        self._capacity = (len(memory) - 2 * LINE) // ALIGNMENT * ALIGNMENT
        self._written = memory[:ALIGNMENT].cast("Q")
        self._read = memory[LINE : LINE + ALIGNMENT].cast("Q")
        self._data = memory[2 * LINE : 2 * LINE + self._capacity]
        self._position = 0  # the end's own count
        self._known_read = 0  # the count that the writer has seen last

    @property
    def longest(self) -> int:
        """Bytes of the longest frame, of which two fit."""
        return self._capacity // 2 // ALIGNMENT * ALIGNMENT - HEADER.size

    def put(self, frame: bytes) -> bool:
        """Write a frame; False where there is no room for it yet."""
        position = self._position
        following = position + _size_of(len(frame))
        if following - self._known_read > self._capacity:
            self._known_read = self._read[0]
            if following - self._known_read > self._capacity:
                return False
        whole = HEADER.pack(len(frame), _checksum(frame, position)) + frame
        begin = position % self._capacity
        behind = begin + len(whole) - self._capacity
        if behind <= 0:
            self._data[begin : begin + len(whole)] = whole
        else:
            self._data[begin:] = whole[:-behind]
            self._data[:behind] = whole[-behind:]
        self._written[0] = self._position = following
        return True

    def has_news(self) -> bool:
        """Return True if the writer has written what was not read."""
        return self._written[0] != self._position

    def get(self) -> bytes | None:
        """Read the next frame; None where there is none, or not all of it can be seen yet."""
        position = self._position
        written = self._written[0]
        if written == position:
            return None
        begin = position % self._capacity
        length, checksum = HEADER.unpack_from(self._data, begin)
        if _size_of(length) > min(written - position, self._capacity):
            return None
        begin += HEADER.size
        frame = bytes(self._data[begin : begin + length])
        if len(frame) < length:
            frame += bytes(self._data[: length - len(frame)])
        if _checksum(frame, position) != checksum:
            return None
        self._read[0] = self._position = position + _size_of(length)
        return frame


def ring_bytes(capacity: int) -> int:
    """Return the bytes of memory of a ring."""
    return 2 * LINE + capacity


def _size_of(length: int) -> int:
    return -(-(HEADER.size + length) // ALIGNMENT) * ALIGNMENT


def _checksum(frame: bytes, position: int) -> int:
    """Return what no frame has that stood in the same place in an earlier round, whose position was another one."""
    return zlib.crc32(frame, ~position & _MASK)
