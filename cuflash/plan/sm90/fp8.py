"""The table of Hopper's forward kernel on e4m3 queries, keys and values (wgmma, TMA), and when it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cuflash.hardware import (
    FLOAT_BYTES,
    ROWS_OF_WARPGROUP,
    SMEM_ALIGNMENT,
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
from cuflash.plan.key_splits import OF_MANY_ROWS, merging_us, per_sequence, rows_of
from cuflash.plan.record import ANY_ONE, HOPPER, PLAIN, Record, Takes, Word, candidates, narrowest, one_of, records
from cuflash.plan.sm90.config import SMEM_BESIDE_TILES, Sm90ForwardConfig
from cuflash.plan.sm90.forward import Layout, expressible, has_few_queries
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.fp8 import FP8

FLAG = "has_fp8"
HANDLES = (*KNOWN_TO_ALL, *OF_RULES, FLAG)  # the flags that the kernel knows
ENTRY = "fp8_forward_sm90"
_FEWEST_STEPS = 4  # tiles of keys of a split
_THREADS_OF_ROW = 4  # each keeps the row's scale
TOKENS = Word("token_scales")  # the rows of a head have scales of their own
# The arithmetic's dtype where results are float32; it names the types of what has 16 bits in headers that are shared.
_HALF_OF = {"float16": "float16", "bfloat16": "bfloat16", "float32": "bfloat16"}


@dataclass(frozen=True)
class Fp8Tile:
    """A tile: the queries of two or three warpgroups, and keys."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile, a multiple of 32
    stages: int = 2  # buffers of keys, of values and of transposed values
    query_stages: int = 1  # buffers of queries
    slice: int = 0  # columns of a product of weights and values; 0 in the table is all at once
    # Registers of a thread that loads, schedules or prepares values, and of one that computes.
    registers: tuple[int, int] = (56, 224)
    ping_pong: bool = True  # the warpgroups alternate at the tensor cores
    shares_factors: bool = False  # factors of totals lie in shared memory, which leaves registers for other things

    @property
    def scores(self) -> int:
        """How many scores a tile has: fewer are slower, where there are enough tiles."""
        return self.block_m * self.block_n


def _tiles(head_dim: int, head_dim_v: int, *lines: Record[Fp8Tile]) -> tuple[Record[Fp8Tile], ...]:
    whole = (replace(line, tile=replace(line.tile, slice=line.tile.slice or head_dim_v)) for line in lines)
    return records((ENTRY,), FP8, (head_dim, head_dim_v), *whole)


def _without_tokens(takes: Takes) -> Takes:
    return replace(takes, lacks=(*takes.lacks, TOKENS))


# Three warpgroups overlap exponentials and products better than two, and have fewer registers.
_OF_THREE, _OF_SLICES, _MOST = (32, 160), (40, 232), (24, 240)
_WITHOUT_BIAS = replace(ANY_ONE, lacks=("has_bias",))
# Block masks have blocks of 64 rows and keys, so that their tiles have 64 or 128.
_WITHOUT_BOTH = replace(ANY_ONE, lacks=("has_bias", "has_block_mask"))
_FEW = one_of("has_softcap", "has_alibi")
_FEW_OR_DROPOUT = one_of("has_softcap", "has_alibi", "has_dropout")


# Each option takes registers, so that tiles with options are smaller; so do scales of tokens. TFLOP/s were measured on
# an H200 with 8192 tokens.
FORWARD = (
    *_tiles(
        64,
        64,
        Record(Fp8Tile(192, 128, query_stages=2, registers=_OF_THREE), _without_tokens(_WITHOUT_BOTH)),  # 636
        Record(Fp8Tile(192, 96, query_stages=2, registers=_OF_THREE), _WITHOUT_BOTH, needs=(TOKENS,)),
        Record(Fp8Tile(128, 128, query_stages=2), _WITHOUT_BIAS),
        Record(Fp8Tile(128, 64, query_stages=2)),
    ),
    *_tiles(
        96,
        96,
        Record(Fp8Tile(192, 128, registers=_OF_THREE, shares_factors=True), replace(PLAIN, lacks=(TOKENS,))),
        Record(Fp8Tile(192, 96, registers=_OF_THREE), _without_tokens(_WITHOUT_BOTH)),
        Record(Fp8Tile(192, 96, registers=_OF_THREE), _FEW, needs=(TOKENS,)),
        Record(Fp8Tile(128, 128, query_stages=2), _WITHOUT_BIAS),
        Record(Fp8Tile(128, 64, query_stages=2)),
    ),
    *_tiles(
        128,
        128,
        Record(Fp8Tile(192, 96, query_stages=2, registers=_OF_THREE), _without_tokens(_FEW)),  # 920
        Record(Fp8Tile(128, 128), _WITHOUT_BIAS),
        Record(Fp8Tile(128, 64, query_stages=2)),
    ),
    *_tiles(
        192,
        128,
        Record(Fp8Tile(128, 128), _without_tokens(_WITHOUT_BIAS)),
        Record(Fp8Tile(128, 64)),
    ),
    *_tiles(
        192,
        192,
        Record(Fp8Tile(128, 128, slice=32, registers=_OF_SLICES), _without_tokens(_FEW_OR_DROPOUT)),  # 966
        Record(Fp8Tile(128, 96, slice=32, registers=_OF_SLICES), _FEW_OR_DROPOUT, needs=(TOKENS,)),
        Record(Fp8Tile(128, 64, slice=32), _without_tokens(_WITHOUT_BIAS)),
        # A block mask, too, would take a second longer to compile than with 32 keys.
        Record(Fp8Tile(128, 64, slice=32), _WITHOUT_BOTH, needs=(TOKENS,)),
        Record(Fp8Tile(128, 32, slice=32)),
    ),
    *_tiles(
        256,
        256,
        Record(Fp8Tile(128, 96, slice=32, registers=_MOST), _without_tokens(one_of("has_dropout"))),  # 1053
        Record(Fp8Tile(128, 64, slice=32, registers=_OF_SLICES), _FEW),
        Record(Fp8Tile(128, 32, slice=16, registers=_OF_SLICES)),
    ),
)
HEAD_DIMS = tuple(dict.fromkeys((line.head_dim, line.head_dim_v) for line in FORWARD))


@dataclass(frozen=True, kw_only=True)
class Sm90Fp8Config(Sm90ForwardConfig):
    """The configuration of the kernel; what it shares with that on 16 bits are its hooks of scores."""

    result: str  # C++ type of the results
    slice: int  # columns of a product of weights and values
    shares_factors: bool


def _smem_bytes(record: Record[Fp8Tile], token_scales: bool) -> int:
    tile = record.tile
    row_bytes, row_bytes_v = whole_rows(record.head_dim), whole_rows(record.head_dim_v)
    keys = tile.block_n * (row_bytes + row_bytes_v) + record.head_dim_v * SWIZZLE_BYTES
    small = SMEM_BESIDE_TILES
    if token_scales:
        small += (tile.stages * 2 * tile.block_n + _THREADS_OF_ROW * tile.block_m) * FLOAT_BYTES
    if tile.shares_factors:
        small += tile.block_m * FLOAT_BYTES
    totals = tile.block_m * record.head_dim_v * FLOAT_BYTES if tile.slice == record.head_dim_v else 0
    small = math.ceil(small / SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    return tile.query_stages * tile.block_m * row_bytes + tile.stages * keys + totals + small


def _config_of(problem: AttentionProblem, record: Record[Fp8Tile], token_scales: bool) -> Sm90Fp8Config:
    flags, result_dtype = flags_of(problem), problem.result_dtype
    return Sm90Fp8Config(
        entry=ENTRY,
        consumers=record.tile.block_m // ROWS_OF_WARPGROUP,
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
    asked = (without_window(flags_of(problem)) - {FLAG}) | ({TOKENS} if token_scales else set())
    found = candidates(lines, asked, HOPPER, lambda record: True, lambda record: -record.tile.scores)
    return tuple(with_rules(_config_of(problem, record, token_scales), problem) for record in found)


def choices(
    problem: AttentionProblem, layouts: tuple[Layout, ...], token_scales: bool, num_sms: int
) -> tuple[tuple[Sm90Fp8Config, int], ...]:
    """The candidates for a problem, each with its number of splits, by their predicted times."""
    found = [with_splits(problem, config, num_sms) for config in forward(problem, layouts, token_scales)]
    return tuple(sorted(found, key=lambda choice: _predicted_us(problem, choice[0], choice[1], num_sms)))


def with_splits(problem: AttentionProblem, config: Sm90Fp8Config, num_sms: int) -> tuple[Sm90Fp8Config, int]:
    """The kernel, and how many splits of the keys a tile of queries has; 1 leaves the keys whole."""
    steps = math.ceil(problem.seqlen_k / config.block_n)
    if problem.packed or problem.block_mask:
        number = 1
    elif problem.num_splits is not None:
        number = max(min(problem.num_splits, steps), 1)  # a split needs a tile of keys to compute
    else:
        room = max(num_sms // _tiles_of(problem, config), 1)
        tried = [n for n in OF_MANY_ROWS if n == 1 or (n <= room and n * _FEWEST_STEPS <= steps)]
        number = min(tried, key=lambda n: _predicted_us(problem, config, n, num_sms))
    return (config if number == 1 else replace(config, splits_keys=True)), number


def _tiles_of(problem: AttentionProblem, config: Sm90Fp8Config) -> int:
    rows = per_sequence(problem, problem.seqlen_q)
    return math.ceil(rows / config.block_m) * problem.num_heads_q * max(problem.batch, 1)


# Microseconds of a step (a tile of queries and one of keys): fixed, for each score, for each million operations of the
# products, and how much longer it takes two warpgroups; and of a tile's start and end. They were fitted to the times of
# 8192 tokens in head dims 64 to 256 on an H200, which they are off by up to 10%.
_STEP, _SCORE, _MFLOP, _OF_TWO, _START = 0.25, 2.6e-5, 0.067, 1.18, 3.0


def _predicted_us(problem: AttentionProblem, config: Sm90Fp8Config, num_splits: int, num_sms: int) -> float:
    """Microseconds of a pass: those of the longest tile, or of all tiles on their multiprocessors."""
    keys, share = per_sequence(problem, problem.seqlen_k), 1.0
    if problem.window_right is not None:
        if problem.window_left is not None:
            keys = min(keys, problem.window_left + problem.window_right + config.block_m)
        else:
            share = 0.5  # of the keys that a tile sees in the mean
    steps = math.ceil(math.ceil(keys / config.block_n) / num_splits)
    scores = config.block_m * config.block_n
    step = _STEP + _SCORE * scores + _MFLOP * 2e-6 * scores * (config.head_dim + config.head_dim_v)
    step *= _OF_TWO if config.consumers == 2 else 1
    turns = math.ceil(_tiles_of(problem, config) * num_splits / num_sms)
    time = max(steps * step + _START, turns * (steps * share * step + _START))
    return time + merging_us(rows_of(problem), problem.head_dim_v, num_splits)
