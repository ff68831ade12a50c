"""The table of Hopper's forward kernel on 16 bits (wgmma, TMA), and when it runs.

`sm90_tiles` has its tiles, and `sm90_grid` replaces the configuration where a grid does not fill the GPU. The base
`Sm90Config` is also that of the backward pass and of `split`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cuflash.hardware import (
    ALIGNMENT,
    FLOAT_BYTES,
    HALF_BYTES,
    ROWS_OF_WARPGROUP,
    SMEM_ALIGNMENT,
    SMEM_BYTES,
    SWIZZLE_BYTES,
    WARPGROUP,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan.config import (
    FLAGS,
    KNOWN_TO_ALL,
    OF_RULES,
    KernelConfig,
    common,
    flags_of,
    has_plain_scale,
    not_taken,
    unknown,
    with_rules,
    without_blocks_of_rule,
    without_window,
)
from cuflash.plan.sm90_tiles import FORWARD, Sm90Row, Sm90Tile
from cuflash.plan.sm90_times import is_timed
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.rules.form import NO_RULES

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that the kernel knows
# These options know rows of several heads. A block mask does not, as its lists of keys are those of tiles of one head,
# and users' own rules are asked for one head.
_KNOWN_TO_ROWS = tuple(flag for flag in KNOWN_TO_ALL if flag != "has_block_mask")
# Registers of a thread that loads and of one that computes, by the number of computing warpgroups. In all they are no
# more than those that a launch gives to each thread in eights, of 64 K, or a warpgroup would wait for registers for
# ever. With a block mask, and with a mask or a bias alone, the loading warpgroup needs more; with pages still more.
REGISTERS = {1: (80, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
_MORE_TO_LOAD = {1: (80, 248), 2: (56, 224), 3: (56, 152), 4: (32, 112)}
_PAGES_TO_LOAD = {1: (80, 248), 2: (72, 216)}
OTHER_GPUS = "as on other GPUs"  # users read this where other kernels run
# A thread computes powers in groups of four, two in each of its rows.
_POWERS_AT_ONCE = 4
# So many bytes of shared memory are no tile's: barriers, the numbers of tiles under way, and which keys are seen.
SMEM_BESIDE_TILES = 1024
LONG_QUERIES = 4096  # from so many queries on, pairs of thread blocks pay and causal tiles have to even out
DTYPES = ("float16", "bfloat16")
_ELEMENT_BYTES_OF = {"float16": HALF_BYTES, "bfloat16": HALF_BYTES, "float32": FLOAT_BYTES}
# A softcap between these bounds needs no maximum of scores: sums of 2^40 powers times values of 2^15 stay finite, as
# does the cubic term's factor, and no power is denormal.
_LARGEST_BOUND, SMALLEST_BOUND = 50, 2**-10
_BOUNDED_DTYPES = ("bfloat16",)  # weights without a maximum need exponents like float32's
MANY_KEYS = 2048  # from so many keys on, maxima seldom grow and larger tiles pay
_WIDE_WINDOW = 2048  # a window of fewer keys is narrow
_FEW_QUERIES = ROWS_OF_WARPGROUP  # most queries of a head that are few, so that one tile has them all
# TMA takes 37 ns for a box of a page on an H200, however few its rows are, so that threads copy boxes of fewer rows:
# 64 x 8192 keys of 8 heads take 1115 us by threads in pages of 1 and 4688 by TMA, but 1004 and 734 in pages of 16.
_FEWEST_ROWS_OF_BOX = 16
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # strides in bytes, shape


@dataclass(frozen=True, kw_only=True)
class Sm90Config(KernelConfig):
    """The configuration of a kernel by wgmma, in which one warpgroup loads and the others compute."""

    consumers: int  # warpgroups that compute
    producer_registers: int  # registers of a thread that loads
    consumer_registers: int  # registers of a thread that computes
    ping_pong: bool  # the warpgroups alternate at the tensor cores
    # A score is, before alibi, a product of q and k times a scale, which is positive in the forward pass.
    plain_scores: bool

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return (self.consumers + 1) * WARPGROUP


@dataclass(frozen=True, kw_only=True)
class Sm90ForwardConfig(Sm90Config):
    """The configuration of the forward kernel on 16 bits; fields without a comment are as in `Sm90Tile`."""

    stages: int
    query_stages: int  # buffers of queries
    packs_heads: bool  # rows of a tile are the query heads of a KV head, for each of a few queries
    has_pages: bool  # keys and values lie in pools of pages
    copies_rows: bool  # pages are so small that threads copy their rows; else TMA copies boxes of them
    hides_queries: bool  # lengths or a window may leave no key to whole tiles of queries
    splits_keys: bool  # several thread blocks share the keys of a tile, and a kernel merges their results
    has_work_list: bool  # a kernel before this one lists tiles and chunks of their keys, as `sm90_mixed` says
    staging_panels: int  # panels of results in shared memory that TMA stores at a time; with 0 threads store them
    bias_stages: int  # buffers of the bias
    mask_stages: int  # buffers of the mask
    mask_row_bytes: int  # bytes of a row of a mask's tile in shared memory
    teams: int  # groups of warpgroups with tiles and shared memory of their own
    follows_every_maximum: bool  # `Sm90Tile.exact`
    keys_in_reverse: bool
    query_steps_in_registers: int
    pair: int
    early_draws: int
    waits_after_powers: bool
    early_powers: int  # powers that a thread computes before it waits for the last product with values
    has_bias_tiles: bool  # TMA loads the bias; else it is read element by element
    has_mask_tiles: bool  # TMA loads the mask; else its rows are read from global memory
    bounded_scores: bool  # softcap bounds the scores so tightly that their powers need no maximum

    def queries_of_tile(self, problem: AttentionProblem) -> int:
        """Queries whose tiles a thread block, or a cluster, computes together."""
        return self.block_m // problem.group_size if self.packs_heads else self.block_m * self.pair

    def num_heads(self, problem: AttentionProblem) -> int:
        """The number of heads of which each has tiles of its own."""
        return problem.num_heads_kv if self.packs_heads else problem.num_heads_q


def _tiles_for_rules(row: Sm90Row, flags: tuple[str, ...]) -> tuple[Sm90Tile, ...]:
    return row.tiles_for_rules(len(without_blocks_of_rule(without_window(flags))) > 1)


def _tile_for(
    row: Sm90Row,
    flags: tuple[str, ...],
    plain_scores: bool,
    bias_tiles: bool,
    mask_tiles: bool,
    many_keys: bool,
    narrow_window: bool,
    few_queries: bool,
    bounded_scores: bool,
    has_pages: bool,
) -> Sm90Tile:
    options = without_window(flags)
    if options & {*OF_RULES}:
        return _tiles_for_rules(row, flags)[0]
    if few_queries and "has_block_mask" not in options:
        return row.of_few_queries("has_bias" in options and not bias_tiles)
    if not options and plain_scores:
        if flags:
            return (narrow_window and row.narrow_window) or (many_keys and row.many_windowed) or row.windowed
        return (many_keys and row.many_keys) or row.full
    if has_pages and options in ({"has_alibi"}, {"has_block_mask"}):
        return row.with_more  # registers that slopes and bits of blocks would need load the pages
    if bounded_scores and row.bounded:
        return row.bounded
    if options <= {"has_softcap"} or options == {"has_alibi"}:
        return row.with_score
    if options == {"has_dropout"}:
        return row.with_dropout
    if options == {"has_block_mask"} and row.with_blocks:
        return row.with_blocks
    if options == {"has_bias"} and bias_tiles:
        return row.with_bias
    if options == {"has_mask"} and mask_tiles and row.with_mask_tiles:
        return row.with_mask_tiles
    return row.with_mask if options in ({"has_mask"}, {"has_block_mask"}) else row.with_more


def forward_config(
    row: Sm90Row,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool = True,
    bias_tiles: bool = False,
    splits_keys: bool = False,
    many_keys: bool = False,
    narrow_window: bool = False,
    few_queries: bool = False,
    bounded_scores: bool = False,
    mask_tiles: bool = False,
    packs_heads: bool = False,
    has_pages: bool = False,
) -> Sm90ForwardConfig:
    """The configuration of one forward kernel.

    `flags` is a subset of `FLAGS`; the other arguments say what `_tile_for` chooses a tile of the row by, and whether
    TMA loads the bias (`bias_tiles`) and the mask (`mask_tiles`), and whether heads are rows (`packs_heads`).
    """
    bounded_scores = bounded_scores and dtype in _BOUNDED_DTYPES and without_window(flags) == {"has_softcap"}
    of_tile = bias_tiles, mask_tiles, many_keys, narrow_window, few_queries, bounded_scores, has_pages
    tile = _tile_for(row, flags, plain_scores, *of_tile)
    if packs_heads:
        tile = row.of_heads(tile, has_pages, bool(without_window(flags)))
    elif has_pages:
        tile = row.with_spare_registers(tile)
    chosen = plain_scores, bias_tiles, mask_tiles, splits_keys, bounded_scores, packs_heads, has_pages
    return config_of(row, tile, dtype, bias_dtype, flags, *chosen)


def config_of(
    row: Sm90Row,
    tile: Sm90Tile,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool = True,
    bias_tiles: bool = False,
    mask_tiles: bool = False,
    splits_keys: bool = False,
    bounded_scores: bool = False,
    packs_heads: bool = False,
    has_pages: bool = False,
) -> Sm90ForwardConfig:
    """The configuration of a kernel with this tile of the row; see `forward_config`."""
    options = without_window(flags)
    consumers, teams = tile.block_m // ROWS_OF_WARPGROUP + tile.alone, 1 + (tile.alone > 0)
    more_to_load = "has_block_mask" in options or options in ({"has_mask"}, {"has_bias"})
    registers = _PAGES_TO_LOAD if has_pages else _MORE_TO_LOAD if more_to_load else REGISTERS
    producer_registers, consumer_registers = registers[consumers]
    row_bytes, row_bytes_v = (whole_rows(HALF_BYTES * d) for d in (row.head_dim, row.head_dim_v))
    most_bytes = SMEM_BYTES // teams
    queries = tile.block_m * row_bytes
    smem_bytes = queries + tile.stages * tile.block_n * (row_bytes + row_bytes_v) + SMEM_BESIDE_TILES
    if plain_scores and options == {"has_alibi"} and not packs_heads:
        # Products with columns' numbers need a row of 16 bytes a column, and read eight rows behind them.
        smem_bytes += -((tile.block_n + 8) * 16 // -SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    mask_row_bytes = _mask_row_bytes(tile.block_n)
    mask_bytes = tile.block_m * mask_row_bytes if mask_tiles else 0
    bias_bytes = tile.block_m * whole_rows(tile.block_n * _ELEMENT_BYTES_OF[bias_dtype or dtype]) if bias_tiles else 0
    mask_stages = 2 if mask_bytes and smem_bytes + bias_bytes + 2 * mask_bytes <= most_bytes else 1
    smem_bytes += mask_stages * mask_bytes
    bias_stages = 2 if bias_bytes and smem_bytes + 2 * bias_bytes <= most_bytes else 1
    smem_bytes += bias_stages * bias_bytes
    # Results leave through shared memory where there is room, and the next tile's queries are loaded early.
    staging_bytes = tile.block_m * SWIZZLE_BYTES
    staging_panels = int(smem_bytes + staging_bytes <= most_bytes)
    smem_bytes += staging_panels * staging_bytes
    query_stages = 2 if smem_bytes + queries <= most_bytes else 1
    smem_bytes += (query_stages - 1) * queries
    panels = row_bytes_v // SWIZZLE_BYTES
    while 0 < staging_panels < panels and smem_bytes + staging_bytes <= most_bytes:
        staging_panels += 1
        smem_bytes += staging_bytes
    return Sm90ForwardConfig(
        entry="forward_sm90",
        query_stages=query_stages,
        packs_heads=packs_heads,
        has_pages=has_pages,
        copies_rows=False,
        hides_queries=False,
        splits_keys=splits_keys,
        has_work_list=False,
        staging_panels=0 if splits_keys else staging_panels,
        bias_stages=bias_stages,
        mask_stages=mask_stages,
        mask_row_bytes=mask_row_bytes,
        consumers=consumers,
        teams=teams,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
        follows_every_maximum=tile.exact,
        early_powers=tile.block_n // 2 * tile.early_eighths // 8 // _POWERS_AT_ONCE * _POWERS_AT_ONCE,
        has_bias_tiles=bias_tiles,
        has_mask_tiles=mask_tiles,
        bounded_scores=bounded_scores,
        plain_scores=plain_scores and not {"has_softcap", "has_bias", "has_score_mod"} & set(flags),
        smem_bytes=teams * smem_bytes,
        **common(Sm90ForwardConfig, dtype, bias_dtype, flags, row, tile),
    )


@kept
def candidates(problem: AttentionProblem, config: Sm90ForwardConfig) -> tuple[Sm90ForwardConfig, ...]:
    """Return a problem's configuration, and behind it those of smaller tiles, which take fewer registers."""
    row, flags = row_of(problem), tuple(flag for flag in FLAGS if getattr(config, flag))
    of_inputs = config.plain_scores, config.has_bias_tiles, config.has_mask_tiles
    smaller = [
        config_of(
            *(row, tile, problem.dtype, problem.bias_dtype, flags, *of_inputs),
            splits_keys=config.splits_keys,
            packs_heads=config.packs_heads,
            has_pages=config.has_pages,
        )
        for tile in (row.tiles if config.rules == NO_RULES else _tiles_for_rules(row, flags))
        if tile.block_m * tile.block_n < config.block_m * config.block_n
        and not tile.alone
        and not (config.packs_heads and tile.block_m < problem.group_size)
        and not (config.has_pages and tile.block_m // ROWS_OF_WARPGROUP not in _PAGES_TO_LOAD)
    ]
    exact: dict[str, Any] = {"follows_every_maximum": True, "early_powers": 0} if config.follows_every_maximum else {}
    panels = [min(c.staging_panels, config.staging_panels) for c in smaller]
    same: dict[str, Any] = {"pair": 1, "has_work_list": config.has_work_list, **exact}
    tails = [replace(c, staging_panels=n, **same) for c, n in zip(smaller, panels, strict=True)]
    by_size = sorted(dict.fromkeys(tails), key=lambda c: -c.block_m * c.block_n)
    return config, *(with_rules(c, problem) for c in by_size)


def wide_config(problem: AttentionProblem, config: Sm90ForwardConfig) -> Sm90ForwardConfig | None:
    """The kernel that writes float32 results, as the only split of the keys; None where there is none.

    Its epilogue holds addresses, for which a softcap's numbers leave the largest tiles too few registers.
    """
    if config.teams > 1:
        return None
    if problem.softcap and config.consumers > 1:
        row, flags = row_of(problem), flags_of(problem)
        of_pages = {"has_pages": config.has_pages}
        config = config_of(row, row.with_more, problem.dtype, problem.bias_dtype, flags, **of_pages)
        config = with_rules(config, problem)
    return replace(for_pages(problem, config), splits_keys=True, has_work_list=False, staging_panels=0, pair=1)


def for_pages(problem: AttentionProblem, config: Sm90ForwardConfig) -> Sm90ForwardConfig:
    """The kernel that brings the pages of a problem in the way that suits their size.

    TMA brings all pages beside a block mask, whose lists of keys are one warp's, beside users' own rules, and beside
    other options in tiles of many rows, which leave no registers.
    """
    if problem.pages is None or math.gcd(config.block_n, problem.pages.page_size) >= _FEWEST_ROWS_OF_BOX:
        return config
    row, flags = row_of(problem), known_flags(problem)
    has_options = bool(without_window(flags)) or not config.plain_scores
    if config.has_block_mask or config.rules != NO_RULES or (has_options and config.block_m > row.few_queries.block_m):
        return config
    return _copying_rows(row, config, problem.dtype, flags)


def may_hide_queries(problem: AttentionProblem) -> bool:
    """Return True if lengths, or a window that ends before the last query, may leave no key to a tile of queries."""
    right = problem.window_right
    is_cut = right is not None and problem.seqlen_q > problem.seqlen_k + right
    return problem.packed or problem.q_lengths or problem.kv_lengths or is_cut


def _copying_rows(row: Sm90Row, config: Sm90ForwardConfig, dtype: str, flags: tuple[str, ...]) -> Sm90ForwardConfig:
    """The kernel that copies pages row by row, with a smaller tile where many rows leave too few registers."""
    if row.paged_heads and config.block_m > row.few_queries.block_m:
        smaller = config_of(row, row.paged_heads, dtype, None, flags, packs_heads=config.packs_heads, has_pages=True)
        config = replace(smaller, follows_every_maximum=config.follows_every_maximum)
    return replace(config, copies_rows=True)


def _mask_row_bytes(block_n: int) -> int:
    """Bytes of a row of a mask's tile in shared memory, so that TMA swizzles rows or they lie in different banks."""
    return block_n if block_n == SWIZZLE_BYTES or block_n // ALIGNMENT % 2 else block_n + ALIGNMENT


def inputs_obstacle(problem: AttentionProblem) -> str:
    """Say why a problem's inputs cannot take the Hopper kernels of either pass; empty if they can."""
    if problem.dtype not in DTYPES:
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

    Heads stay apart with options that do not find each row's own query and head (`_KNOWN_TO_ROWS`).
    """
    return not unknown(_KNOWN_TO_ROWS, problem)


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
    bias_itemsize = _ELEMENT_BYTES_OF[problem.bias_dtype or problem.dtype]
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


def row_of(problem: AttentionProblem) -> Sm90Row:
    """The first row of the table that is wide enough for a problem."""
    return next(r for r in FORWARD if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)


def config_for(
    problem: AttentionProblem,
    bias_tiles: bool = False,
    mask_tiles: bool = False,
    few_queries: bool | None = None,
    heads_are_rows: bool | None = None,
) -> Sm90ForwardConfig:
    """The kernel of a problem, whose tile is that for few queries or not as these are, or as `few_queries` says.

    Its rows are the query heads of a KV head where queries are few, or as `heads_are_rows` says.
    """
    row = row_of(problem)
    plain_scores = has_plain_scale(problem)
    flags = known_flags(problem)
    # Maxima of very many keys grow rarely, so the tile for few keys, which has exact maxima, is taken again.
    grow_rarely = not (flags or problem.packed) and problem.seqlen_k >= row.exact_again
    if few_queries is None:
        # A tile with more rows may have room for the heads of one query where that for few queries has none.
        few_queries = has_few_queries(problem) and problem.group_size <= row.few_queries.block_m
    config = forward_config(
        row,
        problem.dtype,
        problem.bias_dtype,
        flags,
        plain_scores,
        bias_tiles,
        many_keys=_has_many_keys(problem) and not grow_rarely,
        narrow_window=_has_narrow_window(problem),
        few_queries=few_queries,
        bounded_scores=SMALLEST_BOUND <= problem.softcap <= _LARGEST_BOUND,
        mask_tiles=mask_tiles,
        packs_heads=packs_heads(problem) if heads_are_rows is None else heads_are_rows,
        has_pages=problem.pages is not None,
    )
    config = with_rules(config, problem)
    if config.packs_heads and problem.group_size > config.block_m:
        config = replace(config, packs_heads=False)
    few = problem.seqlen_q < LONG_QUERIES or problem.packed or problem.window_left is not None
    return replace(config, pair=1) if few else config


def reason(problem: AttentionProblem) -> str:
    """A sentence for users: the kernel that a forward pass takes on Hopper, and why."""
    if obstacle(problem):
        return f"{OTHER_GPUS}: {obstacle(problem)}"
    config = config_for(problem)
    return (
        f"wgmma and TMA (NVRTC from 12.9 on), tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: "
        f"{config.flags}; {OTHER_GPUS} where an address or a stride of q, k or v is no multiple of 16 bytes"
    )


def _of_small_grids(row: Sm90Row, dtype: str) -> Iterator[Sm90ForwardConfig]:
    """Kernels that `sm90_grid.for_grid` can choose and that no other row of the table has."""
    for tile in row.plain_tiles(windowed=True):
        config = replace(config_of(row, tile, dtype, None, ("has_window",)), pair=1)
        exact = replace(config, follows_every_maximum=True, early_powers=0) if row.full.exact else config
        for kernel in dict.fromkeys((config, exact)):
            yield replace(kernel, splits_keys=True, staging_panels=0)
        if is_timed(config):
            yield exact


def _of_few_queries(row: Sm90Row, dtype: str) -> Iterator[Sm90ForwardConfig]:
    """Kernels of few queries: tiles of one head, then those of a group."""
    tiles = partial(forward_config, row, dtype, None)
    yield tiles((), splits_keys=True, few_queries=True)
    yield tiles(_KNOWN_TO_ROWS, few_queries=True)
    for flags in ((), ("has_window",), ("has_window", "has_bias"), _KNOWN_TO_ROWS):
        yield tiles(flags, few_queries=True, packs_heads=True)
    yield tiles(("has_window", "has_softcap"), few_queries=True, packs_heads=True, bounded_scores=True)
    in_tiles = {"bias_tiles": True, "mask_tiles": True}
    yield tiles(_KNOWN_TO_ROWS, few_queries=True, packs_heads=True, splits_keys=True, **in_tiles)
    yield tiles(("has_window",), packs_heads=True, splits_keys=True)


def _of_work_lists(row: Sm90Row, dtype: str) -> Iterator[Sm90ForwardConfig]:
    """Kernels that take their tiles from a list of work: of rows and of pages, with tiles of few and of many rows."""
    tiles = partial(forward_config, row, dtype, None, packs_heads=True)
    listed = (
        tiles(("has_window",), few_queries=True),
        tiles(("has_window",), has_pages=True),
        tiles(_KNOWN_TO_ROWS, few_queries=True, has_pages=True),
        tiles(_KNOWN_TO_ROWS, has_pages=True),
    )
    yield from (replace(config, has_work_list=True) for config in listed)


def _of_pages(row: Sm90Row, dtype: str) -> Iterator[Sm90ForwardConfig]:
    """Kernels of pages: many queries, and few, whose heads may need a tile of many rows."""
    tiles = partial(forward_config, row, dtype, None, has_pages=True)
    of_heads = ("has_window",), ("has_window", "has_dropout"), ("has_window", "has_bias"), _KNOWN_TO_ROWS
    of_pages: tuple[tuple[str, ...], ...] = ("has_window",), ("has_window", "has_softcap"), KNOWN_TO_ALL
    yield from (tiles(flags, packs_heads=True) for flags in of_heads)
    yield from (tiles(flags) for flags in of_pages)
    few = partial(tiles, few_queries=True, packs_heads=True)
    yield few(("has_window", "has_mask"), mask_tiles=True)
    yield few((), splits_keys=True)
    small_pages = few((), splits_keys=True), few(_KNOWN_TO_ROWS)
    many = (tiles(("has_window",), packs_heads=heads) for heads in (False, True))
    yield from (_copying_rows(row, config, dtype, ("has_window",)) for config in (*small_pages, *many))


def table() -> Iterator[tuple[Sm90ForwardConfig, str]]:
    """Every kernel, with its dtype.

    Each row comes plain, with a window and any one option, and with all; plain ones also without staged results.
    """
    single = [("has_window", flag) for flag in KNOWN_TO_ALL if flag != "has_window"]
    for row in FORWARD:
        for dtype in DTYPES:
            for flags in ((), ("has_window",), *single, KNOWN_TO_ALL):
                yield forward_config(row, dtype, None, flags), dtype
            for flags in ((), ("has_window",)):
                yield replace(forward_config(row, dtype, None, flags), staging_panels=0), dtype
            lists = _of_work_lists(row, dtype)
            yield from ((config, dtype) for config in (*_of_few_queries(row, dtype), *_of_pages(row, dtype), *lists))
            if row.many_keys:
                yield forward_config(row, dtype, None, (), many_keys=True), dtype
                yield forward_config(row, dtype, None, ("has_window",), many_keys=True), dtype
                if row.narrow_window:
                    yield forward_config(row, dtype, None, ("has_window",), narrow_window=True), dtype
                for flags in ((), ("has_window",)):
                    yield forward_config(row, dtype, None, flags, few_queries=True), dtype
            yield from ((config, dtype) for config in _of_small_grids(row, dtype))
            if dtype in _BOUNDED_DTYPES:
                yield forward_config(row, dtype, None, ("has_window", "has_softcap"), bounded_scores=True), dtype
            for bias_dtype in (dtype, "float32"):
                for flags in (("has_window", "has_bias"), KNOWN_TO_ALL):
                    yield forward_config(row, dtype, bias_dtype, flags, bias_tiles=True), dtype
            yield forward_config(row, dtype, None, ("has_window", "has_mask"), mask_tiles=True), dtype
            for flags in ((), ("has_window",), ("has_window", "has_softcap")):
                yield replace(forward_config(row, dtype, None, flags), hides_queries=True), dtype
            yield forward_config(row, dtype, None, KNOWN_TO_ALL, bias_tiles=True, mask_tiles=True), dtype
