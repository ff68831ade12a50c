"""The configurations of the kernels for one query a head over a cache (sm_80 and later), and when they run.

Every query sees the same keys, so that a thread block reads each once for the query heads that share a KV head. Options
that hide keys one by one, and more queries, are left to the kernels whose tiles are of queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cuflash.hardware import CODE_BYTES, FLOAT_BYTES, HALF_BYTES
from cuflash.kept import kept
from cuflash.plan.config import CPP_TYPES, common, flags_of, has_plain_scale, has_plain_scores, not_taken
from cuflash.plan.decode_tiles import CODES, ENTRY, HALF, RECORDS, DecodeTile
from cuflash.plan.key_splits import NUMBERS, fewest, keys_seen, merging_us, rows_of
from cuflash.plan.record import AMPERE, Place, Record, asked_of, candidates, narrowest
from cuflash.plan.sm80_forward import Sm80Config, fits
from cuflash.plan.sm80_fp8 import COMPUTED
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.problem.fp8 import FP8

__all__ = ["ENTRY"]
HANDLES = ("has_window", "has_softcap", "has_alibi", "has_fp8")  # the flags that the kernel knows
# Hopper's own kernel copies boxes of TMA from pages: with smaller ones than this it waits for the copies' number.
SMALL_PAGES = 64
_MOST_TILES = 4  # of query heads that share a KV head, each of which reads its keys
_STAGE_ALIGNMENT = 128  # bytes

# These are times in microseconds, of an H200.
_ANSWER = 1.0  # from asking memory for a stage to having it
_READ = 36e3  # bytes that a multiprocessor reads in a microsecond where all do
_START = 3.0  # a thread block, besides its steps
_FEWEST_STEPS = 2  # steps of a split: fewer take no shorter than a launch does


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(Sm80Config):
    """The configuration of a kernel for one query over a cache."""

    warp_keys: int  # see `decode_tiles.DecodeTile`
    result: str  # C++ type of the results
    query_codes: bool  # queries are codes, and weights are rounded to e4m3
    has_pages: bool  # keys and values lie in pools of pages
    splits_keys: bool = False  # several thread blocks share the keys, and a kernel merges their results


def _stage_bytes(tile: DecodeTile, record: Record[DecodeTile]) -> int:
    number = CODE_BYTES if record.kind == CODES else HALF_BYTES
    scales = 2 * FLOAT_BYTES * (tile.warp_keys if record.kind == CODES else 1)
    of_keys = tile.warp_keys * (record.head_dim + record.head_dim_v) * number
    return math.ceil((of_keys + scales) / _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT


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
        has_room = fits(record.tile.min_blocks, _smem_bytes(record.tile, record), own.limit)
        return has_room and math.ceil(problem.group_size / record.tile.block_m) <= _MOST_TILES

    def waste(record: Record[DecodeTile]) -> float:
        """Return the rows without a head, then the stages that a multiprocessor lacks."""
        tile = record.tile
        rows = math.ceil(problem.group_size / tile.block_m) * tile.block_m
        return rows - 0.01 * tile.min_blocks * tile.stages

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


@kept
def num_splits(problem: AttentionProblem, config: DecodeConfig, num_sms: int) -> int:
    """Return how many thread blocks share the keys of a tile on `num_sms` multiprocessors."""
    if problem.is_empty:
        return 1
    if problem.num_splits is not None:
        return max(1, min(problem.num_splits, math.ceil(problem.seqlen_k / config.block_n)))
    steps = math.ceil(keys_seen(problem, 1) / config.block_n)
    tried = [n for n in NUMBERS if n == 1 or n * _FEWEST_STEPS <= steps]
    return fewest({n: predicted_us(problem, config, n, num_sms) for n in tried})


def predicted_us(problem: AttentionProblem, config: DecodeConfig, num_splits: int, num_sms: int) -> float:
    """Microseconds of a pass with so many splits of the keys, merging included and the host's work left out.

    A multiprocessor reads as fast as it asks, up to its share of the memory's bandwidth.
    """
    number = CODE_BYTES if config.has_fp8 else HALF_BYTES
    step_bytes = config.block_n * (problem.head_dim + problem.head_dim_v) * number
    blocks = tiles(problem, config) * problem.num_heads_kv * problem.batch * num_splits
    at_once = min(config.min_blocks, math.ceil(blocks / num_sms))
    rounds = math.ceil(blocks / (num_sms * at_once))
    steps = math.ceil(keys_seen(problem, 1) / config.block_n / num_splits)
    step = max(_ANSWER / (config.stages - 1), at_once * step_bytes / _READ)
    time = rounds * (_START + steps * step)
    return time + merging_us(rows_of(problem), problem.head_dim_v, num_splits)
