"""The portable kernels' table: which tile a problem takes on any GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cuflash.hardware import ALIGNMENT, SMALLEST_SMEM
from cuflash.kept import kept
from cuflash.plan.config import (
    HEAD_DIM_CLASSES,
    KNOWN_TO_ALL,
    KernelConfig,
    beside_window,
    common,
    flags_of,
    head_dim_class,
    table_flags,
    unknown,
)
from cuflash.plan.entries import key_results
from cuflash.problem.attention_problem import MAX_HEAD_DIM, AttentionProblem, accum_of

_SIZES = {"float32": 4, "float64": 8}
# Threads along either side of a tile.
SIDE = 16
HANDLES = KNOWN_TO_ALL  # of the portable kernels


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, depth of a chunk in shared memory, and how far it is unrolled."""

    block_m: int
    block_n: int
    block_k: int
    unroll: int
    sum_columns: int = 128  # of results whose sums over a tile are in registers at once; 0: no such sums


@dataclass(frozen=True)
class Row:
    """One row of the table; no kernel of it spills registers on any architecture."""

    tiles: tuple[Tile, ...]  # plain or with a window: the first whose shared memory the GPU has; the last fits all
    with_options: Tile  # any other, as they take registers


# (kernel, accumulator, head-dim class of the widest result) -> tiles, by measurement on an H200.
PORTABLE: dict[tuple[str, str, int], Row] = {
    ("forward", "float32", 32): Row((Tile(128, 128, 16, 16), Tile(128, 64, 16, 16)), Tile(64, 64, 16, 16)),
    ("forward", "float32", 64): Row((Tile(128, 128, 16, 16), Tile(128, 64, 16, 16)), Tile(64, 64, 16, 16)),
    ("forward", "float32", 128): Row((Tile(128, 128, 8, 4), Tile(128, 64, 16, 16, 64)), Tile(64, 64, 16, 16)),
    ("forward", "float32", 256): Row((Tile(64, 64, 16, 16),), Tile(64, 64, 8, 8)),
    ("forward", "float64", 32): Row((Tile(128, 32, 8, 8),), Tile(64, 32, 8, 4)),
    ("forward", "float64", 64): Row((Tile(128, 32, 8, 8, 0),), Tile(64, 32, 8, 4)),
    ("forward", "float64", 128): Row((Tile(64, 32, 8, 4, 64),), Tile(32, 32, 16, 4)),
    ("forward", "float64", 256): Row((Tile(32, 64, 8, 1, 64),), Tile(32, 32, 8, 2, 64)),
    ("backward_dq", "float32", 32): Row((Tile(128, 64, 16, 16),), Tile(64, 64, 16, 16)),
    ("backward_dq", "float32", 64): Row((Tile(128, 64, 16, 16),), Tile(64, 64, 16, 16)),
    ("backward_dq", "float32", 128): Row((Tile(64, 64, 16, 16),), Tile(64, 64, 8, 8)),
    ("backward_dq", "float32", 256): Row((Tile(64, 64, 16, 16, 64),), Tile(32, 64, 16, 16)),
    ("backward_dq", "float64", 32): Row((Tile(64, 32, 16, 16),), Tile(64, 32, 8, 4)),
    ("backward_dq", "float64", 64): Row((Tile(64, 32, 16, 16),), Tile(64, 32, 8, 4)),
    ("backward_dq", "float64", 128): Row((Tile(64, 32, 8, 4, 64),), Tile(32, 32, 16, 4)),
    ("backward_dq", "float64", 256): Row((Tile(32, 64, 8, 2, 64),), Tile(32, 32, 4, 4, 64)),
    ("backward_dkv", "float32", 32): Row((Tile(64, 128, 8, 8),), Tile(64, 64, 16, 16)),
    ("backward_dkv", "float32", 64): Row((Tile(64, 128, 8, 8),), Tile(64, 64, 16, 16)),
    ("backward_dkv", "float32", 128): Row((Tile(64, 64, 16, 16),), Tile(32, 64, 16, 16, 0)),
    ("backward_dkv", "float32", 256): Row((Tile(64, 32, 16, 4, 0),), Tile(32, 32, 16, 4)),
    ("backward_dkv", "float64", 32): Row((Tile(32, 64, 16, 2),), Tile(32, 64, 8, 4)),
    ("backward_dkv", "float64", 64): Row((Tile(32, 64, 16, 2, 0),), Tile(32, 64, 4, 4, 0)),
    ("backward_dkv", "float64", 128): Row((Tile(64, 32, 8, 2, 64),), Tile(32, 32, 8, 2, 64)),
    # dk and dv by themselves: where both together do not fit the registers.
    ("backward_dk", "float64", 256): Row((Tile(32, 32, 8, 4, 64),), Tile(32, 32, 8, 4, 64)),
    ("backward_dv", "float64", 256): Row((Tile(32, 32, 8, 4, 64),), Tile(32, 32, 8, 4, 64)),
    ("backward_bias", "float32", 0): Row((), Tile(64, 64, 16, 16)),
    ("backward_bias", "float64", 0): Row((), Tile(64, 32, 8, 4)),
}


@dataclass(frozen=True, kw_only=True)
class Config(KernelConfig):
    """A portable kernel."""

    block_k: int
    unroll: int
    sum_columns: int

    @property
    def tile(self) -> str:
        """Queries, keys and depth of a tile."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return SIDE * SIDE


def key_kernels(problem: AttentionProblem) -> tuple[str, ...]:
    """The kernels that compute dk and dv, together or by themselves."""
    widest = head_dim_class(max(problem.head_dim, problem.head_dim_v))
    together = ("backward_dkv", problem.accum_dtype, widest) in PORTABLE
    return ("backward_dkv",) if together else ("backward_dk", "backward_dv")


def _smem_bytes(entry: str, tile: Tile, accum: str, head_dim: int, head_dim_v: int) -> int:
    """Size of SharedStorage in cuda_src/<entry>.cu, which asserts that it is enough."""
    size = _SIZES[accum]
    pad = ALIGNMENT // size
    widest = max(head_dim, head_dim_v)
    chunk = tile.block_k * max(tile.block_m + tile.block_n + 2 * pad, widest)
    if key_results(entry):
        factor, seen = tile.block_m * (tile.block_n + pad), tile.block_m
    elif entry == "backward_bias":
        factor, seen = SIDE * max(tile.block_m, tile.block_n), tile.block_n
    else:
        factor, seen = tile.block_n * (tile.block_m + pad), tile.block_n
    return (2 * chunk + factor) * size + math.ceil(seen / 16) * 16


@cache
def config_of(
    entry: str,
    dtype: str,
    bias_dtype: str | None,
    head_dim: int,
    head_dim_v: int,
    flags: tuple[str, ...],
    smem_limit: int = SMALLEST_SMEM,
) -> Config:
    """The configuration of a portable kernel; head dims are classes, `flags` a subset of `FLAGS`."""
    accum = accum_of(dtype)
    row = PORTABLE[entry, accum, max(head_dim, head_dim_v)]
    tiles = (row.with_options,) if beside_window(flags) else row.tiles
    fitting = (t for t in tiles if _smem_bytes(entry, t, accum, head_dim, head_dim_v) <= smem_limit)
    tile = next(fitting, row.with_options)
    return Config(
        entry=entry,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        smem_bytes=_smem_bytes(entry, tile, accum, head_dim, head_dim_v),
        **common(Config, dtype, bias_dtype, flags, tile),
    )


def _result_classes(entry: str, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Head-dim classes of the results that the kernel accumulates; 0 for the others."""
    of_k = entry in ("backward_dq", "backward_dkv", "backward_dk")
    of_v = entry in ("forward", "backward_dkv", "backward_dv")
    return head_dim if of_k else 0, head_dim_v if of_v else 0


@kept
def plan(problem: AttentionProblem, entry: str, smem_limit: int = SMALLEST_SMEM) -> Config:
    """The kernel `entry` of `PORTABLE` for a problem."""
    if unknown(HANDLES, problem):
        raise NotImplementedError(f"{entry}: no kernel takes these inputs with {unknown(HANDLES, problem)}")
    flags = flags_of(problem)
    if entry in ("backward_dk", "backward_dv"):
        head_dim, head_dim_v = _result_classes(entry, MAX_HEAD_DIM, MAX_HEAD_DIM)
    else:
        classes = head_dim_class(problem.head_dim), head_dim_class(problem.head_dim_v)
        head_dim, head_dim_v = _result_classes(entry, *classes)
    return config_of(entry, problem.dtype, problem.bias_dtype, head_dim, head_dim_v, flags, smem_limit)


def types_of(problem: AttentionProblem) -> Config:
    """The configuration of a problem's kernels in around/reduce.cu, which know its types and no options."""
    return config_of("forward", problem.dtype, problem.bias_dtype, 0, HEAD_DIM_CLASSES[0], ())


def table(smem_limit: int) -> Iterator[tuple[Config, str]]:
    """Every kernel for a GPU, with its dtype."""
    for entry, accum, widest in PORTABLE:
        head_dim, head_dim_v = _result_classes(entry, widest, widest)
        for dtype in ("float64",) if accum == "float64" else ("float16", "bfloat16", "float32"):
            for flags in table_flags(HANDLES) if entry != "backward_bias" else (("has_bias",), HANDLES):
                yield config_of(entry, dtype, None, head_dim, head_dim_v, flags, smem_limit), dtype
