"""What is measured: one attention problem a cell, and the named suites of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash.block_mask import BlockMask

FORWARD, BACKWARD = "forward", "backward"
# Matrix products: 2 forward, 5 backward (q k^T again, dout v^T, and one for each gradient).
RELATIVE_FLOPS = {FORWARD: 1.0, BACKWARD: 2.5}


@dataclass(frozen=True)
class Cell:
    """One problem. `lengths` makes it packed, `density` gives it a random block mask; `precision` is for cuflash."""

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
    lengths: tuple[int, ...] = ()
    precision: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of q, k, v and dout."""
        rows_q, rows_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if self.lengths:
            rows_q = rows_k = (sum(self.lengths),)  # type: ignore[assignment]
        return {
            "q": (*rows_q, self.num_heads_q, self.head_dim),
            "k": (*rows_k, self.num_heads_kv, self.head_dim),
            "v": (*rows_k, self.num_heads_kv, self.head_dim_v),
            "dout": (*rows_q, self.num_heads_q, self.head_dim_v),
        }

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The window as every library spells it: inclusive, None is unbounded."""
        return self.window_left, 0 if self.causal else None

    def flops(self, direction: str) -> float:
        """Floating-point operations of the visible pairs' products; a causal cell counts half of all pairs."""
        if self.lengths:
            pairs: float = sum(n * n for n in self.lengths)
        else:
            pairs = self.batch * self.seqlen_q * self.seqlen_k
        if self.window_left is not None or self.density is not None:
            every = np.arange(self.seqlen_q)
            share = np.mean([self.visible(every[i : i + 1024]).mean() for i in every[::1024]])
            pairs *= float(share)
        elif self.causal and self.seqlen_q > 1:
            pairs /= 2
        return 2.0 * pairs * self.num_heads_q * (self.head_dim + self.head_dim_v) * RELATIVE_FLOPS[direction]

    def visible(self, rows: np.ndarray) -> np.ndarray:
        """Which keys the query `rows` see: bool (rows, seqlen_k)."""
        diagonal = rows[:, None] + self.seqlen_k - self.seqlen_q
        keys = np.arange(self.seqlen_k)
        seen = np.ones((len(rows), self.seqlen_k), bool)
        if self.causal:
            seen &= keys <= diagonal
        if self.window_left is not None:
            seen &= keys >= diagonal - self.window_left
        if self.density is not None:
            seen &= dense_mask(self)[rows]
        return seen

    @property
    def restricted(self) -> bool:
        """Whether another library needs a dense mask to compute this cell."""
        return self.window_left is not None or self.density is not None

    def sequence(self, index: int) -> tuple[slice, Cell]:
        """Where sequence `index` of a packed cell lies, and its problem alone."""
        start, length = sum(self.lengths[:index]), self.lengths[index]
        return slice(start, start + length), replace(self, batch=1, seqlen_q=length, seqlen_k=length, lengths=())

    def describe(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return asdict(self)


@lru_cache(maxsize=2)
def block_mask(cell: Cell) -> BlockMask:
    """The random blocks of 128 x 128 that `cell.density` asks for."""
    assert cell.density is not None
    return BlockMask.random(cell.seqlen_q, cell.seqlen_k, cell.density, seed=0)


@lru_cache(maxsize=2)
def dense_mask(cell: Cell) -> np.ndarray:
    """The block mask of `cell` as bool (seqlen_q, seqlen_k)."""
    return np.asarray(block_mask(cell).to_dense())[0, 0]


def short(seqlen: int) -> str:
    """``16384`` as ``16k``."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


@dataclass(frozen=True)
class Grid:
    """What the command line says of the sizes."""

    dtype: str = "bfloat16"
    head_dims: Sequence[int] = (64, 128, 256)
    seqlens: Sequence[int] = (512, 2048, 8192, 16384)
    masks: Sequence[str] = ("full", "causal")
    tokens: int = 16384
    width: int = 2048


def _plain(name: str, dtype: str, batch: int, heads: int, seqlen: int, head_dim: int, **changes: Any) -> Cell:
    return replace(Cell(name, dtype, batch, seqlen, seqlen, heads, heads, head_dim, head_dim), **changes)


def _dense(grid: Grid) -> list[Cell]:
    """The same tokens in all and the same width, cut into sequences and heads: the shape of a training step."""
    return [
        _plain(
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


def _float32(grid: Grid) -> list[Cell]:
    """Float32 exact and by TF32, and float64."""
    kinds = [("float32", None), ("float32", "tf32"), ("float64", None)]
    sizes = [(4, 64), (2, 128)]
    return [
        _plain(
            f"{precision or dtype} d{head_dim} {mask} n4k",
            dtype,
            batch,
            16,
            4096,
            head_dim,
            causal=mask == "causal",
            precision=precision,
        )
        for dtype, precision in kinds
        for batch, head_dim in sizes
        for mask in ("full", "causal")
    ]


def _window(grid: Grid) -> list[Cell]:
    return [
        _plain(f"window {left} d128 n16k", grid.dtype, 1, 16, 16384, 128, causal=True, window_left=left)
        for left in (128, 512, 1024, 4096)
    ]


def _gqa(grid: Grid) -> list[Cell]:
    return [
        _plain("heads 16:2 d128 causal n16k", grid.dtype, 1, 16, 16384, 128, num_heads_kv=2, causal=True),
        _plain("dims 192/128 causal n8k", grid.dtype, 2, 16, 8192, 192, head_dim_v=128, causal=True),
    ]


def _sparse(grid: Grid) -> list[Cell]:
    """Dense first, so that the table shows how time follows density."""
    return [_plain("dense d128 n16k", grid.dtype, 1, 16, 16384, 128)] + [
        _plain(f"density {density} d128 n16k", grid.dtype, 1, 16, 16384, 128, density=density)
        for density in (0.5, 0.25, 0.1, 0.05)
    ]


def _varlen(grid: Grid) -> list[Cell]:
    """Sequences of 64 to 8192, 32k tokens in all, in no particular order."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := 32768 - sum(lengths)) > 0:
        lengths.append(min(left, int(2 ** rng.uniform(6, 13))))
    total = sum(lengths)
    cell = _plain(f"{len(lengths)} sequences of 64 to 8k", grid.dtype, len(lengths), 16, total, 128)
    return [replace(cell, causal=True, lengths=tuple(lengths))]


def _decode(grid: Grid) -> list[Cell]:
    return [
        _plain(f"decode b{batch} n{short(n)}", grid.dtype, batch, 32, n, 128, seqlen_q=1, num_heads_kv=8)
        for batch, n in ((1, 65536), (16, 8192), (64, 4096))
    ]


def _cpu(grid: Grid) -> list[Cell]:
    return [
        _plain(f"float32 d64 {mask} n4k", "float32", 1, 8, 4096, 64, causal=mask == "causal")
        for mask in ("causal", "full")
    ]


SUITES: dict[str, Callable[[Grid], list[Cell]]] = {
    "dense": _dense,
    "float32": _float32,
    "window": _window,
    "gqa": _gqa,
    "sparse": _sparse,
    "varlen": _varlen,
    "decode": _decode,
    "cpu": _cpu,
}


def default_scale(cell: Cell) -> float:
    """The softmax scale of every library."""
    return 1.0 / math.sqrt(cell.head_dim)
