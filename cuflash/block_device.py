"""Block masks on the GPU: from a bool array to the canonical store, and from the store to a kernel's lists of tiles.

The namespace `xp` of the arrays is CuPy's; `get_kernel` is `kernels.get`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from cuflash.block_store import CANONICAL, HIDDEN, VISIBLE, num_blocks
from cuflash.problem import AS_STORED, ROWS_ARE_QUERIES

Array = Any
Made = TypeVar("Made")
GetKernel = Callable[[str, str, dict[str, int]], Callable[..., Any]]

_SOURCE = "block_sparse"
_CONSTANTS = {"CANONICAL": CANONICAL, "HIDDEN": HIDDEN, "VISIBLE": VISIBLE}
_WARP = 32
_WARPS = 8  # per thread block, where each works on its own: a usual size, nothing depends on it
_SCAN_THREADS = 1024
_WARPGROUP = 128


class TileLists(NamedTuple):
    """Which tiles a kernel visits, for each (batch, head) of the mask; all arrays int32.

    ``row_index[b, h, m, :row_count[b, h, m]]`` are the columns of tiles that tile row m visits, ascending, each as
    ``(tile << 1) | partial``; a tile that is not partial is visible as far as the array reaches. ``col_index`` and
    ``col_count`` are the same for the columns. Entries beyond the count are not set. `key_bits` are the mask's bits in
    the order in which the kernel reads them.
    """

    row_index: Array  # (B, H, num_m, num_n)
    row_count: Array  # (B, H, num_m)
    col_index: Array  # (B, H, num_n, num_m)
    col_count: Array  # (B, H, num_n)
    key_bits: Array


class OnDevice(Generic[Made]):
    """Arrays that were enqueued on one stream, for use on any.

    Other streams wait for them on the device until they are known to be complete; the host never waits.
    """

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
        """Whether no stream needs to wait for them any longer."""
        return self._complete is None

    def get(self) -> Made:
        """The arrays, ready for use on the current stream."""
        if self._complete is not None:
            stream = self._stream_of()
            # A capture may neither ask for nor wait on work outside of it: what it needs was made before it began.
            if not stream.is_capturing():
                if self._complete.done:
                    self._complete = None
                else:
                    stream.wait_event(self._complete)
        return self._made


def pack(
    xp: Any, get_kernel: GetKernel, cells: Array, cell_size: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> tuple[Array, Array]:
    """The slots and bits of a bool array on the device; waits for the device once.

    Parameters
    ----------
    xp, get_kernel
        See the module.
    cells : bool array (batch, heads, rows, columns)
        Any strides. Says for each cell of `cell_size` elements whether it is visible.
    cell_size : (int, int)
        Rows and columns of elements per cell; (1, 1) for a mask of elements.
    seqlen_q, seqlen_k : int
        Sizes of the mask in elements.
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
    grid, block = (num_blocks(slots.size, _WARPS),), (_WARPS * _WARP,)
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
    order: int = AS_STORED,
) -> TileLists:
    """The lists of tiles of block_m x block_n elements; never waits for the device.

    Each list has room for all tiles, so the host need not know how many there are.
    """
    images = slots.shape[:2]
    num_m, num_n = num_blocks(seqlen_q, block_m), num_blocks(seqlen_k, block_n)

    def empty(*shape: int) -> Array:
        return xp.empty((*images, *shape), np.int32)

    ordered = bits if order == AS_STORED else order_bits(xp, get_kernel, bits, order)
    lists = TileLists(empty(num_m, num_n), empty(num_m), empty(num_n, num_m), empty(num_n), ordered)
    num_images = images[0] * images[1]
    num_lists = num_images * (num_m + num_n)
    if num_lists:
        sizes = (num_images, seqlen_q, seqlen_k, block_m, block_n, num_m, num_n)
        args = (slots, bits, *(np.int32(size) for size in sizes), *lists[:-1])
        grid, block = (num_blocks(num_lists, _WARPS),), (_WARPS * _WARP,)
        get_kernel(_SOURCE, "list_tiles", _CONSTANTS)(grid, block, args)
    return lists


def order_bits(xp: Any, get_kernel: GetKernel, bits: Array, order: int) -> Array:
    """The bits in the order of Hopper's fragments, uint32 (num_partial, 128); never waits for the device."""
    ordered = xp.empty((len(bits), _WARPGROUP), np.uint32)
    if len(bits):
        grid = (num_blocks(ordered.size, _WARPS * _WARP),)
        args = bits, np.int64(len(bits)), np.int32(order == ROWS_ARE_QUERIES), ordered
        get_kernel(_SOURCE, "order_bits", _CONSTANTS)(grid, (_WARPS * _WARP,), args)
    return ordered
