"""Models of time share these where thread blocks split keys: numbers of splits, the keys of a tile, and merging."""

from __future__ import annotations

import math
from typing import NamedTuple

from cuflash.hardware import FLOAT_BYTES
from cuflash.problem.attention_problem import AttentionProblem

# Numbers of splits that are tried. Few rows go up to the last, as little as they leave to merge; others to the tenth.
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
OF_MANY_ROWS = NUMBERS[:10]

# Predictions that differ by less are the same; then fewer splits win, as their partial results take less memory.
EQUAL = 0.05


class Merge(NamedTuple):
    """Times of merging the partial results over splits of the keys, in microseconds."""

    launch: float  # a launch
    megabyte: float  # a megabyte of partial results


_MERGE = Merge(2.5, 0.4)  # fitted to the times of `sm90.times`


def merging_us(rows: int, head_dim_v: int, num_splits: int, megabyte_us: float = _MERGE.megabyte) -> float:
    """Microseconds that merging the splits of so many rows takes; there is nothing to merge of one split."""
    if num_splits == 1:
        return 0.0
    return _MERGE.launch + megabyte_us * FLOAT_BYTES * 1e-6 * rows * head_dim_v * num_splits


def fewest(times: dict[int, float], equal: float = EQUAL) -> int:
    """Return the least number of splits whose predicted time, of those in ascending order, is as good as the best."""
    bound = min(times.values()) * (1 + equal)
    return next(n for n, time in times.items() if time <= bound)


def rows_of(problem: AttentionProblem) -> int:
    """Return the rows of the result."""
    return problem.seqlen_q * problem.num_heads_q * (1 if problem.packed else problem.batch)


def per_sequence(problem: AttentionProblem, rows: int) -> int:
    """Return the queries or keys of a sequence; of packed sequences the mean length counts."""
    return math.ceil(rows / max(problem.batch, 1)) if problem.packed else rows


def hidden_queries(problem: AttentionProblem) -> int:
    """Return how many of a head's first queries see no key, where lengths are the arrays'."""
    right = problem.window_right
    return 0 if right is None else min(max(problem.seqlen_q - problem.seqlen_k - right, 0), problem.seqlen_q)


def keys_seen(problem: AttentionProblem, queries: int) -> int:
    """Keys that a tile of so many queries sees, at most, and at least one; of packed sequences the mean length counts.

    The host knows the keys' number as a bound, as lengths stay on the device.
    """
    keys = per_sequence(problem, problem.seqlen_k)
    if problem.pages is not None:  # a table may be much wider than what the pool can hold for each sequence
        keys = min(keys, math.ceil(problem.pages.num_pages * problem.pages.page_size / problem.batch))
    if problem.window_left is not None and problem.window_right is not None:
        of_tile = min(queries, per_sequence(problem, problem.seqlen_q))
        keys = min(keys, problem.window_left + problem.window_right + of_tile)
    return max(keys, 1)
