"""The configuration of Hopper's forward kernel on 16 bits (wgmma, TMA): registers and shared memory of a tile.

The base `Sm90Config` is also that of the backward pass and of `split`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
from cuflash.plan.config import KernelConfig, common, without_window
from cuflash.plan.record import Record
from cuflash.plan.sm90.tiles import (
    BIAS_TILES,
    BOUNDED,
    HEADS,
    MASK_TILES,
    PAGES,
    PLAIN_SCORES,
    Sm90Tile,
)
from cuflash.problem.attention_problem import AttentionProblem

# Registers of a thread that loads and of one that computes, by the number of computing warpgroups. In all they are no
# more than those that a launch gives to each thread in eights, of 64 K, or a warpgroup would wait for registers for
# ever. With a block mask, and with a mask or a bias alone, the loading warpgroup needs more; with pages still more.
REGISTERS = {1: (80, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
MORE_TO_LOAD = {1: (80, 248), 2: (56, 224), 3: (56, 152), 4: (32, 112)}
_PAGES_TO_LOAD = {1: (80, 248), 2: (72, 216)}
_MOST_PLAIN_ROWS = 128  # with tiles of more rows a thread that loads has 32 registers
# Rows of several heads leave registers for so many rows where there are no options, and where a thread has so many of a
# tile's numbers at most in its 160 registers: scores, their weights in 16 bits, and results.
_MOST_ROWS_OF_HEADS = 192
_MOST_NUMBERS = 128
# A thread computes powers in groups of four, two in each of its rows.
_POWERS_AT_ONCE = 4
# So many bytes of shared memory are no tile's: barriers, the numbers of tiles under way, and which keys are seen.
SMEM_BESIDE_TILES = 1024
ELEMENT_BYTES_OF = {"float16": HALF_BYTES, "bfloat16": HALF_BYTES, "float32": FLOAT_BYTES}


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
    packs_heads: bool = False  # rows of a tile are the query heads of a KV head, for each of a few queries
    has_pages: bool = False  # keys and values lie in pools of pages
    token_scales: bool = False  # the rows of a head's codes have scales of their own; else all share one
    copies_rows: bool = False  # pages are so small that threads copy their rows; else TMA copies boxes of them
    hides_queries: bool = False  # lengths or a window may leave no key to whole tiles of queries
    splits_keys: bool = False  # several thread blocks share the keys of a tile, and a kernel merges their results
    has_work_list: bool = False  # a kernel before this one lists tiles and chunks of their keys, as `mixed` says
    staging_panels: int = 0  # panels of results in shared memory that TMA stores at a time; with 0 threads store them
    bias_stages: int = 1  # buffers of the bias
    mask_stages: int = 1  # buffers of the mask
    mask_row_bytes: int = SWIZZLE_BYTES  # bytes of a row of a mask's tile in shared memory
    teams: int = 1  # groups of warpgroups with tiles and shared memory of their own
    follows_every_maximum: bool  # `Sm90Tile.exact`
    keys_in_reverse: bool = False
    query_steps_in_registers: int = 0
    pair: int = 1
    early_draws: int = 0
    waits_after_powers: bool = False
    early_powers: int = 0  # powers that a thread computes before it waits for the last product with values
    has_bias_tiles: bool = False  # TMA loads the bias; else it is read element by element
    has_mask_tiles: bool = False  # TMA loads the mask; else its rows are read from global memory
    bounded_scores: bool = False  # softcap bounds the scores so tightly that their powers need no maximum

    def queries_of_tile(self, problem: AttentionProblem) -> int:
        """Queries whose tiles a thread block, or a cluster, computes together."""
        return self.block_m // problem.group_size if self.packs_heads else self.block_m * self.pair

    def num_heads(self, problem: AttentionProblem) -> int:
        """The number of heads of which each has tiles of its own."""
        return problem.num_heads_kv if self.packs_heads else problem.num_heads_q


class Asked(NamedTuple):
    """All that the table knows of a problem."""

    dtype: str
    bias_dtype: str | None
    flags: tuple[str, ...]  # a subset of `FLAGS`
    words: frozenset[str]  # what it is like, in words of `tiles`


def leaves_registers(tile: Sm90Tile, words: frozenset[str]) -> bool:
    """Return True if a tile leaves registers to load pages with, and to the rows of several heads, if there are any."""
    is_full = tile.query_steps_in_registers > 0 or tile.block_m > _MOST_PLAIN_ROWS
    return words.isdisjoint((HEADS, PAGES)) or not is_full


def leaves_registers_to_heads(record: Record[Sm90Tile]) -> bool:
    """Return True if the tile of a record, without options, leaves registers to rows of several heads."""
    tile = record.tile
    numbers_of_row = tile.block_n * 3 // 2 + record.head_dim_v
    few = tile.block_m <= _MOST_PLAIN_ROWS or numbers_of_row * ROWS_OF_WARPGROUP <= _MOST_NUMBERS * WARPGROUP
    return few and tile.block_m <= _MOST_ROWS_OF_HEADS and tile.query_steps_in_registers == 0


def may_split_keys(config: Sm90ForwardConfig) -> bool:
    """Return True if the thread that hands out work has registers to split the keys of its tiles.

    It counts queries of several heads, bounds of a window, and splits in 32 registers where tiles have many rows.
    """
    return not (config.packs_heads and config.has_window and config.block_m > _MOST_PLAIN_ROWS)


def config_of(record: Record[Sm90Tile], asked: Asked) -> Sm90ForwardConfig:
    """The configuration of a kernel with the tile of a record."""
    tile, (dtype, bias_dtype, flags, words) = record.tile, asked
    plain_scores, has_pages, packs_heads = PLAIN_SCORES in words, PAGES in words, HEADS in words
    bias_tiles, mask_tiles = BIAS_TILES in words, MASK_TILES in words
    options = without_window(flags)
    consumers, teams = tile.block_m // ROWS_OF_WARPGROUP + tile.alone, 1 + (tile.alone > 0)
    more_to_load = "has_block_mask" in options or options in ({"has_mask"}, {"has_bias"})
    registers = _PAGES_TO_LOAD if has_pages else MORE_TO_LOAD if more_to_load else REGISTERS
    producer_registers, consumer_registers = registers[consumers]
    row_bytes, row_bytes_v = (whole_rows(HALF_BYTES * d) for d in (record.head_dim, record.head_dim_v))
    most_bytes = SMEM_BYTES // teams
    queries = tile.block_m * row_bytes
    smem_bytes = queries + tile.stages * tile.block_n * (row_bytes + row_bytes_v) + SMEM_BESIDE_TILES
    if plain_scores and options == {"has_alibi"} and not packs_heads:
        # Products with columns' numbers need a row of 16 bytes a column, and read eight rows behind them.
        smem_bytes += -((tile.block_n + 8) * 16 // -SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    mask_row_bytes = _mask_row_bytes(tile.block_n)
    mask_bytes = tile.block_m * mask_row_bytes if mask_tiles else 0
    bias_bytes = tile.block_m * whole_rows(tile.block_n * ELEMENT_BYTES_OF[bias_dtype or dtype]) if bias_tiles else 0
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
        entry=record.entries[0],
        query_stages=query_stages,
        packs_heads=packs_heads,
        has_pages=has_pages,
        staging_panels=staging_panels,
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
        bounded_scores=BOUNDED in words and not tile.keeps_maxima,
        plain_scores=plain_scores and not {"has_softcap", "has_bias", "has_score_mod"} & set(flags),
        smem_bytes=teams * smem_bytes,
        **common(Sm90ForwardConfig, dtype, bias_dtype, flags, record, tile),
    )


def _mask_row_bytes(block_n: int) -> int:
    """Bytes of a row of a mask's tile in shared memory, so that TMA swizzles rows or they lie in different banks."""
    return block_n if block_n == SWIZZLE_BYTES or block_n // ALIGNMENT % 2 else block_n + ALIGNMENT
