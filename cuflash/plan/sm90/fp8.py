"""The table of Hopper's forward kernel on e4m3 queries, keys and values (wgmma, TMA), and when it runs."""

from __future__ import annotations

import math
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
    common,
    flags_of,
    has_plain_scores,
    not_taken,
    with_rules,
    without_window,
)
from cuflash.plan.key_splits import OF_MANY_ROWS, merging_us, rows_of
from cuflash.plan.record import ANY_ONE, HOPPER, PLAIN, Record, Word, candidates, narrowest, one_of, records
from cuflash.plan.sm90.config import SMEM_BESIDE_TILES, Sm90ForwardConfig
from cuflash.plan.sm90.forward import Layout, expressible, has_few_queries
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.fp8 import FP8

FLAG = "has_fp8"
HANDLES = (*KNOWN_TO_ALL, *OF_RULES, FLAG)  # the flags that the kernel knows
ENTRY = "fp8_forward_sm90"
_FEWEST_STEPS = 4  # tiles of keys of a split
_FLOPS = 7.5e6  # of a multiprocessor in a microsecond: half of what the tensor cores do with codes, as a prediction
_CONSUMERS = 2
_THREADS_OF_ROW = 4  # each keeps the row's scale
TOKENS = Word("token_scales")  # the rows of a head have scales of their own
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
    registers: tuple[int, int] = (56, 224)
    ping_pong: bool = True  # the warpgroups alternate at the tensor cores


def _tiles(head_dim: int, head_dim_v: int, *lines: Record[Fp8Tile]) -> tuple[Record[Fp8Tile], ...]:
    return records((ENTRY,), FP8, (head_dim, head_dim_v), *lines)


_MORE_TO_LOAD = (72, 216)
_D64 = Fp8Tile(128, query_stages=2, slice=32, registers=_MORE_TO_LOAD)
_D64_DROPPED = Fp8Tile(128, query_stages=2)  # random bits take registers
_D96 = Fp8Tile(128, query_stages=2, slice=48)
_D128 = Fp8Tile(128, query_stages=2)
_128, _64 = Fp8Tile(128), Fp8Tile(64)
_D192 = replace(_64, slice=32, registers=_MORE_TO_LOAD)
_D256 = Fp8Tile(64, slice=32, registers=(40, 232))
_NO_BIAS = replace(ANY_ONE, lacks=("has_bias",))
_FEWER_KEYS = replace(_D128, block_n=64)
# Each option takes registers, so that tiles with options have fewer keys; so do scales of tokens, which leave fewer to
# the products with values.
FORWARD = (
    *_tiles(
        64,
        64,
        Record(_D64, PLAIN),
        Record(_D64_DROPPED, one_of("has_dropout")),
        Record(_D64, _NO_BIAS),
        Record(replace(_D64, block_n=64)),
    ),
    *_tiles(96, 96, Record(_D96, PLAIN), Record(replace(_D96, block_n=64))),
    *_tiles(
        128,
        128,
        Record(replace(_D128, slice=32), PLAIN, needs=(TOKENS,)),
        Record(_D128, PLAIN),
        Record(_FEWER_KEYS, _NO_BIAS),
        Record(replace(_FEWER_KEYS, slice=32)),
    ),
    *_tiles(
        192,
        128,
        Record(replace(_128, slice=32), PLAIN, needs=(TOKENS,)),
        Record(_128, PLAIN),
        Record(_64, _NO_BIAS),
        Record(replace(_64, slice=32)),
    ),
    *_tiles(192, 192, Record(_D192, PLAIN), Record(_D192, _NO_BIAS), Record(replace(_D192, block_n=32))),
    *_tiles(
        256,
        256,
        Record(replace(_D256, slice=16), PLAIN, needs=(TOKENS,)),
        Record(_D256, PLAIN),
        Record(replace(_D256, block_n=32)),
    ),
)
HEAD_DIMS = tuple(dict.fromkeys((line.head_dim, line.head_dim_v) for line in FORWARD))


@dataclass(frozen=True, kw_only=True)
class Sm90Fp8Config(Sm90ForwardConfig):
    """The configuration of the kernel; what it shares with that on 16 bits are its hooks of scores."""

    result: str  # C++ type of the results
    slice: int  # columns of a product of weights and values


def _smem_bytes(row: Record[Fp8Tile], token_scales: bool) -> int:
    tile = row.tile
    row_bytes, row_bytes_v = whole_rows(row.head_dim), whole_rows(row.head_dim_v)
    keys = tile.block_n * (row_bytes + row_bytes_v) + row.head_dim_v * SWIZZLE_BYTES + 2 * tile.block_n * FLOAT_BYTES
    scales_of_rows = _THREADS_OF_ROW * tile.block_m * FLOAT_BYTES if token_scales else 0
    return tile.query_stages * tile.block_m * row_bytes + tile.stages * keys + scales_of_rows + SMEM_BESIDE_TILES


def _config_of(problem: AttentionProblem, record: Record[Fp8Tile], token_scales: bool) -> Sm90Fp8Config:
    flags, result_dtype = flags_of(problem), problem.result_dtype
    return Sm90Fp8Config(
        entry=ENTRY,
        consumers=_CONSUMERS,
        producer_registers=record.tile.registers[0],
        consumer_registers=record.tile.registers[1],
        follows_every_maximum=True,
        plain_scores=has_plain_scores(problem),
        smem_bytes=_smem_bytes(record, token_scales),
        result=CPP_TYPES[result_dtype],
        token_scales=token_scales,
        **common(Sm90Fp8Config, _HALF_OF[result_dtype], problem.bias_dtype, flags, record, record.tile),
    )


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
    lines = narrowest(FORWARD, problem.head_dim, problem.head_dim_v)
    options = without_window(flags_of(problem)) - {FLAG}
    asked = options | ({TOKENS} if token_scales else set())
    found = candidates(lines, asked, HOPPER, lambda record: True, lambda record: 1 / record.tile.block_n)
    return tuple(with_rules(_config_of(problem, record, token_scales), problem) for record in found)


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
        tried = [n for n in OF_MANY_ROWS if n == 1 or (n <= room and n * _FEWEST_STEPS <= steps)]
        number = min(tried, key=lambda n: _predicted_us(problem, config, n))
    return (config if number == 1 else replace(config, splits_keys=True)), number


def _predicted_us(problem: AttentionProblem, config: Sm90Fp8Config, num_splits: int) -> float:
    """Microseconds of a pass whose tiles all run at once, if products run at half of the tensor cores' rate."""
    keys = problem.seqlen_k
    if problem.window_left is not None and problem.window_right is not None:
        keys = min(keys, problem.window_left + problem.window_right + config.block_m)
    steps = math.ceil(math.ceil(keys / config.block_n) / num_splits)
    step = 2 * config.block_m * config.block_n * (config.head_dim + config.head_dim_v) / _FLOPS
    return steps * step + merging_us(rows_of(problem), problem.head_dim_v, num_splits)
