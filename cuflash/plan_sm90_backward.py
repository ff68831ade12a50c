"""Rows of the table for Hopper's own backward kernels (wgmma, TMA), and when they run. Pure, no CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from cuflash import plan_sm90
from cuflash.config import (
    FLAGS,
    FLOAT_BYTES,
    HALF_BYTES,
    L2_BYTES,
    MOST_KEPT,
    SMEM_BESIDE_TILES,
    KernelConfig,
)
from cuflash.plan import CPP_TYPES, are_products, flags_of
from cuflash.plan_sm90 import DTYPES, ROWS_OF_WARPGROUP, WARPGROUP
from cuflash.problem import AttentionProblem
from cuflash.tensor_map import ALIGNMENT, SWIZZLE_BYTES, whole_rows

# Every warpgroup has 64 keys, or (for wide heads) the warpgroups compute dv, dk and dq of 64 keys.
NARROW, WIDE = "backward_sm90", "backward_sm90_wide"
# Before and behind them: what they load of each query, and dq from its sum.
ROWS, DQ = "backward_sm90_rows", "backward_sm90_dq"
# Registers of a thread of the loading warpgroup, of those that compute, and of the one for dq alone.
_REGISTERS = {NARROW: (24, 240, 0), WIDE: (48, 200, 64)}
_REGISTERS_WITH_OPTIONS = (96, 176, 64)
_PANEL = SWIZZLE_BYTES // HALF_BYTES


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


# The first row that is wide enough is taken.
BACKWARD = (
    Row(NARROW, 64, 64, 128, 128, 2, 2, 2),
    Row(NARROW, 96, 96, 64, 128, 2, 2, 2, 2),
    Row(NARROW, 128, 128, 64, 128, 2, 2, 2, 2),
    Row(WIDE, 192, 128, 64, 64, 2, 2, 2),
    Row(WIDE, 192, 192, 64, 64, 2, 2, 2),
    Row(WIDE, 256, 256, 64, 64, 2, 2, 2),
)


# With options that take registers; one that is an array stands alone.
WITH_OPTIONS = (
    Row(NARROW, 64, 64, 64, 128, 2, 2, 2),
    Row(WIDE, 128, 128, 64, 64, 2, 2, 2),
)
# With alibi alone, which takes a few.
WITH_ALIBI = (*BACKWARD[:2], WITH_OPTIONS[1], *BACKWARD[3:])
_ARRAYS = ("has_bias", "has_mask", "has_block_mask")


@dataclass(frozen=True, kw_only=True)
class Config(KernelConfig):
    """The kernels of one backward pass."""

    query_stages: int
    dout_stages: int
    ds_stages: int
    key_stages: int
    dq_stages: int  # of each part
    dq_parts: int  # of a tile's dq: queries, or columns
    dq_columns: int
    consumers: int  # warpgroups that compute
    producer_registers: int
    consumer_registers: int
    dq_registers: int
    deterministic: bool  # sums of dq have an order
    ping_pong: bool  # the warpgroups take turns at the tensor cores
    plain_scores: bool  # a score is a product of q and k times a scale

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.consumers + 1) * WARPGROUP

    @property
    def dq_tile(self) -> int:
        """Elements of a tile in the sum of dq (cuda_src/sm90/gradient_rows.cuh)."""
        return self.dq_parts * ROWS_OF_WARPGROUP * self.dq_columns


def backward_config(
    row: Row, dtype: str, bias_dtype: str | None, flags: tuple[str, ...], deterministic: bool = False
) -> Config:
    """The configuration of one backward pass; `flags` is a subset of `config.FLAGS`."""
    row_bytes, row_bytes_v = (whole_rows(HALF_BYTES * d) for d in (row.head_dim, row.head_dim_v))
    of_query = row.query_stages * (row_bytes + FLOAT_BYTES) + row.dout_stages * (row_bytes_v + FLOAT_BYTES)
    of_query += row.ds_stages * row.block_n * HALF_BYTES
    if row.entry == WIDE:
        consumers, dq_parts, dq_columns = 3, -(-row.head_dim // _PANEL), _PANEL
        exchanged = row.block_m * row.block_n * FLOAT_BYTES  # the weights
    else:
        consumers = dq_parts = row.block_n // ROWS_OF_WARPGROUP
        # A warpgroup has queries of its own for dq, or panels of columns.
        by_queries = row.block_m > ROWS_OF_WARPGROUP
        dq_columns = row.head_dim if by_queries else -(-row.head_dim // (consumers * _PANEL)) * _PANEL
        exchanged = dq_parts * ROWS_OF_WARPGROUP * dq_columns * FLOAT_BYTES
    # The room that is left is for one more tile of keys or one more part of dq, which an order of the sums waits for.
    key_stages = 1 if deterministic else row.key_stages
    dq_stages = 2 if row.entry == NARROW and key_stages == 1 else 1
    smem_bytes = row.block_n * (key_stages * row_bytes + row_bytes_v) + row.block_m * of_query + dq_stages * exchanged
    producer_registers, consumer_registers, dq_registers = (
        _REGISTERS_WITH_OPTIONS if row == WITH_OPTIONS[1] else _REGISTERS[row.entry]
    )
    return Config(
        entry=row.entry,
        element=CPP_TYPES[dtype],
        accum="float",
        bias_element=CPP_TYPES[bias_dtype or dtype],
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        block_m=row.block_m,
        block_n=row.block_n,
        query_stages=row.query_stages,
        dout_stages=row.dout_stages,
        ds_stages=row.ds_stages,
        key_stages=key_stages,
        dq_stages=dq_stages,
        dq_parts=dq_parts,
        dq_columns=dq_columns,
        consumers=consumers,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
        dq_registers=dq_registers,
        deterministic=deterministic,
        ping_pong=row.entry == NARROW,
        plain_scores=are_products(flags),
        smem_bytes=smem_bytes + SMEM_BESIDE_TILES,
        **{flag: flag in flags for flag in FLAGS},
    )


def _row(problem: AttentionProblem) -> Row | None:
    options = set(flags_of(problem)) - {"has_window"}
    rows = BACKWARD if not options else WITH_ALIBI if options == {"has_alibi"} else WITH_OPTIONS
    return next((r for r in rows if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v), None)


def obstacle(problem: AttentionProblem) -> str:
    """Why a problem's backward pass cannot take the Hopper kernel; empty if it can."""
    if plan_sm90.obstacle(problem):
        return plan_sm90.obstacle(problem)
    if problem.head_dim * HALF_BYTES % ALIGNMENT or problem.head_dim_v * HALF_BYTES % ALIGNMENT:
        return f"rows of head dims {problem.head_dim} and {problem.head_dim_v} are no multiples of {ALIGNMENT} bytes"
    options = set(flags_of(problem)) - {"has_window"}
    if options.intersection(_ARRAYS) and len(options) > 1:
        return f"no kernel for {' and '.join(sorted(flag.removeprefix('has_') for flag in options))} together"
    if problem.deterministic and problem.block_mask:
        return "sums of dq have no order beside a block mask"
    return "" if _row(problem) else f"no kernel for head dims {problem.head_dim} and {problem.head_dim_v} with options"


@lru_cache(maxsize=MOST_KEPT)
def backward(problem: AttentionProblem, layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> Config | None:
    """The Hopper kernels for a problem on arrays whose (strides in bytes, shapes) are `layouts`, or None.

    The arrays are those that are read: their addresses are multiples of 16 bytes. Results may lie anywhere.
    """
    if obstacle(problem) or not all(plan_sm90.expressible(*layout) for layout in layouts):
        return None
    return _config(problem)


def _config(problem: AttentionProblem) -> Config:
    row = _row(problem)
    assert row is not None
    return backward_config(row, problem.dtype, problem.bias_dtype, flags_of(problem), bool(problem.deterministic))


def reason(problem: AttentionProblem) -> str:
    """What the backward pass takes on Hopper, and why, in words."""
    if obstacle(problem):
        return f"{plan_sm90.OTHER_GPUS}: {obstacle(problem)}"
    config = _config(problem)
    return (
        f"wgmma and TMA, tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: {config.flags}; "
        f"{plan_sm90.OTHER_GPUS} where an address or a stride of an input is no multiple of 16 bytes"
    )


def table() -> Iterator[tuple[Config, str]]:
    """Every row in both dtypes (returned beside it), plain and with a window, and the kernels around it."""
    for row in BACKWARD:
        for dtype in DTYPES:
            for flags, deterministic in product(((), ("has_window",)), (False, True)):
                config = backward_config(row, dtype, None, flags, deterministic)
                for entry in (row.entry, ROWS, DQ):
                    yield replace(config, entry=entry), dtype
    for row, dtype in product(WITH_ALIBI, DTYPES):
        yield backward_config(row, dtype, None, ("has_window", "has_alibi")), dtype
    for row, dtype in product(WITH_OPTIONS, DTYPES):
        for flags in (("has_window", "has_softcap", "has_alibi", "has_dropout"), *(("has_window", x) for x in _ARRAYS)):
            yield backward_config(row, dtype, None, flags), dtype


def heads_together(problem: AttentionProblem) -> int:
    """KV heads (of all sequences) whose queries' arrays fit in L2 together."""
    sequences = 1 if problem.packed else problem.batch
    of_row = problem.head_dim * (HALF_BYTES + FLOAT_BYTES) + problem.head_dim_v * HALF_BYTES
    fitting = L2_BYTES // (problem.seqlen_q * of_row * problem.group_size)
    return min(max(fitting, 1), problem.num_heads_kv * sequences)
