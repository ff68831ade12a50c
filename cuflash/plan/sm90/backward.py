"""The table of Hopper's own backward kernels on 16 bits (wgmma, TMA), and when they run.

`backward_tiles` has the records; this module chooses among them and makes their kernels' configurations.
"""

from __future__ import annotations

from dataclasses import replace

from cuflash import hardware
from cuflash.hardware import (
    ALIGNMENT,
    FLOAT_BYTES,
    HALF_BYTES,
    PANEL,
    ROWS_OF_WARPGROUP,
    SWIZZLE_BYTES,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan.config import (
    KNOWN_TO_ALL,
    OF_RULES,
    are_products,
    common,
    flags_of,
    not_taken,
    with_rules,
    without_window,
)
from cuflash.plan.record import HOPPER, Record, candidates, of_own_columns
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90.backward_config import Sm90BackwardConfig, with_dslopes
from cuflash.plan.sm90.backward_tiles import (
    BIAS_BY_ELEMENTS,
    IN_ORDER,
    MASK_BY_ELEMENTS,
    NARROW,
    NARROW_TABLE,
    SHORT,
    SIGNED,
    WIDE,
    WIDE_TABLE,
    Sm90BackwardTile,
)
from cuflash.plan.sm90.config import SMEM_BESIDE_TILES
from cuflash.plan.sm90.forward import Layout, has_vectors
from cuflash.plan.sm90.order import queries_seen
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that these kernels know
# ROWS runs before the main kernel and prepares what that loads of each query. DQ runs last and writes dq from sums.
ROWS, DQ = "backward_sm90_rows", "backward_sm90_dq"
FEW_SEEN = 4096  # most queries that see a key where they are few
_FEWEST_NARROW = SWIZZLE_BYTES // FLOAT_BYTES  # columns with which a warp's part of dq has room for rows of dk and dv
_GROUP_OF_DRAWS = 16  # queries whose random bits are drawn at once
# A tile's dq has so many sums where additions have an order, so that an addition waits for the last but one. With a
# diagonal few wait, and one sum is enough.
_DQ_SUMS = 2

# Predicted times are that of a tile's loads, which its rows share, and these of a step, chosen so that records keep
# their order: the wait for queries, which buffers of them share, and the additions to dq, which a pair shares.
_WAIT, _ADDITIONS = 1e-3, 1e-3


def _buffers(record: Record[Sm90BackwardTile], asked: set[str]) -> dict[str, int]:
    """Return the buffers and parts of a record's kernel, and its shared memory, by the configuration's fields."""
    tile, bias_tiles = record.tile, "has_bias" in asked
    row_bytes, row_bytes_v = (whole_rows(HALF_BYTES * d) for d in (record.head_dim, record.head_dim_v))
    query_bytes = tile.query_stages * (row_bytes + FLOAT_BYTES) + tile.dout_stages * (row_bytes_v + FLOAT_BYTES)
    query_bytes += tile.ds_stages * tile.block_n * HALF_BYTES
    is_wide = WIDE in record.entries
    if is_wide:
        consumers, dq_pieces, dq_columns = 3, -(-record.head_dim // PANEL), PANEL
        exchanged = tile.block_m * tile.block_n * FLOAT_BYTES  # warpgroups exchange the weights
    else:
        consumers = dq_pieces = tile.block_n // ROWS_OF_WARPGROUP
        # Each warpgroup computes dq of queries of its own, or of panels of columns.
        by_queries = tile.block_m > ROWS_OF_WARPGROUP
        dq_columns = record.head_dim if by_queries else -(-record.head_dim // (consumers * PANEL)) * PANEL
        exchanged = dq_pieces * ROWS_OF_WARPGROUP * dq_columns * FLOAT_BYTES
    # The room that is left holds one more tile of keys or, where additions wait for their order, one more part of dq.
    key_stages = 1 if IN_ORDER in asked or bias_tiles else tile.key_stages
    dq_stages = 1 if is_wide or key_stages > 1 or tile.query_stages > 2 or bias_tiles else 2
    if bias_tiles:
        query_bytes += tile.query_stages * tile.block_n * HALF_BYTES
    smem_bytes = (
        tile.block_n * (key_stages * row_bytes + row_bytes_v) + tile.block_m * query_bytes + dq_stages * exchanged
    )
    # A pair needs room for the keys of both thread blocks, and for gradients of the other's scores.
    smem_bytes += (tile.pair - 1) * tile.block_n * (row_bytes + (tile.ds_stages + 1) * tile.block_m * HALF_BYTES)
    smem_bytes += SMEM_BESIDE_TILES * tile.query_stages // 2  # each stage has barriers and steps
    if is_wide and asked >= {IN_ORDER, "has_block_mask"}:
        smem_bytes += SMEM_BESIDE_TILES  # the places in the order, and the mask's slots
    return {
        "consumers": consumers,
        "key_stages": key_stages,
        "dq_stages": dq_stages,
        "dq_pieces": dq_pieces,
        "dq_columns": dq_columns,
        "smem_bytes": smem_bytes,
    }


def _predicted(record: Record[Sm90BackwardTile]) -> float:
    tile = record.tile
    return 1 / tile.block_m + 1 / tile.block_n + _WAIT / tile.query_stages + _ADDITIONS / tile.pair


def _asked(problem: AttentionProblem, bias_tiles: bool, mask_vectors: bool) -> set[str]:
    """Return what of a problem takes registers, or a record of its own."""
    asked = without_window(flags_of(problem))
    if "has_bias" in asked and not bias_tiles:
        asked = asked - {"has_bias"} | {BIAS_BY_ELEMENTS}
    if "has_mask" in asked and not mask_vectors:
        asked = asked - {"has_mask"} | {MASK_BY_ELEMENTS}
    in_window = "has_window" in flags_of(problem)
    regimes = {IN_ORDER: problem.deterministic, SHORT: in_window and queries_seen(problem) <= FEW_SEEN}
    return asked | {regime for regime, holds in regimes.items() if holds}


def _chosen(
    problem: AttentionProblem, bias_tiles: bool = False, mask_vectors: bool = True
) -> tuple[set[str], tuple[Record[Sm90BackwardTile], ...]]:
    """Return what of a problem takes registers, and its records, where TMA can load the bias and a mask has vectors."""
    asked = _asked(problem, bias_tiles, mask_vectors)

    def fits(record: Record[Sm90BackwardTile]) -> bool:
        signed = WIDE in record.entries and asked >= SIGNED
        return not signed and _buffers(record, asked)["smem_bytes"] <= hardware.SMEM_BYTES

    lines = [
        line
        for table, fewest in ((NARROW_TABLE, _FEWEST_NARROW), (WIDE_TABLE, PANEL))
        for line in of_own_columns(table, problem.head_dim, problem.head_dim_v, fewest)
    ]
    found = candidates(lines, asked, HOPPER, fits, _predicted)
    # No tile of the widest head dims leaves room for tiles of a bias.
    return (asked, found) if found or not bias_tiles else _chosen(problem, False, mask_vectors)


def _config_of(
    record: Record[Sm90BackwardTile], problem: AttentionProblem, asked: set[str], writes_dbias: bool = False
) -> Sm90BackwardConfig:
    flags, in_order, is_narrow = flags_of(problem), IN_ORDER in asked, NARROW in record.entries
    constants = common(Sm90BackwardConfig, problem.dtype, problem.bias_dtype, flags, record, record.tile)
    constants |= _buffers(record, asked)
    config = Sm90BackwardConfig(
        entry=record.entries[0],
        dq_sums=_DQ_SUMS if in_order and not flags else 1,
        early_draws=_early_draws(record, flags),
        deterministic=in_order,
        first_addition_stores=in_order or is_narrow,
        ping_pong=is_narrow,
        plain_scores=are_products(flags),
        has_bias_tiles="has_bias" in asked,
        has_mask_vectors="has_mask" in asked,
        writes_dbias=writes_dbias and is_narrow and "has_bias" in asked,
        **constants,
    )
    return with_rules(config, problem)


def _early_draws(record: Record[Sm90BackwardTile], flags: tuple[str, ...]) -> int:
    """Groups of queries whose random bits the registers hold, for `Sm90BackwardConfig.early_draws`."""
    groups = record.tile.block_m // _GROUP_OF_DRAWS
    if WIDE in record.entries and record.head_dim > 128 and without_window(flags) > {"has_dropout"}:
        return 0
    return groups - 2 if record.tile.block_m > ROWS_OF_WARPGROUP and "has_window" in flags else groups


def obstacle(problem: AttentionProblem) -> str:
    """Say why a problem's backward pass cannot take the Hopper kernel; empty if it can."""
    if sm90_forward.inputs_obstacle(problem):
        return sm90_forward.inputs_obstacle(problem)
    if not_taken(HANDLES, problem):
        return f"no kernel with {not_taken(HANDLES, problem)}"
    # Scores that a bound below this one caps have weights of 1 +- 2^-22, which do not tell the gradient of tanh.
    if 0 < problem.softcap < sm90_forward.SMALLEST_BOUND:
        return f"softcap is below {sm90_forward.SMALLEST_BOUND}"
    if problem.head_dim * HALF_BYTES % ALIGNMENT or problem.head_dim_v * HALF_BYTES % ALIGNMENT:
        return f"rows of head dims {problem.head_dim} and {problem.head_dim_v} are no multiples of {ALIGNMENT} bytes"
    return (
        ""
        if _chosen(problem)[1]
        else f"no kernel for head dims {problem.head_dim}, {problem.head_dim_v} and these options"
    )


@kept
def backward(
    problem: AttentionProblem,
    layouts: tuple[Layout, ...],
    bias: Layout | None = None,
    dbias: Layout | None = None,
    mask: Layout | None = None,
    dslopes: bool = False,
) -> tuple[Sm90BackwardConfig, ...]:
    """The candidates for the Hopper kernels on arrays of these `layouts` (strides in bytes, shape), the fastest first.

    Their addresses, and those of `bias`, `mask` and a wanted `dbias`, are multiples of 16 bytes. With `dslopes` the
    gradient of ALiBi's slopes is wanted, which those candidates add up that can.
    """
    if obstacle(problem) or not all(sm90_forward.expressible(*layout) for layout in layouts):
        return ()
    in_tiles = problem.bias_dtype in HALF_DTYPES and not problem.packed and has_vectors(bias, HALF_BYTES)
    in_tiles = in_tiles and problem.rules.score is None
    in_vectors = has_vectors(mask, 1) and mask is not None and mask[1][-1] % ALIGNMENT == 0
    asked, found = _chosen(problem, in_tiles, in_vectors)
    writes = _is_whole(problem) and has_vectors(dbias, HALF_BYTES)
    writes = writes and not problem.block_mask and not problem.softcap  # softcap changes ds
    configs = tuple(_config_of(record, problem, asked, writes) for record in found)
    return tuple(map(with_dslopes, configs)) if dslopes else configs


def writing_dq(problem: AttentionProblem, config: Sm90BackwardConfig) -> tuple[Sm90BackwardConfig, ...]:
    """Return the candidates in place of one: where a tile of keys, or a pair's two, has all keys, steps can write dq.

    Rows of padding, and tiles of queries that a block mask leaves without keys, need the kernel that clears them.
    """
    others = problem.packed or problem.q_lengths or config.has_block_mask
    return (config,) if problem.seqlen_k > config.keys or others else (replace(config, writes_dq=True), config)


def _is_whole(problem: AttentionProblem) -> bool:
    """Return True if the gradient of a bias has one element for each score, and its rows are vectors of 16 bytes."""
    scores = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    vectors = problem.seqlen_k * HALF_BYTES % ALIGNMENT == 0
    return problem.bias == scores and problem.bias_dtype == problem.dtype and vectors
