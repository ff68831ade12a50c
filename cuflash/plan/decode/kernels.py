"""The configurations of the kernels for one query a head over a cache (sm_80 and later), and when they run.

Every query sees the same keys, so that a thread block reads each once for the query heads that share a KV head. Options
that hide keys one by one, and more queries, are left to the kernels whose tiles are of queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cuflash.hardware import CODE_BYTES, FLOAT_BYTES, HALF_BYTES, LINE_BYTES
from cuflash.kept import kept
from cuflash.plan.config import CPP_TYPES, common, flags_of, has_plain_scale, has_plain_scores, not_taken
from cuflash.plan.decode.tiles import CODES, COLUMNS, ENTRY, HALF, RECORDS, DecodeTile
from cuflash.plan.key_splits import NUMBERS, fewest, keys_seen, merging_us, rows_of
from cuflash.plan.record import AMPERE, Place, Record, asked_of, candidates, narrowest
from cuflash.plan.sm80.forward import Sm80Config, fits
from cuflash.plan.sm80.fp8 import COMPUTED
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.problem.fp8 import FP8

__all__ = ["ENTRY"]
HANDLES = ("has_window", "has_softcap", "has_alibi", "has_fp8")  # the flags that the kernel knows
# Hopper's own kernel copies boxes of TMA from pages: with smaller ones than this it waits for the copies' number.
SMALL_PAGES = 64
# The kernel runs in place of Hopper's own where its predicted time is less than so much of that one's.
_SOONER = 0.97
_MOST_TILES = 4  # of query heads that share a KV head, each of which reads its keys

# Predictions are in microseconds and of an H200, by 484 times of 24 problems in CUDA graphs (head dims 64 and 128, 1 to
# 64 sequences, 512 to 32k keys, 1 to 64 splits, arrays and pages of 16): half are within 4%, nine of ten within 15%.
_LAUNCH, _ROUND = 3.6, 1.0  # a launch, and thread blocks that run at once, besides their steps
_READ = 4.5e6  # bytes that memory sends in a microsecond
_SHORT_ROWS, _HALF_LINES = 0.92, 0.8  # of that, where rows are half a line: with both heads of a line, and with one


class _Step(NamedTuple):
    """Times of a warp's tile that waits for nothing but its own instructions."""

    tile: float
    kilobyte: float  # of the tile
    pages: float  # finding the rows' pages
    crowded: float  # share more for each further four warps of a multiprocessor


_STEPS = {HALF: _Step(0.3, 0.0245, 0.35, 0.3), CODES: _Step(0.6, 0.041, 0.62, 0.56)}
_ROWS_MORE = 0.3  # of a step's time, for each further eight query heads
_MERGED_MEGABYTE = 0.5  # merging, besides its launch
_EQUAL = 0.02  # predictions that differ by less are the same
_FEWEST_STEPS = 2  # steps of a split: fewer take no shorter than a launch does


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Sm80Config):
    """The configuration of a kernel for one query over a cache."""

    warp_keys: int  # see `decode.tiles.DecodeTile`
    kv_heads: int
    result: str  # C++ type of the results
    query_codes: bool  # queries are codes, and weights are rounded to e4m3
    has_pages: bool  # keys and values lie in pools of pages
    splits_keys: bool = False  # several thread blocks share the keys, and a kernel merges their results


def _stage_bytes(tile: DecodeTile, record: Record[DecodeTile]) -> int:
    number = CODE_BYTES if record.kind == CODES else HALF_BYTES
    scales = 2 * FLOAT_BYTES * (tile.warp_keys if record.kind == CODES else 1)
    of_keys = tile.warp_keys * (record.head_dim + record.head_dim_v) * number
    return math.ceil((of_keys + scales) / LINE_BYTES) * LINE_BYTES


def _smem_bytes(tile: DecodeTile, record: Record[DecodeTile]) -> int:
    return tile.num_warps * tile.stages * _stage_bytes(tile, record)


def takes(problem: AttentionProblem, place: Place) -> bool:
    """Return True if the kernel computes a problem on a GPU."""
    is_one = problem.seqlen_q == 1 and not problem.packed and problem.split_size is None
    dtypes = (*HALF_DTYPES, FP8) if problem.has_fp8_keys else HALF_DTYPES
    has_products = place.aligned and place.capability >= AMPERE and problem.dtype in dtypes
    return is_one and has_products and has_plain_scale(problem) and not not_taken(HANDLES, problem)


@kept
def forward(problem: AttentionProblem, *place: Any) -> tuple[DecodeConfig, ...]:
    """The candidates for a problem; none where other families run. `place` has the fields of `Place`."""
    own = Place(*place)
    if not takes(problem, own):
        return ()
    kind = CODES if problem.has_fp8_keys else HALF
    table = narrowest([line for line in RECORDS if line.kind == kind], problem.head_dim, problem.head_dim_v)

    def can_take(record: Record[DecodeTile]) -> bool:
        tile = record.tile
        has_room = fits(tile.min_blocks, _smem_bytes(tile, record), own.limit)
        has_heads = problem.num_heads_kv % tile.kv_heads == 0
        return has_room and has_heads and math.ceil(problem.group_size / tile.block_m) <= _MOST_TILES

    def waste(record: Record[DecodeTile]) -> int:
        """Return the rows without a head."""
        return -problem.group_size % record.tile.block_m

    query_codes = problem.dtype == FP8
    computed = COMPUTED if query_codes else problem.dtype
    found = candidates(table, asked_of(problem, own), own.capability, can_take, waste)
    return tuple(
        DecodeConfig(
            **common(DecodeConfig, computed, None, flags_of(problem), record, record.tile),
            entry=ENTRY,
            block_n=record.tile.block_n,
            product_depth=16,
            async_copies=True,
            aligned=True,
            plain_scores=has_plain_scores(problem),
            smem_bytes=_smem_bytes(record.tile, record),
            result=CPP_TYPES[problem.result_dtype],
            query_codes=query_codes,
            has_pages=problem.pages is not None,
        )
        for record in found
    )


def tiles(problem: AttentionProblem, config: DecodeConfig) -> int:
    """Return the tiles of query heads that share a KV head."""
    return math.ceil(problem.group_size / config.block_m)


class Choice(NamedTuple):
    """A kernel, and how many thread blocks share the keys of a tile."""

    config: DecodeConfig
    num_splits: int
    predicted_us: float


@kept
def choices(problem: AttentionProblem, num_sms: int, *place: Any) -> tuple[Choice, ...]:
    """The candidates on `num_sms` multiprocessors, each with its best number of splits, by their predicted times.

    Those that are predicted to take as long as the quickest come in the order of `forward`.
    """
    found = []
    for config in forward(problem, *place):
        number = num_splits(problem, config, num_sms)
        time = 0.0 if problem.is_empty else predicted_us(problem, config, number, num_sms)
        found.append(Choice(replace(config, splits_keys=number > 1), number, time))
    bound = min((choice.predicted_us for choice in found), default=0.0) * (1 + _EQUAL)
    return tuple(sorted(found, key=lambda choice: max(choice.predicted_us, bound)))


def is_sooner(problem: AttentionProblem, num_sms: int, *place: Any) -> bool:
    """Return True if the kernel is predicted to take clearly less than Hopper's own, or if that one has small pages."""
    found = choices(problem, num_sms, *place)
    if not found or (problem.pages is not None and problem.pages.page_size < SMALL_PAGES):
        return bool(found)
    own = sm90_grid.few_queries_us(problem, num_sms)
    return own is not None and found[0].predicted_us < _SOONER * own


def num_splits(problem: AttentionProblem, config: DecodeConfig, num_sms: int) -> int:
    """Return how many thread blocks share the keys of a tile on `num_sms` multiprocessors."""
    if problem.is_empty:
        return 1
    if problem.num_splits is not None:
        return max(1, min(problem.num_splits, math.ceil(problem.seqlen_k / config.block_n)))
    steps = math.ceil(keys_seen(problem, 1) / config.block_n)
    tried = [n for n in NUMBERS if n == 1 or n * _FEWEST_STEPS <= steps]
    return fewest({n: predicted_us(problem, config, n, num_sms) for n in tried}, _EQUAL)


def predicted_us(problem: AttentionProblem, config: DecodeConfig, splits: int, num_sms: int) -> float:
    """Microseconds of a pass with so many splits of the keys, merging included and the host's work left out.

    Thread blocks that run at once take as long as memory needs for their keys, or as a warp needs for its tiles.
    """
    number = CODE_BYTES if config.has_fp8 else HALF_BYTES
    numbers_of_key = problem.head_dim + problem.head_dim_v
    of_scales = 2 * FLOAT_BYTES if config.has_fp8 else 0
    steps = math.ceil(keys_seen(problem, 1) / config.block_n / splits)
    block_bytes = steps * config.block_n * config.kv_heads * (numbers_of_key * number + of_scales)
    read = _READ
    if numbers_of_key * number < 2 * LINE_BYTES:
        read *= _SHORT_ROWS if config.kv_heads > 1 else _HALF_LINES
    tile_bytes = config.warp_keys * numbers_of_key * number
    blocks = tiles(problem, config) * problem.num_heads_kv // config.kv_heads * problem.batch * splits

    def round_us(count: int) -> float:
        """Return the time of so many thread blocks that run at once."""
        num_warps = math.ceil(count / num_sms) * config.num_warps
        return _ROUND + max(steps * _step_us(config, tile_bytes, num_warps), count * block_bytes / read)

    at_once = num_sms * config.min_blocks
    full, rest = divmod(blocks, at_once)
    time = _LAUNCH + full * round_us(at_once) + (round_us(rest) if rest else 0)
    if splits > 1:
        time += merging_us(rows_of(problem), problem.head_dim_v, splits, _MERGED_MEGABYTE)
    return time


def _step_us(config: DecodeConfig, tile_bytes: int, num_warps: int) -> float:
    """Microseconds of a warp's tile where a multiprocessor has so many warps."""
    step = _STEPS[CODES if config.has_fp8 else HALF]
    more_rows = 1 + _ROWS_MORE * (config.block_m // COLUMNS - 1)
    crowded = 1 + step.crowded * max(num_warps / 4 - 1, 0)  # four warps have a scheduler each
    computing = (step.tile + step.kilobyte * tile_bytes / 1024) * more_rows * crowded
    return computing + step.pages * config.has_pages
