"""Rows of the table for Hopper's float32 kernels, with operands in float16 parts, and when they run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cuflash.hardware import (
    FLOAT_BYTES,
    HALF_BYTES,
    ROWS_OF_WARPGROUP,
    SMEM_ALIGNMENT,
    SMEM_BYTES,
    WORD_BITS,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan.config import (
    KNOWN_TO_ALL,
    are_products,
    beside_window,
    common,
    flags_of,
    has_plain_scale,
    unknown,
)
from cuflash.plan.entries import key_results
from cuflash.plan.sm90_forward import REGISTERS, SMEM_BESIDE_TILES, HopperConfig
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = KNOWN_TO_ALL
# float16 parts of weights, values and dout, and of queries and keys, by precision; one has the 11 bits of TF32.
PARTS = {None: 2, "tf32": 1}
KEY_PARTS = {2: 3, 1: 1}
DQ, DKV, DK, DV = "split_dq", "split_dkv", "split_dk", "split_dv"


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and buffers for keys and for values."""

    block_m: int
    block_n: int
    key_stages: int = 2
    value_stages: int = 2
    ping_pong: bool = True


@dataclass(frozen=True)
class Row:
    """Tiles for head dims up to these: without a window, with one, and with other options.

    No kernel spills; None where that leaves no tile: other kernels run.
    """

    head_dim: int
    head_dim_v: int
    full: Tile
    windowed: Tile
    with_options: Tile | None
    with_array: Tile | None  # a bias or a mask
    with_all: Tile | None  # either of these beside anything but a window
    with_blocks: Tile | None = None  # either of these beside a block mask, if not with_all
    with_blocks_and_more: Tile | None = None


_SMALL, _SMALLEST = Tile(64, 32, 2, 1, ping_pong=False), Tile(64, 16, ping_pong=False)
# By number of parts; the first row that is wide enough is taken. `*2 * (tile,)` is one tile for two kinds of options.
FORWARD = {
    2: (
        Row(64, 64, *2 * (Tile(128, 112),), *2 * (Tile(128, 64),), Tile(128, 32)),
        Row(128, 128, Tile(128, 64, 2, 1), Tile(128, 48), Tile(128, 32), *2 * (Tile(128, 16),), Tile(128, 32)),
        Row(192, 128, *3 * (Tile(128, 32, 1, 1),), *2 * (Tile(128, 16),), *2 * (_SMALL,)),
        Row(192, 192, *2 * (Tile(128, 32, 1, 1),), None, None, None),
        Row(256, 128, *4 * (_SMALL,), _SMALLEST, _SMALL, _SMALLEST),
        Row(256, 256, *2 * (_SMALLEST,), None, None, None),
    ),
    1: (
        Row(64, 64, *2 * (Tile(128, 128),), *2 * (Tile(128, 64),), Tile(128, 32)),
        Row(128, 128, *2 * (Tile(128, 96),), Tile(128, 64), *2 * (Tile(128, 32),)),
        Row(192, 192, *2 * (Tile(128, 64),), *2 * (Tile(128, 32),), Tile(128, 16), Tile(128, 32)),
        Row(256, 128, *4 * (Tile(128, 64),), Tile(128, 32)),
        Row(256, 256, *3 * (Tile(128, 32),), None, None),
    ),
}
# Vectors of a tile of columns: two of keys and values, four of queries.
_VECTORS = {DQ: 2, DKV: 4, DK: 4, DV: 4}
_FORWARD_REGISTERS = REGISTERS | {1: (80, 248)}
_BLOCK_MASK_REGISTERS = (56, 224)
_COLUMNS = 16  # of which halves are multiples
BY_HALVES = "; half of v's columns at a time"


@dataclass(frozen=True)
class Walk:
    """Rows that stay with a thread block, columns of a tile that it walks, and buffers of these."""

    rows: int
    columns: int
    stages: int = 2
    stages_v: int = 2


@dataclass(frozen=True)
class GradientRow:
    """Kernels for head dims up to this one and their tiles: plain or with a window, and with other options.

    dk and dv have a kernel each where both together would spill.
    """

    head_dim: int
    plain: dict[str, Walk]
    with_options: dict[str, Walk]
    most_of_two: int = 16  # columns beside a block mask and two options; 0: other kernels run
    narrow: tuple[set[str], ...] = ()  # options with as few columns
    without: tuple[set[str], ...] = ()  # with which other kernels run


def _apart(walk: Walk, of_dv: Walk | None = None) -> dict[str, Walk]:
    return {DQ: walk, DK: walk, DV: of_dv or walk}


_BIAS_AND_BLOCKS, _MASK_AND_BLOCKS = {"has_bias", "has_block_mask"}, {"has_mask", "has_block_mask"}
_DROPOUT_AND_BLOCKS = {"has_dropout", "has_block_mask"}
_MANY = {"has_bias", "has_mask", "has_alibi", "has_dropout"}
# By number of parts; the first row that is wide enough is taken; else other kernels run.
BACKWARD = {
    2: (
        GradientRow(
            64,
            {DQ: Walk(128, 64), DKV: Walk(128, 48)},
            {DQ: Walk(128, 32), DKV: Walk(128, 32)},
            narrow=(_MANY,),
        ),
        GradientRow(
            128,
            _apart(Walk(128, 32, 2, 1), Walk(128, 64, 2, 1)),
            _apart(Walk(128, 32, 2, 1), Walk(128, 32)),
            narrow=(_MANY,),
        ),
        GradientRow(
            192,
            _apart(Walk(64, 32, 2, 1), Walk(64, 48, 2, 1)),
            _apart(Walk(64, 32, 2, 1)),
            narrow=(_BIAS_AND_BLOCKS, _MASK_AND_BLOCKS, _DROPOUT_AND_BLOCKS, _MANY),
        ),
        GradientRow(
            256,
            *2 * (_apart(Walk(64, 16, 2, 1), Walk(64, 32, 2, 1)),),
            0,
            (_DROPOUT_AND_BLOCKS,),
            (
                _BIAS_AND_BLOCKS,
                _MASK_AND_BLOCKS,
                {"has_bias", "has_mask"},
                {"has_bias", "has_alibi"},
                {"has_mask", "has_alibi", "has_dropout"},
            ),
        ),
    ),
    1: (
        GradientRow(
            64,
            {DQ: Walk(128, 64), DKV: Walk(128, 64)},
            {DQ: Walk(128, 64), DKV: Walk(128, 32)},
            32,
            ({"has_bias", "has_mask"}, {"has_bias", "has_alibi", "has_dropout"}),
        ),
        GradientRow(
            128,
            {DQ: Walk(128, 64), DKV: Walk(128, 32)},
            _apart(Walk(128, 32)),
            0,
        ),
        GradientRow(192, _apart(Walk(128, 48, 2, 1)), _apart(Walk(128, 32)), narrow=(_BIAS_AND_BLOCKS,)),
        GradientRow(256, _apart(Walk(128, 32, 2, 1)), _apart(Walk(128, 16)), 0),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config(HopperConfig):
    """One kernel of this family."""

    parts: int  # of weights, values and dout
    key_parts: int  # of queries and keys
    teams: int = 1

    @property
    def tile(self) -> str:
        """Queries and keys of a tile, and parts."""
        return f"{self.block_m}x{self.block_n}x{self.parts}"


@dataclass(frozen=True, kw_only=True)
class ForwardConfig(Config):
    """The forward kernel."""

    key_stages: int
    value_stages: int
    query_stages: int
    factor_stages: int = 4  # of the factors of a tile of keys and values


@dataclass(frozen=True, kw_only=True)
class GradientConfig(Config):
    """A gradient kernel."""

    of_keys: bool
    computes_dk: bool
    computes_dv: bool
    deterministic: bool  # sums wait for their turn (sm90/backward/schedule.cuh): never
    stages: int
    stages_v: int


def _constants(parts: int, consumers: int, registers: tuple[int, int], plain_scores: bool) -> dict[str, Any]:
    return {
        "parts": parts,
        "key_parts": KEY_PARTS[parts],
        "consumers": consumers,
        "producer_registers": registers[0],
        "consumer_registers": registers[1],
        "plain_scores": plain_scores,
    }


def _tile_of(row: Row, flags: tuple[str, ...], plain_scores: bool) -> Tile | None:
    options = beside_window(flags)
    if options & {"has_bias", "has_mask"}:
        tile = row.with_array if len(options) == 1 else row.with_all
    elif not options and plain_scores:
        tile = row.windowed if flags else row.full
    else:
        tile = row.with_options
    if tile is not None and "has_block_mask" in flags and tile.block_n % WORD_BITS:
        return row.with_blocks if len(options) == 2 else row.with_blocks_and_more
    return tile


def forward_config(
    row: Row, parts: int, bias_dtype: str | None, flags: tuple[str, ...], plain_scores: bool = True
) -> ForwardConfig | None:
    """The configuration of one forward kernel, if there is one; `flags` is a subset of `FLAGS`."""
    tile = _tile_of(row, flags, plain_scores)
    if tile is None:
        return None
    consumers = tile.block_m // ROWS_OF_WARPGROUP
    row_bytes, row_bytes_v = (
        count * whole_rows(HALF_BYTES * d) for count, d in ((KEY_PARTS[parts], row.head_dim), (parts, row.head_dim_v))
    )
    queries = tile.block_m * row_bytes
    keys = tile.block_n * (tile.key_stages * row_bytes + tile.value_stages * row_bytes_v)
    smem_bytes = queries + keys + ForwardConfig.factor_stages * 2 * tile.block_n * FLOAT_BYTES + SMEM_BESIDE_TILES
    # With room for them the next tile's queries come early.
    query_stages = 2 if smem_bytes + queries <= SMEM_BYTES else 1
    smem_bytes += (query_stages - 1) * queries
    return ForwardConfig(
        entry="split_forward",
        query_stages=query_stages,
        smem_bytes=smem_bytes,
        **common(ForwardConfig, "float32", bias_dtype, flags, row, tile),
        **_constants(parts, consumers, _FORWARD_REGISTERS[consumers], plain_scores and are_products(flags)),
    )


def gradient_config(
    entry: str,
    head_dim: int,
    tile: Walk,
    parts: int,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool = True,
) -> GradientConfig:
    """The configuration of one gradient kernel; `flags` is a subset of `FLAGS`."""
    wanted = key_results(entry)
    of_keys = bool(wanted)
    consumers = tile.rows // ROWS_OF_WARPGROUP
    # A walk along a block mask's lists takes registers of the loading thread.
    registers = _BLOCK_MASK_REGISTERS if "has_block_mask" in flags and consumers > 1 else REGISTERS[consumers]
    row_bytes = whole_rows(HALF_BYTES * head_dim)
    key_parts = KEY_PARTS[parts]
    # dv needs no products of values and dout.
    rows = tile.rows * (key_parts + (parts if entry != DV else 0)) * row_bytes
    columns = tile.columns * (tile.stages * key_parts + tile.stages_v * parts) * row_bytes
    vectors = tile.stages * _VECTORS[entry] * tile.columns * FLOAT_BYTES
    return GradientConfig(
        entry=entry,
        head_dim=head_dim,
        head_dim_v=head_dim,
        block_m=tile.columns if of_keys else tile.rows,
        block_n=tile.rows if of_keys else tile.columns,
        of_keys=of_keys,
        computes_dk="dk" in wanted,
        computes_dv="dv" in wanted,
        deterministic=False,
        ping_pong=False,
        smem_bytes=rows + columns + math.ceil((vectors + SMEM_BESIDE_TILES) / SMEM_ALIGNMENT) * SMEM_ALIGNMENT,
        **common(GradientConfig, "float32", bias_dtype, flags, tile),
        **_constants(parts, consumers, registers, plain_scores and are_products(flags)),
    )


def gradient_configs(
    row: GradientRow, parts: int, bias_dtype: str | None, flags: tuple[str, ...], plain_scores: bool = True
) -> tuple[GradientConfig, ...]:
    """The configurations of a pass, that of dq first; none where they would spill, or mma.sync is as fast."""
    options = beside_window(flags)
    beside_block_mask = len(options) - 1 if "has_block_mask" in flags else 0
    if beside_block_mask > (2 if row.most_of_two else 1) or any(x <= options for x in row.without):
        return ()
    tiles = row.with_options if options or not plain_scores else row.plain
    is_narrow = beside_block_mask > 1 or any(x <= options for x in row.narrow)
    if is_narrow or beside_block_mask:
        most = (row.most_of_two or _COLUMNS) if is_narrow else WORD_BITS
        tiles = {entry: replace(tile, columns=min(tile.columns, most)) for entry, tile in tiles.items()}
    return tuple(
        gradient_config(entry, row.head_dim, tile, parts, bias_dtype, flags, plain_scores)
        for entry, tile in tiles.items()
    )


def _is_taken(problem: AttentionProblem) -> bool:
    return problem.dtype == "float32" and not problem.is_empty and not unknown(HANDLES, problem)


@kept
def forward(problem: AttentionProblem) -> ForwardConfig | None:
    """The Hopper kernel for the forward pass of a float32 problem, or None."""
    if not _is_taken(problem):
        return None
    parts = PARTS[problem.precision]
    row = next(r for r in FORWARD[parts] if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    return forward_config(row, parts, problem.bias_dtype, flags_of(problem), has_plain_scale(problem))


def of_half(problem: AttentionProblem) -> AttentionProblem:
    """The problem on the first half of the columns of values."""
    return replace(problem, head_dim_v=math.ceil(problem.head_dim_v / 2 / _COLUMNS) * _COLUMNS)


@kept
def backward(problem: AttentionProblem) -> tuple[GradientConfig, ...]:
    """The kernels for the gradients of a float32 problem, that for dq first; none where others run."""
    if not _is_taken(problem):
        return ()
    parts = PARTS[problem.precision]
    widest = max(problem.head_dim, problem.head_dim_v)
    for row in BACKWARD[parts]:
        if widest <= row.head_dim:
            return gradient_configs(row, parts, problem.bias_dtype, flags_of(problem), has_plain_scale(problem))
    return ()


def reason(problem: AttentionProblem) -> str:
    """What the forward pass takes, in words; empty unless it is this kernel."""
    whole = forward(problem)
    config = whole or forward(of_half(problem))
    return "" if config is None else _in_words(config.tile, config) + ("" if whole else BY_HALVES)


def gradient_reason(problem: AttentionProblem) -> str:
    """What the backward pass takes, in words; empty unless it is these kernels."""
    configs = backward(problem)
    return _in_words(", ".join(f"{config.entry} {config.tile}" for config in configs), *configs) if configs else ""


def _in_words(tiles: str, *configs: Config) -> str:
    parts = configs[0].parts
    exactness = "one product of float16 each, TF32's error" if parts == 1 else "float16 parts, float32's error"
    smem_bytes = max(config.smem_bytes for config in configs)
    limits = f"tiles of {tiles}, {smem_bytes} bytes of shared memory: {configs[0].flags}"
    return f"wgmma and TMA (NVRTC from 12.9 on), {exactness}, {limits}"


_TABLE_FLAGS: tuple[tuple[str, ...], ...] = (
    *((), *((flag,) for flag in HANDLES), ("has_window", "has_block_mask")),
    *((*_DROPOUT_AND_BLOCKS,), ("has_window", *_DROPOUT_AND_BLOCKS)),
)
_ALL_BUT_BLOCK_MASK = tuple(flag for flag in HANDLES if flag != "has_block_mask")


def table() -> Iterator[tuple[Config, str]]:
    """Every forward kernel, and its dtype."""
    others = "has_softcap", "has_alibi", "has_dropout"
    for parts, rows in FORWARD.items():
        for row in rows:
            blocks = () if row.with_blocks is None else (("has_window", "has_mask", "has_block_mask"),)
            for flags in (*_TABLE_FLAGS, *blocks, others, _ALL_BUT_BLOCK_MASK, HANDLES):
                config = forward_config(row, parts, None, flags)
                if config is not None:
                    yield config, "float32"


def gradient_table() -> Iterator[tuple[Config, str]]:
    """Every gradient kernel, and its dtype."""
    for parts, rows in BACKWARD.items():
        for row in rows:
            beside = [(*x, *window) for x in row.narrow for window in _TABLE_FLAGS[:2]]
            for flags in (*_TABLE_FLAGS, *beside, _ALL_BUT_BLOCK_MASK, _ALL_BUT_BLOCK_MASK[1:]):
                for config in gradient_configs(row, parts, None, flags):
                    yield config, "float32"
