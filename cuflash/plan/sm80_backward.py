"""Rows of the table for the backward pass by mma.sync (sm_75 and later), and when they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, capability_of, smem_limit
from cuflash.kept import kept
from cuflash.plan import sm80_forward, sm80_wide
from cuflash.plan.config import FLAGS, KNOWN_TO_ALL, are_products, flags_of, unknown
from cuflash.plan.sm80_forward import (
    ANY,
    BLACKWELL,
    BLOCK_FLAGS,
    BLOCK_SIZES,
    MORE,
    SMEM_BESIDE_TILES,
    Capability,
    MmaConfig,
    Row,
    constants,
    dtypes,
    fits,
    meets_whole_blocks,
)
from cuflash.plan.sm80_forward import Config as QueryConfig
from cuflash.plan.sm80_forward import Tile as QueryTile
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = KNOWN_TO_ALL  # gradients of scores, dq in the order of keys, the gradient of a bias


@dataclass(frozen=True)
class Tile:
    """A tile; what is not said here is as in `sm80_forward.Tile`."""

    block_m: int
    block_n: int
    num_warps: int
    dq_fragments: int  # sixteens of queries whose dq a warp has
    together: bool  # dk and dv fit the registers; else each has a kernel of its own
    stages: int = 1  # buffers of queries and of the scores' gradients; with two a step has one barrier
    min_blocks: int = 1
    query_warps: int = 1  # with the same keys, each a part of the queries of a tile and of the columns of dk and dv
    query_parts: int = 1  # of a warp's queries, computed one behind the other
    bulk_adds: bool = False  # all that a warp has of dq is added at once (from sm_90 on)
    dq_buffer: bool = False  # and out of a buffer of its own
    short: bool = False  # for short walks only
    below: Capability = ANY
    only: tuple[str, ...] = ()


_LONG = Tile(64, 128, 4, 2, True, stages=2, min_blocks=2, query_parts=2, below=BLACKWELL)
_HALF = Tile(64, 64, 4, 2, True, min_blocks=2, query_warps=2)
# The first row that is wide enough is taken.
BACKWARD = (
    Row(
        64,
        64,
        (
            _LONG,
            _HALF,
            Tile(64, 64, 4, 2, True, query_warps=2),
        ),
        (Tile(32, 64, 4, 1, True, min_blocks=2, query_warps=2), Tile(32, 64, 4, 1, True, query_warps=2)),
        (
            replace(_LONG, only=MORE),
            replace(_HALF, min_blocks=3, below=BLACKWELL, only=("has_block_mask",)),
            replace(_HALF, only=FLAGS),
        ),
    ),
    Row(
        128,
        128,
        (
            replace(_HALF, bulk_adds=True, dq_buffer=True, short=True, below=BLACKWELL),
            Tile(64, 128, 8, 2, True, stages=2, query_warps=2, bulk_adds=True, dq_buffer=True, below=BLACKWELL),
            Tile(64, 128, 8, 2, True, stages=2, query_warps=2),
            _HALF,
            Tile(64, 64, 8, 2, True, query_warps=2),
            Tile(32, 64, 4, 1, True, query_warps=2),
        ),
        (Tile(64, 64, 8, 2, True, query_warps=2), Tile(32, 64, 4, 1, False)),
        (
            Tile(64, 128, 8, 2, True, stages=2, query_warps=2, below=BLACKWELL, only=MORE),
            replace(_HALF, bulk_adds=True, dq_buffer=True, below=BLACKWELL, only=("has_block_mask",)),
            replace(_HALF, below=BLACKWELL, only=("has_block_mask",)),
        ),
    ),
    Row(
        192,
        192,
        (
            Tile(64, 64, 8, 1, True, stages=2, query_warps=2, bulk_adds=True),
            Tile(64, 64, 8, 1, True, stages=2, query_warps=2),
            Tile(64, 64, 8, 1, True, query_warps=2),
            Tile(32, 64, 4, 1, False),
            Tile(16, 32, 2, 1, False),
        ),
        (
            Tile(32, 32, 4, 1, True, query_warps=2, below=BLACKWELL),
            Tile(16, 32, 2, 1, False, below=BLACKWELL),
            Tile(32, 16, 2, 1, False, query_warps=2),
        ),
        (
            Tile(64, 64, 8, 1, True, stages=2, query_warps=2, only=("has_block_mask",)),
            Tile(64, 64, 8, 1, True, query_warps=2, only=("has_block_mask",)),
        ),
    ),
    Row(
        256,
        256,
        (
            Tile(64, 64, 8, 2, True, stages=2, query_warps=4, bulk_adds=True),
            Tile(64, 64, 8, 1, True, query_warps=4),
            Tile(32, 64, 4, 1, False),
            Tile(16, 64, 4, 1, False),
            Tile(16, 32, 2, 1, False),
        ),
        (
            Tile(32, 64, 8, 2, True, query_warps=2, below=BLACKWELL),
            Tile(16, 64, 4, 1, False),
            Tile(32, 16, 2, 1, False, query_warps=2),  # in 64 KB
        ),
        (Tile(64, 64, 8, 2, True, stages=2, query_warps=4, bulk_adds=True, below=BLACKWELL, only=("has_block_mask",)),),
    ),
)
# Of the kernel that stays with queries: for bits that repeat beside a block mask, and for slopes.
OF_QUERIES = tuple(
    Row(head_dim, head_dim, tiles, tiles)
    for head_dim, tiles in (
        (64, (QueryTile(64, 32, 4),)),
        (128, (QueryTile(64, 32, 4),)),
        (192, (QueryTile(64, 16, 4), QueryTile(32, 16, 2))),
        (256, (QueryTile(64, 16, 4, 2), QueryTile(32, 16, 2))),
    )
)
# Of the kernel for the gradient of a bias; options are those beside it. Stages: see `sm80_wide.BIAS`.
_HALF_OF_KEYS = (QueryTile(64, 32, 4, min_blocks=2), QueryTile(64, 32, 4), QueryTile(32, 32, 2), QueryTile(32, 16, 2))
_BIAS_TILES = (
    QueryTile(64, 64, 4, min_blocks=3, below=BLACKWELL),
    QueryTile(64, 64, 4, min_blocks=2),
    QueryTile(64, 64, 4),
    *_HALF_OF_KEYS,
)
OF_BIAS = (
    *(Row(d, d, _BIAS_TILES, _HALF_OF_KEYS) for d in (64, 128, 192)),
    Row(256, 256, tuple(replace(tile, stages=2) for tile in _BIAS_TILES), _HALF_OF_KEYS),
)
# Queries that a tile of keys walks: up to so many, blocks that share a multiprocessor are faster.
_SHORT = 1024
# Of a block of the kernel before the gradients.
_ROW_WARPS = 4
# GPUs from here on add in memory what a warp has in shared memory, or vectors.
_LARGE_ADDS = (9, 0)
MAIN, ROWS, DQ, ORDERED_DQ = "backward_sm80", "backward_sm80_rows", "backward_sm80_dq", "ordered_dq"
BIAS = "bias_sm80"


@dataclass(frozen=True, kw_only=True)
class Config(MmaConfig):
    """One kernel of a backward pass."""

    dq_fragments: int
    query_warps: int
    query_parts: int
    vector_adds: bool  # four floats are added in memory at once
    bulk_adds: bool  # `Tile`
    dq_buffer: bool
    computes_dk: bool  # and dq
    computes_dv: bool
    deterministic: bool  # tiles of keys add to dq in an order
    turns: int = 8  # of a tile of queries then: one for each warp at most


def _smem_bytes(tile: Tile, row: Row[Tile], computes_dk: bool) -> int:
    of_key = row.head_dim + (row.head_dim_v if computes_dk else 0)
    of_query = tile.stages * (HALF_BYTES * (row.head_dim + row.head_dim_v) + 2 * FLOAT_BYTES)
    weights = tile.query_warps > 1 and (tile.together or not computes_dk)  # which warps share, as gradients
    of_score = HALF_BYTES * (weights + (tile.stages if computes_dk else 0))
    of_query += tile.block_n * of_score + (FLOAT_BYTES * row.head_dim if tile.dq_buffer else 0)
    elements = tile.block_n * HALF_BYTES * of_key + tile.block_m * of_query
    return elements + SMEM_BESIDE_TILES


def configs(
    row: Row[Tile],
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    aligned: bool = True,
    is_short: bool = False,
    deterministic: bool = False,
    block_keys: int = 0,
) -> tuple[Config, ...]:
    """The kernels for the gradients of scores, none where no tile fits; `flags` is a subset of `FLAGS`."""
    fitting = (
        t
        for t in row.tiles_for(flags, aligned)
        if capability < t.below
        and (capability >= _LARGE_ADDS or not t.bulk_adds)
        and (is_short or not t.short)
        and meets_whole_blocks(t.block_n, block_keys)
        and fits(t.min_blocks, _smem_bytes(t, row, True), limit)
    )
    tile = next(fitting, None)
    if tile is None:
        return ()
    passes = ((True, True),) if tile.together else ((True, False), (False, True))
    return tuple(
        Config(
            entry=MAIN,
            vector_adds=capability >= _LARGE_ADDS,
            plain_scores=are_products(flags),
            computes_dk=computes_dk,
            computes_dv=computes_dv,
            deterministic=deterministic,
            smem_bytes=_smem_bytes(tile, row, computes_dk),
            **constants(Config, row, tile, dtype, bias_dtype, flags, capability, aligned),
        )
        for computes_dk, computes_dv in passes
    )


def of_rows(config: Config, entry: str) -> Config:
    """The kernel before or behind that of `config`. In larger blocks the former's reads wait for others."""
    of_all: dict[str, Any] = {"bias_element": config.element, **dict.fromkeys(FLAGS, False)}
    of_all |= dict.fromkeys(("plain_scores", "computes_dk", "computes_dv"), True)
    num_warps = min(config.num_warps, _ROW_WARPS) if entry == ROWS else config.num_warps
    return replace(config, entry=entry, num_warps=num_warps, **of_all)


def _is_short(problem: AttentionProblem) -> bool:
    rows = problem.seqlen_q // max(problem.batch, 1) if problem.packed else problem.seqlen_q
    walked = rows // 2 if problem.window_right is not None else rows
    return walked * problem.group_size <= _SHORT


@kept
def backward(problem: AttentionProblem, aligned: bool, capability: Capability, limit: int) -> tuple[Config, ...]:
    """The kernels for a problem; none where mma.sync does not take its dtype or an option, or no tile fits."""
    if problem.dtype not in dtypes(capability) or unknown(HANDLES, problem):
        return ()
    row = next(r for r in BACKWARD if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    given = row, problem.dtype, problem.bias_dtype, flags_of(problem), capability, limit, aligned, _is_short(problem)
    return configs(*given, bool(problem.deterministic and not problem.block_mask), problem.block_size[1])


def _smem_of_queries(tile: QueryTile, row: Row[QueryTile]) -> int:
    rows = tile.block_m + tile.stages * tile.block_n
    of_walk = tile.stages * tile.block_n * 2 * FLOAT_BYTES  # lse and delta, where queries are walked
    return rows * HALF_BYTES * (row.head_dim + row.head_dim_v) + of_walk + SMEM_BESIDE_TILES


_QUERY_KERNEL: dict[str, Any] = {"rows": OF_QUERIES, "entry": ORDERED_DQ, "smem_bytes": _smem_of_queries}


def of_queries(problem: AttentionProblem, *place: Any) -> QueryConfig | None:
    """The kernel for dq in the order of keys, or None; `place` as for `sm80_forward.forward`."""
    return sm80_forward.forward(problem, *place, handled=HANDLES, **_QUERY_KERNEL)


def _smem_of_bias(tile: QueryTile, row: Row[QueryTile]) -> int:
    columns = tile.stages * QueryConfig.chunk if tile.stages > 1 else row.head_dim + row.head_dim_v
    return (tile.block_m + tile.block_n) * columns * HALF_BYTES + SMEM_BESIDE_TILES


_BIAS_KERNEL: dict[str, Any] = {"rows": OF_BIAS, "entry": BIAS, "smem_bytes": _smem_of_bias}


def _with_bias(config: QueryConfig) -> QueryConfig:
    return replace(config, has_bias=True, plain_scores=False)


def of_bias(problem: AttentionProblem, *place: Any) -> QueryConfig | None:
    """The kernel for the gradient of a bias of any shape, or None; `place` as for `sm80_forward.forward`."""
    config = sm80_forward.forward(replace(problem, bias=None), *place, handled=HANDLES, **_BIAS_KERNEL)
    return _with_bias(config) if config else sm80_wide.of_bias(problem, *place)


def reason(problem: AttentionProblem) -> str:
    """What the backward pass takes on GPUs but Hopper's, in words."""
    tiles = []
    for name in ("sm_80", "sm_86"):
        chosen = backward(problem, True, capability_of(name), smem_limit(name))
        if not chosen:
            own_options = unknown(HANDLES, problem)
            of = f"with {own_options}" if own_options else f"for {problem.dtype} of this size"
            return f"portable kernels: mma.sync has none {of}"
        tiles.append(f"{chosen[0].tile} on {name}")
    return f"mma.sync, tiles of {', '.join(tiles)}"


def table(capability: Capability, limit: int) -> Iterator[tuple[Config | QueryConfig, str]]:
    """Every kernel for a GPU, with its dtype: `plan.table`."""
    for row in BACKWARD:
        for dtype in dtypes(capability):
            kinds = [(flags, True, False, 0) for flags in sm80_forward.table_flags(row, HANDLES)]
            kinds += [(flags, True, False, size) for flags, size in product(BLOCK_FLAGS, BLOCK_SIZES)]
            if any(tile.short for tile in row.tiles):
                kinds += [((), True, True, 0), (("has_window",), True, True, 0)]
            for flags, aligned, is_short, block_keys in (*kinds, (HANDLES, False, False, 0)):
                of = dtype, None, flags, capability, limit, aligned, is_short
                for deterministic in (False,) if "has_block_mask" in flags else (False, True):
                    for config in configs(row, *of, deterministic, block_keys):
                        yield config, dtype
    yield from sm80_forward.table(capability, limit, handled=HANDLES, **_QUERY_KERNEL)
    for other, dtype in sm80_forward.table(capability, limit, handled=HANDLES, **_BIAS_KERNEL):
        yield _with_bias(other), dtype
