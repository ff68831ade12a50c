"""Few queries on Hopper: which tile, and how many splits of the keys, by the time that each is predicted to take.

Such a pass reads its keys once and does little else. Besides a tile's begin and end it takes as long as memory needs to
deliver them, or as the busiest multiprocessor needs for its steps, whichever is longer; splits of the keys make more
multiprocessors busy, and their merging takes time of its own. The host knows the keys' number as a bound: lengths stay
on the device, where the splits of each sequence share the tiles of keys that it really has, so that the prediction need
only be right for the longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from cuflash.hardware import HALF_BYTES
from cuflash.plan.key_splits import NUMBERS, keys_seen, merging_us, per_sequence, rows_of
from cuflash.plan.sm90.config import Sm90ForwardConfig, may_split_keys
from cuflash.plan.sm90.times import tile_us, times_of
from cuflash.problem.attention_problem import AttentionProblem

# Bytes that memory delivers in a microsecond: an H200's. With slower memory more numbers of splits are equally good,
# and of these the least is taken.
BYTES_PER_US = 4.4e6
SHORTEST_SPLIT = 128  # keys of a split: the bound for few keys is a launch's time, which no split makes shorter
_MOST_BLOCKS = 2  # most splits of tiles that a multiprocessor is given
# Microseconds, fitted to 30 problems in CUDA graphs, drawn at random in log scale (up to 20 sequences, 64 heads and
# queries, groups, head dims and masks of all kinds), with 5 to 20 tiles and splits each, on an H200: half of the
# predictions are within 5%, nine of ten within 15%; what is chosen takes at most 9% more than the best.
_SOONER = 1.5  # a launch takes so much less than one of many queries
_NEXT_TILE = 3.5  # a tile that a multiprocessor has after another one, whose queries and keys it loads meanwhile
_MERGED_MEGABYTE = 0.5  # a megabyte of partial results, which few thread blocks write and read
# Predictions that differ by less are the same; then fewer splits win, as their partial results take less memory.
EQUAL = 0.02


def quickest(
    problem: AttentionProblem, configs: Iterable[Sm90ForwardConfig], num_sms: int
) -> tuple[Sm90ForwardConfig, int]:
    """The kernel among `configs` and the number of splits that are predicted to take the least time."""
    tried = [
        (config, n)
        for config in dict.fromkeys(configs)
        for n in _numbers_of_splits(problem, config, num_sms)
        if n == 1 or may_split_keys(config)
    ]
    times = [predicted_us(problem, *choice, num_sms) for choice in tried]
    bound = min(times) * (1 + EQUAL)
    good = [choice for choice, time in zip(tried, times, strict=True) if time <= bound]
    return min(good, key=lambda choice: choice[1])


def predicted_us(problem: AttentionProblem, config: Sm90ForwardConfig, num_splits: int, num_sms: int) -> float:
    """Microseconds of a pass with so many splits of the keys, merging included and the host's work left out."""
    times = times_of(config)
    seen = keys_seen(problem, config.queries_of_tile(problem))
    steps = math.ceil(math.ceil(seen / config.block_n) / num_splits)
    rounds = math.ceil(_tiles(problem, config) * num_splits / num_sms)
    computing = rounds * steps * times.step + (rounds - 1) * _NEXT_TILE
    bytes_of_key = (problem.head_dim + problem.head_dim_v) * HALF_BYTES
    reading = problem.batch * problem.num_heads_kv * seen * bytes_of_key / BYTES_PER_US
    merging = merging_us(rows_of(problem), problem.head_dim_v, num_splits, _MERGED_MEGABYTE)
    return times.launch - _SOONER + max(computing, reading) + tile_us(config) + merging


def _numbers_of_splits(problem: AttentionProblem, config: Sm90ForwardConfig, num_sms: int) -> list[int]:
    tiles, seen = _tiles(problem, config), keys_seen(problem, config.queries_of_tile(problem))
    shortest = max(SHORTEST_SPLIT, config.block_n)
    once = max(num_sms // tiles, 1)
    return sorted(
        n
        for n in {*NUMBERS, once}
        if n == 1 or (tiles * n <= _MOST_BLOCKS * max(num_sms, tiles) and n * shortest <= seen)
    )


def _tiles(problem: AttentionProblem, config: Sm90ForwardConfig) -> int:
    """Tiles of queries; of packed sequences those of their mean length."""
    queries = config.queries_of_tile(problem)
    of_sequence = math.ceil(per_sequence(problem, problem.seqlen_q) / queries)
    return max(of_sequence * config.num_heads(problem) * problem.batch, 1)
