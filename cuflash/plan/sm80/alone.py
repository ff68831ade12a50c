"""Clusters and predicted times of the backward kernel that runs alone, where a tile, or a cluster, has all keys.

All times are microseconds. Of 65 kernels of 20 problems that were timed in CUDA graphs on an H200, half of the
predictions are within 8%, nine of ten within 22%, and so are those of other kernels' launches; of several steps of wide
heads they lie between 0.52 and 1.36 of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, MAX_CLUSTER, SMS_OF_GPC
from cuflash.plan.key_splits import hidden_queries
from cuflash.plan.record import HOPPER, Capability, Record
from cuflash.plan.sm80.tiles import Sm80BackwardTile
from cuflash.problem.attention_problem import AttentionProblem

# A kernel takes so long to begin and to end, and so long for a tile of queries, which grows with each column of its
# head dim. That is a tile with so many scores of a warp; as many more add a share of it.
_LAUNCH_US, _STEP_US, _STEP_US_OF_COLUMN = 2.6, 2.0, 0.03
_SCORES_OF_WARP, _SHARE_OF_SCORES = 256, 0.2
# A cluster takes so long to meet for an exchange of sums, of whose bytes a thread block sends so many in a microsecond.
_MEET_US, _BYTES_PER_US = 0.7, 22_000
# Three launches (rows, gradients, dq) take so long, two of them where one tile of their main kernel has all keys, which
# then writes dq itself; and so long for each tile of queries behind the first, with a part for each column of the head
# dim. Where few tiles of keys leave multiprocessors idle, thread blocks share the queries (`QuerySplits`), and adding
# up their shares takes no longer than this.
_THREE_LAUNCHES_US, _TWO_LAUNCHES_US, _NEXT_US, _NEXT_US_OF_COLUMN = 13.5, 10.0, 0.6, 0.01
_ADDING_US = 4.5
_ROWS, _KEYS, _KEYS_OF_WIDEST = 64, 128, 64  # the tile of their main kernel, and its keys above head dim 192
_WIDEST = 192
# A thread block makes so many bytes of dq zeros in a microsecond, of tiles of queries that see no key.
_ZEROED_BYTES_PER_US = 15_000
# A cluster is taken where it is predicted to take so much of the time of others' launches, as predictions err.
_LEAST_GAIN = 0.97


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


def hidden_tiles_of(problem: AttentionProblem, block_m: int) -> int:
    """Return the first tiles of queries of a KV head to which a window leaves no key, where lengths are the arrays'."""
    return problem.group_size * (hidden_queries(problem) // block_m)


def steps_of(problem: AttentionProblem, block_m: int) -> int:
    """Return the tiles of queries of a KV head that see some key, one at least."""
    tiles = problem.group_size * math.ceil(problem.seqlen_q / block_m)
    return max(tiles - hidden_tiles_of(problem, block_m), 1)


def waves_of(problem: AttentionProblem, tile: Sm80BackwardTile, num_sms: int) -> int:
    """Return how many clusters run one behind the other, each within a part of the GPU; more than one without parts.

    Thread blocks of a cluster are taken to need multiprocessors by twos: five for each of 24 heads took as long as two
    rounds would.
    """
    at_once = num_sms * tile.min_blocks
    if tile.cluster > 1:
        pairs = 2 * math.ceil(tile.cluster / 2)
        at_once = num_sms // SMS_OF_GPC * (SMS_OF_GPC * tile.min_blocks // pairs)
    heads = problem.batch * problem.num_heads_kv
    return math.ceil(heads / at_once) if at_once else heads + 1


def time_of(problem: AttentionProblem, record: Record[Sm80BackwardTile], num_sms: int) -> float:
    """Return the predicted time of a kernel that runs alone."""
    tile = record.tile
    scores = tile.block_m * tile.block_n / tile.num_warps / _SCORES_OF_WARP
    step = (_STEP_US + _STEP_US_OF_COLUMN * record.head_dim) * (1 + _SHARE_OF_SCORES * (scores - 1))
    # Thread blocks that share a multiprocessor wait for one another in further steps.
    blocks = problem.batch * problem.num_heads_kv * tile.cluster
    next_step = step * max(min(blocks / num_sms, tile.min_blocks), 1)
    steps = math.ceil(steps_of(problem, tile.block_m) / tile.cluster_queries)
    time = _LAUNCH_US + step + (steps - 1) * next_step + _zeroing_time(problem, tile)
    if tile.cluster_keys > 1:
        time += steps * _adding_time(min(tile.block_m, problem.seqlen_q), problem.head_dim)
    if tile.cluster_queries > 1:
        time += _adding_time(tile.block_n, problem.head_dim + problem.head_dim_v) + _MEET_US * tile.adds_apart
    return waves_of(problem, tile, num_sms) * time


def _zeroing_time(problem: AttentionProblem, tile: Sm80BackwardTile) -> float:
    """Return the time in which a cluster makes dq zeros where no key is seen."""
    tiles = math.ceil(hidden_tiles_of(problem, tile.block_m) / tile.cluster)
    return tiles * tile.block_m * problem.head_dim * HALF_BYTES / _ZEROED_BYTES_PER_US


def _adding_time(rows: int, columns: int) -> float:
    """Return the time in which a cluster adds up the sums of a tile."""
    return _MEET_US + rows * columns * FLOAT_BYTES / _BYTES_PER_US


def is_faster(problem: AttentionProblem, record: Record[Sm80BackwardTile], num_sms: int) -> bool:
    """Tell whether a cluster is predicted to be faster than two or three launches."""
    return waves_of(problem, record.tile, num_sms) == 1 and beats_others(problem, record, num_sms)


def beats_others(problem: AttentionProblem, record: Record[Sm80BackwardTile], num_sms: int) -> bool:
    """Tell whether the predicted time is clearly less than that of two or three launches."""
    return time_of(problem, record, num_sms) < _LEAST_GAIN * time_of_others(problem, num_sms)


def time_of_others(problem: AttentionProblem, num_sms: int) -> float:
    """Return the predicted time of the kernels that others than this family's only one launch."""
    widest = max(problem.head_dim, problem.head_dim_v)
    keys = _KEYS if widest <= _WIDEST else _KEYS_OF_WIDEST
    has_sums = problem.seqlen_k > keys or problem.q_lengths
    launches = _THREE_LAUNCHES_US if has_sums else _TWO_LAUNCHES_US
    steps = steps_of(problem, _ROWS)
    tiles = problem.batch * problem.num_heads_kv * math.ceil(problem.seqlen_k / keys)
    step = _NEXT_US + _NEXT_US_OF_COLUMN * widest
    whole = math.ceil(tiles / num_sms) * (steps - 1) * step
    return launches + (min(whole, _ADDING_US) if 2 * tiles <= num_sms else whole)
