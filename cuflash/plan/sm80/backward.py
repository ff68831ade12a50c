"""The configurations of the backward kernels by mma.sync on 16 bits (sm_75 and later), and when they run.

Kernels whose thread blocks stay with keys compute dq, dk, dv and the slopes' gradient (`backward`). Those whose thread
blocks stay with queries compute the rest: dq with repeating bits under a block mask and, with it or with options
with which the former cannot, the slopes' gradient (`of_queries`), and a bias's gradient (`of_bias`). `tiles` has
the records of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, ROWS_OF_WARP, WARP
from cuflash.kept import kept
from cuflash.plan.config import FLAGS, KNOWN_TO_ALL, OF_RULES, are_products, flags_of, not_taken, with_rules
from cuflash.plan.record import HOPPER, Place, Record, asked_of, candidates, narrowest
from cuflash.plan.sm80 import alone as sm80_alone
from cuflash.plan.sm80 import times as sm80_times
from cuflash.plan.sm80 import wide as sm80_wide
from cuflash.plan.sm80.forward import (
    SMEM_BESIDE_TILES,
    Sm80Config,
    Sm80QueryConfig,
    constants,
    dtypes,
    fits,
    meets_whole_blocks,
    query_configs,
)
from cuflash.plan.sm80.tiles import (
    ALONE,
    BACKWARD,
    BIAS,
    IN_CLUSTERS,
    MAIN,
    OF_BIAS,
    OF_QUERIES,
    ORDERED_DQ,
    Sm80BackwardTile,
    Sm80Tile,
)
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.rules.form import NO_RULES

__all__ = ["BIAS", "DQ", "MAIN", "ORDERED_DQ", "ROWS"]
# The flags that these kernels know: those for gradients of scores, for dq in the order of keys, for a bias's gradient.
HANDLES = (*KNOWN_TO_ALL, *OF_RULES)
# Thread blocks that share a multiprocessor are faster where a tile of keys meets at most so many queries.
_SHORT = 1024
_ROW_WARPS = 4  # most warps of a thread block of the kernel before the gradients
# A kernel whose tile has all keys is launched alone. Its thread blocks visit tiles of queries one after the other, so
# that three launches with more thread blocks are faster where these have more elements of queries. On an H200 a tile
# takes 8 to 10 us, two take 14, four of head dim 64 take 19 and four of head dim 160 take 33; three launches take 20.
_MOST_ELEMENTS_ALONE = 1 << 14
_PIECE_COLUMNS = WARP  # columns of a piece of a sum, which thread blocks of a cluster exchange
# GPUs from this capability on add to global memory by vectors of four floats, or in bulk out of shared memory.
_LARGE_ADDS = HOPPER
ROWS, DQ = "backward_sm80_rows", "backward_sm80_dq"


@dataclass(frozen=True, kw_only=True)
class Sm80BackwardConfig(Sm80Config):
    """The configuration of a kernel of the backward pass."""

    dq_fragments: int  # see `sm80.tiles.Sm80BackwardTile`
    query_warps: int
    query_passes: int
    vector_adds: bool  # one instruction adds four floats of dq to global memory
    bulk_adds: bool  # see `sm80.tiles.Sm80BackwardTile`
    dq_buffer: bool
    computes_dk: bool  # the kernel computes dk, and dq with it
    computes_dv: bool
    deterministic: bool  # tiles of keys add to dq in a fixed order
    writes_dslopes: bool = False  # the kernel, which computes dk, adds up the gradient of ALiBi's slopes
    order_counters: int = 8  # of a query tile, which keep this order: one for each warp, at most
    all_keys: bool = False  # a tile has all keys of its head: its thread block computes delta, and writes dq itself
    cluster_keys: int = 1  # see `sm80.tiles.Sm80BackwardTile`
    cluster_queries: int = 1
    adds_apart: bool = False

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster_keys * self.cluster_queries


def _smem_bytes(tile: Sm80BackwardTile, row: Record[Sm80BackwardTile], computes_dk: bool) -> int:
    of_key = row.head_dim + (row.head_dim_v if computes_dk else 0)
    of_query = tile.stages * (HALF_BYTES * (row.head_dim + row.head_dim_v) + 2 * FLOAT_BYTES)
    # Warps with the same keys share weights through shared memory, as they do gradients of scores.
    weights = tile.query_warps > 1 and (tile.together or not computes_dk)
    of_score = HALF_BYTES * (weights + (tile.stages if computes_dk else 0))
    of_query += tile.block_n * of_score + (FLOAT_BYTES * row.head_dim if tile.dq_buffer else 0)
    elements = tile.block_n * HALF_BYTES * of_key + tile.block_m * of_query
    return elements + _sum_bytes(tile, row) + SMEM_BESIDE_TILES


def _sum_bytes(tile: Sm80BackwardTile, row: Record[Sm80BackwardTile]) -> int:
    """Return the shared memory by way of which a cluster's thread blocks add up pieces of sums."""

    def of_pieces(blocks: int, rows: int, columns: int) -> int:
        pieces = rows // ROWS_OF_WARP * (columns // _PIECE_COLUMNS)
        return math.ceil(pieces / blocks) * blocks * ROWS_OF_WARP * _PIECE_COLUMNS * FLOAT_BYTES if blocks > 1 else 0

    columns = max(row.head_dim, row.head_dim_v) if tile.adds_apart else row.head_dim + row.head_dim_v
    of_keys = of_pieces(tile.cluster_queries, tile.block_n, columns)
    return max(of_pieces(tile.cluster_keys, tile.block_m, row.head_dim), of_keys)


def of_rows(config: Sm80BackwardConfig, entry: str) -> Sm80BackwardConfig:
    """The kernel ROWS before that of `config`, or DQ behind it.

    ROWS has at most `_ROW_WARPS` warps, as in larger thread blocks its reads wait for others.
    """
    constant: dict[str, Any] = {"bias_element": config.element, **dict.fromkeys(FLAGS, False)}
    constant |= {"rules": NO_RULES, "rule_in_blocks": False}
    constant |= dict.fromkeys(("plain_scores", "computes_dk", "computes_dv"), True)
    num_warps = min(config.num_warps, _ROW_WARPS) if entry == ROWS else config.num_warps
    writes_dslopes = config.writes_dslopes and entry == ROWS
    return replace(config, entry=entry, num_warps=num_warps, writes_dslopes=writes_dslopes, **constant)


def with_dslopes(config: Sm80BackwardConfig) -> Sm80BackwardConfig:
    """Return the configuration of a kernel that adds up the slopes' gradient, or the same one where it cannot.

    That gradient comes from those of scores before softcap's derivative, which with a rule is the rule's.
    """
    writes = config.has_alibi and config.computes_dk and not (config.has_softcap and config.has_score_mod)
    return replace(config, writes_dslopes=writes)


def _is_short(problem: AttentionProblem) -> bool:
    rows = problem.seqlen_q // max(problem.batch, 1) if problem.packed else problem.seqlen_q
    seeing = rows // 2 if problem.window_right is not None else rows
    return seeing * problem.group_size <= _SHORT


@kept
def backward(
    problem: AttentionProblem, *place: Any, dslopes: bool = False
) -> tuple[tuple[Sm80BackwardConfig, ...], ...]:
    """The candidates for the kernels for dq, dk and dv, the fastest first; none where mma.sync does not take a problem.

    `place` has the fields of `Place`. With `dslopes` they add up the gradient of ALiBi's slopes, where they can.
    """
    is_short = _is_short(problem)

    def takes(record: Record[Sm80BackwardTile]) -> bool:
        tile = record.tile
        adds = Place(*place).capability >= _LARGE_ADDS or not tile.bulk_adds
        return adds and (is_short or not tile.short)

    found = _candidates(problem, Place(*place), BACKWARD, takes, sm80_times.of_keys)
    return tuple(tuple(map(with_dslopes, configs)) for configs in found) if dslopes else found


@kept
def all_keys(problem: AttentionProblem, *place: Any, num_sms: int) -> tuple[tuple[Sm80BackwardConfig, ...], ...]:
    """The candidates for the only kernel where a tile, or a cluster's tiles, have all keys, the fastest first.

    There are none where others are faster. Bits repeat without an order of additions, because each result is one thread
    block's, or is added up in the order of a cluster's. `place` has the fields of `Place`.
    """
    if problem.packed or problem.block_mask or problem.is_empty:
        return ()
    problem = replace(problem, deterministic=False)
    capability = Place(*place).capability
    table = (*ALONE, *IN_CLUSTERS) if capability >= HOPPER else ALONE

    def time(record: Record[Sm80BackwardTile]) -> float:
        return sm80_alone.time_of(problem, record, num_sms)

    def takes(record: Record[Sm80BackwardTile]) -> bool:
        tile = record.tile
        if tile.cluster > 1 or record not in ALONE:
            return sm80_alone.is_faster(problem, record, num_sms)
        tiles, waves = sm80_alone.steps_of(problem, tile.block_m), sm80_alone.waves_of(problem, tile, num_sms)
        is_fast = tiles * tile.block_m * record.head_dim <= _MOST_ELEMENTS_ALONE
        if waves > 1:  # a thread block has to hide what another waits for
            is_fast &= tiles == 1 and tile.min_blocks > 1
        # Hopper's own kernels take few launches, and zeros of queries that see no key may take long.
        if (capability >= HOPPER and waves == 1) or sm80_alone.hidden_tiles_of(problem, tile.block_m):
            is_fast &= sm80_alone.beats_others(problem, record, num_sms)
        return is_fast

    lines = tuple(sm80_alone.clustered(table, problem.seqlen_k, capability))
    return _alone(_candidates(problem, Place(*place), lines, takes, time))


def of_cluster(
    problem: AttentionProblem, *place: Any, record: Record[Sm80BackwardTile]
) -> tuple[tuple[Sm80BackwardConfig, ...], ...]:
    """The kernel of one record, with its cluster, whatever its time; none where the problem cannot take it."""
    return _alone(_candidates(problem, Place(*place), (record,), lambda _: True, lambda _: 0.0))


def _alone(found: tuple[tuple[Sm80BackwardConfig, ...], ...]) -> tuple[tuple[Sm80BackwardConfig, ...], ...]:
    return tuple((replace(config, all_keys=True),) for (config,) in found)


def _candidates(
    problem: AttentionProblem,
    place: Place,
    table: tuple[Record[Sm80BackwardTile], ...],
    takes: Callable[[Record[Sm80BackwardTile]], bool],
    time: Callable[[Record[Sm80BackwardTile]], float],
) -> tuple[tuple[Sm80BackwardConfig, ...], ...]:
    if problem.dtype not in dtypes(place.capability) or not_taken(HANDLES, problem):
        return ()
    keys_of_block = problem.block_size[1]

    def fitting(record: Record[Sm80BackwardTile]) -> bool:
        tile = record.tile
        has_room = fits(tile.min_blocks, _smem_bytes(tile, record, True), place.limit)
        return has_room and meets_whole_blocks(tile.block_n, keys_of_block) and takes(record)

    def config_of(record: Record[Sm80BackwardTile], computes_dk: bool, computes_dv: bool) -> Sm80BackwardConfig:
        config = Sm80BackwardConfig(
            entry=MAIN,
            vector_adds=place.capability >= _LARGE_ADDS,
            plain_scores=are_products(flags_of(problem)),
            computes_dk=computes_dk,
            computes_dv=computes_dv,
            deterministic=bool(problem.deterministic and not problem.block_mask),
            smem_bytes=_smem_bytes(record.tile, record, computes_dk),
            **constants(Sm80BackwardConfig, record, problem, place),
        )
        return with_rules(config, problem)

    def of_record(record: Record[Sm80BackwardTile]) -> tuple[Sm80BackwardConfig, ...]:
        passes = ((True, True),) if record.tile.together else ((True, False), (False, True))
        return tuple(config_of(record, *computes) for computes in passes)

    lines = narrowest(table, problem.head_dim, problem.head_dim_v)
    found = candidates(lines, asked_of(problem, place), place.capability, fitting, time)
    return tuple(dict.fromkeys(map(of_record, found)))


def _smem_of_queries(tile: Sm80Tile, row: Record[Sm80Tile]) -> int:
    rows = tile.block_m + tile.stages * tile.block_n
    # There is room for lse and delta of a tile, which a kernel that iterates over queries loads with them.
    vectors = tile.stages * tile.block_n * 2 * FLOAT_BYTES
    return rows * HALF_BYTES * (row.head_dim + row.head_dim_v) + vectors + SMEM_BESIDE_TILES


@kept
def of_queries(problem: AttentionProblem, *place: Any) -> tuple[Sm80QueryConfig, ...]:
    """The candidates for the kernel that adds dq in the order of keys; `place` has the fields of `Place`."""
    return query_configs(problem, Place(*place), OF_QUERIES, HANDLES, _smem_of_queries)


def _smem_of_bias(tile: Sm80Tile, row: Record[Sm80Tile]) -> int:
    columns = tile.stages * Sm80QueryConfig.chunk if tile.stages > 1 else row.head_dim + row.head_dim_v
    return (tile.block_m + tile.block_n) * columns * HALF_BYTES + SMEM_BESIDE_TILES


@kept
def of_bias(problem: AttentionProblem, *place: Any) -> tuple[Sm80QueryConfig, ...]:
    """The candidates for the gradient of a bias of any shape; `place` has the fields of `Place`."""
    configs = query_configs(replace(problem, bias=None), Place(*place), OF_BIAS, HANDLES, _smem_of_bias)
    with_bias = (replace(config, has_bias=True, plain_scores=False) for config in configs)
    return tuple(with_bias) or sm80_wide.of_bias(problem, *place)
