"""The table of Hopper's forward kernel on e4m3 queries, keys and values (wgmma, TMA), and when it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuflash.hardware import (
    FLOAT_BYTES,
    ROWS_OF_WARPGROUP,
    SWIZZLE_BYTES,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan.config import (
    CPP_TYPES,
    KNOWN_TO_ALL,
    OF_RULES,
    are_products,
    common,
    flags_of,
    has_plain_scale,
    not_taken,
    with_rules,
    without_window,
)
from cuflash.plan.sm90_forward import SMEM_BESIDE_TILES, Layout, Sm90ForwardConfig, expressible, has_few_queries
from cuflash.plan.sm90_times import merging_us
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.fp8 import FP8

FLAG = "has_fp8"
HANDLES = (*KNOWN_TO_ALL, *OF_RULES, FLAG)  # the flags that the kernel knows
ENTRY = "fp8_forward_sm90"
RESULTS = ("bfloat16", "float16", "float32")
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of splits that are compared
_FEWEST_STEPS = 4  # tiles of keys of a split
_FLOPS = 7.5e6  # of a multiprocessor in a microsecond: half of what the tensor cores do with codes, as a prediction
_CONSUMERS = 2
_THREADS_OF_ROW = 4  # each keeps the row's scale
# The arithmetic's dtype where results are float32; it names the types of what has 16 bits in headers that are shared.
_HALF_OF = {"float16": "float16", "bfloat16": "bfloat16", "float32": "bfloat16"}


@dataclass(frozen=True)
class Fp8Tile:
    """A tile: the queries of two warpgroups, and keys."""

    block_n: int  # keys of a tile, a multiple of 32
    block_m: int = _CONSUMERS * ROWS_OF_WARPGROUP  # queries of a tile
    stages: int = 2  # buffers of keys, of values and of transposed values
    query_stages: int = 1  # buffers of queries
    slice: int = 64  # columns of a product of weights and values
    # Registers of a thread that loads, schedules or prepares values, and of one that computes.
    registers: tuple[int, int] = (64, 224)
    ping_pong: bool = True  # the warpgroups alternate at the tensor cores


@dataclass(frozen=True)
class Fp8Row:
    """Tiles for head dims up to these; each option takes registers, so that tiles with options have fewer keys."""

    head_dim: int  # widest q and k
    head_dim_v: int  # widest v
    full: Fp8Tile  # tile without options, or with causal or a window alone
    of_tokens: Fp8Tile  # the same with scales of single rows
    with_score: Fp8Tile  # tile with one option
    with_more: Fp8Tile  # tile with a bias, or with several options


_D64, _D96, _D128 = (Fp8Tile(n, query_stages=2, slice=columns) for n, columns in ((128, 64), (128, 48), (128, 64)))
_D256 = Fp8Tile(64, slice=32, registers=(48, 232))
# The first row is taken that is wide enough.
FORWARD = (
    Fp8Row(64, 64, _D64, _D64, _D64, replace(_D64, block_n=64)),
    Fp8Row(96, 96, _D96, _D96, replace(_D96, block_n=64), replace(_D96, block_n=64)),
    Fp8Row(
        128,
        128,
        _D128,
        replace(_D128, slice=32),
        replace(_D128, block_n=64),
        replace(_D128, block_n=64, slice=32),
    ),
    Fp8Row(192, 128, Fp8Tile(128), Fp8Tile(128, slice=32), Fp8Tile(64), Fp8Tile(64, slice=32)),
    Fp8Row(192, 192, Fp8Tile(64), Fp8Tile(64), Fp8Tile(64), Fp8Tile(32)),
    Fp8Row(256, 256, _D256, replace(_D256, slice=16), replace(_D256, block_n=32), replace(_D256, block_n=32)),
)


@dataclass(frozen=True, kw_only=True)
class Sm90Fp8Config(Sm90ForwardConfig):
    """The configuration of the kernel; what it shares with that on 16 bits are its hooks of scores."""

    result: str  # C++ type of the results
    slice: int  # columns of a product of weights and values
    token_scales: bool  # the rows of a head have scales of their own; else all share one


def _smem_bytes(row: Fp8Row, tile: Fp8Tile, token_scales: bool) -> int:
    row_bytes, row_bytes_v = whole_rows(row.head_dim), whole_rows(row.head_dim_v)
    keys = tile.block_n * (row_bytes + row_bytes_v) + row.head_dim_v * SWIZZLE_BYTES + 2 * tile.block_n * FLOAT_BYTES
    scales_of_rows = _THREADS_OF_ROW * tile.block_m * FLOAT_BYTES if token_scales else 0
    return tile.query_stages * tile.block_m * row_bytes + tile.stages * keys + scales_of_rows + SMEM_BESIDE_TILES


def config_of(
    row: Fp8Row,
    tile: Fp8Tile,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool = True,
    result_dtype: str = "bfloat16",
    token_scales: bool = False,
) -> Sm90Fp8Config:
    """The configuration of a kernel with this tile of the row; `flags` is a subset of `HANDLES`."""
    return Sm90Fp8Config(
        entry=ENTRY,
        has_work_list=False,
        packs_heads=False,
        has_pages=False,
        copies_rows=False,
        hides_queries=False,
        splits_keys=False,
        staging_panels=0,
        bias_stages=1,
        mask_stages=1,
        mask_row_bytes=SWIZZLE_BYTES,
        consumers=_CONSUMERS,
        teams=1,
        producer_registers=tile.registers[0],
        consumer_registers=tile.registers[1],
        follows_every_maximum=True,
        keys_in_reverse=False,
        query_steps_in_registers=0,
        pair=1,
        early_draws=0,
        early_powers=0,
        waits_after_powers=False,
        has_bias_tiles=False,
        has_mask_tiles=False,
        bounded_scores=False,
        plain_scores=plain_scores and are_products(flags),
        smem_bytes=_smem_bytes(row, tile, token_scales),
        result=CPP_TYPES[result_dtype],
        token_scales=token_scales,
        **common(Sm90Fp8Config, _HALF_OF[result_dtype], bias_dtype, (*flags, FLAG), row, tile),
    )


def _tiles_for(row: Fp8Row, flags: tuple[str, ...], token_scales: bool) -> tuple[Fp8Tile, ...]:
    """The tiles that these options can take, the fastest first."""
    options = without_window(flags) - {FLAG}
    if not options:
        return ((row.of_tokens if token_scales else row.full),)
    return (row.with_more,) if len(options) > 1 or "has_bias" in options else (row.with_score, row.with_more)


def obstacle(problem: AttentionProblem) -> str:
    """Say why a problem cannot take the kernel; empty if it can."""
    if problem.dtype != FP8 or not problem.has_fp8_keys:
        return f"wgmma on codes takes {FP8} queries, keys and values"
    if problem.is_empty:
        return "TMA takes no empty arrays"
    if problem.pages is not None:
        return "no kernel with pages"
    if problem.split_size is not None:
        return "no kernel with splits of one size"
    if has_few_queries(problem):
        return "no kernel for few queries"
    return f"no kernel with {not_taken(HANDLES, problem)}" if not_taken(HANDLES, problem) else ""


@kept
def forward(
    problem: AttentionProblem, layouts: tuple[Layout, ...], token_scales: bool = False
) -> tuple[Sm90Fp8Config, ...]:
    """The candidates for a problem whose q, k and v have these `layouts`, at multiples of 16 bytes; none without any.

    `token_scales` says that the rows of a head have scales of their own.
    """
    if obstacle(problem) or not all(expressible(*layout) for layout in layouts):
        return ()
    row = next(r for r in FORWARD if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    flags = flags_of(problem)
    given = problem.bias_dtype, flags, has_plain_scale(problem), problem.result_dtype, token_scales
    return tuple(with_rules(config_of(row, tile, *given), problem) for tile in _tiles_for(row, flags, token_scales))


def with_splits(problem: AttentionProblem, config: Sm90Fp8Config, num_sms: int) -> tuple[Sm90Fp8Config, int]:
    """The kernel, and how many splits of the keys a tile of queries has; 1 leaves the keys whole."""
    steps = math.ceil(problem.seqlen_k / config.block_n)
    if problem.packed or problem.block_mask:
        number = 1
    elif problem.num_splits is not None:
        number = max(min(problem.num_splits, steps), 1)  # a split needs a tile of keys to compute
    else:
        tiles = math.ceil(problem.seqlen_q / config.block_m) * problem.num_heads_q * problem.batch
        room = max(num_sms // tiles, 1)
        tried = [n for n in _SPLITS if n == 1 or (n <= room and n * _FEWEST_STEPS <= steps)]
        number = min(tried, key=lambda n: _predicted_us(problem, config, n))
    return (config if number == 1 else replace(config, splits_keys=True)), number


def _predicted_us(problem: AttentionProblem, config: Sm90Fp8Config, num_splits: int) -> float:
    """Microseconds of a pass whose tiles all run at once, if products run at half of the tensor cores' rate."""
    keys = problem.seqlen_k
    if problem.window_left is not None and problem.window_right is not None:
        keys = min(keys, problem.window_left + problem.window_right + config.block_m)
    steps = math.ceil(math.ceil(keys / config.block_n) / num_splits)
    step = 2 * config.block_m * config.block_n * (config.head_dim + config.head_dim_v) / _FLOPS
    rows = problem.seqlen_q * problem.num_heads_q * problem.batch
    return steps * step + merging_us(rows, problem.head_dim_v, num_splits)


def reason(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that a forward pass on codes takes on Hopper, and why."""
    if obstacle(problem):
        return f"as on other GPUs: {obstacle(problem)}"
    layout = ((0,), (1,))
    config = forward(problem, (layout,))[0]
    return (
        f"wgmma on e4m3 codes and TMA, tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: "
        f"{config.flags}; as on other GPUs where an address or a stride of q, k or v is no multiple of 16 bytes"
    )


def table() -> Iterator[tuple[Sm90Fp8Config, str]]:
    """Every kernel, with its queries' dtype: plain, with a window and any one option, and with all."""
    single = [("has_window", flag) for flag in KNOWN_TO_ALL if flag != "has_window"]
    for row in FORWARD:
        for n, flags in enumerate(((), ("has_window",), *single, KNOWN_TO_ALL)):
            bias_dtype = "float32" if "has_bias" in flags else None
            for token_scales in (False, True):
                result = RESULTS[(n + token_scales) % len(RESULTS)]
                tile = _tiles_for(row, flags, token_scales)[0]
                config = config_of(row, tile, bias_dtype, flags, True, result, token_scales)
                yield config, FP8
        yield replace(config_of(row, row.full, None, ("has_window",)), plain_scores=False), FP8
        yield replace(config_of(row, row.full, None, ("has_window",)), splits_keys=True), FP8
