"""The splits of the queries of Hopper's backward pass, where few tiles of keys meet many queries, and its pairs.

A thread block computes dk and dv of one tile of keys, over all queries and query heads that see it. With few keys and
few KV heads that leaves most multiprocessors idle, so that several thread blocks share the queries of a tile, and their
float32 shares of dk and dv are added up behind.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cuflash.hardware import FLOAT_BYTES
from cuflash.kept import kept
from cuflash.plan.key_splits import per_sequence
from cuflash.plan.sm90.backward_config import Sm90BackwardConfig
from cuflash.plan.sm90.backward_tiles import NARROW, WIDE
from cuflash.plan.sm90.times import computing_us, tiles_seen
from cuflash.problem.attention_problem import AttentionProblem

_PRODUCTS_FLOPS = 10  # of a pair of query and key for each column: five products
# Microseconds and rates are those of some hundred splits of 12 problems in CUDA graphs on an H200 (head dims 48 to 152,
# 4 to 20k queries, 100 to 1,000 keys, 1 to 17 query heads of a KV head).
_FLOPS_PER_US = {NARROW: 5.0e6, WIDE: 2.9e6}  # of one multiprocessor
_STEP_OF_PAIR = 0.88  # of the time of a step without a pair, measured at head dims 136 to 192
_TILE_US = 5.0  # the beginning and the end of a tile of keys
_LAUNCH_US, _BYTES_PER_US = 4.0, 0.92e6  # of float32 shares, which are written, and of the kernel that adds them up
_LEAST_GAIN = 0.92  # of the time without splits, which more splits must stay below
# Thread blocks without pairs are taken below such a share of the time of pairs. They add twice as much to dq, which is
# not predicted.
_LEAST_GAIN_WITHOUT_PAIRS = 0.85
_MOST_ROUNDS = 8  # of tiles that a multiprocessor takes with splits; more are even enough


class QuerySplits(NamedTuple):
    """How many thread blocks share the queries of a tile of keys."""

    of_heads: int  # parts of the query heads of a group
    of_rows: int  # parts of each head's tiles of queries

    @property
    def in_all(self) -> int:
        """All parts."""
        return self.of_heads * self.of_rows


WHOLE_QUERIES = QuerySplits(1, 1)


@kept
def in_order(
    problem: AttentionProblem, configs: tuple[Sm90BackwardConfig, ...], num_sms: int
) -> tuple[Sm90BackwardConfig, ...]:
    """Return the configurations with those without pairs first, where pairs waste too many of their keys or rounds."""
    unpaired = tuple(config for config in configs if config.pair == 1)
    if not unpaired or configs[0].pair == 1:
        return configs
    paired_us, unpaired_us = (_fastest(problem, config, num_sms)[0] for config in (configs[0], unpaired[0]))
    if unpaired_us >= _LEAST_GAIN_WITHOUT_PAIRS * paired_us:
        return configs
    return unpaired + tuple(config for config in configs if config.pair > 1)


@kept
def splits_of(problem: AttentionProblem, config: Sm90BackwardConfig, num_sms: int) -> QuerySplits:
    """Return the splits that take the least time on `num_sms` multiprocessors."""
    return _fastest(problem, config, num_sms)[1]


def _fastest(problem: AttentionProblem, config: Sm90BackwardConfig, num_sms: int) -> tuple[float, QuerySplits]:
    """Return the predicted microseconds of the main kernel with the splits that take the least time, and these."""
    takers, columns = num_sms // config.pair, problem.head_dim + problem.head_dim_v
    rows = _rows_seen(problem, config)  # of each tile of keys of one head: tiles of queries that see it
    heads = problem.num_heads_kv * problem.batch
    tiles = len(rows) * heads
    step_us = _PRODUCTS_FLOPS * config.block_m * config.block_n * columns / 2 / _FLOPS_PER_US[config.entry]
    step_us *= _STEP_OF_PAIR if config.pair > 1 else 1
    shares = problem.seqlen_k * problem.num_heads_kv * columns * FLOAT_BYTES * (1 if problem.packed else problem.batch)

    def us(splits: QuerySplits) -> float:
        steps = math.ceil(problem.group_size / splits.of_heads) * -(-rows // splits.of_rows)
        adding = _LAUNCH_US + splits.in_all * shares / _BYTES_PER_US if splits.in_all > 1 else 0.0
        return computing_us(steps, splits.in_all * heads, step_us, _TILE_US, takers) + adding

    if not tiles:
        return 0.0, WHOLE_QUERIES
    whole_us = us(WHOLE_QUERIES)
    if tiles >= _MOST_ROUNDS * takers:
        return whole_us, WHOLE_QUERIES
    most = max(_MOST_ROUNDS * takers // tiles, 1)
    # A block mask lists the tiles of queries of each head, which stay together.
    longest = int(rows.max())
    most_of_rows = 1 if problem.block_mask else min(longest, most)
    # These numbers of parts are worth a try: more that leave the longest as many tiles only add more shares.
    worth = [n for n in range(1, most_of_rows + 1) if n == 1 or -(-longest // n) < -(-longest // (n - 1))]
    found = [
        QuerySplits(of_heads, of_rows)
        for of_heads in range(1, min(problem.group_size, most) + 1)
        for of_rows in worth
        if of_heads * of_rows <= most
    ]
    best = min(found, key=us)
    return (us(best), best) if us(best) < _LEAST_GAIN * whole_us else (whole_us, WHOLE_QUERIES)


def _rows_seen(problem: AttentionProblem, config: Sm90BackwardConfig) -> np.ndarray:
    """Return how many tiles of queries of a head see each tile of keys; packed sequences are taken to be alike."""
    queries, keys = (per_sequence(problem, n) for n in (problem.seqlen_q, problem.seqlen_k))
    return tiles_seen(keys, config.keys, queries, config.block_m, problem.window_right, problem.window_left)
