"""Which kernel of Hopper's forward pass on 16 bits (wgmma, TMA) a problem takes, and when it runs.

`tiles` has its records, `config` makes configurations of them, and `grid` replaces the configuration
where a grid does not fill the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cuflash.hardware import ALIGNMENT, ROWS_OF_WARPGROUP
from cuflash.kept import kept
from cuflash.plan.config import (
    FLAGS,
    KNOWN_TO_ALL,
    OF_RULES,
    flags_of,
    has_plain_scale,
    not_taken,
    unknown,
    with_rules,
    without_window,
)
from cuflash.plan.record import HOPPER, Record, of_own_columns
from cuflash.plan.record import candidates as taken_of
from cuflash.plan.sm90 import tiles
from cuflash.plan.sm90.config import ELEMENT_BYTES_OF, Asked, Sm90ForwardConfig, config_of, leaves_registers
from cuflash.plan.sm90.tiles import Sm90Tile
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.rules.form import NO_RULES

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that the kernel knows
# These options know rows of several heads. A block mask does not, as its lists of keys are those of tiles of one head,
# and users' own rules are asked for one head.
KNOWN_TO_ROWS = tuple(flag for flag in KNOWN_TO_ALL if flag != "has_block_mask")
LONG_QUERIES = 4096  # from so many queries on, pairs of thread blocks pay and causal tiles have to even out
# A softcap between these bounds needs no maximum of scores: sums of 2^40 powers times values of 2^15 stay finite, as
# does the cubic term's factor, and no power is denormal.
_LARGEST_BOUND, SMALLEST_BOUND = 50, 2**-10
_BOUNDED_DTYPES = ("bfloat16",)  # weights without a maximum need exponents like float32's
MANY_KEYS = 2048  # from so many keys on, maxima seldom grow and larger tiles pay
_VERY_MANY_KEYS = 4096  # from so many keys on, maxima grow so rarely that exact ones cost little again
_WIDE_WINDOW = 2048  # a window of fewer keys is narrow
_FEW_QUERIES = ROWS_OF_WARPGROUP  # most queries of a head that are few, so that one tile has them all
# TMA takes 37 ns for a box of a page on an H200, however few its rows are, so that threads copy boxes of fewer rows:
# 64 x 8192 keys of 8 heads take 1115 us by threads in pages of 1 and 4688 by TMA, but 1004 and 734 in pages of 16.
_FEWEST_ROWS_OF_BOX = 16
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # strides in bytes, shape
Line = Record[Sm90Tile]


def lines_of(problem: AttentionProblem) -> tuple[Line, ...]:
    """Return the lines of the table for a problem's head dims, whose kernels have columns for these alone."""
    return of_own_columns(tiles.FORWARD, problem.head_dim, problem.head_dim_v)


def taken(lines: Sequence[Line], asked: Asked, fits: Callable[[Line], bool] | None = None) -> tuple[Line, ...]:
    """Return the lines that take what is asked for, the fastest first, which is their order in the table.

    `fits` tells whether a line leaves registers; without it `leaves_registers` does.
    """

    def leaves(line: Line) -> bool:
        return leaves_registers(line.tile, asked.words)

    return taken_of(lines, without_window(asked.flags) | asked.words, HOPPER, fits or leaves, lambda line: 0)


def asked_of(
    problem: AttentionProblem, bias_tiles: bool, mask_tiles: bool, few_queries: bool | None, heads_are_rows: bool | None
) -> Asked:
    """Return what the table knows of a problem; see `config_for`."""
    if few_queries is None:
        # A tile with more rows may have room for the heads of one query where that for few queries has none.
        few_queries = has_few_queries(problem) and problem.group_size <= _FEW_QUERIES
    flags = known_flags(problem)
    is_bounded = SMALLEST_BOUND <= problem.softcap <= _LARGEST_BOUND and problem.dtype in _BOUNDED_DTYPES
    holds = {
        tiles.FEW_QUERIES: few_queries,
        tiles.MANY: _has_many_keys(problem),
        tiles.VERY_MANY: not (flags or problem.packed) and problem.seqlen_k >= _VERY_MANY_KEYS,
        tiles.WINDOW: "has_window" in flags,
        tiles.NARROW_WINDOW: _has_narrow_window(problem),
        tiles.PLAIN_SCORES: has_plain_scale(problem),
        tiles.BOUNDED: is_bounded and without_window(flags) == {"has_softcap"},
        tiles.BIAS_TILES: bias_tiles,
        tiles.BIAS_ELEMENTS: problem.bias is not None and not bias_tiles,
        tiles.MASK_TILES: mask_tiles,
        tiles.HEADS: packs_heads(problem) if heads_are_rows is None else heads_are_rows,
        tiles.PAGES: problem.pages is not None,
    }
    return Asked(problem.dtype, problem.bias_dtype, flags, words_in(holds))


def words_in(holds: Mapping[Any, bool]) -> frozenset[str]:
    """Return the words of the table that hold."""
    return frozenset(word for word, held in holds.items() if held)


def _asked_again(problem: AttentionProblem, config: Sm90ForwardConfig) -> Asked:
    """Return what a configuration tells of what was asked for."""
    flags = tuple(flag for flag in FLAGS if getattr(config, flag))
    holds = {
        tiles.PLAIN_SCORES: config.plain_scores,
        tiles.BIAS_TILES: config.has_bias_tiles,
        tiles.MASK_TILES: config.has_mask_tiles,
        tiles.HEADS: config.packs_heads,
        tiles.PAGES: config.has_pages,
    }
    return Asked(problem.dtype, problem.bias_dtype, flags, words_in(holds))


@kept
def candidates(problem: AttentionProblem, config: Sm90ForwardConfig) -> tuple[Sm90ForwardConfig, ...]:
    """Return a problem's configuration, and behind it those of smaller tiles, which take fewer registers.

    A line that takes the options can take them whatever the problem is like besides: it is only not the fastest.
    """
    asked = _asked_again(problem, config)
    lines = taken([replace(line, needs=()) for line in lines_of(problem)], asked)
    exact: dict[str, Any] = {"follows_every_maximum": True, "early_powers": 0} if config.follows_every_maximum else {}
    same = {"pair": 1, "has_work_list": config.has_work_list, "splits_keys": config.splits_keys, **exact}
    smaller = [
        replace(each, staging_panels=min(each.staging_panels, config.staging_panels), **same)
        for each in (config_of(line, asked) for line in lines if not line.tile.alone)
        if each.block_m * each.block_n < config.block_m * config.block_n
        and not (config.packs_heads and each.block_m < problem.group_size)
    ]
    by_size = sorted(dict.fromkeys(smaller), key=lambda each: (-each.block_m * each.block_n, -each.block_m))
    return config, *(with_rules(each, problem) for each in by_size)


def wide_config(problem: AttentionProblem, config: Sm90ForwardConfig) -> Sm90ForwardConfig | None:
    """The kernel that writes float32 results, as the only split of the keys; None where there is none.

    Its epilogue holds addresses, for which a softcap's numbers leave the largest tiles too few registers.
    """
    if config.teams > 1:
        return None
    if problem.softcap and config.consumers > 1:
        holds = {tiles.PLAIN_SCORES: True, tiles.PAGES: config.has_pages, tiles.WIDE_RESULTS: True}
        asked = Asked(problem.dtype, problem.bias_dtype, flags_of(problem), words_in(holds))
        config = with_rules(config_of(taken(lines_of(problem), asked)[0], asked), problem)
    return replace(for_pages(problem, config), splits_keys=True, has_work_list=False, staging_panels=0, pair=1)


def for_pages(problem: AttentionProblem, config: Sm90ForwardConfig) -> Sm90ForwardConfig:
    """The kernel that brings the pages of a problem in the way that suits their size.

    TMA brings all pages under a block mask, whose lists of keys are one warp's, under users' own rules, and with other
    options in tiles of many rows, which leave no registers.
    """
    if problem.pages is None or math.gcd(config.block_n, problem.pages.page_size) >= _FEWEST_ROWS_OF_BOX:
        return config
    flags, has_many_rows = known_flags(problem), config.block_m > ROWS_OF_WARPGROUP
    has_options = bool(without_window(flags)) or not config.plain_scores
    if config.has_block_mask or config.rules != NO_RULES or (has_options and has_many_rows):
        return config
    smaller = [line for line in lines_of(problem) if tiles.COPIED_ROWS in line.needs]
    if smaller and has_many_rows:
        holds = {tiles.PLAIN_SCORES: True, tiles.PAGES: True, tiles.HEADS: config.packs_heads}
        asked = Asked(problem.dtype, None, flags, words_in(holds))
        config = replace(config_of(smaller[0], asked), follows_every_maximum=config.follows_every_maximum)
    return replace(config, copies_rows=True)


def may_hide_queries(problem: AttentionProblem) -> bool:
    """Return True if lengths, or a window that ends before the last query, may leave no key to a tile of queries."""
    right = problem.window_right
    is_cut = right is not None and problem.seqlen_q > problem.seqlen_k + right
    return problem.packed or problem.q_lengths or problem.kv_lengths or is_cut


def inputs_obstacle(problem: AttentionProblem) -> str:
    """Say why a problem's inputs cannot take the Hopper kernels of either pass; empty if they can."""
    if problem.dtype not in HALF_DTYPES:
        return f"wgmma takes 16-bit inputs, not {problem.dtype}"
    if problem.is_empty:
        return "TMA takes no empty arrays"
    return ""


def obstacle(problem: AttentionProblem) -> str:
    """Say why a problem's forward pass cannot take the Hopper kernel; empty if it can."""
    option = f"no kernel with {not_taken(HANDLES, problem)}" if not_taken(HANDLES, problem) else ""
    return inputs_obstacle(problem) or option


def expressible(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True if a tensor map can describe an array whose last axis is contiguous; `strides` are in bytes."""
    axes = zip(strides[:-1], shape[:-1], strict=True)
    return all(size == 1 or (stride > 0 and stride % ALIGNMENT == 0) for stride, size in axes)


def packs_heads(problem: AttentionProblem) -> bool:
    """Return True if the query heads of a KV head are rows of one tile, so that few queries read their keys once.

    Packed sequences take such tiles with one head, too, as these can split their keys.
    """
    several = problem.group_size > 1 or problem.packed
    return has_few_queries(problem) and several and may_pack_heads(problem)


def may_pack_heads(problem: AttentionProblem) -> bool:
    """Return True if a tile's rows may be the query heads of a KV head, as forward/rows.cuh says.

    Heads stay apart with options that do not find each row's own query and head (`KNOWN_TO_ROWS`).
    """
    return not unknown(KNOWN_TO_ROWS, problem)


def known_flags(problem: AttentionProblem) -> tuple[str, ...]:
    """Return `flags_of` without a window that hides nothing, as causal does from an only query, the last one."""
    sees_all = problem.seqlen_q == 1 and problem.window_left is None and (problem.window_right or 0) >= 0
    flags = flags_of(problem)
    return tuple(flag for flag in flags if flag != "has_window") if sees_all and not problem.packed else flags


@kept
def forward(
    problem: AttentionProblem,
    layouts: tuple[Layout, ...],
    bias: Layout | None = None,
    mask: Layout | None = None,
) -> Sm90ForwardConfig | None:
    """The Hopper kernel for a problem on arrays of these `layouts`, or None.

    Their addresses, and those of `bias` and `mask`, are multiples of 16 bytes. The result may lie anywhere, so that
    its bits depend on the inputs alone.
    """
    if obstacle(problem) or not all(expressible(*layout) for layout in layouts):
        return None
    bias_itemsize = ELEMENT_BYTES_OF[problem.bias_dtype or problem.dtype]
    return config_for(problem, has_vectors(bias, bias_itemsize), has_vectors(mask, 1))


def has_vectors(layout: Layout | None, itemsize: int) -> bool:
    """Return True if rows of a bias or mask begin at multiples of 16 bytes; axes may be broadcast."""
    if layout is None:
        return False
    strides, shape = layout
    steps = [s for s, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1]
    return shape[-1] > 1 and strides[-1] == itemsize and all(s >= 0 and s % ALIGNMENT == 0 for s in steps)


def _has_many_keys(problem: AttentionProblem) -> bool:
    if not problem.packed:
        return problem.seqlen_k >= MANY_KEYS
    # The host knows packed sequences' mean length alone. The longest have most of the work, so half the bound will do.
    return 2 * problem.seqlen_k >= MANY_KEYS * problem.batch


def has_few_queries(problem: AttentionProblem) -> bool:
    """Return True if one tile has the queries of a head, so that keys are read once.

    The mean number of queries counts where sequences are packed.
    """
    return problem.seqlen_q <= _FEW_QUERIES * (problem.batch if problem.packed else 1)


def _has_narrow_window(problem: AttentionProblem) -> bool:
    left, right = problem.window_left, problem.window_right
    bounded = left is not None and right is not None and left + right < _WIDE_WINDOW
    return bounded and _has_many_keys(problem)


def config_for(
    problem: AttentionProblem,
    bias_tiles: bool = False,
    mask_tiles: bool = False,
    few_queries: bool | None = None,
    heads_are_rows: bool | None = None,
) -> Sm90ForwardConfig:
    """The kernel of a problem, whose tile is that for few queries or not as these are, or as `few_queries` says.

    TMA loads the bias (`bias_tiles`) and the mask (`mask_tiles`). Rows are the query heads of a KV head where queries
    are few, or as `heads_are_rows` says.
    """
    asked = asked_of(problem, bias_tiles, mask_tiles, few_queries, heads_are_rows)
    config = with_rules(config_of(taken(lines_of(problem), asked)[0], asked), problem)
    if config.packs_heads and problem.group_size > config.block_m:
        config = replace(config, packs_heads=False)
    few = problem.seqlen_q < LONG_QUERIES or problem.packed or problem.window_left is not None
    return replace(config, pair=1) if few else config


def has_exact_maxima(problem: AttentionProblem) -> bool:
    """Return True if the kernel for few keys, without options, follows every maximum."""
    asked = Asked(problem.dtype, None, (), frozenset({tiles.PLAIN_SCORES}))
    return taken(lines_of(problem), asked)[0].tile.exact
