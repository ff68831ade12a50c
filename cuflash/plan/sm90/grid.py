"""The kernel of Hopper's forward pass on 16 bits that fills a GPU best, by tiles, splits of keys and order of heads.

`forward` finds the configuration for a grid that fills the GPU. For smaller grids this module compares it with
other tiles, and with splits of the keys, by the times that `times` predicts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cuflash.kept import kept
from cuflash.plan.config import flags_of, has_plain_scale, without_window
from cuflash.plan.key_splits import EQUAL
from cuflash.plan.record import PLAIN
from cuflash.plan.sm90 import few_queries as sm90_few_queries
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import mixed as sm90_mixed
from cuflash.plan.sm90.config import (
    Asked,
    Sm90ForwardConfig,
    config_of,
    leaves_registers_to_heads,
    may_split_keys,
)
from cuflash.plan.sm90.forward import config_for, has_exact_maxima, has_few_queries, lines_of, taken, words_in
from cuflash.plan.sm90.tiles import FEW_QUERIES, HEADS, MANY, PAGES, PLAIN_SCORES, WINDOW
from cuflash.plan.sm90.times import MANY_WAVES, is_timed, num_tiles, predicted_us, rows_per_query, splits_worth_trying
from cuflash.problem.attention_problem import AttentionProblem

# Tiles of several heads are compared where they have at most such a share of the rows of those of one head: these rows
# are stored one by one, which costs more than a few tiles do.
_FEWER_ROWS = 0.9
# Tiles are full where they have at most so many rows for each query that sees a key: then no other tile wastes less.
_FULL = 1.1


class Launches(NamedTuple):
    """The kernel of a problem, and the splits of the keys of each of its tiles."""

    config: Sm90ForwardConfig
    num_splits: int  # 1 leaves the keys whole, unless a list of work cuts them


@kept
def for_grid(problem: AttentionProblem, config: Sm90ForwardConfig, num_sms: int) -> Launches:
    """The kernel and the number of splits that take the least time on `num_sms` multiprocessors.

    `config` is the kernel for a grid that fills the GPU.
    """
    with_list = sm90_mixed.config_of_list(problem, config, num_sms)
    if with_list is not None:
        return Launches(with_list, 1)
    if problem.block_mask or (problem.packed and not config.packs_heads):
        return Launches(config, 1)
    if problem.num_splits is not None:
        # A split needs a tile of keys to compute, so that there are no more splits than tiles.
        num_splits = max(min(problem.num_splits, -(-problem.seqlen_k // config.block_n)), 1)
        return Launches(_with_exact_maxima(problem, config, num_splits, config.follows_every_maximum), num_splits)
    if has_few_queries(problem):
        other = config_for(problem, config.has_bias_tiles, config.has_mask_tiles, few_queries=False)
        tried = config, other, *tiles_of_groups(problem)
        return Launches(*sm90_few_queries.quickest(problem, tried, num_sms))
    tiles = -(-problem.seqlen_q // config.block_m) * problem.num_heads_q * problem.batch
    if tiles >= MANY_WAVES * num_sms and rows_per_query(problem, config) <= _FULL:
        return Launches(config, 1)
    found = [
        Launches(_with_exact_maxima(problem, candidate, num_splits, config.follows_every_maximum), num_splits)
        for candidate in compared(problem, config)
        for num_splits in splits_worth_trying(problem, candidate, num_sms)
        if num_splits == 1 or may_split_keys(candidate)
    ]
    times = {launches: predicted_us(problem, launches.config, launches.num_splits, num_sms) for launches in found}
    # Whole keys need one launch, no memory for partial results, and are taken where splits gain little.
    whole = min((launches for launches in found if launches.num_splits == 1), key=times.__getitem__)
    best = min(found, key=times.__getitem__)
    return whole if times[whole] <= times[best] * (1 + EQUAL) else best


def is_modelled(problem: AttentionProblem) -> bool:
    """Return True if times are predicted: without options but a window, and without lists of work."""
    is_plain = not without_window(flags_of(problem)) and has_plain_scale(problem)
    return is_plain and not problem.packed and not sm90_forward.obstacle(problem)


@kept
def few_queries_us(problem: AttentionProblem, num_sms: int) -> float | None:
    """Microseconds that few queries are predicted to take; None where times are not predicted."""
    if not (is_modelled(problem) and has_few_queries(problem)):
        return None
    own = for_grid(problem, config_for(problem), num_sms)
    return sm90_few_queries.predicted_us(problem, own.config, own.num_splits, num_sms)


def compared(problem: AttentionProblem, config: Sm90ForwardConfig) -> list[Sm90ForwardConfig]:
    """Return the configurations whose times are compared where a grid does not fill the GPU, the given one first."""
    rows = num_tiles(problem, config) * config.block_m
    grouped = [
        tile
        for tile in tiles_of_groups(problem)
        if not config.packs_heads and num_tiles(problem, tile) * tile.block_m <= _FEWER_ROWS * rows
    ]
    return [config, *filter(is_timed, other_tiles(problem, config)), *grouped]


def other_tiles(problem: AttentionProblem, config: Sm90ForwardConfig) -> list[Sm90ForwardConfig]:
    """Return the configurations of a problem's other tiles, where it has no option but a window; none if it has."""
    flags = flags_of(problem)
    if without_window(flags) or not config.plain_scores:
        return []
    # Tiles for few queries and for many keys are compared, whether there are few and many or not.
    holds = {PLAIN_SCORES: True, WINDOW: bool(flags), PAGES: config.has_pages, FEW_QUERIES: True, MANY: True}
    asked = Asked(problem.dtype, None, flags, words_in(holds))
    others = (config_of(line, asked) for line in taken(lines_of(problem), asked))
    return [replace(other, pair=1) for other in others if other.tile != config.tile]


@kept
def tiles_of_groups(problem: AttentionProblem) -> tuple[Sm90ForwardConfig, ...]:
    """Return the configurations whose rows are the query heads of a KV head, of problems without options but a window.

    23 heads of 136 queries are 28 tiles of 5 queries, but 46 of one head, every second of which has 8 rows; and 49
    heads of 20 queries are 7 tiles of 3 queries, which read the keys 7 times, but 20 tiles of one query.
    """
    flags = flags_of(problem)
    options = without_window(flags) or not has_plain_scale(problem) or problem.pages is not None
    if options or problem.packed or problem.group_size == 1:
        return ()
    asked = Asked(
        problem.dtype, None, flags, words_in({PLAIN_SCORES: True, WINDOW: bool(flags), MANY: True, HEADS: True})
    )
    tiles: dict[tuple[int, int], Sm90ForwardConfig] = {}
    for line in taken(lines_of(problem), asked, leaves_registers_to_heads):
        if line.takes is PLAIN and problem.group_size <= line.tile.block_m:
            config = replace(config_of(line, asked), pair=1)
            # Results in float32 are those of an only split.
            if may_split_keys(config) or problem.result_dtype == problem.dtype:
                tiles.setdefault((config.block_m, config.block_n), config)
    return tuple(tiles.values())


def _with_exact_maxima(
    problem: AttentionProblem, config: Sm90ForwardConfig, num_splits: int, always: bool
) -> Sm90ForwardConfig:
    """Return the configuration with exact maxima where a split has few keys, as weights are large there.

    It is the given one unless the kernel for few keys has exact maxima, or with `always`.
    """
    few = problem.seqlen_k < sm90_forward.MANY_KEYS * num_splits and has_exact_maxima(problem)
    plain = config.plain_scores and not without_window(flags_of(problem))
    if config.follows_every_maximum or not plain or not (few or always):
        return config
    return replace(config, follows_every_maximum=True, early_powers=0)
