"""Rows of the table for Hopper's own backward kernels (wgmma, TMA), and when they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cuflash import hardware
from cuflash.hardware import (
    ALIGNMENT,
    FLOAT_BYTES,
    HALF_BYTES,
    L2_BYTES,
    PANEL,
    ROWS_OF_WARPGROUP,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan import sm90_forward
from cuflash.plan.config import (
    FLAGS,
    KNOWN_TO_ALL,
    are_products,
    beside_window,
    common,
    flags_of,
    unknown,
)
from cuflash.plan.sm90_forward import DTYPES, SMEM_BESIDE_TILES, HopperConfig, Layout, has_vectors
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = KNOWN_TO_ALL
# Every warpgroup has 64 keys, or (wide heads) they compute dv, dk and dq of 64 keys.
NARROW, WIDE = "backward_sm90", "backward_sm90_wide"
# Before and behind them: what they load of each query, and dq from its sum.
ROWS, DQ = "backward_sm90_rows", "backward_sm90_dq"
# Registers of a thread of the loading warpgroup, of those that compute (WIDE: for dv; dk's has the rest), and for dq.
_REGISTERS = {NARROW: (24, 240, 0), WIDE: (48, 200, 64)}
_REGISTERS_WITH_OPTIONS, _REGISTERS_OF_PAIR = (96, 176, 64), (64, 192, 64)
_REGISTERS_OF_WIDEST = (32, 208, 64)  # with dropout or a mask beside another option
# The same with a bias, and with softcap beside dropout.
_REGISTERS_OF_BIAS, _REGISTERS_OF_CAPPED = (32, 216, 64), (24, 216, 64)
# The loading warp asks arrays for hidden keys; of NARROW all three.
_REGISTERS_OF_SEVERAL, _REGISTERS_OF_ARRAYS = {NARROW: (40, 232, 0), WIDE: (64, 208, 64)}, (48, 224, 0)
_GROUP_OF_DRAWS = 16  # queries
# Of dq where they have an order: an addition waits for the last but one. With a diagonal few wait, and one is enough.
_DQ_SUMS = 2

_ROW_WARPGROUPS = 7  # of the kernels around them
_SHORT = 4096  # queries that see a key


@dataclass(frozen=True)
class Row:
    """Tiles for head dims up to these, and how many of each are under way."""

    entry: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    query_stages: int
    dout_stages: int
    ds_stages: int
    key_stages: int = 1  # of keys; values have one

    def holds(self, problem: AttentionProblem) -> bool:
        """Whether it is wide enough."""
        return problem.head_dim <= self.head_dim and problem.head_dim_v <= self.head_dim_v


# The first row that is wide enough is taken. Numbers: head dims, block_m, block_n, stages of queries, dout, ds, keys.
BACKWARD = (
    Row(NARROW, 64, 64, 128, 128, 2, 2, 2),
    Row(NARROW, 96, 96, 64, 128, 2, 2, 2, 2),
    Row(NARROW, 128, 128, 64, 128, 2, 2, 2, 2),
    Row(WIDE, 192, 128, 64, 64, 2, 2, 2),
    Row(WIDE, 192, 192, 64, 64, 2, 2, 2),
    Row(WIDE, 256, 256, 64, 64, 2, 2, 2),
)


# With softcap, a bias that TMA brings, or a mask that is read in vectors (not where sums have an order: registers).
_FEW_QUERIES = Row(NARROW, 64, 64, 64, 128, 2, 2, 2)
WITH_ONE_OPTION = (_FEW_QUERIES, *BACKWARD[1:])
# With options that take registers.
WITH_OPTIONS = (_FEW_QUERIES, Row(WIDE, 128, 128, 64, 64, 2, 2, 2), *BACKWARD[3:])
_WITH_BIAS_TILES = (*WITH_ONE_OPTION[:-1], WITH_OPTIONS[1])  # which have room
# A third tile of queries: those that a block mask picks come from farther away, and half hidden steps are passed over.
_WITH_SHORT_WALKS = (*BACKWARD[:2], Row(NARROW, 128, 128, 64, 128, 3, 3, 2), *BACKWARD[3:])
_ARRAYS = {"has_bias", "has_mask", "has_block_mask"}


@dataclass(frozen=True, kw_only=True)
class Config(HopperConfig):
    """The kernels of one backward pass."""

    query_stages: int
    dout_stages: int
    ds_stages: int
    key_stages: int
    dq_stages: int  # of each part
    dq_parts: int  # of a tile's dq: queries, or columns
    dq_columns: int
    pair: int  # thread blocks that compute dq by turns
    dq_sums: int  # of a tile of queries, which take additions by turns where they have an order
    dq_registers: int
    early_draws: int  # groups of 16 queries whose random bits are drawn before their weights are known
    holds_draws: bool  # behind the start of the products
    deterministic: bool  # sums of dq have an order
    stores_first: bool  # the first part of a sum of dq is stored, so that nobody clears it
    has_bias_tiles: bool  # TMA brings the bias; else it is read element by element
    has_mask_vectors: bool  # a mask is read 16 keys at a time; else element by element
    writes_dbias: bool  # of the scores' whole shape

    @property
    def of_rows(self) -> Config:
        """The kernels before and behind, with stages of their own (cuda_src/sm90/backward_rows.cu)."""
        known = {"has_bias", "has_window"} if self.writes_dbias else {"has_bias"}
        flags: dict[str, Any] = {flag: getattr(self, flag) and flag in known for flag in FLAGS}
        of_stage = 2 * self.block_m * whole_rows(HALF_BYTES * self.head_dim_v)
        room, consumers = hardware.SMEM_BYTES - SMEM_BESIDE_TILES, _ROW_WARPGROUPS
        stages = room // of_stage
        stages -= stages % min(stages, consumers)
        of_sums = self.dq_sums * ROWS_OF_WARPGROUP * self.dq_columns * FLOAT_BYTES
        sum_stages = room // of_sums // consumers * consumers
        return replace(
            self,
            block_n=self.block_n if self.writes_dbias else ROWS_OF_WARPGROUP,
            consumers=consumers,
            producer_registers=0,
            consumer_registers=0,
            dq_registers=0,
            early_draws=0,
            holds_draws=False,
            query_stages=sum_stages,
            dout_stages=stages,
            key_stages=1,
            dq_stages=1,
            pair=1,
            smem_bytes=hardware.SMEM_BYTES,
            plain_scores=True,
            has_bias_tiles=False,
            has_mask_vectors=False,
            **flags,
        )

    @property
    def dq_tile(self) -> int:
        """Elements of a tile in the sum of dq (cuda_src/sm90/gradient_rows.cuh)."""
        return self.dq_parts * ROWS_OF_WARPGROUP * self.dq_columns


def backward_config(
    row: Row,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    deterministic: bool = False,
    bias_tiles: bool = False,
    mask_vectors: bool = False,
) -> Config:
    """The configuration of one backward pass; `flags` is a subset of `FLAGS`."""
    row_bytes, row_bytes_v = (whole_rows(HALF_BYTES * d) for d in (row.head_dim, row.head_dim_v))
    of_query = row.query_stages * (row_bytes + FLOAT_BYTES) + row.dout_stages * (row_bytes_v + FLOAT_BYTES)
    of_query += row.ds_stages * row.block_n * HALF_BYTES
    if row.entry == WIDE:
        consumers, dq_parts, dq_columns = 3, -(-row.head_dim // PANEL), PANEL
        exchanged = row.block_m * row.block_n * FLOAT_BYTES  # the weights
    else:
        consumers = dq_parts = row.block_n // ROWS_OF_WARPGROUP
        # A warpgroup has queries of its own for dq, or panels of columns.
        by_queries = row.block_m > ROWS_OF_WARPGROUP
        dq_columns = row.head_dim if by_queries else -(-row.head_dim // (consumers * PANEL)) * PANEL
        exchanged = dq_parts * ROWS_OF_WARPGROUP * dq_columns * FLOAT_BYTES
    # The room that is left is for one more tile of keys, or part of dq, which an order of the sums waits for.
    key_stages = 1 if deterministic or bias_tiles else row.key_stages
    dq_stages = 2 if row.entry == NARROW and key_stages == 1 and row.query_stages == 2 and not bias_tiles else 1
    if bias_tiles:
        of_query += row.query_stages * row.block_n * HALF_BYTES
    smem_bytes = row.block_n * (key_stages * row_bytes + row_bytes_v) + row.block_m * of_query + dq_stages * exchanged
    # Additions of dq are what wide heads wait for. A pair needs room for the keys of both, and for gradients of the
    # other's scores. A bias that is read element by element leaves too few registers.
    of_other = row.block_n * (row_bytes + (row.ds_stages + 1) * row.block_m * HALF_BYTES)
    pair = 1
    alone = deterministic or "has_block_mask" in flags or ("has_bias" in flags and not bias_tiles)
    if row in BACKWARD and row.entry == WIDE and not alone:
        pair += smem_bytes + of_other + SMEM_BESIDE_TILES <= hardware.SMEM_BYTES
    smem_bytes += (pair - 1) * of_other
    smem_bytes += SMEM_BESIDE_TILES * row.query_stages // 2  # barriers and steps of each
    if deterministic and row.entry == WIDE and "has_block_mask" in flags:
        smem_bytes += SMEM_BESIDE_TILES  # turns and slots
    registers = _REGISTERS_OF_PAIR if pair > 1 else _REGISTERS[row.entry]
    options = beside_window(flags)
    arrays = options & _ARRAYS
    if (arrays and len(options) > 2) or (row.entry == NARROW and (len(arrays) > 1 or options > {"has_block_mask"})):
        of_all = row.entry == NARROW and arrays == _ARRAYS
        registers = _REGISTERS_OF_ARRAYS if of_all else _REGISTERS_OF_SEVERAL[row.entry]
    masks_in_order = deterministic and options == {"has_mask", "has_block_mask"}
    if row == BACKWARD[-1] and len(options) > 1:
        if "has_bias" in options:
            registers = _REGISTERS_OF_BIAS
        elif options >= {"has_softcap", "has_dropout"}:
            registers = _REGISTERS_OF_CAPPED
        elif options & {"has_mask", "has_dropout"} and not masks_in_order:
            registers = _REGISTERS_OF_WIDEST
    producer_registers, consumer_registers, dq_registers = (
        _REGISTERS_WITH_OPTIONS if row == WITH_OPTIONS[1] else registers
    )
    return Config(
        dq_stages=dq_stages,
        dq_parts=dq_parts,
        dq_columns=dq_columns,
        pair=pair,
        dq_sums=_DQ_SUMS if deterministic and not flags else 1,
        consumers=consumers,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
        dq_registers=dq_registers,
        early_draws=_early_draws(row, flags),
        holds_draws=False,
        deterministic=deterministic,
        stores_first=deterministic or row.entry == NARROW,
        ping_pong=row.entry == NARROW,
        plain_scores=are_products(flags),
        has_bias_tiles=bias_tiles,
        has_mask_vectors=mask_vectors,
        writes_dbias=False,
        smem_bytes=smem_bytes,
        **common(Config, dtype, bias_dtype, flags, replace(row, key_stages=key_stages)),
    )


def _early_draws(row: Row, flags: tuple[str, ...]) -> int:
    """As many as registers hold."""
    groups = row.block_m // _GROUP_OF_DRAWS
    if row.entry == WIDE and row.head_dim > 128 and beside_window(flags) > {"has_dropout"}:
        return 0
    return groups - 2 if row.block_m > ROWS_OF_WARPGROUP and "has_window" in flags else groups


def _options(problem: AttentionProblem) -> set[str]:
    return beside_window(flags_of(problem))


def _row(problem: AttentionProblem, bias_tiles: bool = False, mask_vectors: bool = False) -> Row | None:
    options = _options(problem)
    rows: tuple[Row, ...] = WITH_OPTIONS
    # Where sums have an order, registers hold no random bits.
    drops = options == {"has_dropout"} and not problem.deterministic
    if (drops or not (options or problem.deterministic)) and _has_short_walks(problem):
        rows = _WITH_SHORT_WALKS
    elif options <= {"has_alibi"} or drops:
        rows = BACKWARD
    elif options == {"has_block_mask"}:
        rows = WITH_ONE_OPTION if problem.deterministic else _WITH_SHORT_WALKS
    elif (
        options == {"has_softcap"}
        or (options == {"has_bias"} and bias_tiles)
        or (options == {"has_mask"} and mask_vectors and not problem.deterministic)
    ):
        rows = WITH_ONE_OPTION
    # For the rest registers are too few.
    if "has_bias" in options:
        capped = "has_softcap" in options and options & {"has_mask", "has_dropout"}
        dropped = "has_dropout" in options and options & {"has_mask", "has_alibi"}
        if len(options) > 3 or capped or (dropped and not bias_tiles and rows[0].holds(problem)):
            return None
    bias_and_blocks = {"has_bias", "has_block_mask"} <= options
    if (options & _ARRAYS and len(options) > 2) or (problem.deterministic and bias_and_blocks):
        rows = rows[:-1]
    return next((r for r in rows if r.holds(problem)), None)


def obstacle(problem: AttentionProblem) -> str:
    """Why a problem's backward pass cannot take the Hopper kernel; empty if it can."""
    if sm90_forward.inputs_obstacle(problem):
        return sm90_forward.inputs_obstacle(problem)
    if unknown(HANDLES, problem):
        return f"no kernel with {unknown(HANDLES, problem)}"
    # Of smaller scores a weight, 1 +- 2^-22, does not tell tanh again.
    if 0 < problem.softcap < sm90_forward.SMALLEST_BOUND:
        return f"softcap is below {sm90_forward.SMALLEST_BOUND}"
    if problem.head_dim * HALF_BYTES % ALIGNMENT or problem.head_dim_v * HALF_BYTES % ALIGNMENT:
        return f"rows of head dims {problem.head_dim} and {problem.head_dim_v} are no multiples of {ALIGNMENT} bytes"
    return (
        "" if _row(problem) else f"no kernel for head dims {problem.head_dim}, {problem.head_dim_v} and these options"
    )


@kept
def backward(
    problem: AttentionProblem,
    layouts: tuple[Layout, ...],
    bias: Layout | None = None,
    dbias: Layout | None = None,
    mask: Layout | None = None,
) -> Config | None:
    """The Hopper kernels for a problem on arrays of these `layouts`, or None.

    Their addresses, and those of `bias`, `mask` and a wanted `dbias`, are multiples of 16 bytes.
    """
    if obstacle(problem) or not all(sm90_forward.expressible(*layout) for layout in layouts):
        return None
    in_tiles = problem.bias_dtype in DTYPES and not problem.packed and has_vectors(bias, HALF_BYTES)
    in_vectors = has_vectors(mask, 1) and mask is not None and mask[1][-1] % ALIGNMENT == 0
    config = _config(problem, in_tiles, in_vectors)
    if config.has_mask and not config.has_mask_vectors and config.head_dim <= 128 and len(_options(problem)) > 1:
        return None  # slower than mma.sync
    whole = config.has_bias_tiles and config.entry == NARROW and _is_whole(problem) and has_vectors(dbias, HALF_BYTES)
    whole = whole and not problem.block_mask and not problem.softcap  # ds is no more that of scores
    return replace(config, writes_dbias=True) if whole else config


def _config(problem: AttentionProblem, bias_tiles: bool = False, mask_vectors: bool = False) -> Config:
    row = _row(problem, bias_tiles, mask_vectors)
    assert row is not None
    return backward_config(
        row,
        problem.dtype,
        problem.bias_dtype,
        flags_of(problem),
        bool(problem.deterministic),
        bias_tiles and row in _WITH_BIAS_TILES,
        mask_vectors,
    )


def _is_whole(problem: AttentionProblem) -> bool:
    """Whether dbias has one element for each score, and rows are vectors."""
    scores = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    vectors = problem.seqlen_k * HALF_BYTES % ALIGNMENT == 0
    return problem.bias == scores and problem.bias_dtype == problem.dtype and vectors


def reason(problem: AttentionProblem) -> str:
    """What the backward pass takes on Hopper, and why, in words."""
    if obstacle(problem):
        return f"{sm90_forward.OTHER_GPUS}: {obstacle(problem)}"
    config = _config(problem)
    return (
        f"wgmma and TMA, tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: {config.flags}; "
        f"{sm90_forward.OTHER_GPUS} where an address or a stride of an input is no multiple of 16 bytes"
    )


def table() -> Iterator[tuple[Config, str]]:
    """Every row in both dtypes, and the kernels around them."""
    around: dict[Config, str] = {}
    for config, dtype in dict.fromkeys(_of_scores()):
        yield config, dtype
        around |= {replace(config.of_rows, entry=entry): dtype for entry in (ROWS, DQ)}
    yield from around.items()


def _of_scores() -> Iterator[tuple[Config, str]]:
    for row, dtype in product(BACKWARD, DTYPES):
        for flags, deterministic in product(((), ("has_window",)), (False, True)):
            yield backward_config(row, dtype, None, flags, deterministic), dtype
    for row, dtype in product(BACKWARD, DTYPES):
        for flags in (("has_window", "has_alibi"), ("has_dropout",), ("has_window", "has_dropout")):
            yield backward_config(row, dtype, None, flags), dtype
    for row, dtype in product(_WITH_SHORT_WALKS, DTYPES):
        for flags in (("has_window",), ("has_window", "has_block_mask"), ("has_window", "has_dropout")):
            yield backward_config(row, dtype, None, flags), dtype
    for row, dtype, deterministic in product(WITH_ONE_OPTION, DTYPES, (False, True)):
        if row in _WITH_BIAS_TILES:
            config = backward_config(row, dtype, None, ("has_window", "has_bias"), deterministic, bias_tiles=True)
            yield replace(config, writes_dbias=row.entry == NARROW), dtype
        yield backward_config(row, dtype, None, ("has_window", "has_softcap"), deterministic), dtype
        if deterministic:
            yield backward_config(row, dtype, None, ("has_window", "has_block_mask"), True), dtype
        else:
            yield backward_config(row, dtype, None, ("has_window", "has_mask"), mask_vectors=True), dtype
    for row, dtype in product(WITH_OPTIONS, DTYPES):
        for options in (("has_softcap", "has_alibi", "has_dropout"), ("has_bias",), ("has_mask",)):
            yield backward_config(row, dtype, None, ("has_window", *options)), dtype
        in_tiles = row in _WITH_BIAS_TILES
        yield backward_config(row, dtype, None, ("has_window", "has_softcap", "has_bias"), bias_tiles=in_tiles), dtype
        if in_tiles:
            arrays = "has_window", "has_bias", "has_mask", "has_block_mask"
            yield backward_config(row, dtype, None, arrays, bias_tiles=True, mask_vectors=True), dtype
    for row, dtype, deterministic in product(WITH_OPTIONS, DTYPES, (False, True)):
        blocks = "has_window", "has_block_mask", "has_dropout" if row == BACKWARD[-1] else "has_bias"
        yield backward_config(row, dtype, None, blocks, deterministic, row in _WITH_BIAS_TILES), dtype
        masks = "has_window", "has_mask", "has_dropout"
        yield backward_config(row, dtype, None, masks, deterministic, mask_vectors=True), dtype


def _seen(problem: AttentionProblem) -> int:
    """Queries that see a key."""
    left, right = problem.window_left, problem.window_right
    return problem.seqlen_q if left is None or right is None else min(left + right + 1, problem.seqlen_q)


def _has_short_walks(problem: AttentionProblem) -> bool:
    return "has_window" in flags_of(problem) and _seen(problem) <= _SHORT


def heads_together(problem: AttentionProblem) -> int:
    """KV heads (of all sequences) whose queries' arrays fit in L2 together."""
    sequences = 1 if problem.packed else problem.batch
    of_row = problem.head_dim * (HALF_BYTES + FLOAT_BYTES) + problem.head_dim_v * HALF_BYTES
    fitting = L2_BYTES // (problem.seqlen_q * of_row * problem.group_size)
    return min(max(fitting, 1), problem.num_heads_kv * sequences)


def last_heads(problem: AttentionProblem, config: Config) -> int:
    """KV heads behind all others, whose longest tiles of keys come first; dq of the others is written meanwhile."""
    if not config.ping_pong or config.deterministic:
        return heads_together(problem)
    # With a window tiles have one length.
    return 1 if 4 * _seen(problem) <= problem.seqlen_q else max(heads_together(problem), 8)
