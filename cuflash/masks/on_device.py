"""A block mask on a GPU: how it is packed there, and the lists of tiles that kernels visit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from cuflash.hardware import WARP, WARPGROUP
from cuflash.masks.store import CANONICAL, CONSTANTS, Array, num_blocks

Made = TypeVar("Made")
GetKernel = Callable[[str, str, dict[str, int]], Callable[..., Any]]

_SOURCE = "around/block_sparse"
_WARPS = 8  # warps of a thread block; nothing depends on their number
_SCAN_THREADS = 1024
_CONSTANTS = CONSTANTS | {"SCAN_THREADS": _SCAN_THREADS}


class KernelOfLists(NamedTuple):
    """The kernel that makes lists of tiles: its file, its entry, its constants, and threads of a block."""

    source: str
    entry: str
    constants: dict[str, int]
    threads: int


LIST_TILES = KernelOfLists(_SOURCE, "list_tiles", _CONSTANTS, _WARPS * WARP)


class Device(Protocol):
    """The members of a device that a mask uses."""

    namespace: Any  # its array module

    def pointer(self, x: Array) -> int:
        """The address of an array's first element."""


class TileLists(NamedTuple):
    """Which tiles a kernel visits, for each (batch, head) of the mask; all arrays int32.

    ``row_index[b, h, m, :row_count[b, h, m]]`` are the columns of tiles that tile row m visits, ascending, each as
    ``(tile << 1) | partial``; others are visible as far as the array reaches. ``col_index`` and ``col_count`` are the
    same for the columns. `fragment_bits` are the mask's bits as the kernel reads them.
    """

    row_index: Array  # (B, H, num_m, num_n)
    row_count: Array  # (B, H, num_m)
    col_index: Array  # (B, H, num_n, num_m)
    col_count: Array  # (B, H, num_n)
    fragment_bits: Array


class OnDevice(Generic[Made]):
    """Arrays that were enqueued on one stream, for use on any: there the device waits until they are complete."""

    def __init__(self, xp: Any, make: Callable[[], Made]) -> None:
        self._complete = None
        if xp is not np:
            stream = xp.cuda.get_current_stream()
            if stream.is_capturing():
                raise RuntimeError(
                    "BlockMask: expected a first call with this mask outside of graph capture, which prepares the "
                    "mask on this device; call the function once before the capture"
                )
            self._stream_of = xp.cuda.get_current_stream
            self._made = make()
            self._complete = stream.record()
        else:
            self._made = make()

    @property
    def is_complete(self) -> bool:
        """The arrays are complete, so that no stream needs to wait for them."""
        return self._complete is None

    def get(self) -> Made:
        """The arrays, ready for use on the current stream."""
        complete = self._complete  # another thread may find it done meanwhile
        if complete is not None:
            stream = self._stream_of()
            # A captured stream cannot ask about an event outside of the capture.
            if not stream.is_capturing():
                if complete.done:
                    self._complete = None
                else:
                    stream.wait_event(complete)
        return self._made


def pack_on_device(
    xp: Any, get_kernel: GetKernel, cells: Array, cell_size: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> tuple[Array, Array]:
    """The slots and bits of a mask of seqlen_q x seqlen_k elements; waits for the device once.

    `cells`, bools (batch, heads, rows, columns) of any strides, say which cells of `cell_size` elements are visible.
    `get_kernel` is `cuda.device.get`.
    """
    batch, heads = cells.shape[:2]
    slots = xp.empty((batch, heads, num_blocks(seqlen_q), num_blocks(seqlen_k)), np.int32)
    if slots.size == 0:
        return slots, xp.empty((0, CANONICAL, CANONICAL // 32), np.uint32)
    source = (
        cells,
        *(np.int64(stride) for stride in cells.strides),
        *(np.int32(size) for size in (heads, *cell_size, seqlen_q, seqlen_k)),
        np.int64(slots.size),
    )
    grid, block = (num_blocks(slots.size, _WARPS),), (_WARPS * WARP,)
    count = xp.empty(1, np.int32)
    get_kernel(_SOURCE, "classify_blocks", _CONSTANTS)(grid, block, (*source, slots))
    get_kernel(_SOURCE, "number_blocks", _CONSTANTS)((1,), (_SCAN_THREADS,), (np.int64(slots.size), slots, count))
    bits = xp.empty((int(count[0]), CANONICAL, CANONICAL // 32), np.uint32)
    if bits.size:
        get_kernel(_SOURCE, "pack_blocks", _CONSTANTS)(grid, block, (*source, slots, bits))
    return slots, bits


def list_tiles(
    xp: Any,
    get_kernel: GetKernel,
    slots: Array,
    bits: Array,
    seqlen_q: int,
    seqlen_k: int,
    block_m: int,
    block_n: int,
    of_keys: bool | None,
) -> TileLists:
    """The lists of visited tiles, each with room for all tiles; never waits for the device."""
    batch_heads = slots.shape[:2]
    num_m, num_n = num_blocks(seqlen_q, block_m), num_blocks(seqlen_k, block_n)

    def empty(*shape: int) -> Array:
        return xp.empty((*batch_heads, *shape), np.int32)

    ordered = bits if of_keys is None else order_bits(xp, get_kernel, bits, of_keys)
    lists = TileLists(empty(num_m, num_n), empty(num_m), empty(num_n, num_m), empty(num_n), ordered)
    num_batch_heads = batch_heads[0] * batch_heads[1]
    num_lists = num_batch_heads * (num_m + num_n)
    if num_lists:
        sizes = (num_batch_heads, seqlen_q, seqlen_k, block_m, block_n, num_m, num_n)
        args = (slots, bits, *(np.int32(size) for size in sizes), *lists[:-1])
        grid, block = (num_blocks(num_lists, _WARPS),), (_WARPS * WARP,)
        get_kernel(_SOURCE, "list_tiles", _CONSTANTS)(grid, block, args)
    return lists


def order_bits(xp: Any, get_kernel: GetKernel, bits: Array, of_keys: bool) -> Array:
    """The bits in the order of fragments, uint32 (num_partial, 128); never waits for the device."""
    ordered = xp.empty((len(bits), WARPGROUP), np.uint32)
    if len(bits):
        grid = (num_blocks(ordered.size, _WARPS * WARP),)
        args = bits, np.int64(len(bits)), np.int32(not of_keys), ordered
        get_kernel(_SOURCE, "order_bits", _CONSTANTS)(grid, (_WARPS * WARP,), args)
    return ordered
