"""How many thread blocks share the keys of a tile in the forward kernels by mma.sync, by the time that it takes.

A pass whose tiles of queries do not fill the GPU takes as long as one thread block needs for its tiles of keys. Splits
of the keys make more multiprocessors busy, and their merging takes time of its own. The host knows the keys' number as
a bound: lengths stay on the device, where the splits of each sequence share the tiles of keys that it really has.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from cuflash.kept import kept
from cuflash.plan.key_splits import NUMBERS, fewest, keys_seen, merging_us, per_sequence, rows_of
from cuflash.plan.sm80.forward import Sm80QueryConfig
from cuflash.problem.attention_problem import WHOLE, AttentionProblem
from cuflash.rules.form import NO_RULES

# These are times in microseconds. On an H200 one thread block of four warps takes some 3 for a step of 64 x 64 scores
# at head dim 128 where it decodes codes, when it is alone on its multiprocessor (1,540 for 32k keys).
_STEP = 1.0  # a step, besides its products: waiting, synchronising, powers
_DECODED_CODES = 1.0e4  # codes that a thread block decodes in a microsecond
_FLOPS = 2.5e6  # operations of products that a thread block makes in a microsecond
_TILE = 3.0  # a tile of queries, besides its steps
_FEWEST_STEPS = 2  # tiles of keys of a split: fewer take no shorter than a launch does
_MOST_ROUNDS = 2  # so many thread blocks one after the other, at most, where there are several splits

Config = TypeVar("Config", bound=Sm80QueryConfig)


@kept
def with_splits(problem: AttentionProblem, config: Config, num_sms: int) -> tuple[Config, int]:
    """The kernel on `num_sms` multiprocessors, and the number of splits of the keys; 1 leaves them whole."""
    num_splits = _num_splits(problem, config, num_sms)
    return (config if num_splits == 1 else replace(config, splits_keys=True)), num_splits


def heads_are_rows(problem: AttentionProblem) -> bool:
    """Return True if the query heads of a KV head can be rows of a tile, so that their keys are read once.

    They can with one query, whose heads lie in memory like queries, where options do not tell the heads apart and the
    place of a query does not matter. Products of float32 in parts find their operands in a work space instead.
    """
    shows_all = problem.window_left is None and (problem.window_right or 0) >= 0
    is_one = problem.seqlen_q == 1 and not (problem.packed or problem.q_lengths or problem.split_size) and shows_all
    told_apart = problem.sink or problem.alibi is not None or problem.dropout_p or problem.block_mask
    has_own_place = problem.place != WHOLE or problem.rules != NO_RULES
    in_parts = problem.dtype == "float32"
    return is_one and problem.group_size > 1 and not (told_apart or has_own_place or in_parts)


@kept
def with_heads_as_rows(problem: AttentionProblem) -> AttentionProblem:
    """The problem of one query with the query heads of each KV head as its queries, which see the same keys."""
    return replace(
        problem,
        seqlen_q=problem.group_size,
        num_heads_q=problem.num_heads_kv,
        window_right=None,
        bias=_of_rows(problem, problem.bias),
        mask=_of_rows(problem, problem.mask),
    )


def _of_rows(problem: AttentionProblem, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape (batch, heads, queries, keys) with heads as queries."""
    if shape is None or shape[1] == 1:
        return shape
    return shape[0], problem.num_heads_kv, problem.group_size, shape[3]


def _num_splits(problem: AttentionProblem, config: Sm80QueryConfig, num_sms: int) -> int:
    # Keys stay whole with splits of one size, so that packed and padded calls give a row the same bits.
    if problem.is_empty or problem.split_size is not None:
        return 1
    steps = math.ceil(problem.seqlen_k / config.block_n)
    if problem.num_splits is not None:
        return min(problem.num_splits, steps)  # a split needs a tile of keys to compute
    if _tiles(problem, config) >= num_sms * config.min_blocks:
        return 1
    tried = [n for n in NUMBERS if n == 1 or _may_pay(problem, config, n, num_sms)]
    return fewest({n: predicted_us(problem, config, n, num_sms) for n in tried})


def predicted_us(problem: AttentionProblem, config: Sm80QueryConfig, num_splits: int, num_sms: int) -> float:
    """Microseconds of a pass with so many splits of the keys, merging included and the host's work left out."""
    columns = config.head_dim + config.head_dim_v
    decoding = config.block_n * columns / _DECODED_CODES if getattr(config, "multiplies_codes", True) is False else 0.0
    step = _STEP + decoding + 2 * config.block_m * config.block_n * columns / _FLOPS
    steps = math.ceil(_steps(problem, config) / num_splits)
    rounds = math.ceil(_tiles(problem, config) * num_splits / (num_sms * config.min_blocks))
    return rounds * (steps * step + _TILE) + merging_us(rows_of(problem), problem.head_dim_v, num_splits)


def _may_pay(problem: AttentionProblem, config: Sm80QueryConfig, num_splits: int, num_sms: int) -> bool:
    at_once = num_sms * config.min_blocks
    has_room = _tiles(problem, config) * num_splits <= _MOST_ROUNDS * at_once
    return has_room and num_splits * _FEWEST_STEPS <= _steps(problem, config)


def _steps(problem: AttentionProblem, config: Sm80QueryConfig) -> int:
    """Tiles of keys that a tile of queries sees, at most."""
    return math.ceil(keys_seen(problem, config.block_m) / config.block_n)


def _tiles(problem: AttentionProblem, config: Sm80QueryConfig) -> int:
    """Tiles of queries; of packed sequences those of their mean length."""
    of_sequence = math.ceil(per_sequence(problem, problem.seqlen_q) / config.block_m)
    return of_sequence * problem.num_heads_q * problem.batch
