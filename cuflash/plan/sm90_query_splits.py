"""The splits of the queries of Hopper's backward pass, where few tiles of keys meet many queries.

A thread block computes dk and dv of one tile of keys, over all queries and query heads that see it. With few keys and
few KV heads that leaves most multiprocessors idle, so that several thread blocks share the queries of a tile, and their
float32 shares of dk and dv are added up behind.
"""

from __future__ import annotations

import math

from cuflash.hardware import FLOAT_BYTES
from cuflash.kept import kept
from cuflash.plan.sm90_backward import Sm90BackwardConfig
from cuflash.plan.sm90_backward_tiles import queries_seen
from cuflash.problem.attention_problem import AttentionProblem

_PRODUCTS_FLOPS = 10  # of a pair of query and key for each column: five products
_FLOPS_PER_US = 4e6  # of one multiprocessor
_TILE_US = 3.0  # the beginning and the end of a tile of keys
_LAUNCH_US, _BYTES_PER_US = 3.0, 2e6  # of the kernel that adds up shares
_LEAST_GAIN = 0.92  # of the time without splits, which more splits must stay below


@kept
def num_query_splits(problem: AttentionProblem, config: Sm90BackwardConfig, num_sms: int) -> int:
    """Return the number of splits that take the least time: parts of the group's heads, times parts of each head."""
    takers, columns = num_sms // config.pair, problem.head_dim + problem.head_dim_v
    sequences = problem.batch if problem.packed else 1
    length = math.ceil(problem.seqlen_k / sequences)
    tiles = math.ceil(length / (config.block_n * config.pair)) * problem.num_heads_kv * problem.batch
    if tiles >= 2 * takers:
        return 1
    rows = math.ceil(min(queries_seen(problem), problem.seqlen_q) / sequences / config.block_m)
    step_us = _PRODUCTS_FLOPS * config.block_m * config.block_n * columns / 2 / _FLOPS_PER_US
    shares = problem.seqlen_k * problem.num_heads_kv * columns * FLOAT_BYTES * (1 if problem.packed else problem.batch)

    def us(splits: int) -> float:
        steps = math.ceil(problem.group_size / splits) * rows
        if splits > problem.group_size:
            steps = math.ceil(rows / (splits // problem.group_size))
        adding = _LAUNCH_US + splits * shares / _BYTES_PER_US if splits > 1 else 0.0
        return math.ceil(tiles * splits / takers) * (_TILE_US + steps * step_us) + adding

    # A block mask lists the tiles of queries of each head, which stay together.
    most = 1 if problem.block_mask else min(rows, math.ceil(takers / max(tiles * problem.group_size, 1)))
    of_rows = (problem.group_size * parts for parts in range(2, most + 1))
    best = min((*range(1, problem.group_size + 1), *of_rows), key=us)
    return best if us(best) < _LEAST_GAIN * us(1) else 1
