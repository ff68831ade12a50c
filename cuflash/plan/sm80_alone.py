"""Clusters and predicted times of the backward kernel that runs alone, where a tile, or a cluster, has all keys.

All times are microseconds. They are fitted to an H200, where a kernel without a cluster takes 8 to 10 for one tile of
queries, 14 for two, 19 for four of head dim 64 and 33 for four of head dim 160.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cuflash.hardware import FLOAT_BYTES, MAX_CLUSTER, SMS_OF_GPC
from cuflash.plan.record import HOPPER, Capability, Record
from cuflash.plan.sm80_tiles import Sm80BackwardTile
from cuflash.problem.attention_problem import AttentionProblem

# A warp computes so many scores of the first head dim below in a microsecond, so many while its thread block begins and
# ends, and so many while a step waits for others.
_SCORES_PER_US, _HEAD_DIM = 138, 128
_LAUNCH, _STEP = 480, 250
# A cluster takes so long to meet for an exchange of sums, and a thread block sends so many of their bytes at a time.
_MEET_US, _BYTES_PER_US = 0.7, 22_000
# Three launches (rows, gradients, dq) take so long, and for each step of a tile behind the first; the last numbers are
# of a step of head dim 0, and what a head dim adds. Beyond so many steps thread blocks share them (`QuerySplits`).
_THREE_LAUNCHES_US, _STEP_US, _STEP_US_OF_DIM, _MOST_STEPS = 17.5, 0.2, 0.0065, 16
_ROWS, _KEYS = 64, 128  # the tile of their main kernel


def clustered(
    table: Iterable[Record[Sm80BackwardTile]], seqlen_k: int, capability: Capability
) -> Iterator[Record[Sm80BackwardTile]]:
    """Yield the records whose tile has all keys, and those of the clusters that have them."""
    for record in table:
        keys = math.ceil(seqlen_k / record.tile.block_n)
        if capability < HOPPER:
            if keys == 1:
                yield record
            continue
        for queries in (1, 2, 4, 8):
            if keys * queries <= MAX_CLUSTER:
                tile = replace(record.tile, cluster_keys=keys, cluster_queries=queries)
                yield replace(record, tile=tile)
                if queries > 1:
                    yield replace(record, tile=replace(tile, adds_apart=True))


def steps_of(problem: AttentionProblem, block_m: int) -> int:
    """Return the tiles of queries of a KV head."""
    return problem.group_size * math.ceil(problem.seqlen_q / block_m)


def waves_of(problem: AttentionProblem, tile: Sm80BackwardTile, num_sms: int) -> int:
    """Return how many clusters run one behind the other, each within a part of the GPU; more than one without parts."""
    at_once = num_sms * tile.min_blocks
    if tile.cluster > 1:
        at_once = num_sms // SMS_OF_GPC * (SMS_OF_GPC * tile.min_blocks // tile.cluster)
    heads = problem.batch * problem.num_heads_kv
    return math.ceil(heads / at_once) if at_once else heads + 1


def time_of(problem: AttentionProblem, record: Record[Sm80BackwardTile], num_sms: int, capability: Capability) -> float:
    """Return the predicted time of a kernel that runs alone."""
    tile = record.tile
    width = record.head_dim / _HEAD_DIM if capability >= HOPPER else 1
    step = (_STEP + width * tile.block_m * tile.block_n / tile.num_warps) / _SCORES_PER_US
    if tile.cluster_keys > 1:
        step += _adding_time(tile.block_m, problem.seqlen_q, problem.head_dim)
    time = _LAUNCH / _SCORES_PER_US + math.ceil(steps_of(problem, tile.block_m) / tile.cluster_queries) * step
    if tile.cluster_queries > 1:
        time += _adding_time(tile.block_n, problem.seqlen_k, problem.head_dim + problem.head_dim_v)
        time += _MEET_US * tile.adds_apart
    return waves_of(problem, tile, num_sms) * time


def _adding_time(block: int, rows: int, columns: int) -> float:
    """Return the time in which a cluster adds up the rows of a tile, but for those that the result does not have."""
    return _MEET_US + min(block, rows) * columns * FLOAT_BYTES / _BYTES_PER_US


def time_of_three(problem: AttentionProblem, num_sms: int) -> float:
    """Return the predicted time of the kernels that others than this family's only one launch."""
    steps = min(steps_of(problem, _ROWS), _MOST_STEPS) - 1
    tiles = problem.batch * problem.num_heads_kv * math.ceil(problem.seqlen_k / _KEYS)
    step = _STEP_US + _STEP_US_OF_DIM * max(problem.head_dim, problem.head_dim_v)
    return _THREE_LAUNCHES_US + math.ceil(tiles / num_sms) * steps * step
