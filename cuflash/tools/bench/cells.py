"""The cells that are measured, one attention problem each, and named suites of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash.masks.block_mask import BlockMask
from cuflash.masks.store import CANONICAL, VISIBLE

FORWARD, BACKWARD = "forward", "backward"
# 2 matrix products forward, 5 backward.
RELATIVE_FLOPS = {FORWARD: 1.0, BACKWARD: 2.5}
# The suite "random" draws sizes in log scale up to these; head dims are multiples of 8.
RANDOM = "random"
MOST_BATCHES, MOST_HEADS, MOST_SEQLEN, HEAD_DIMS = 64, 64, 65536, range(32, 257, 8)
# A drawn problem has at most so many FLOPs forward, and elements in an array: 256 MB in 16 bits.
MOST_FLOPS, MOST_ELEMENTS = 2e13, 1 << 27


@dataclass(frozen=True)
class Cell:
    """One problem.

    `lengths` makes it packed, with as many keys as queries or with `key_lengths`; `density` gives it a random block
    mask, `block_size` is a multiple of 64; `options` are names of `inputs.py`.
    """

    name: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window_left: int | None = None
    density: float | None = None
    block_size: int = 128
    lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    options: tuple[str, ...] = ()
    suite: str = ""
    directions: tuple[str, ...] = (FORWARD, BACKWARD)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of q, k, v and dout."""
        rows_q, rows_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if self.lengths:
            rows_q, rows_k = (sum(self.lengths),), (sum(self.keys),)  # type: ignore[assignment]
        return {
            "q": (*rows_q, self.num_heads_q, self.head_dim),
            "k": (*rows_k, self.num_heads_kv, self.head_dim),
            "v": (*rows_k, self.num_heads_kv, self.head_dim_v),
            "dout": (*rows_q, self.num_heads_q, self.head_dim_v),
        }

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys of each packed sequence."""
        return self.key_lengths or self.lengths

    @property
    def window(self) -> tuple[int | None, int | None]:
        """Both ends are included, None is unbounded."""
        return self.window_left, 0 if self.causal else None

    def flops(self, direction: str) -> float:
        """Floating-point operations of the visible pairs; a causal cell counts half of all pairs."""
        if self.lengths:
            pairs: float = sum(n * keys for n, keys in zip(self.lengths, self.keys, strict=True))
        else:
            pairs = self.batch * self.seqlen_q * self.seqlen_k
        if self.density is not None:
            pairs *= block_mask(self).density
        elif self.window_left is not None:
            last = np.arange(self.seqlen_q) + self.seqlen_k - self.seqlen_q  # the key on each query's diagonal
            ends = np.minimum(last, self.seqlen_k - 1) if self.causal else self.seqlen_k - 1
            pairs *= np.clip(ends - np.maximum(last - self.window_left, 0) + 1, 0, None).mean() / self.seqlen_k
        elif self.key_lengths and self.causal:  # these end where the keys do, and few of them are many queries
            pairs -= sum(n * (n - 1) / 2 for n in self.lengths)
        elif self.causal and self.seqlen_q > 1:
            pairs /= 2
        return 2.0 * pairs * self.num_heads_q * (self.head_dim + self.head_dim_v) * RELATIVE_FLOPS[direction]

    def visible(self, rows: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
        """Which of the `keys` (by default all) the query `rows` see: bool (rows, keys)."""
        keys = np.arange(self.seqlen_k) if keys is None else keys
        diagonal = rows[:, None] + self.seqlen_k - self.seqlen_q
        seen = np.ones((len(rows), len(keys)), bool)
        if self.causal:
            seen &= keys <= diagonal
        if self.window_left is not None:
            seen &= keys >= diagonal - self.window_left
        if self.density is not None:
            slots = block_mask(self).arrays(np)[0][0, 0]  # no block is partial
            seen &= slots[np.ix_(rows // CANONICAL, keys // CANONICAL)] == VISIBLE
        if "hole" in self.options:
            seen &= self.but_one(rows[:, None], keys)
        return seen

    def but_one(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """All pairs but that of the middle query and its own key: a window is none then."""
        return (i != self.seqlen_q // 2) | (j != self.seqlen_q // 2)

    @property
    def plain(self) -> Cell:
        """Without options but the precision, window and block mask, packed in sequences of 4096.

        A batch with key lengths of its own is plain.
        """
        if self.key_lengths:
            return self
        lengths = (4096,) * (sum(self.lengths) // 4096)
        options = tuple(name for name in self.options if name == "tf32")
        return replace(self, options=options, window_left=None, density=None, lengths=lengths)

    @property
    def restricted(self) -> bool:
        """Other libraries need a dense mask."""
        return self.window_left is not None or self.density is not None

    def sequence(self, index: int) -> tuple[slice, slice, Cell]:
        """The places of a packed sequence's queries and of its keys, and its problem alone."""
        queries, keys = self.lengths[index], self.keys[index]
        begin, begin_k = sum(self.lengths[:index]), sum(self.keys[:index])
        single = replace(self, batch=1, seqlen_q=queries, seqlen_k=keys, lengths=(), key_lengths=())
        return slice(begin, begin + queries), slice(begin_k, begin_k + keys), single

    def describe(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return asdict(self)


@lru_cache(maxsize=32)
def block_mask(cell: Cell) -> BlockMask:
    """Random blocks, or the cell's window as a block mask."""
    if cell.density is None:
        sizes = cell.seqlen_q, cell.seqlen_k
        mask = BlockMask.sliding_window(*sizes, cell.window_left, 0 if cell.causal else None)
        if "hole" in cell.options:
            mask &= BlockMask.from_function(lambda b, h, i, j: cell.but_one(i, j), *sizes)
        return mask
    block_size = cell.block_size, cell.block_size
    return BlockMask.random(cell.seqlen_q, cell.seqlen_k, cell.density, seed=0, block_size=block_size)


def short(seqlen: int) -> str:
    """``16384`` as ``16k``."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def default_scale(cell: Cell) -> float:
    """The softmax scale of every library."""
    return 1.0 / math.sqrt(cell.head_dim)


@dataclass(frozen=True)
class Grid:
    """The cells that the command line's sizes describe."""

    dtype: str = "bfloat16"
    head_dims: Sequence[int] = (64, 128, 256)
    seqlens: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
    masks: Sequence[str] = ("full", "causal")
    tokens: int = 16384
    width: int = 2048
    seed: int = 0
    count: int = 300


def _square(name: str, dtype: str, batch: int, heads: int, seqlen: int, head_dim: int, **changes: Any) -> Cell:
    return replace(Cell(name, dtype, batch, seqlen, seqlen, heads, heads, head_dim, head_dim), **changes)


def _dense(grid: Grid) -> list[Cell]:
    """The same tokens and the same width, cut into sequences and heads."""
    return [
        _square(
            f"d{head_dim} {mask} n{short(seqlen)}",
            grid.dtype,
            max(1, grid.tokens // seqlen),
            max(1, grid.width // head_dim),
            seqlen,
            head_dim,
            causal=mask == "causal",
        )
        for head_dim in grid.head_dims
        for mask in grid.masks
        for seqlen in grid.seqlens
    ]


def _window(grid: Grid) -> list[Cell]:
    """Causal windows; the second as a block mask, too, known as a window or not."""
    cells = [
        _square(f"window {left} d128 n16k", grid.dtype, 1, 16, 16384, 128, causal=True, window_left=left)
        for left in (127, 1023, 4095)
    ]
    names = {"window 1023 as blocks": ("blocks",), "window 1023 but one pair": ("blocks", "hole")}
    return [*cells, *(replace(cells[1], name=name, options=options) for name, options in names.items())]


def _sparse(grid: Grid) -> list[Cell]:
    """Random blocks, smaller ones at head dim 128 alone; an empty mask, too."""
    return [
        _square(f"density {density} {name}", grid.dtype, 1, grid.width // d, 16384, d, density=density, block_size=size)
        for d in grid.head_dims
        for name, size, densities in (
            (f"d{d} n16k", 128, (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.0)),
            (f"d{d} n16k, blocks of 64", 64, (0.5, 0.1, 0.02) if d == 128 else ()),
        )
        for density in densities
    ]


def _options(grid: Grid) -> list[Cell]:
    return [
        _square(f"{option} d{d} n8k", grid.dtype, 2, grid.width // d, 8192, d, options=(option,))
        for d in grid.head_dims
        for option in ("softcap", "alibi", "bias", "mask", "dropout")
    ]


def _dbias(grid: Grid) -> list[Cell]:
    return [_square("dbias d128 n4k", grid.dtype, 2, 16, 4096, 128, options=("dbias",), directions=(BACKWARD,))]


def _deterministic(grid: Grid) -> list[Cell]:
    return [
        replace(cell, options=("deterministic",), directions=(BACKWARD,))
        for cell in _dense(replace(grid, seqlens=(8192, 16384)))
    ]


def _float32(grid: Grid) -> list[Cell]:
    cells = [
        _square(f"float32 d{d} {mask} n4k", "float32", 4 * 64 // d, 16, 4096, d, causal=mask == "causal")
        for d in grid.head_dims
        for mask in grid.masks
    ]
    tf32 = [replace(cell, name=cell.name.replace("float32", "tf32"), options=("tf32",)) for cell in cells]
    float64 = [_square(f"float64 d{d} full n4k", "float64", 4 * 64 // d, 16, 4096, d) for d in grid.head_dims]
    return [*cells, *tf32, *float64]


def _gqa(grid: Grid) -> list[Cell]:
    return [
        _square("heads 16:2 d128 causal n16k", grid.dtype, 1, 16, 16384, 128, num_heads_kv=2, causal=True),
        _square("dims 192/128 causal n8k", grid.dtype, 2, 16, 8192, 192, head_dim_v=128, causal=True),
    ]


def _varlen(grid: Grid) -> list[Cell]:
    """A mix, then as many tokens in equal lengths."""
    rng = np.random.default_rng(0)
    total = 32768
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(2 ** rng.uniform(6, 13))))
    mix = _square(f"{len(lengths)} sequences of 64 to 8k", grid.dtype, len(lengths), 16, total, 128)
    mix = replace(mix, causal=True, lengths=tuple(lengths))
    return [mix, replace(mix, name="8 sequences of 4k", batch=8, lengths=mix.plain.lengths)]


def _decode(grid: Grid) -> list[Cell]:
    cells = [
        _square(f"decode b{batch} n{short(n)}", grid.dtype, batch, 32, n, 128, seqlen_q=1, num_heads_kv=8)
        for batch, n in ((1, 65536), (16, 8192), (64, 4096), (128, 1024))
    ]
    return [replace(cell, directions=(FORWARD,)) for cell in (*cells, _server(grid))]


def _server(grid: Grid) -> Cell:
    """A server's batch: 63 sequences decode while one reads 512 tokens of its prompt, over 512 to 16k keys."""
    rng = np.random.default_rng(0)
    keys = tuple(int(n) for n in 2 ** rng.uniform(9, 14, 64))
    cell = _square("63 decodes and a prefill of 512", grid.dtype, 64, 32, 512, 128, num_heads_kv=8, causal=True)
    return replace(cell, seqlen_q=512 + 63, seqlen_k=sum(keys), lengths=(*([1] * 63), 512), key_lengths=keys)


def _random(grid: Grid) -> list[Cell]:
    """Problems that nobody listed, all drawn from the seed."""
    rng = random.Random(grid.seed)

    def drawn(most: int) -> int:
        return int(2 ** rng.uniform(0, math.log2(most)))

    cells: list[Cell] = []
    while len(cells) < grid.count:
        batch, heads = drawn(MOST_BATCHES), drawn(MOST_HEADS)
        heads_kv = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        seqlen_q, seqlen_k, d = drawn(MOST_SEQLEN), drawn(MOST_SEQLEN), rng.choice(HEAD_DIMS)
        causal = rng.random() < 0.5
        name = f"b{batch} h{heads}:{heads_kv} {seqlen_q}x{seqlen_k} d{d} {'causal' if causal else 'full'}"
        cell = Cell(name, grid.dtype, batch, seqlen_q, seqlen_k, heads, heads_kv, d, d, causal=causal)
        fits = max(math.prod(shape) for shape in cell.shapes().values()) <= MOST_ELEMENTS
        if fits and cell.flops(FORWARD) <= MOST_FLOPS:
            cells.append(cell)
    return cells


def _cpu(grid: Grid) -> list[Cell]:
    return [
        _square(f"float32 d64 {mask} n4k", "float32", 1, 8, 4096, 64, causal=mask == "causal")
        for mask in ("causal", "full")
    ]


SUITES: dict[str, Callable[[Grid], list[Cell]]] = {
    "dense": _dense,
    "window": _window,
    "sparse": _sparse,
    "options": _options,
    "dbias": _dbias,
    "deterministic": _deterministic,
    "float32": _float32,
    "gqa": _gqa,
    "varlen": _varlen,
    "decode": _decode,
    RANDOM: _random,
    "cpu": _cpu,
}


def cells_of(suite: str, grid: Grid) -> list[Cell]:
    """The cells of a suite, each with the suite's name."""
    return [replace(cell, suite=suite) for cell in SUITES[suite](grid)]
