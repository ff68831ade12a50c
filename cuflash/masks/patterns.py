"""The named sparsity patterns: constructors that `BlockMask` inherits.

A pattern gives any range of rows as words (see `masks.store`): no dense mask is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cuflash import hints
from cuflash.masks.checks import (
    MAX_REACH,
    check_block_size,
    check_count,
    check_global_tokens,
    check_reach,
    check_side,
    generator_of,
)
from cuflash.masks.store import (
    Store,
    Words,
    WordsOf,
    num_blocks,
    pack,
    words_below,
    words_between,
    words_from_block_rows,
    words_from_bools,
    words_of_window,
)
from cuflash.problem.checks import check_bool, check_number

if TYPE_CHECKING:
    from cuflash.masks.checks import Seed

Rows = NDArray[np.int64]
M = TypeVar("M", bound="Patterns")


class Patterns:
    """The named patterns. Each is element-exact, whatever the block size.

    All take the keyword arguments `heads` (the number of heads of the mask; 1 serves every head of a call),
    `block_size` (rows, columns) and `causal` (True: hide what a causal mask, aligned bottom-right, hides), and raise
    TypeError for an argument of the wrong kind and ValueError for one out of range.
    """

    @classmethod
    def _from_store(cls: type[M], store: Store, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int]) -> M:
        raise NotImplementedError

    @classmethod
    @hints.with_hints(hints.MASKS)
    def sliding_window(
        cls: type[M],
        seqlen_q: int,
        seqlen_k: int,
        left: int | None,
        right: int | None,
        *,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        causal: bool = False,
    ) -> M:
        """Each query sees the keys around its own position, aligned bottom-right.

        Query i sees key j iff ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``: the `window`
        of `attention`. "Longformer: The Long-Document Transformer", 2020, section 3.1, "Sliding Window".

        Parameters
        ----------
        seqlen_q, seqlen_k : int
            Lengths of the sequences.
        left, right : int or None
            How many keys are seen on either side, both ends included; None is unbounded.
        heads, block_size, causal
            See `Patterns`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.BlockMask.sliding_window(8, 8, left=2, right=0).to_dense()[0, 0, 6].astype(int).tolist()
        [0, 0, 0, 0, 1, 1, 1, 0]
        """
        seqlen_q, seqlen_k = check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)
        left, right = check_side("left", left), check_side("right", right)
        words_of = words_of_window(seqlen_q, seqlen_k, left, right)
        return cls._from_words(words_of, seqlen_q, seqlen_k, heads, block_size, causal)

    @classmethod
    @hints.with_hints(hints.MASKS)
    def strided(
        cls: type[M],
        seqlen: int,
        local: int,
        stride: int,
        *,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        causal: bool = False,
    ) -> M:
        """The strided pattern of Sparse Transformers: the neighbours, and every `stride`-th position.

        Query i sees key j iff ``|i - j| <= local`` or ``(i - j) % stride == 0``. With ``causal=True`` these are the
        paper's two sets, ``i - j`` in ``[0, local]`` and the multiples of `stride` before i, in one mask (there both
        lengths are l). "Generating Long Sequences with Sparse Transformers", 2019, section 4.3.

        Parameters
        ----------
        seqlen : int
            Length of the sequence.
        local : int
            How far the neighbourhood reaches, its end included.
        stride : int
            Distance between the other positions seen, at least 1.
        heads, block_size, causal
            See `Patterns`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.BlockMask.strided(8, local=2, stride=4).to_dense()[0, 0, 6].astype(int).tolist()
        [0, 0, 1, 0, 1, 1, 1, 1]
        """
        seqlen, local = check_count("seqlen", seqlen), check_reach("local", local)
        stride = check_reach("stride", stride, 1)
        # Row i sees the multiples of the stride moved by i: one window of the comb for each remainder of i.
        remainders = min(stride, seqlen)
        comb = np.arange(1 - remainders, seqlen) % stride == 0

        def words_of(b: int, h: int, first: int, last: int) -> Words:
            rows = np.arange(first, last)
            windows = np.lib.stride_tricks.sliding_window_view(comb, seqlen)
            every = words_from_bools(windows[remainders - 1 - rows % stride])
            return words_between(rows - local, rows + local + 1, seqlen) | every

        return cls._from_words(words_of, seqlen, seqlen, heads, block_size, causal)

    @classmethod
    @hints.with_hints(hints.MASKS)
    def fixed(
        cls: type[M],
        seqlen: int,
        local: int,
        summary: int,
        *,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        causal: bool = False,
    ) -> M:
        """The fixed pattern of Sparse Transformers: the own section, and the last positions of every section.

        Query i sees key j iff ``i // local == j // local`` or ``j % local >= local - summary``; the paper (there l and
        c) has this with ``causal=True``. "Generating Long Sequences with Sparse Transformers", 2019, section 4.3.

        Parameters
        ----------
        seqlen : int
            Length of the sequence.
        local : int
            Length of a section, at least 1.
        summary : int
            How many positions at the end of each section all queries see, at most `local`.
        heads, block_size, causal
            See `Patterns`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.BlockMask.fixed(8, local=4, summary=1).to_dense()[0, 0, 6].astype(int).tolist()
        [0, 0, 0, 1, 1, 1, 1, 1]
        """
        seqlen, local = check_count("seqlen", seqlen), check_count("local", local, 1, None)
        summary = check_count("summary", summary, 0, None)
        if summary > local:
            raise ValueError(f"summary: expected an integer <= local = {local}, got {summary}")
        local, before = min(local, MAX_REACH), min(local - summary, MAX_REACH)
        summaries = words_from_bools((np.arange(seqlen) % local >= before)[None])

        def words_of(b: int, h: int, first: int, last: int) -> Words:
            start = np.arange(first, last) // local * local
            return words_between(start, start + local, seqlen) | summaries

        return cls._from_words(words_of, seqlen, seqlen, heads, block_size, causal)

    @classmethod
    @hints.with_hints(hints.MASKS)
    def longformer(
        cls: type[M],
        seqlen: int,
        window: int,
        global_tokens: int | Sequence[int] | NDArray[np.integer[Any]],
        *,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        causal: bool = False,
    ) -> M:
        """A sliding window, and global tokens that see all and are seen by all.

        Query i sees key j iff ``|i - j| <= window // 2`` or i or j is a global token. "Longformer: The Long-Document
        Transformer", 2020, section 3.1, "Sliding Window" and "Global Attention".

        Parameters
        ----------
        seqlen : int
            Length of the sequence.
        window : int
            Width of the window; half of it lies on each side.
        global_tokens : int or sequence of int
            The first so many tokens (all, if there are fewer), or the positions of the global tokens.
        heads, block_size, causal
            See `Patterns`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> cuflash.BlockMask.longformer(8, window=2, global_tokens=1).to_dense()[0, 0, 6].astype(int).tolist()
        [1, 0, 0, 0, 0, 1, 1, 1]
        """
        seqlen, window = check_count("seqlen", seqlen), check_reach("window", window)
        is_global = check_global_tokens(global_tokens, seqlen)
        columns = words_from_bools(is_global[None])
        all_columns = words_from_bools(np.ones((1, seqlen), bool))

        def words_of(b: int, h: int, first: int, last: int) -> Words:
            rows = np.arange(first, last)
            near = words_between(rows - window // 2, rows + window // 2 + 1, seqlen)
            return np.where(is_global[first:last, None], all_columns, near | columns)

        return cls._from_words(words_of, seqlen, seqlen, heads, block_size, causal)

    @classmethod
    @hints.with_hints(hints.MASKS)
    def bigbird(
        cls: type[M],
        seqlen: int,
        window_blocks: int,
        global_blocks: int,
        random_blocks: int,
        seed: Seed,
        *,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        causal: bool = False,
    ) -> M:
        """A band of blocks, global blocks that see all and are seen by all, and random blocks, drawn for each head.

        "Big Bird: Transformers for Longer Sequences", 2020, section 2, on blocks as in its appendix on the
        implementation: a block of queries sees the ``window_blocks // 2`` blocks on each side of its own and its own,
        the first `global_blocks` blocks, and `random_blocks` of the others. Where a block of rows spans several blocks
        of columns, all of these count as its own. The draw takes no notice of `causal`.

        Parameters
        ----------
        seqlen : int
            Length of the sequence.
        window_blocks : int
            Width of the band: an odd number counts the blocks in it, an even one is as wide as the next odd one.
        global_blocks : int
            How many rows and columns of blocks, the first ones, are seen whole.
        random_blocks : int
            How many blocks each row of blocks sees besides these, drawn without replacement (all, if fewer are left).
        seed : int or whatever else `numpy.random.default_rng` takes
            The same seed gives the same mask.
        heads, block_size, causal
            See `Patterns`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> mask = cuflash.BlockMask.bigbird(1024, window_blocks=1, global_blocks=1, random_blocks=1, seed=0)
        >>> mask.density < 0.6
        True
        """
        seqlen, heads = check_count("seqlen", seqlen), check_count("heads", heads, 1)
        block_size = check_block_size(block_size)
        half = check_reach("window_blocks", window_blocks) // 2
        num_rows, num_columns = num_blocks(seqlen, block_size[0]), num_blocks(seqlen, block_size[1])
        global_blocks = check_reach("global_blocks", global_blocks)
        num_global = min(global_blocks, num_columns)
        row_start = np.arange(num_rows) * block_size[0]
        row_stop = np.minimum(row_start + block_size[0], seqlen)
        band_start = np.maximum(row_start // block_size[1] - half, 0)
        band_stop = np.minimum((row_stop - 1) // block_size[1] + 1 + half, num_columns)
        count, rng = check_reach("random_blocks", random_blocks), generator_of(seed)
        others = _draw_others(rng, heads, count, num_global, band_start, band_stop, num_columns)

        def rows_of(b: int, h: int, top: int, bottom: int) -> NDArray[np.bool_]:
            column = np.arange(num_columns)
            blocks = (band_start[top:bottom, None] <= column) & (column < band_stop[top:bottom, None])
            blocks[:, :num_global] = True
            blocks[: max(global_blocks - top, 0)] = True
            for row in range(top, bottom):
                blocks[row - top, others[h][row]] = True
            return blocks

        words_of = words_from_block_rows(rows_of, block_size, seqlen)
        return cls._from_words(words_of, seqlen, seqlen, heads, block_size, causal, heads_differ=True)

    @classmethod
    @hints.with_hints(hints.MASKS)
    def random(
        cls: type[M],
        seqlen_q: int,
        seqlen_k: int,
        density: float,
        seed: Seed,
        *,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        causal: bool = False,
    ) -> M:
        """Random blocks, an exact fraction of them, the same number (give or take one) in every row of blocks.

        Each head sees exactly ``round(density * blocks)`` of its blocks, every one with the same probability. Equal
        rows are the random attention of "Big Bird: Transformers for Longer Sequences", 2020, section 2, and leave no
        row empty while ``density`` times the blocks of a row is at least 1. Before `causal` hides its part, that is.

        Parameters
        ----------
        seqlen_q, seqlen_k : int
            Lengths of the sequences.
        density : float
            Fraction of visible blocks, 0 to 1.
        seed : int or whatever else `numpy.random.default_rng` takes
            The same seed gives the same mask.
        heads, block_size, causal
            See `Patterns`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> mask = cuflash.BlockMask.random(1024, 1024, 0.25, seed=0)
        >>> mask.shape, 0 < mask.density < 0.6
        ((1, 1, 1024, 1024), True)
        """
        seqlen_q, seqlen_k = check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)
        heads, block_size = check_count("heads", heads, 1), check_block_size(block_size)
        fraction = check_number("density", density)
        if not 0 <= fraction <= 1:
            raise ValueError(f"density: expected a number from 0 to 1, got {fraction}")
        num_rows, num_columns = num_blocks(seqlen_q, block_size[0]), num_blocks(seqlen_k, block_size[1])
        rng = generator_of(seed)
        drawn = [_draw_rows(rng, num_rows, num_columns, fraction) for _ in range(heads)]

        def rows_of(b: int, h: int, top: int, bottom: int) -> NDArray[np.bool_]:
            return np.unpackbits(drawn[h][top:bottom], axis=1, count=num_columns).view(bool)

        words_of = words_from_block_rows(rows_of, block_size, seqlen_k)
        return cls._from_words(words_of, seqlen_q, seqlen_k, heads, block_size, causal, heads_differ=True)

    @classmethod
    def _from_words(
        cls: type[M],
        words_of: WordsOf,
        seqlen_q: int,
        seqlen_k: int,
        heads: int,
        block_size: tuple[int, int],
        causal: bool,
        heads_differ: bool = False,
    ) -> M:
        """Heads that do not differ share the bits of one."""
        heads, block_size = check_count("heads", heads, 1), check_block_size(block_size)
        causal = check_bool("causal", causal)
        shape = (1, heads if heads_differ else 1, seqlen_q, seqlen_k)
        slots, table = pack(shape, _causal(words_of, seqlen_q, seqlen_k) if causal else words_of)
        if not heads_differ:
            slots = np.repeat(slots, heads, axis=1)
        return cls._from_store(Store(slots, table), seqlen_q, seqlen_k, block_size)


def _causal(words_of: WordsOf, seqlen_q: int, seqlen_k: int) -> WordsOf:
    def causal_words_of(b: int, h: int, first: int, last: int) -> Words:
        stop = np.arange(first, last) + (seqlen_k - seqlen_q + 1)
        return words_of(b, h, first, last) & words_below(stop, seqlen_k)

    return causal_words_of


def _draw_others(
    rng: np.random.Generator, heads: int, count: int, num_global: int, start: Rows, stop: Rows, num_columns: int
) -> list[list[Rows]]:
    """Columns for each head and row of blocks: `count` of those outside [0, num_global) and the row's [start, stop)."""
    start, stop = np.maximum(start, num_global), np.maximum(stop, num_global)
    num_others = num_columns - num_global - (stop - start)

    def draw(row: int) -> Rows:
        others = int(num_others[row])
        columns = num_global + rng.choice(others, min(count, others), replace=False, shuffle=False)
        return np.where(columns < start[row], columns, columns + stop[row] - start[row])

    return [[draw(row) for row in range(len(start))] for _ in range(heads)]


def _draw_rows(rng: np.random.Generator, num_rows: int, num_columns: int, fraction: float) -> NDArray[np.uint8]:
    """The blocks of `random` as packed bits, by rows."""
    count = round(fraction * num_rows * num_columns)
    per_row, extra = divmod(count, max(num_rows, 1))
    counts = np.full(num_rows, per_row)
    counts[rng.choice(num_rows, extra, replace=False)] += 1
    packed = np.empty((num_rows, num_blocks(num_columns, 8)), np.uint8)
    for row in range(num_rows):
        visible = np.zeros(num_columns, bool)
        visible[rng.choice(num_columns, counts[row], replace=False, shuffle=False)] = True
        packed[row] = np.packbits(visible)
    return packed
