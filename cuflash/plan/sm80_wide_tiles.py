"""Tiles of the kernels by mma.sync on wide elements, by kind of products (`sm80_kinds`), head dims and options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cuflash.hardware import smem_limit
from cuflash.plan.config import FLAGS
from cuflash.plan.sm80_forward import BLACKWELL, Sm80Row, Sm80Tile

_64X48 = Sm80Tile(64, 48, 4, below=BLACKWELL)
# Exact float32 takes `_SEVERAL` with several options and `_ONE` with one. On Blackwell several options leave too few
# registers for 32 keys.
_SEVERAL = Sm80Tile(64, 32, 4, below=BLACKWELL), Sm80Tile(64, 16, 4)
_ONE = (Sm80Tile(64, 32, 4, only=FLAGS),)
# Keys are kinds of products. The first row is taken whose head dims are no smaller than the problem's.
FORWARD = {
    "float32": (
        Sm80Row(64, 64, (Sm80Tile(64, 64, 4, 1, 2),), (Sm80Tile(64, 32, 4, 1, 2),)),
        Sm80Row(128, 128, (_64X48, Sm80Tile(64, 32, 4)), _SEVERAL, _ONE),
        Sm80Row(192, 128, (Sm80Tile(64, 64, 4, below=BLACKWELL), _64X48, Sm80Tile(64, 32, 4)), _SEVERAL, _ONE),
        Sm80Row(256, 128, (Sm80Tile(64, 64, 4, below=BLACKWELL), Sm80Tile(64, 32, 4)), _SEVERAL, _ONE),
    ),
    "tf32": (
        Sm80Row(64, 64, (Sm80Tile(128, 64, 4, 2, 2), Sm80Tile(128, 64, 4, 1, 2)), (Sm80Tile(64, 64, 4, 2, 2),)),
        Sm80Row(128, 128, (Sm80Tile(64, 64, 4, 1, 2), Sm80Tile(64, 32, 4, 1, 2)), (Sm80Tile(64, 32, 4, 1, 2),)),
        Sm80Row(256, 256, (Sm80Tile(64, 64, 4),), (Sm80Tile(64, 32, 4, 2),)),
    ),
    "float64": (
        Sm80Row(64, 64, (Sm80Tile(64, 32, 4, 2, 2), Sm80Tile(64, 32, 4)), (Sm80Tile(64, 32, 4),)),
        Sm80Row(128, 128, (Sm80Tile(64, 16, 4, 1, 2), Sm80Tile(64, 32, 4)), (Sm80Tile(64, 32, 4),)),
        Sm80Row(256, 128, (Sm80Tile(64, 16, 4), Sm80Tile(32, 16, 2)), (Sm80Tile(32, 32, 2),)),
    ),
}


@dataclass(frozen=True)
class WideGradientRow:
    """Tiles for head dims up to this one. A thread block stays with a tile's rows and iterates over columns."""

    head_dim: int  # widest q, k and v
    key_kernels: tuple[str, ...]  # ends of the entries that compute dk and dv: one for both, or one each
    tile: Sm80Tile | None  # the tile without options but a window; None where portable kernels are faster
    with_options: Sm80Tile  # the tile with any other option

    @property
    def head_dim_v(self) -> int:
        """Widest v, which has the same bound as q and k."""
        return self.head_dim


_TOGETHER, _APART = ("dkv",), ("dk", "dv")  # two kernels run where dk and dv together do not fit the registers
_SHARED = Sm80Tile(64, 32, 8, key_warps=2)  # `gradient_configs` takes fewer rows where these do not fit
_PAIRS = Sm80Tile(32, 32, 4, min_blocks=2, key_warps=2)
# Four and two warps share the rows of these tiles of float64.
_SHARED_BY_FOUR, _SHARED_BY_TWO = Sm80Tile(32, 32, 8, key_warps=4), Sm80Tile(64, 16, 8, key_warps=2)
BACKWARD = {
    "float32": (
        WideGradientRow(64, _TOGETHER, Sm80Tile(64, 32, 4, 1, 2), Sm80Tile(64, 32, 4)),
        WideGradientRow(128, _APART, Sm80Tile(64, 48, 4), Sm80Tile(64, 32, 4)),
        WideGradientRow(192, _APART, _SHARED, _SHARED),
        WideGradientRow(256, _APART, _SHARED, _SHARED),
    ),
    "tf32": (
        WideGradientRow(64, _TOGETHER, Sm80Tile(64, 48, 4, 2, 2), Sm80Tile(64, 32, 4, 2, 2)),
        WideGradientRow(128, _TOGETHER, Sm80Tile(64, 32, 4, 2), Sm80Tile(64, 16, 4, 2)),
        WideGradientRow(256, _APART, Sm80Tile(64, 32, 4), Sm80Tile(64, 16, 4)),
    ),
    "float64": (
        WideGradientRow(64, _APART, _PAIRS, _PAIRS),
        WideGradientRow(128, _APART, _SHARED, _SHARED),
        WideGradientRow(192, _APART, _SHARED_BY_FOUR, _SHARED_BY_FOUR),
        WideGradientRow(256, _APART, _SHARED_BY_TWO, _SHARED_BY_TWO),
    ),
}
# Rows of exact float32 for GPUs with 99 KB of shared memory, as far as they should be faster there than multiply-adds.
_FEWER_COLUMNS = replace(_SHARED, block_n=16)
_FORWARD_IN_99_KB = (
    Sm80Row(64, 64, *2 * ((Sm80Tile(128, 64, 8),),)),
    Sm80Row(128, 128, (Sm80Tile(64, 32, 4),), (Sm80Tile(64, 32, 4, below=(12, 0)), Sm80Tile(64, 16, 4))),
)
_BACKWARD_IN_99_KB = (
    WideGradientRow(64, _TOGETHER, Sm80Tile(64, 32, 4, 2), Sm80Tile(64, 32, 4, 2)),
    WideGradientRow(128, _APART, None, _SHARED),
    WideGradientRow(192, _APART, None, _FEWER_COLUMNS),
)
# Rows of the kernel for the gradient of a bias. `with_options` counts options besides the bias; with several stages a
# stage is a chunk of columns.
_IN_CHUNKS, _FEWER_KEYS = Sm80Tile(64, 64, 4, 2, 2, only=FLAGS), Sm80Tile(64, 32, 4, 2, 2)
_ALONE = replace(_FEWER_KEYS, min_blocks=1)  # float64 on sm_80 and 99 KB of shared memory take it
BIAS = {
    "float32": (
        Sm80Row(
            64,
            64,
            (Sm80Tile(64, 64, 4, 1, 2), Sm80Tile(64, 32, 4, 1, 2), Sm80Tile(64, 64, 4, 2)),
            (Sm80Tile(64, 32, 4, 1, 2), Sm80Tile(64, 64, 4, 2)),
        ),
        *(
            Sm80Row(
                d, d, (_IN_CHUNKS, _FEWER_KEYS, replace(_IN_CHUNKS, min_blocks=1)), (_FEWER_KEYS, _ALONE), (_IN_CHUNKS,)
            )
            for d in (128, 192, 256)
        ),
    ),
    "tf32": (
        Sm80Row(
            64,
            64,
            (Sm80Tile(64, 64, 4, 1, 3, below=BLACKWELL), Sm80Tile(64, 64, 4, 1, 2)),
            (Sm80Tile(64, 32, 4, 1, 2),),
        ),
        Sm80Row(
            128,
            128,
            (Sm80Tile(128, 64, 8, 1, 2), Sm80Tile(64, 64, 4, 1, 2), Sm80Tile(64, 64, 4)),
            (Sm80Tile(64, 32, 4),),
        ),
        Sm80Row(
            256, 256, (Sm80Tile(64, 64, 4, 2, 3, below=BLACKWELL), Sm80Tile(64, 64, 4, 2, 2)), (Sm80Tile(64, 32, 4),)
        ),
    ),
    "float64": (
        Sm80Row(64, 64, (Sm80Tile(64, 32, 4, 1, 2), Sm80Tile(64, 32, 4)), (Sm80Tile(64, 32, 4),)),
        *(Sm80Row(d, d, *2 * ((_FEWER_KEYS, _ALONE),)) for d in (128, 192, 256)),
    ),
}


def _rows(table: dict[str, Any], in_99_kb: Any, kind: str, limit: int) -> Any:
    """The rows for a kind of products on a GPU whose thread blocks may use `limit` bytes of shared memory."""
    return in_99_kb if kind == "float32" and limit < smem_limit("sm_80") else table[kind]


forward_rows_of = partial(_rows, FORWARD, _FORWARD_IN_99_KB)
backward_rows_of = partial(_rows, BACKWARD, _BACKWARD_IN_99_KB)
