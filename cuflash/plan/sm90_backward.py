"""The table of Hopper's own backward kernels on 16 bits (wgmma, TMA), and when they run.

`sm90_backward_tiles` chooses a row of tiles by head dims and options; this module makes its kernels' configuration.
"""

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
    ROWS_OF_WARP,
    ROWS_OF_WARPGROUP,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan import sm90_forward
from cuflash.plan.config import (
    FLAGS,
    KNOWN_TO_ALL,
    OF_RULES,
    are_products,
    common,
    flags_of,
    not_taken,
    with_rules,
    without_window,
)
from cuflash.plan.sm90_backward_tiles import (
    ARRAYS,
    BACKWARD,
    FOR_SHORT_RANGES,
    NARROW,
    WIDE,
    WITH_BIAS_TILES,
    WITH_ONE_OPTION,
    WITH_OPTIONS,
    Sm90BackwardRow,
    options_of,
    queries_seen,
    row_for,
    smaller_rows,
)
from cuflash.plan.sm90_forward import DTYPES, SMEM_BESIDE_TILES, Layout, Sm90Config, has_vectors
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.rules.form import NO_RULES

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that these kernels know
# ROWS runs before the main kernel and prepares what that loads of each query. DQ runs last and writes dq from sums.
ROWS, DQ = "backward_sm90_rows", "backward_sm90_dq"
# Registers of a thread that loads, of one that computes, and of one that computes dq. In WIDE the second number is that
# for dv, and the warpgroup for dk has the rest.
_REGISTERS = {NARROW: (24, 240, 0), WIDE: (48, 200, 64)}
_REGISTERS_WITH_OPTIONS, _REGISTERS_OF_PAIR = (96, 176, 64), (64, 192, 64)
_REGISTERS_OF_WIDEST = (32, 208, 64)  # the widest head dims with dropout or a mask and another option
# The widest head dims have these with a bias and another option, and with softcap and dropout.
_REGISTERS_OF_BIAS, _REGISTERS_OF_CAPPED = (32, 216, 64), (24, 216, 64)
# The loading warp reads arrays to find hidden keys, and has more registers with several options, and with all three
# arrays in NARROW.
_REGISTERS_OF_SEVERAL, _REGISTERS_OF_ARRAYS = {NARROW: (40, 232, 0), WIDE: (64, 208, 64)}, (48, 224, 0)
_GROUP_OF_DRAWS = 16  # queries whose random bits are drawn at once
_EARLY_DRAWS_OF_SPLITS = 3  # groups of them that are drawn early where thread blocks share queries
# A tile's dq has so many sums where additions have an order, so that an addition waits for the last but one. With a
# diagonal few wait, and one sum is enough.
_DQ_SUMS = 2

_ROW_WARPGROUPS = 7  # computing warpgroups of ROWS and DQ


@dataclass(frozen=True, kw_only=True)
class Sm90BackwardConfig(Sm90Config):
    """The configuration of the kernels of one backward pass."""

    query_stages: int  # buffers of queries
    dout_stages: int  # buffers of dout
    ds_stages: int  # buffers of the scores' gradients
    key_stages: int  # buffers of keys
    dq_stages: int  # buffers of each part of dq
    dq_pieces: int  # parts into which a tile's dq is cut, by queries or by columns
    dq_columns: int  # columns of a part
    pair: int  # thread blocks of a cluster that alternate in computing dq
    dq_sums: int  # sums of a tile's dq that alternate in taking additions, where these have an order
    dq_registers: int  # registers of a thread that computes dq, where a warpgroup does nothing else
    early_draws: int  # groups of 16 queries whose random bits are drawn before their weights are known
    holds_draws: bool  # the draws are held back until the products have started
    deterministic: bool  # additions to dq have a fixed order
    first_addition_stores: bool  # the first addition to a sum of dq is a store, so that nobody clears the sum
    has_bias_tiles: bool  # TMA loads the bias; else it is read element by element
    has_mask_vectors: bool  # a mask is read 16 keys at a time; else element by element
    writes_dbias: bool  # the kernel writes dbias, which has one element for each score
    writes_dslopes: bool  # the kernel adds up the gradient of ALiBi's slopes
    wide_results: bool  # dq, dk and dv are float32, so that shares of several calls are added before they are rounded
    adds_results: bool  # dq, dk and dv are added to what the arrays hold
    splits_queries: bool  # several thread blocks share the queries of a tile of keys, and write float32 dk and dv each
    query_warps: int = 1  # a warp computes with all queries of a tile, at once: see `sm80_backward`
    query_passes: int = 1

    @property
    def of_rows(self) -> Sm90BackwardConfig:
        """The configuration of the kernels ROWS and DQ, whose stages are their own (cuda_src/sm90/backward/rows.cu)."""
        # With a bias or a rule, whose text ROWS does not need, lse keeps its units.
        known = {"has_bias", "has_window"} if self.writes_dbias else {"has_bias", "has_score_mod"}
        flags: dict[str, Any] = {flag: getattr(self, flag) and flag in known for flag in FLAGS}
        stage_bytes = 2 * self.block_m * whole_rows(HALF_BYTES * self.head_dim_v)
        room, consumers = hardware.SMEM_BYTES - SMEM_BESIDE_TILES, _ROW_WARPGROUPS
        stages = room // stage_bytes
        stages -= stages % min(stages, consumers)
        sum_bytes = self.dq_sums * ROWS_OF_WARPGROUP * self.dq_columns * FLOAT_BYTES
        sum_stages = room // sum_bytes // consumers * consumers
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
            rules=NO_RULES,
            rule_in_blocks=False,
            splits_queries=False,
            **flags,
        )

    @property
    def slope_sums(self) -> int:
        """The sums of the slopes' gradient that the warps of thread blocks with a tile of keys have, or with a pair."""
        warpgroups = self.consumers if self.entry == NARROW else self.pair
        return warpgroups * ROWS_OF_WARPGROUP // ROWS_OF_WARP

    @property
    def dq_tile(self) -> int:
        """Elements of a query tile's dq in the sum of dq (cuda_src/sm90/backward/rows.cuh)."""
        return self.dq_pieces * ROWS_OF_WARPGROUP * self.dq_columns


def backward_config(
    row: Sm90BackwardRow,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    deterministic: bool = False,
    bias_tiles: bool = False,
    mask_vectors: bool = False,
) -> Sm90BackwardConfig:
    """The configuration of one backward pass.

    `flags` is a subset of `FLAGS`; TMA loads the bias with `bias_tiles`, and a mask is read 16 keys at a time with
    `mask_vectors`.
    """
    row_bytes, row_bytes_v = (whole_rows(HALF_BYTES * d) for d in (row.head_dim, row.head_dim_v))
    query_bytes = row.query_stages * (row_bytes + FLOAT_BYTES) + row.dout_stages * (row_bytes_v + FLOAT_BYTES)
    query_bytes += row.ds_stages * row.block_n * HALF_BYTES
    if row.entry == WIDE:
        consumers, dq_pieces, dq_columns = 3, -(-row.head_dim // PANEL), PANEL
        exchanged = row.block_m * row.block_n * FLOAT_BYTES  # warpgroups exchange the weights
    else:
        consumers = dq_pieces = row.block_n // ROWS_OF_WARPGROUP
        # Each warpgroup computes dq of queries of its own, or of panels of columns.
        by_queries = row.block_m > ROWS_OF_WARPGROUP
        dq_columns = row.head_dim if by_queries else -(-row.head_dim // (consumers * PANEL)) * PANEL
        exchanged = dq_pieces * ROWS_OF_WARPGROUP * dq_columns * FLOAT_BYTES
    # The room that is left holds one more tile of keys or, where additions wait for their order, one more part of dq.
    key_stages = 1 if deterministic or bias_tiles else row.key_stages
    dq_stages = 2 if row.entry == NARROW and key_stages == 1 and row.query_stages == 2 and not bias_tiles else 1
    if bias_tiles:
        query_bytes += row.query_stages * row.block_n * HALF_BYTES
    smem_bytes = (
        row.block_n * (key_stages * row_bytes + row_bytes_v) + row.block_m * query_bytes + dq_stages * exchanged
    )
    # Wide heads wait for the additions of dq, which a pair halves. A pair needs room for the keys of both thread
    # blocks, and for gradients of the other's scores. A bias that is read element by element leaves too few registers.
    pair_bytes = row.block_n * (row_bytes + (row.ds_stages + 1) * row.block_m * HALF_BYTES)
    pair = 1
    alone = deterministic or "has_block_mask" in flags or ("has_bias" in flags and not bias_tiles)
    if row in BACKWARD and row.entry == WIDE and not alone:
        pair += smem_bytes + pair_bytes + SMEM_BESIDE_TILES <= hardware.SMEM_BYTES
    smem_bytes += (pair - 1) * pair_bytes
    smem_bytes += SMEM_BESIDE_TILES * row.query_stages // 2  # each stage has barriers and steps
    if deterministic and row.entry == WIDE and "has_block_mask" in flags:
        smem_bytes += SMEM_BESIDE_TILES  # the places in the order, and the mask's slots
    registers = _REGISTERS_OF_PAIR if pair > 1 else _REGISTERS[row.entry]
    options = without_window(flags)
    arrays = options & ARRAYS
    if (arrays and len(options) > 2) or (row.entry == NARROW and (len(arrays) > 1 or options > {"has_block_mask"})):
        has_all = row.entry == NARROW and arrays == ARRAYS
        registers = _REGISTERS_OF_ARRAYS if has_all else _REGISTERS_OF_SEVERAL[row.entry]
    if options & {*OF_RULES} and row.entry == WIDE:  # the loading warp asks the rules which keys are hidden
        registers = _REGISTERS_OF_WIDEST if row == BACKWARD[-1] else _REGISTERS_OF_SEVERAL[WIDE]
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
    return Sm90BackwardConfig(
        dq_stages=dq_stages,
        dq_pieces=dq_pieces,
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
        first_addition_stores=deterministic or row.entry == NARROW,
        ping_pong=row.entry == NARROW,
        plain_scores=are_products(flags),
        has_bias_tiles=bias_tiles,
        has_mask_vectors=mask_vectors,
        writes_dbias=False,
        writes_dslopes=False,
        wide_results=False,
        adds_results=False,
        splits_queries=False,
        smem_bytes=smem_bytes,
        **common(Sm90BackwardConfig, dtype, bias_dtype, flags, replace(row, key_stages=key_stages)),
    )


def with_query_splits(config: Sm90BackwardConfig) -> Sm90BackwardConfig:
    """Return the configuration of a kernel whose thread blocks share the queries of a tile of keys.

    Float32 results take registers that are left where fewer random bits are drawn early.
    """
    holds = config.has_dropout and config.entry == NARROW
    early_draws = min(config.early_draws, _EARLY_DRAWS_OF_SPLITS) if holds else config.early_draws
    return replace(config, splits_queries=True, early_draws=early_draws, holds_draws=holds)


def _early_draws(row: Sm90BackwardRow, flags: tuple[str, ...]) -> int:
    """Groups of queries whose random bits the registers hold, for `Sm90BackwardConfig.early_draws`."""
    groups = row.block_m // _GROUP_OF_DRAWS
    if row.entry == WIDE and row.head_dim > 128 and without_window(flags) > {"has_dropout"}:
        return 0
    return groups - 2 if row.block_m > ROWS_OF_WARPGROUP and "has_window" in flags else groups


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
        if row_for(problem)
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
    in_tiles = problem.bias_dtype in DTYPES and not problem.packed and has_vectors(bias, HALF_BYTES)
    in_tiles = in_tiles and problem.rules.score is None
    in_vectors = has_vectors(mask, 1) and mask is not None and mask[1][-1] % ALIGNMENT == 0
    configs = tuple(with_rules(config, problem) for config in _configs(problem, in_tiles, in_vectors))
    first = configs[0]
    if first.has_mask and not first.has_mask_vectors and first.head_dim <= 128 and len(options_of(problem)) > 1:
        return ()  # slower than mma.sync
    writes = _is_whole(problem) and has_vectors(dbias, HALF_BYTES)
    writes = writes and not problem.block_mask and not problem.softcap  # softcap changes ds
    configs = tuple(replace(c, writes_dbias=writes and c.has_bias_tiles and c.entry == NARROW) for c in configs)
    return tuple(map(with_dslopes, configs)) if dslopes else configs


def with_dslopes(config: Sm90BackwardConfig) -> Sm90BackwardConfig:
    """Return the configuration of a kernel that adds up the slopes' gradient, or the same one where it cannot.

    That gradient comes from those of scores before softcap's derivative. Beside a rule, and in WIDE beside a bias, the
    weights are multiplied by this derivative before.
    """
    others = config.has_score_mod or (config.has_bias and config.entry == WIDE)
    if not config.has_alibi or (config.has_softcap and others):
        return config
    # A step has the place of the sums, too, for which there may be no room.
    steps = SMEM_BESIDE_TILES if config.deterministic and config.entry == WIDE else 0
    smem_bytes = config.smem_bytes + steps
    return replace(config, writes_dslopes=True, smem_bytes=smem_bytes) if smem_bytes <= hardware.SMEM_BYTES else config


def _configs(
    problem: AttentionProblem, bias_tiles: bool = False, mask_vectors: bool = False
) -> tuple[Sm90BackwardConfig, ...]:
    row = row_for(problem, bias_tiles, mask_vectors)
    assert row is not None
    rows = dict.fromkeys((row, *smaller_rows(problem)))
    return tuple(
        backward_config(
            each,
            problem.dtype,
            problem.bias_dtype,
            flags_of(problem),
            bool(problem.deterministic),
            bias_tiles and each in WITH_BIAS_TILES,
            mask_vectors,
        )
        for each in rows
    )


def _is_whole(problem: AttentionProblem) -> bool:
    """Return True if the gradient of a bias has one element for each score, and its rows are vectors of 16 bytes."""
    scores = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    vectors = problem.seqlen_k * HALF_BYTES % ALIGNMENT == 0
    return problem.bias == scores and problem.bias_dtype == problem.dtype and vectors


def reason(problem: AttentionProblem) -> str:
    """A sentence for users: the kernels that a backward pass takes on Hopper, and why."""
    if obstacle(problem):
        return f"{sm90_forward.OTHER_GPUS}: {obstacle(problem)}"
    config = _configs(problem)[0]
    return (
        f"wgmma and TMA, tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: {config.flags}; "
        f"{sm90_forward.OTHER_GPUS} where an address or a stride of an input is no multiple of 16 bytes"
    )


def table() -> Iterator[tuple[Sm90BackwardConfig, str]]:
    """Every kernel with its dtype, ROWS and DQ included."""
    around: dict[Sm90BackwardConfig, str] = {}
    for config, dtype in dict.fromkeys(_of_scores()):
        yield config, dtype
        around |= {replace(config.of_rows, entry=entry): dtype for entry in (ROWS, DQ)}
    yield from around.items()


def _of_scores() -> Iterator[tuple[Sm90BackwardConfig, str]]:
    for row, dtype in product(BACKWARD, DTYPES):
        for flags, deterministic in product(((), ("has_window",)), (False, True)):
            yield backward_config(row, dtype, None, flags, deterministic), dtype
    for row, dtype in product(BACKWARD, DTYPES):
        for flags in ((), ("has_dropout",), ("has_window", "has_dropout")):
            yield with_query_splits(backward_config(row, dtype, None, flags)), dtype
        yield with_query_splits(backward_config(row, dtype, None, ("has_window",), deterministic=True)), dtype
    for row, dtype in product(BACKWARD, DTYPES):
        for flags in (("has_dropout",), ("has_window", "has_dropout")):
            yield backward_config(row, dtype, None, flags), dtype
        for deterministic in (False, True):
            config = backward_config(row, dtype, None, ("has_window", "has_alibi"), deterministic)
            yield with_dslopes(config), dtype
    for row, dtype in product(FOR_SHORT_RANGES, DTYPES):
        for flags in (("has_window",), ("has_window", "has_block_mask"), ("has_window", "has_dropout")):
            yield backward_config(row, dtype, None, flags), dtype
    for row, dtype, deterministic in product(WITH_ONE_OPTION, DTYPES, (False, True)):
        if row in WITH_BIAS_TILES:
            config = backward_config(row, dtype, None, ("has_window", "has_bias"), deterministic, bias_tiles=True)
            yield replace(config, writes_dbias=row.entry == NARROW), dtype
        yield backward_config(row, dtype, None, ("has_window", "has_softcap"), deterministic), dtype
        if deterministic:
            yield backward_config(row, dtype, None, ("has_window", "has_block_mask"), True), dtype
        else:
            yield backward_config(row, dtype, None, ("has_window", "has_mask"), mask_vectors=True), dtype
    for row, dtype in product(WITH_OPTIONS, DTYPES):
        for options in (("has_softcap", "has_alibi", "has_dropout"), ("has_bias",), ("has_mask",)):
            yield with_dslopes(backward_config(row, dtype, None, ("has_window", *options))), dtype
        in_tiles = row in WITH_BIAS_TILES
        yield backward_config(row, dtype, None, ("has_window", "has_softcap", "has_bias"), bias_tiles=in_tiles), dtype
        if in_tiles:
            arrays = "has_window", "has_bias", "has_mask", "has_block_mask"
            yield backward_config(row, dtype, None, arrays, bias_tiles=True, mask_vectors=True), dtype
    for row, dtype, deterministic in product(WITH_OPTIONS, DTYPES, (False, True)):
        blocks = "has_window", "has_block_mask", "has_dropout" if row == BACKWARD[-1] else "has_bias"
        yield backward_config(row, dtype, None, blocks, deterministic, row in WITH_BIAS_TILES), dtype
        masks = "has_window", "has_mask", "has_dropout"
        yield backward_config(row, dtype, None, masks, deterministic, mask_vectors=True), dtype


def num_grouped_heads(problem: AttentionProblem) -> int:
    """The number of KV heads (of all sequences) whose queries, dout and sums of dq fit in L2 together."""
    sequences = 1 if problem.packed else problem.batch
    row_bytes = problem.head_dim * (HALF_BYTES + FLOAT_BYTES) + problem.head_dim_v * HALF_BYTES
    fitting = L2_BYTES // (problem.seqlen_q * row_bytes * problem.group_size)
    return min(max(fitting, 1), problem.num_heads_kv * sequences)


def last_heads(problem: AttentionProblem, config: Sm90BackwardConfig) -> int:
    """The number of last KV heads whose tiles of keys are mixed, the longest first, while dq of others is written."""
    if not config.ping_pong or config.deterministic:
        return num_grouped_heads(problem)
    # All tiles have one length in a narrow window, so that one head suffices.
    return 1 if 4 * queries_seen(problem) <= problem.seqlen_q else max(num_grouped_heads(problem), 8)
