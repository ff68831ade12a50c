"""Keys and values come in chunks through two buffers of the device, and gradients of chunks leave behind them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from cuflash.offload.device import Device, Event, Outgoing
from cuflash.offload.pooled_rows import PooledRows

Array = Any
# There are two buffers, as a chunk is computed while the next one is copied.
NUM_BUFFERS = 2
# So many gradients may be on their way out: dk and dv of two chunks.
_MOST_OUTGOING = 4
# Chunks of many keys hold whole tiles of the kernels.
KEYS_OF_TILES = 128


class Piece(NamedTuple):
    """Sequences of a batch with equal numbers of queries and keys, which are the first rows of the arrays."""

    batch: int
    batch_stop: int
    rows: int
    keys: int

    @property
    def batches(self) -> slice:
        """The sequences' place in the batch."""
        return slice(self.batch, self.batch_stop)

    @property
    def diagonal(self) -> int:
        """The key that query 0 is aligned to; query i is aligned to key ``i + diagonal``."""
        return self.keys - self.rows


class Chunk(NamedTuple):
    """Keys of a piece's sequences, which some query sees."""

    piece: Piece
    first: int
    stop: int

    @property
    def keys(self) -> slice:
        """The keys' place in the arrays."""
        return slice(self.first, self.stop)


def chunks_of(
    piece: Piece, first: int, stop: int, bytes_per_key: int, chunk_bytes: int, split_size: int | None = None
) -> list[Chunk]:
    """Cut keys first to stop - 1 into chunks of at most `chunk_bytes`, but of one key at least.

    With a `split_size` the cuts lie at multiples of it, which other sequences do not move, and `chunk_bytes` holds for
    one sequence.
    """
    if split_size is not None:
        step = max(split_size, chunk_bytes // max(1, bytes_per_key) // split_size * split_size)
        begins = [first, *range((first // step + 1) * step, stop, step)]
        return [Chunk(piece, a, b) for a, b in zip(begins, (*begins[1:], stop), strict=True) if a < b]
    step = max(1, chunk_bytes // max(1, bytes_per_key * (piece.batch_stop - piece.batch)))
    if step > KEYS_OF_TILES:
        step -= step % KEYS_OF_TILES
    return [Chunk(piece, key, min(key + step, stop)) for key in range(first, stop, step)]


def is_part_of(v: Array, k: Array) -> bool:
    """Return True if v is a view of k's first columns, and comes with them."""
    return bool(
        v.ctypes.data == k.ctypes.data
        and v.shape[:-1] == k.shape[:-1]
        and v.shape[-1] <= k.shape[-1]
        and all(n == 1 or a == b for n, a, b in zip(v.shape, v.strides, k.strides, strict=True))
    )


def num_keys(chunks: Sequence[Chunk]) -> int:
    """Count the keys of all sequences."""
    return sum((chunk.stop - chunk.first) * (chunk.piece.batch_stop - chunk.piece.batch) for chunk in chunks)


class _Buffer:
    """The device's memory of one chunk, and the event behind the last computation that read it."""

    def __init__(self, device: Device, sizes: Sequence[int], dtype: Any) -> None:
        self.memories = [device.empty(size, dtype) for size in sizes]
        self.is_free: Event = device.mark()
        self.arrays: list[tuple[Array, Event]] = []


def incoming(
    device: Device, chunks: Sequence[Chunk], k: Array, v: Array, numbers: Callable[[Array, Chunk], Array | PooledRows]
) -> Iterator[tuple[Chunk, Array, Array]]:
    """Yield each chunk with its keys and values on the device, which work enqueued before the next one may read.

    `numbers` gives a chunk's part of k or v, (sequences, keys, heads, columns).
    """
    with_keys = is_part_of(v, k)
    sources = [k] if with_keys else [k, v]

    most_keys = max((num_keys([chunk]) for chunk in chunks), default=0)
    sizes = [most_keys * math.prod(x.shape[2:]) for x in sources]
    buffers = [_Buffer(device, sizes, k.dtype) for _ in range(min(NUM_BUFFERS, len(chunks)))]

    def bring(number: int) -> None:
        buffer = buffers[number % NUM_BUFFERS]
        pairs = zip(buffer.memories, sources, strict=True)
        buffer.arrays = [_bring(device, memory, numbers(x, chunks[number]), buffer.is_free) for memory, x in pairs]

    for number in range(len(buffers)):
        bring(number)
    for number, chunk in enumerate(chunks):
        buffer = buffers[number % NUM_BUFFERS]
        for _, is_ready in buffer.arrays:
            device.wait(is_ready)
        keys, *values = (x for x, _ in buffer.arrays)
        yield chunk, keys, keys[..., : v.shape[-1]] if with_keys else values[0]
        buffer.is_free = device.mark()
        if number + NUM_BUFFERS < len(chunks):
            bring(number + NUM_BUFFERS)


def _bring(device: Device, memory: Array, source: Array | PooledRows, after: Event) -> tuple[Array, Event]:
    if isinstance(source, PooledRows):
        return device.bring_rows(memory, source, after)
    return device.bring(memory, source, after)


class Outbox:
    """Copies to the host that were begun, of which there are few at once, as each holds memory of the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begun: deque[tuple[Outgoing, Callable[[], None] | None]] = deque()

    def post(self, target: Array, source: Array, then: Callable[[], None] | None = None) -> None:
        """Begin to copy, and end the oldest copies; `then` is called once the target is written."""
        while len(self._begun) >= _MOST_OUTGOING:
            self._finish_oldest()
        self._begun.append((self._device.take(target, source), then))

    def finish(self) -> None:
        """End all copies."""
        while self._begun:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        copy, then = self._begun.popleft()
        copy.finish()
        if then is not None:
            then()
