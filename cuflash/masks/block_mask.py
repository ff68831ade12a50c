"""BlockMask: which key each query sees, exactly, with hidden blocks that cost nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import hints, interop
from cuflash.masks.algebra import combine, everything, is_same
from cuflash.masks.checks import adopt_bools, bools_of_rule, check_block_size, check_count, check_order, check_rule
from cuflash.masks.names import OfMasks, names_for_users
from cuflash.masks.on_device import GetKernel, OnDevice, pack_on_device
from cuflash.masks.patterns import Patterns
from cuflash.masks.picture import draw
from cuflash.masks.prepared import HOST, PreparedMask, Window
from cuflash.masks.store import (
    CANONICAL,
    Shape,
    Store,
    Words,
    count_visible,
    find_window,
    num_blocks,
    pack,
    to_dense,
    words_from_block_rows,
    words_from_bools,
)

Array = Any
MaskFunction = Callable[[np.int64, np.int64, NDArray[np.int64], NDArray[np.int64]], Any]

# Elements for one call of a user's function: its temporaries then stay in a core's cache.
FUNCTION_ELEMENTS = 1 << 17


class BlockMask(PreparedMask, Patterns, metaclass=OfMasks):
    """A mask of shape (batch or 1, heads or 1, seqlen_q, seqlen_k) for the option `block_mask`.

    It is exact to the element, combines with every other option by AND, and costs time only for the blocks that hold a
    visible element. Make one with `from_dense`, `from_blocks`, `from_function` or a named pattern. A mask is immutable,
    and belongs to no device: it is prepared on each GPU where it is first used.

    Masks are sets of visible elements. ``a & b``, ``a | b`` and ``a ^ b`` are exact to the element; batch and heads
    broadcast, and the blocks of the result divide those of both masks. ``~a`` sees what `a` hides. ``a == b`` says
    whether two masks have the same shape and the same visible elements, whatever their block sizes and devices, and
    ``hash(a)`` agrees with it. Operators, comparisons, `draw` and `density` copy a mask that was made on a GPU to the
    host, once; a call that uses a mask never waits.

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
    >>> causal = cuflash.BlockMask.sliding_window(256, 256, left=None, right=0)
    >>> near = cuflash.BlockMask.sliding_window(256, 256, left=64, right=64)
    >>> (causal & near) == cuflash.BlockMask.sliding_window(256, 256, left=64, right=0)
    True
    >>> (~causal).density + causal.density
    1.0
    """

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
        device: int = HOST,
        release: Callable[[Array], Any] | None = None,
    ) -> BlockMask:
        mask = cls.__new__(cls)
        mask._begin(shape, block_size, store, device, release)
        return mask

    @classmethod
    @hints.with_hints(hints.MASKS)
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

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.BlockMask.from_dense(np.tri(6, dtype=bool)).shape
        (1, 1, 6, 6)
        """
        block_size = check_block_size(block_size)
        library, cells = adopt_bools("mask", mask)
        return cls._from_cells(library, cells, (1, 1), cells.shape[-2], cells.shape[-1], block_size)

    @classmethod
    @hints.with_hints(hints.MASKS)
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

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> blocks = np.array([[True, False], [True, True]])
        >>> cuflash.BlockMask.from_blocks(blocks, 256, 256).density
        0.75
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
    @hints.with_hints(hints.MASKS)
    def from_function(
        cls,
        function: MaskFunction,
        seqlen_q: int,
        seqlen_k: int,
        batch: int | None = 1,
        heads: int | None = 1,
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
            For how many batch entries and heads to ask the function; 1, or None, serves all of a call. Lengths come
            first here; FlexAttention's ``create_block_mask`` has the order B, H, Q_LEN, KV_LEN.
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
        >>> import numpy as np, cuflash
        >>> document = np.repeat(np.arange(4), 256)
        >>> bm = cuflash.BlockMask.from_function(lambda b, h, i, j: document[i] == document[j], 1024, 1024)
        >>> bm.density
        0.25
        """
        check_rule(function)
        check_order(seqlen_q, seqlen_k)
        seqlen_q, seqlen_k = check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)
        batch, heads = 1 if batch is None else batch, 1 if heads is None else heads
        shape = check_count("batch", batch), check_count("heads", heads, 1), seqlen_q, seqlen_k
        block_size = check_block_size(block_size)

        def words_of(b: int, h: int, first: int, last: int) -> Words:
            words = np.empty((last - first, num_blocks(seqlen_k)), np.uint64)
            step = max(1, FUNCTION_ELEMENTS // (CANONICAL * CANONICAL)) * CANONICAL
            for top in range(first, last, CANONICAL):
                i = np.arange(top, min(top + CANONICAL, last))[:, None]
                for left in range(0, seqlen_k, step):
                    j = np.arange(left, min(left + step, seqlen_k))[None, :]
                    visible = bools_of_rule(function, (np.int64(b), np.int64(h), i, j), (i.shape[0], j.shape[1]))
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

        Examples
        --------
        >>> import cuflash
        >>> cuflash.BlockMask.sliding_window(8, 8, left=3, right=0).window
        (3, 0)
        """
        if self._window is None:
            self._window = (find_window(self._store, *self.shape[2:]) if self._home == HOST else None,)
        return self._window[0]

    @property
    def density(self) -> float:
        """The fraction of visible elements; 0.0 if there are no elements. A mask on a GPU is copied to the host.

        Examples
        --------
        >>> import cuflash
        >>> cuflash.BlockMask.sliding_window(4, 4, left=0, right=0).density
        0.25
        """
        if self._density is None:
            size = math.prod(self.shape)
            self._density = count_visible(self._store, *self.shape[2:]) / size if size else 0.0
        return self._density

    def to_dense(self) -> NDArray[np.bool_]:
        """The bool array of `shape`, of the library and on the device of the array that the mask was made from.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.BlockMask.sliding_window(3, 3, left=1, right=0).to_dense()[0, 0].tolist()
        [[True, False, False], [True, True, False], [False, True, True]]
        """
        dense: Array
        if self._home == HOST:
            dense = to_dense(np, self._store.slots, self._store.bits, self.shape)
        else:
            import cupy

            with cupy.cuda.Device(self._home):
                dense = to_dense(cupy, *self.arrays(cupy), self.shape)
        # CuPy's arrays have the methods of NumPy's, and carry no types.
        result: Array = dense if self._release is None else self._release(dense)
        return result

    def draw(self, batch: int = 0, head: int = 0, *, rows: int = 32, columns: int = 64) -> str:
        """A small picture of one head in plain text: queries go down, keys go across.

        A character stands for one element, or for a rectangle of them where the mask is larger than the picture; the
        first line says which, and what the characters mean.

        Parameters
        ----------
        batch, head : int
            Which part of the mask to draw, from 0.
        rows, columns : int
            The picture has at most so many lines, the first not counted, of so many characters.

        Returns
        -------
        str
            Lines to `print`, without a newline at the end.

        Raises
        ------
        TypeError
            If an argument is no integer.
        ValueError
            If the mask has no such batch entry or head, or for `rows` or `columns` below 1.

        Examples
        --------
        >>> import cuflash
        >>> print(cuflash.BlockMask.sliding_window(6, 12, left=2, right=0).draw())
        6 queries (down) x 12 keys (across), 1 x 1 elements a character: . none, # all
        ....###.....
        .....###....
        ......###...
        .......###..
        ........###.
        .........###
        """
        batch = check_count("batch", batch, 0, self.shape[0] - 1)
        head = check_count("head", head, 0, self.shape[1] - 1)
        limits = check_count("rows", rows, 1), check_count("columns", columns, 1)
        return draw(self._store, self.shape[2:], batch, head, limits)

    def _combine(self, sign: str, operation: np.ufunc, other: BlockMask) -> BlockMask:
        """The mask of ``operation(self, other)``, of each element; `sign` is what errors call it."""
        if not isinstance(other, BlockMask):
            raise TypeError(
                f"{sign}: expected two of BlockMask (from_dense takes a bool array), got {type(other).__name__}"
            )
        if self.shape[2:] != other.shape[2:] or any(
            a != b and 1 not in (a, b) for a, b in zip(self.shape, other.shape, strict=True)
        ):
            raise ValueError(
                f"{sign}: expected masks of the same (batch or 1, heads or 1, seqlen_q, seqlen_k), "
                f"got {self.shape} and {other.shape}"
            )
        store = combine(operation, self._store, other._store, *self.shape[2:])
        rows, columns = (math.gcd(a, b) for a, b in zip(self.block_size, other.block_size, strict=True))
        shape = (*store.slots.shape[:2], *self.shape[2:])
        return BlockMask._of(shape, (rows, columns), store, self._home, self._release)

    def __and__(self, other: BlockMask) -> BlockMask:
        """The mask of the elements that both masks see."""
        return self._combine("&", np.bitwise_and, other)

    def __or__(self, other: BlockMask) -> BlockMask:
        """The mask of the elements that one of the masks sees, or both."""
        return self._combine("|", np.bitwise_or, other)

    def __xor__(self, other: BlockMask) -> BlockMask:
        """The mask of the elements that just one of the masks sees."""
        return self._combine("^", np.bitwise_xor, other)

    # A reflected operator is called for what is no mask, which is an error in any order.
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> BlockMask:
        """The mask of the elements that this one hides."""
        store = combine(np.bitwise_xor, self._store, everything(*self.shape[2:]), *self.shape[2:])
        return BlockMask._of(self.shape, self.block_size, store, self._home, self._release)

    def __sub__(self, other: Any) -> BlockMask:
        """Refused: bools have no difference, as in NumPy."""
        raise TypeError("-: expected &, |, ^ or ~, the operators of BlockMask; what a sees and b hides is a & ~b")

    __rsub__ = __sub__

    def __bool__(self) -> bool:
        """Refused: a mask has many elements, as in NumPy."""
        raise TypeError(
            "bool: expected &, | or ~ to combine masks, as `and`, `or`, `not` and `if` ask for one truth value; a mask "
            "that sees nothing has density 0, and `mask is not None` tells whether there is one"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self is other or (self.shape == other.shape and is_same(self._store, other._store))

    def __hash__(self) -> int:
        return hash((self.shape, self.density))

    def __dir__(self) -> list[str]:
        """The names for users, and Python's own; those for backends are left out."""
        return names_for_users(super().__dir__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are masks of their own, prepared on no device."""
        return BlockMask._of, (self.shape, self.block_size, self._store, self._home, self._release)

    def __repr__(self) -> str:
        batch, heads, seqlen_q, seqlen_k = self.shape
        return (
            f"BlockMask(batch={batch}, heads={heads}, seqlen_q={seqlen_q}, seqlen_k={seqlen_k}, "
            f"block_size={self.block_size}, density={self.density:.4g})"
        )
