"""The named suites of cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.bench.cells import BACKWARD, FORWARD, Cell, short


@dataclass(frozen=True)
class Grid:
    """What the command line says of the sizes."""

    dtype: str = "bfloat16"
    head_dims: Sequence[int] = (64, 128, 256)
    seqlens: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
    masks: Sequence[str] = ("full", "causal")
    tokens: int = 16384
    width: int = 2048


def _square(name: str, dtype: str, batch: int, heads: int, seqlen: int, head_dim: int, **changes: Any) -> Cell:
    return replace(Cell(name, dtype, batch, seqlen, seqlen, heads, heads, head_dim, head_dim), **changes)


def _dense(grid: Grid) -> list[Cell]:
    """The same tokens in all and the same width, cut into sequences and heads: the shape of a training step."""
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
    """Causal windows; the second as a block mask, too, which is to cost no more."""
    cells = [
        _square(f"window {left} d128 n16k", grid.dtype, 1, 16, 16384, 128, causal=True, window_left=left)
        for left in (127, 1023, 4095)
    ]
    return [*cells, replace(cells[1], name="window 1023 as blocks", options=("blocks",))]


def _sparse(grid: Grid) -> list[Cell]:
    return [
        _square(f"density {density} d128 n16k", grid.dtype, 1, 16, 16384, 128, density=density)
        for density in (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)
    ]


def _options(grid: Grid) -> list[Cell]:
    return [
        _square(f"{option} d{d} n8k", grid.dtype, 2, grid.width // d, 8192, d, options=(option,))
        for d in grid.head_dims
        for option in ("softcap", "alibi", "bias", "mask", "dropout")
    ]


def _dbias(grid: Grid) -> list[Cell]:
    """A bias of the scores' whole shape, and its gradient."""
    return [_square("dbias d128 n4k", grid.dtype, 2, 16, 4096, 128, options=("dbias",), directions=(BACKWARD,))]


def _deterministic(grid: Grid) -> list[Cell]:
    return [
        replace(cell, options=("deterministic",), directions=(BACKWARD,))
        for cell in _dense(replace(grid, seqlens=(8192, 16384)))
    ]


def _float32(grid: Grid) -> list[Cell]:
    """Exact and by TF32, and float64."""
    cells = [
        _square(f"float32 d{d} {mask} n4k", "float32", 4 * 64 // d, 16, 4096, d, causal=mask == "causal")
        for d in (64, 128)
        for mask in grid.masks
    ]
    tf32 = [replace(cell, name=cell.name.replace("float32", "tf32"), options=("tf32",)) for cell in cells]
    float64 = [_square(f"float64 d{d} full n4k", "float64", 4 * 64 // d, 16, 4096, d) for d in (64, 128)]
    return [*cells, *tf32, *float64]


def _gqa(grid: Grid) -> list[Cell]:
    return [
        _square("heads 16:2 d128 causal n16k", grid.dtype, 1, 16, 16384, 128, num_heads_kv=2, causal=True),
        _square("dims 192/128 causal n8k", grid.dtype, 2, 16, 8192, 192, head_dim_v=128, causal=True),
    ]


def _varlen(grid: Grid) -> list[Cell]:
    """Sequences of 64 to 8192, 32k tokens in all, in no particular order; then as many tokens in equal lengths."""
    rng = np.random.default_rng(0)
    total = 32768
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(2 ** rng.uniform(6, 13))))
    mix = _square(f"{len(lengths)} sequences of 64 to 8k", grid.dtype, len(lengths), 16, total, 128)
    mix = replace(mix, causal=True, lengths=tuple(lengths))
    return [mix, replace(mix, name="8 sequences of 4k", batch=8, lengths=(4096,) * 8)]


def _decode(grid: Grid) -> list[Cell]:
    cells = [
        _square(f"decode b{batch} n{short(n)}", grid.dtype, batch, 32, n, 128, seqlen_q=1, num_heads_kv=8)
        for batch, n in ((1, 65536), (16, 8192), (64, 4096), (128, 1024))
    ]
    return [replace(cell, directions=(FORWARD,)) for cell in cells]


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
    "cpu": _cpu,
}


def cells_of(suite: str, grid: Grid) -> list[Cell]:
    """The cells of a suite, each with the suite's name."""
    return [replace(cell, suite=suite) for cell in SUITES[suite](grid)]
