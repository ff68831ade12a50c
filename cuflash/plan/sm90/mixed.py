"""Packed queries of any numbers over caches of any lengths on Hopper, balanced by a list of work that a kernel makes.

The lengths are on the device, where `forward/find_work.cu` cuts tiles with many keys into chunks and puts the longest
entries first. The host chooses the tile alone, by what it knows: rows in all, sequences, and what the caches can hold.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from cuflash.hardware import HALF_BYTES
from cuflash.plan.key_splits import keys_seen
from cuflash.plan.sm90 import few_queries as sm90_few_queries
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90.config import Sm90ForwardConfig
from cuflash.plan.sm90.forward import config_for, has_few_queries
from cuflash.plan.sm90.times import MANY_WAVES, Times, is_timed, times_by_products, times_of
from cuflash.problem.attention_problem import AttentionProblem

# A multiprocessor is given a quantum of work at most so many times, in quarters: with more, what the chunks cost
# besides their keys and what merging them takes outweigh how much better they even out.
MOST_QUARTERS = 12


def config_of_list(problem: AttentionProblem, config: Sm90ForwardConfig, num_sms: int) -> Sm90ForwardConfig | None:
    """The kernel that takes its tiles from a list; None where sequences have tiles of their own, whatever they hold.

    Sequences that are packed have a list if their mean has few queries, as in decoding, or if their keys are caches
    (pages, or lengths in use) and the queries are so few that uneven ones would leave multiprocessors idle. Packed
    batches of a training step have neither. A number of splits that the caller fixes, a block mask and users' own rules
    need no list, or know none. `config` is the kernel without a list.
    """
    if not (problem.packed and problem.num_splits is None and sm90_forward.may_pack_heads(problem)):
        return None
    if not (has_few_queries(problem) or _extends_caches(problem, config, num_sms)):
        return None
    of_inputs = config.has_bias_tiles, config.has_mask_tiles
    tiles = (config_for(problem, *of_inputs, few_queries=few, heads_are_rows=True) for few in (True, False))
    found = [replace(tile, has_work_list=True, pair=1) for tile in tiles if tile.packs_heads]
    # Measured times and predicted ones do not compare.
    times_of_tile = times_of if all(map(is_timed, found)) else times_by_products
    times = [predicted_us(problem, tile, num_sms, times_of_tile(tile)) for tile in found]
    good = (tile for tile, time in zip(found, times, strict=True) if time <= min(times) * (1 + sm90_few_queries.EQUAL))
    return next(good, None)


def _extends_caches(problem: AttentionProblem, config: Sm90ForwardConfig, num_sms: int) -> bool:
    has_caches = problem.pages is not None or problem.kv_lengths
    tiles = math.ceil(problem.seqlen_q / config.block_m) * problem.num_heads_q
    return has_caches and tiles < MANY_WAVES * num_sms


def predicted_us(problem: AttentionProblem, config: Sm90ForwardConfig, num_sms: int, times: Times) -> float:
    """Microseconds of a pass whose work is dealt out evenly, but for its launches: those of memory or of products.

    `times` are those of the kernel's tile.
    """
    seen = keys_seen(problem, config.queries_of_tile(problem))
    steps = math.ceil(seen / config.block_n)
    computing = most_tiles(problem, config) * problem.num_heads_kv * (steps * times.step + times.tile) / num_sms
    bytes_of_key = (problem.head_dim + problem.head_dim_v) * HALF_BYTES
    reading = problem.batch * problem.num_heads_kv * seen * bytes_of_key / sm90_few_queries.BYTES_PER_US
    return max(computing, reading)


def most_tiles(problem: AttentionProblem, config: Sm90ForwardConfig) -> int:
    """Tiles of one head that the sequences can have at most."""
    rows = problem.seqlen_q
    return min(rows, rows // config.queries_of_tile(problem) + problem.batch)


class ListSize(NamedTuple):
    """The sizes of a list of work."""

    most_entries: int
    most_cut: int  # tiles that are cut into chunks
    most_parts: int  # chunks of these


def size_of(problem: AttentionProblem, config: Sm90ForwardConfig, slots: int, num_sms: int) -> ListSize:
    """The most that a list can have, of one head, for tiles in so many slots.

    A quantum is at least one of `MOST_QUARTERS` / 4 shares of each multiprocessor in the work of all heads. So there
    are no more quanta than that, and each tile that is cut has one chunk besides.
    """
    quanta = math.ceil(num_sms * MOST_QUARTERS / 4 / problem.num_heads_kv)
    most_cut = max(min(quanta, slots), 1)
    return ListSize(slots + quanta, most_cut, quanta + most_cut)


def steps_of_entry(config: Sm90ForwardConfig) -> int:
    """Return the time that a tile of queries takes besides its keys, in steps."""
    times = times_of(config)
    return max(round(times.tile / times.step), 1)
