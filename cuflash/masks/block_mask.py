"""BlockMask: which key each query sees, exactly, with hidden blocks that cost nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import interop
from cuflash.masks.checks import adopt_bools, bools_of_rule, check_block_size, check_count, check_rule
from cuflash.masks.on_device import Device, GetKernel, OnDevice, TileLists, list_tiles, pack_on_device
from cuflash.masks.patterns import Patterns
from cuflash.masks.store import (
    CANONICAL,
    HIDDEN,
    VISIBLE,
    Shape,
    Store,
    Words,
    count_visible,
    find_window,
    intersect,
    make_store,
    num_blocks,
    pack,
    to_dense,
    words_from_block_rows,
    words_from_bools,
)
from cuflash.problem.mask_metadata import MaskMetadata

Array = Any
Window = tuple[int | None, int | None]
MaskFunction = Callable[[np.int64, np.int64, NDArray[np.int64], NDArray[np.int64]], Any]

# Elements for one call of a user's function: its temporaries then stay in a core's cache.
FUNCTION_ELEMENTS = 1 << 17
_HOST = -1  # this stands for the host where others are numbers of devices
_serials = count()


def _only_and(operator: str) -> Callable[..., BlockMask]:
    def refuse(*_: Any) -> BlockMask:
        raise TypeError(
            f"{operator}: expected &, the only operator of BlockMask; BlockMask.from_dense takes any bool array, "
            f"such as ~mask.to_dense(), got {operator}"
        )

    return refuse


class BlockMask(MaskMetadata, Patterns):
    """A mask of shape (batch or 1, heads or 1, seqlen_q, seqlen_k) for the option `block_mask`.

    It is exact to the element, combines with every other option by AND, and costs time only for the blocks that hold a
    visible element. Make one with `from_dense`, `from_blocks`, `from_function` or a named pattern; intersect two
    with ``&``. A mask is immutable, and belongs to no device: it is prepared on each GPU where it is first used.

    Attributes
    ----------
    shape : tuple of int
        (batch or 1, heads or 1, seqlen_q, seqlen_k).
    block_size : tuple of int
        The rows and columns of a block, as given to the constructor. Where elements, not blocks, define the mask, it
        changes no element.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> mask = cuflash.BlockMask.sliding_window(8, 8, left=2, right=0)
    >>> mask.shape, bool(mask.to_dense()[0, 0, 5, 2])
    ((1, 1, 8, 8), False)
    >>> q = np.ones((1, 8, 2, 8), np.float32)
    >>> out = cuflash.attention(q, q, q, block_mask=mask)
    """

    _home: int
    _release: Callable[[Array], Any] | None
    _host: Store | None
    _on_device: dict[int, OnDevice[tuple[Array, Array]]]
    _lists: dict[tuple[int, int, int, bool | None], OnDevice[TileLists]]
    _addresses: dict[Any, list[int]]
    _window: tuple[Window | None] | None  # None until it was looked for
    _density: float | None
    # NumPy's arrays leave operators to this class, which says what it expects.
    __array_ufunc__ = None

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "BlockMask: expected a call of one of its constructors, such as BlockMask.from_dense(mask), "
            "BlockMask.from_function(function, seqlen_q, seqlen_k) or a named pattern, got a call of the class itself"
        )

    @classmethod
    def _of(
        cls,
        shape: Shape,
        block_size: tuple[int, int],
        store: Store | OnDevice[tuple[Array, Array]],
        device: int = _HOST,
        release: Callable[[Array], Any] | None = None,
    ) -> BlockMask:
        mask = cls.__new__(cls)
        mask.shape = shape
        mask.block_size = block_size
        mask.serial = next(_serials)
        mask._home = device
        mask._release = release
        mask._host = store if isinstance(store, Store) else None
        mask._on_device = {} if isinstance(store, Store) else {device: store}
        mask._lists = {}
        mask._addresses = {}
        mask._window = None
        mask._density = None
        return mask

    @classmethod
    def from_dense(cls, mask: Array, block_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """The mask that a bool array says.

        Parameters
        ----------
        mask : bool array (seqlen_q, seqlen_k), (heads, seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k)
            True = may attend. NumPy, CuPy or any library that speaks DLPack; any strides. On a GPU it is read there.
        block_size : (int, int)
            Rows and columns of a block; changes no element.

        Raises
        ------
        TypeError
            If `mask` is no bool array.
        ValueError
            If it has another number of axes, or for a block size below 1.
        """
        block_size = check_block_size(block_size)
        library, cells = adopt_bools("mask", mask)
        return cls._from_cells(library, cells, (1, 1), cells.shape[-2], cells.shape[-1], block_size)

    @classmethod
    def from_blocks(
        cls, blocks: Array, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int] = (128, 128)
    ) -> BlockMask:
        """The mask whose blocks are visible or hidden as a whole.

        Parameters
        ----------
        blocks : bool array (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk)
            True = may attend; ``nq = ceil(seqlen_q / block_size[0])``, ``nk = ceil(seqlen_k / block_size[1])``.
            NumPy, CuPy or any library that speaks DLPack; any strides.
        seqlen_q, seqlen_k : int
            Lengths of the sequences; the last blocks may be ragged.
        block_size : (int, int)
            Rows and columns of a block, from 1 up.

        Raises
        ------
        TypeError
            If `blocks` is no bool array, or a size no integer.
        ValueError
            If the number of blocks does not fit the lengths.
        """
        block_size = check_block_size(block_size)
        seqlen_q, seqlen_k = check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)
        library, cells = adopt_bools("blocks", blocks)
        expected = num_blocks(seqlen_q, block_size[0]), num_blocks(seqlen_k, block_size[1])
        if tuple(cells.shape[-2:]) != expected:
            raise ValueError(
                f"blocks: expected (..., ceil(seqlen_q / {block_size[0]}), ceil(seqlen_k / {block_size[1]})) = "
                f"(..., {expected[0]}, {expected[1]}), got {tuple(cells.shape)}"
            )
        return cls._from_cells(library, cells, block_size, seqlen_q, seqlen_k, block_size)

    @classmethod
    def from_function(
        cls,
        function: MaskFunction,
        seqlen_q: int,
        seqlen_k: int,
        batch: int = 1,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
    ) -> BlockMask:
        """The mask of a rule ``function(b, h, i, j)``.

        Parameters
        ----------
        function : callable
            Gets the batch index `b` and the head `h` as NumPy integers, and the query positions `i`, shape (rows, 1),
            and key positions `j`, shape (1, columns), as int64 arrays; returns what broadcasts to bool (rows, columns):
            True = may attend. It is called for some rows and columns at a time, in an order that is not defined.
        seqlen_q, seqlen_k : int
            Lengths of the sequences.
        batch, heads : int
            For how many batch entries and heads to ask the function; 1 serves all of a call.
        block_size : (int, int)
            Rows and columns of a block; changes no element.

        Raises
        ------
        TypeError
            If `function` is not callable, or returns something other than bools.
        ValueError
            For a size out of range, or if the function returns another shape.

        Examples
        --------
        >>> document = np.repeat(np.arange(4), 256)
        >>> bm = BlockMask.from_function(lambda b, h, i, j: document[i] == document[j], 1024, 1024)
        >>> bm.density
        0.25
        """
        check_rule(function)
        seqlen_q, seqlen_k = check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)
        shape = check_count("batch", batch), check_count("heads", heads, 1), seqlen_q, seqlen_k
        block_size = check_block_size(block_size)

        def words_of(b: int, h: int, first: int, last: int) -> Words:
            words = np.empty((last - first, num_blocks(seqlen_k)), np.uint64)
            step = max(1, FUNCTION_ELEMENTS // (CANONICAL * CANONICAL)) * CANONICAL
            for top in range(first, last, CANONICAL):
                i = np.arange(top, min(top + CANONICAL, last))[:, None]
                for left in range(0, seqlen_k, step):
                    j = np.arange(left, min(left + step, seqlen_k))[None, :]
                    visible = bools_of_rule(function(np.int64(b), np.int64(h), i, j), (i.shape[0], j.shape[1]))
                    columns = slice(left // CANONICAL, num_blocks(left + j.shape[1]))
                    words[top - first : top - first + len(i), columns] = words_from_bools(visible)
            return words

        return cls._of(shape, block_size, pack(shape, words_of))

    @classmethod
    def _from_store(cls, store: Store, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int]) -> BlockMask:
        return cls._of((*store.slots.shape[:2], seqlen_q, seqlen_k), block_size, store)

    @classmethod
    def _from_cells(
        cls,
        library: interop.Library,
        cells: Array,
        cell_size: tuple[int, int],
        seqlen_q: int,
        seqlen_k: int,
        block_size: tuple[int, int],
    ) -> BlockMask:
        """The mask of bools (rows, columns), or with heads and batch before them, that stand for cells of elements."""
        cells = cells[(None,) * (4 - cells.ndim)]
        shape = (*cells.shape[:2], seqlen_q, seqlen_k)
        if isinstance(cells, np.ndarray):
            words_of = words_from_block_rows(lambda b, h, top, end: cells[b, h, top:end], cell_size, seqlen_k)
            return cls._of(shape, block_size, pack(shape, words_of), release=library.release)
        import cupy

        # It is found by name, as a mask on the host needs none of it.
        get_kernel: GetKernel = import_module("cuflash.cuda.device").get
        with interop.on_stream_of(library, cells):
            made = OnDevice(cupy, lambda: pack_on_device(cupy, get_kernel, cells, cell_size, seqlen_q, seqlen_k))
        return cls._of(shape, block_size, made, cells.device.id, library.release)

    @property
    def window(self) -> Window | None:
        """The option `window` that shows the same; None if none does, or if the mask was made on a GPU.

        Without lengths and packed sequences such a mask is computed as that window.
        """
        if self._window is None:
            self._window = (find_window(self._store, *self.shape[2:]) if self._home == _HOST else None,)
        return self._window[0]

    @property
    def density(self) -> float:
        """The fraction of visible elements; 0.0 if there are no elements. A mask on a GPU is copied to the host."""
        if self._density is None:
            size = math.prod(self.shape)
            self._density = count_visible(self._store, *self.shape[2:]) / size if size else 0.0
        return self._density

    def to_dense(self) -> Array:
        """The bool array of `shape`, of the library and on the device of the array that the mask was made from."""
        if self._home == _HOST:
            dense = to_dense(np, self._store.slots, self._store.bits, self.shape)
        else:
            import cupy

            with cupy.cuda.Device(self._home):
                dense = to_dense(cupy, *self.arrays(cupy), self.shape)
        return dense if self._release is None else self._release(dense)

    def __and__(self, other: BlockMask) -> BlockMask:
        """The mask of the elements that both masks see.

        Batch and heads broadcast; a block of the result divides those of both masks.
        """
        if not isinstance(other, BlockMask):
            raise TypeError(f"&: expected two of BlockMask (from_dense takes a bool array), got {type(other).__name__}")
        if self.shape[2:] != other.shape[2:] or any(
            a != b and 1 not in (a, b) for a, b in zip(self.shape, other.shape, strict=True)
        ):
            raise ValueError(
                f"&: expected masks of the same (batch or 1, heads or 1, seqlen_q, seqlen_k), "
                f"got {self.shape} and {other.shape}"
            )
        store = intersect(self._store, other._store)
        rows, columns = (math.gcd(a, b) for a, b in zip(self.block_size, other.block_size, strict=True))
        shape = (*store.slots.shape[:2], *self.shape[2:])
        return BlockMask._of(shape, (rows, columns), store, self._home, self._release)

    __rand__ = __and__
    __or__ = __ror__ = _only_and("|")
    __xor__ = __rxor__ = _only_and("^")
    __sub__ = __rsub__ = _only_and("-")
    __invert__ = _only_and("~")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are masks of their own, prepared on no device."""
        return BlockMask._of, (self.shape, self.block_size, self._store, self._home, self._release)

    def __repr__(self) -> str:
        batch, heads, seqlen_q, seqlen_k = self.shape
        return (
            f"BlockMask(batch={batch}, heads={heads}, seqlen_q={seqlen_q}, seqlen_k={seqlen_k}, "
            f"block_size={self.block_size}, density={self.density:.4g})"
        )

    def arrays(self, xp: Any) -> tuple[Array, Array]:
        """The slots and bits of `Store` as arrays of `xp` (numpy or cupy) on the current device, moved there once.

        Bit ``j % 32`` of word ``bits[slots[..., i // 64, j // 64], i % 64, j % 64 // 32]`` says whether (i, j) is
        visible; 0 beyond the array.
        """
        if xp is np:
            return self._store.slots, self._store.bits
        device = xp.cuda.runtime.getDevice()
        made = self._on_device.get(device)
        if made is None:
            slots, bits = self._store.slots, self._store.bits
            # Threads that come at once use the same arrays, or one's would be freed while others read.
            made = self._on_device.setdefault(device, OnDevice(xp, lambda: (xp.asarray(slots), xp.asarray(bits))))
        return made.get()

    def tile_lists(
        self, block_m: int, block_n: int, get_kernel: GetKernel, xp: Any, *, of_keys: bool | None = None
    ) -> TileLists:
        """The tiles of block_m x block_n elements that a kernel visits, listed once for each device and tile size.

        `get_kernel` is `cuda.device.get`. Rows of the kernel's fragments are queries or, with `of_keys`, keys; it is
        None where the kernel takes bits as the store has them. The call never waits for the device.
        """
        device = _HOST if xp is np else xp.cuda.runtime.getDevice()
        key = (device, block_m, block_n, of_keys)
        lists = self._lists.get(key)
        if lists is None:
            slots, bits = self.arrays(xp)
            made = OnDevice(
                xp, lambda: list_tiles(xp, get_kernel, slots, bits, *self.shape[2:], block_m, block_n, of_keys)
            )
            lists = self._lists.setdefault(key, made)  # threads that come at once use the same lists
        return lists.get()

    def addresses(self, tiles: tuple[tuple[int, int, bool | None], ...], device: Device) -> list[int]:
        """Addresses of the store and of the lists for `tiles` on the current device, ready on this stream."""
        known = self._addresses.get((device, tiles))
        if known is None:
            xp = device.namespace
            number = _HOST if xp is np else xp.cuda.runtime.getDevice()
            lists = [self._lists[(number,) + tile] for tile in tiles]
            arrays = [*self.arrays(xp), *(x for made in lists for x in made.get())]
            known = [device.pointer(x) for x in arrays]
            store = self._on_device.get(number)
            if all(made.is_complete for made in lists) and (store is None or store.is_complete):
                self._addresses[device, tiles] = known
        return known

    def tile_visible(self, b: int, h: int, i0: int, i1: int, j0: int, j1: int) -> bool | NDArray[np.bool_] | None:
        """The part of columns [j0, j1) that rows [i0, i1) see, in the call's `b` and `h`: None, True (all) or bools."""
        slots, table = self._store
        top, left = i0 // CANONICAL, j0 // CANONICAL
        covered = slots[
            b if slots.shape[0] > 1 else 0,
            h if slots.shape[1] > 1 else 0,
            top : num_blocks(i1),
            left : num_blocks(j1),
        ]
        states = set(covered.ravel().tolist())
        if states <= {HIDDEN}:
            return None
        if states == {VISIBLE}:
            return True
        rows = table[covered].transpose(0, 2, 1).reshape(-1, covered.shape[1])
        own_rows = np.ascontiguousarray(rows[i0 - top * CANONICAL : i1 - top * CANONICAL])
        bits = np.unpackbits(own_rows.view(np.uint8), axis=1, bitorder="little")
        visible = bits[:, j0 - left * CANONICAL : j1 - left * CANONICAL].view(np.bool_)
        if visible.all():
            return True
        return visible if visible.any() else None

    @property
    def _store(self) -> Store:
        """The store on the host, copied from the device when first needed."""
        if self._host is None:
            import cupy

            with cupy.cuda.Device(self._home):
                slots, bits = (cupy.asnumpy(x) for x in self._on_device[self._home].get())
            self._host = make_store(slots, [bits.reshape(len(bits), 2 * CANONICAL).view(np.uint64)])
        return self._host
