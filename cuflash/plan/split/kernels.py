"""The table of Hopper's float32 kernels, which multiply operands as float16 parts by wgmma, and when they run.

`tiles` has their tiles. The same parts are multiplied by mma.sync in `sm80.wide`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cuflash.hardware import (
    FLOAT_BYTES,
    HALF_BYTES,
    REGISTERS_OF_SM,
    ROWS_OF_WARPGROUP,
    SMEM_ALIGNMENT,
    SMEM_BYTES,
    WARPGROUP,
    WORD_BITS,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan.config import (
    KNOWN_TO_ALL,
    OF_RULES,
    common,
    flags_of,
    has_plain_scale,
    has_plain_scores,
    not_taken,
    with_rules,
    without_window,
)
from cuflash.plan.entries import key_results
from cuflash.plan.record import HOPPER, UNUSUAL_SCALE, Record, candidates, narrowest
from cuflash.plan.sm90.config import MORE_TO_LOAD, REGISTERS, SMEM_BESIDE_TILES, Sm90Config
from cuflash.plan.split.tiles import (
    BACKWARD,
    DK,
    DKV,
    DQ,
    DV,
    FORWARD,
    SplitGradientTile,
    SplitTile,
    Tiles,
)
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that these kernels know
# An element of weights, v and dout has so many float16 parts, by precision; an element of q and k has its own number,
# by the former. One part has the 11 bits of TF32.
PARTS = {None: 2, "tf32": 1}
KEY_PARTS = {2: 3, 1: 1}


# A tile of columns comes with so many float32 vectors: factors of keys and values, or of q and dout, lse and delta.
_VECTORS = {DQ: 2, DKV: 4, DK: 4, DV: 4}
# A warpgroup gets registers in eights, and a thread at most so many here.
_REGISTERS_AT_ONCE, _MOST_REGISTERS = 8, 248
# Weights of what is read of keys and values for a row, and of a step for a column. They keep each table's order, the
# fastest first: 128 queries by 16 keys are faster than 64 by 32. They say nothing of how long a tile takes.
_READING, _STEP = 10, 2


@dataclass(frozen=True, kw_only=True)
class SplitConfig(Sm90Config):
    """The configuration of a kernel on float16 parts by wgmma."""

    parts: int  # float16 parts of an element of weights, v and dout
    key_parts: int  # float16 parts of an element of q and k
    teams: int = 1  # groups of warpgroups with shared memory of their own; here always one

    @property
    def tile(self) -> str:
        """Queries and keys of a tile, and parts of an element."""
        return f"{self.block_m}x{self.block_n}x{self.parts}"


@dataclass(frozen=True, kw_only=True)
class SplitForwardConfig(SplitConfig):
    """The configuration of the forward kernel."""

    key_stages: int  # buffers of keys
    value_stages: int  # buffers of values
    query_stages: int  # buffers of queries
    factor_stages: int = 4  # buffers of the factors that belong to a tile of keys and values


@dataclass(frozen=True, kw_only=True)
class SplitGradientConfig(SplitConfig):
    """The configuration of a gradient kernel."""

    of_keys: bool  # thread blocks stay with keys, not with queries
    computes_dk: bool
    computes_dv: bool
    deterministic: bool  # additions wait for their place in an order (sm90/backward/schedule.cuh); here never
    stages: int  # see `SplitGradientTile`
    stages_v: int


def _constants(parts: int, consumers: int, registers: tuple[int, int], plain_scores: bool) -> dict[str, Any]:
    return {
        "parts": parts,
        "key_parts": KEY_PARTS[parts],
        "consumers": consumers,
        "producer_registers": registers[0],
        "consumer_registers": registers[1],
        "plain_scores": plain_scores,
    }


def _asked(problem: AttentionProblem) -> set[str]:
    """Return what takes registers: options, or, where there are none, an unusual scale, or a window."""
    flags = flags_of(problem)
    return without_window(flags) or (set(flags) if has_plain_scale(problem) else {UNUSUAL_SCALE})


def _holds_words(block_n: int) -> bool:
    """Return True if a tile has whole words of a block mask's bits, or a word whole tiles."""
    return block_n % WORD_BITS == 0 or WORD_BITS % block_n == 0


def _predicted(record: Record[SplitTile]) -> float:
    """Return the predicted time of a score: rows share what is read of keys, and columns what a step has besides."""
    return _READING / record.tile.block_m + _STEP / record.tile.block_n


def _predicted_pass(record: Record[Tiles]) -> float:
    """Return the predicted time of a score in all kernels of a pass, as `_predicted` does."""
    return sum(_READING / tile.rows + _STEP / tile.columns for tile in record.tile)


def _forward_config(problem: AttentionProblem, record: Record[SplitTile], parts: int) -> SplitForwardConfig:
    tile, flags = record.tile, flags_of(problem)
    consumers = tile.block_m // ROWS_OF_WARPGROUP
    row_bytes, row_bytes_v = (
        count * whole_rows(HALF_BYTES * d)
        for count, d in ((KEY_PARTS[parts], record.head_dim), (parts, record.head_dim_v))
    )
    queries = tile.block_m * row_bytes
    keys = tile.block_n * (tile.key_stages * row_bytes + tile.value_stages * row_bytes_v)
    smem_bytes = queries + keys + SplitForwardConfig.factor_stages * 2 * tile.block_n * FLOAT_BYTES + SMEM_BESIDE_TILES
    # The next tile's queries are loaded early where there is room for them.
    query_stages = 2 if smem_bytes + queries <= SMEM_BYTES else 1
    smem_bytes += (query_stages - 1) * queries
    registers = tile.producer_registers, _consumer_registers(consumers, tile.producer_registers)
    plain_scores = has_plain_scores(problem)
    return SplitForwardConfig(
        entry=record.entries[0],
        query_stages=query_stages,
        smem_bytes=smem_bytes,
        **{
            **common(SplitForwardConfig, problem.dtype, problem.bias_dtype, flags, record, tile),
            **_constants(parts, consumers, registers, plain_scores),
        },
    )


def _consumer_registers(consumers: int, producer_registers: int) -> int:
    """Return the registers of a thread that computes: a share, in eights, of what the loading warpgroup leaves."""
    left = REGISTERS_OF_SM // WARPGROUP - producer_registers
    return min(left // consumers // _REGISTERS_AT_ONCE * _REGISTERS_AT_ONCE, _MOST_REGISTERS)


def _gradient_config(
    problem: AttentionProblem, entry: str, head_dim: int, tile: SplitGradientTile, parts: int
) -> SplitGradientConfig:
    wanted, flags = key_results(entry), flags_of(problem)
    of_keys = bool(wanted)
    consumers = tile.rows // ROWS_OF_WARPGROUP
    # The thread that loads follows a block mask's lists, which takes registers.
    registers = (MORE_TO_LOAD if problem.block_mask and consumers > 1 else REGISTERS)[consumers]
    row_bytes = whole_rows(HALF_BYTES * head_dim)
    key_parts = KEY_PARTS[parts]
    # A kernel for dv alone multiplies no values with dout, so the block's rows come without values.
    rows = tile.rows * (key_parts + (parts if entry != DV else 0)) * row_bytes
    columns = tile.columns * (tile.stages * key_parts + tile.stages_v * parts) * row_bytes
    vectors = tile.stages * _VECTORS[entry] * tile.columns * FLOAT_BYTES
    return SplitGradientConfig(
        entry=entry,
        head_dim=head_dim,
        head_dim_v=head_dim,
        block_m=tile.columns if of_keys else tile.rows,
        block_n=tile.rows if of_keys else tile.columns,
        of_keys=of_keys,
        computes_dk="dk" in wanted,
        computes_dv="dv" in wanted,
        deterministic=False,
        ping_pong=False,
        smem_bytes=rows + columns + math.ceil((vectors + SMEM_BESIDE_TILES) / SMEM_ALIGNMENT) * SMEM_ALIGNMENT,
        **common(SplitGradientConfig, problem.dtype, problem.bias_dtype, flags, tile),
        **_constants(parts, consumers, registers, has_plain_scores(problem)),
    )


def _is_taken(problem: AttentionProblem) -> bool:
    return problem.dtype == "float32" and not problem.is_empty and not not_taken(HANDLES, problem)


@kept
def forward(problem: AttentionProblem) -> tuple[SplitForwardConfig, ...]:
    """The candidates for the Hopper kernel of a float32 problem's forward pass."""
    if not _is_taken(problem):
        return ()
    parts, has_blocks = PARTS[problem.precision], problem.block_mask
    found = candidates(
        narrowest(FORWARD[parts], problem.head_dim, problem.head_dim_v),
        _asked(problem),
        HOPPER,
        lambda record: not has_blocks or _holds_words(record.tile.block_n),
        _predicted,
    )
    return tuple(with_rules(_forward_config(problem, record, parts), problem) for record in found)


@kept
def backward(problem: AttentionProblem) -> tuple[tuple[SplitGradientConfig, ...], ...]:
    """The candidates for the gradients of a float32 problem, that for dq first in each; none where others run."""
    if not _is_taken(problem):
        return ()
    parts = PARTS[problem.precision]
    asked = without_window(flags_of(problem)) | ({UNUSUAL_SCALE} if not has_plain_scale(problem) else set())
    lines = narrowest(BACKWARD[parts], problem.head_dim, problem.head_dim_v)
    found = candidates(lines, asked, HOPPER, lambda record: True, _predicted_pass)
    return tuple(
        tuple(
            with_rules(_gradient_config(problem, entry, record.head_dim, tile, parts), problem)
            for entry, tile in zip(record.entries, record.tile, strict=True)
        )
        for record in found
    )
