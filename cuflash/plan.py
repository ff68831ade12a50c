"""Problem and device -> kernels, tile sizes, shared memory: THE table of kernel configurations. Pure, no CuPy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, lru_cache

from cuflash.problem import AttentionProblem

_CPP_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
_SIZES = {"float32": 4, "float64": 8}
# Threads along either side of a tile, and the padding of transposed tiles in bytes (cuda_src/tile.cuh).
_SIDE = 16
_PAD_BYTES = 16

HEAD_DIM_CLASSES = (32, 64, 128, 256)


@dataclass(frozen=True)
class Tile:
    """One row of the table.

    Attributes
    ----------
    block_m, block_n : int
        Queries and keys of a tile.
    block_k : int
        Depth of a chunk on its way through shared memory.
    blocks_per_sm : int
        Thread blocks that are to fit a multiprocessor: bounds the registers.
    """

    block_m: int
    block_n: int
    block_k: int
    blocks_per_sm: int


# (kernel, accumulator, head-dim class of the widest result) -> tile. None needs more than 64 KB of shared memory, what
# sm_75 has, so one table serves every architecture.
PORTABLE: dict[tuple[str, str, int], Tile] = {
    ("forward", "float32", 32): Tile(128, 64, 16, 2),
    ("forward", "float32", 64): Tile(128, 64, 16, 2),
    ("forward", "float32", 128): Tile(64, 64, 16, 2),
    ("forward", "float32", 256): Tile(64, 64, 16, 1),
    ("forward", "float64", 32): Tile(64, 32, 8, 2),
    ("forward", "float64", 64): Tile(64, 32, 8, 2),
    ("forward", "float64", 128): Tile(64, 32, 8, 1),
    ("forward", "float64", 256): Tile(32, 32, 8, 1),
    ("backward_dq", "float32", 32): Tile(128, 64, 16, 1),
    ("backward_dq", "float32", 64): Tile(128, 64, 16, 1),
    ("backward_dq", "float32", 128): Tile(64, 64, 16, 1),
    ("backward_dq", "float32", 256): Tile(64, 64, 16, 1),
    ("backward_dq", "float64", 32): Tile(64, 32, 8, 1),
    ("backward_dq", "float64", 64): Tile(64, 32, 8, 1),
    ("backward_dq", "float64", 128): Tile(64, 32, 8, 1),
    ("backward_dq", "float64", 256): Tile(32, 32, 8, 1),
    ("backward_dkv", "float32", 32): Tile(64, 128, 16, 1),
    ("backward_dkv", "float32", 64): Tile(64, 128, 16, 1),
    ("backward_dkv", "float32", 128): Tile(64, 64, 16, 1),
    ("backward_dkv", "float32", 256): Tile(64, 32, 16, 1),
    ("backward_dkv", "float64", 32): Tile(32, 64, 8, 1),
    ("backward_dkv", "float64", 64): Tile(32, 64, 8, 1),
    ("backward_dkv", "float64", 128): Tile(32, 32, 8, 1),
    ("backward_dkv", "float64", 256): Tile(32, 32, 8, 1),
    ("backward_bias", "float32", 0): Tile(64, 64, 16, 1),
    ("backward_bias", "float64", 0): Tile(64, 32, 8, 1),
}


@dataclass(frozen=True)
class Config:
    """One kernel: every field but `entry` is a constant of the generated source (`block_m` -> `BLOCK_M`)."""

    entry: str  # of cuda_src/<entry>.cu, or of the file that `KERNEL_FILES` names
    element: str  # C++ type of q, k, v
    accum: str
    bias_element: str
    head_dim: int  # class: accumulators are this wide; 0 where the kernel does not depend on it
    head_dim_v: int
    block_m: int
    block_n: int
    block_k: int
    blocks_per_sm: int
    smem_bytes: int
    has_window: bool
    has_softcap: bool
    has_bias: bool
    has_mask: bool
    has_alibi: bool
    has_dropout: bool
    has_block_mask: bool

    @property
    def flags(self) -> str:
        """The options that are compiled in, in words."""
        return ", ".join(f.removeprefix("has_") for f in FLAGS if getattr(self, f)) or "plain"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _SIDE * _SIDE


FLAGS = tuple(f.name for f in fields(Config) if f.name.startswith("has_"))

# Entries that live in a file of another name.
KERNEL_FILES = {"reduce_sink": "reduce", "reduce_slopes": "reduce", "reduce_bias": "reduce"}


def head_dim_class(head_dim: int) -> int:
    """The smallest class that holds `head_dim`."""
    return next(c for c in HEAD_DIM_CLASSES if head_dim <= c)


def _smem_bytes(entry: str, tile: Tile, accum: str, head_dim: int, head_dim_v: int) -> int:
    """Shared memory of SharedStorage in cuda_src/<entry>.cu, which asserts that it is enough."""
    size = _SIZES[accum]
    pad = _PAD_BYTES // size
    widest = max(head_dim, head_dim_v)
    chunk = tile.block_k * max(tile.block_m + tile.block_n + 2 * pad, widest)
    if entry == "backward_dkv":
        factor, seen = tile.block_m * (tile.block_n + pad), tile.block_m
    elif entry == "backward_bias":
        factor, seen = _SIDE * max(tile.block_m, tile.block_n), tile.block_n
    else:
        factor, seen = tile.block_n * (tile.block_m + pad), tile.block_n
    return (2 * chunk + factor) * size + math.ceil(seen / 16) * 16


@cache
def config_of(
    entry: str, dtype: str, bias_dtype: str | None, head_dim: int, head_dim_v: int, flags: tuple[str, ...]
) -> Config:
    """The configuration of one portable kernel; head dims are classes, `flags` a subset of `FLAGS`."""
    accum = "float64" if dtype == "float64" else "float32"
    row = PORTABLE[entry, accum, max(head_dim, head_dim_v)]
    return Config(
        entry=entry,
        element=_CPP_TYPES[dtype],
        accum=_CPP_TYPES[accum],
        bias_element=_CPP_TYPES[bias_dtype or dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_m=row.block_m,
        block_n=row.block_n,
        block_k=row.block_k,
        blocks_per_sm=row.blocks_per_sm,
        smem_bytes=_smem_bytes(entry, row, accum, head_dim, head_dim_v),
        **{flag: flag in flags for flag in FLAGS},
    )


@lru_cache(maxsize=4096)
def plan(problem: AttentionProblem, entry: str) -> Config:
    """The kernel `entry` for a problem: forward, backward_dq, backward_dkv, backward_bias or a small one."""
    flags = tuple(
        flag
        for flag, wanted in (
            ("has_window", problem.window_left is not None or problem.window_right is not None),
            ("has_softcap", problem.softcap != 0),
            ("has_bias", problem.bias is not None),
            ("has_mask", problem.mask is not None),
            ("has_alibi", problem.alibi is not None),
            ("has_dropout", problem.dropout_p != 0),
            ("has_block_mask", problem.block_mask),
        )
        if wanted
    )
    # A kernel depends on a head dim only where it accumulates a result of that width.
    head_dim = head_dim_class(problem.head_dim) if entry in ("backward_dq", "backward_dkv") else 0
    head_dim_v = head_dim_class(problem.head_dim_v) if entry in ("forward", "backward_dkv") else 0
    bias_dtype = problem.bias_dtype
    return config_of(entry, problem.dtype, bias_dtype, head_dim, head_dim_v, flags)


def table() -> Iterator[tuple[Config, str]]:
    """Every row of the table in every dtype (returned beside it), plain, with a window, and with all flags."""
    for entry, accum, widest in PORTABLE:
        for dtype in ("float64",) if accum == "float64" else ("float16", "bfloat16", "float32"):
            head_dim = widest if entry in ("backward_dq", "backward_dkv") else 0
            head_dim_v = widest if entry in ("forward", "backward_dkv") else 0
            for flags in ((), ("has_window",), FLAGS):
                yield config_of(entry, dtype, None, head_dim, head_dim_v, flags), dtype
