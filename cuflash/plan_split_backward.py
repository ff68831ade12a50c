"""Rows of the table for Hopper's float32 gradient kernels, with operands in float16 parts, and when they run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cuflash.config import FLAGS, FLOAT_BYTES, HALF_BYTES, MOST_KEPT, SMEM_BESIDE_TILES, KernelConfig
from cuflash.plan import CPP_TYPES, are_products, flags_of, has_plain_scale
from cuflash.plan_sm90 import REGISTERS, ROWS_OF_WARPGROUP, WARPGROUP
from cuflash.plan_split import KEY_PARTS, PARTS, in_words
from cuflash.problem import AttentionProblem
from cuflash.tensor_map import whole_rows

DQ, DKV, DK, DV = "split_dq", "split_dkv", "split_dk", "split_dv"
# Kernels whose tiles stay with keys, and what they compute.
KEY_KERNELS = {DKV: ("dk", "dv"), DK: ("dk",), DV: ("dv",)}
# Vectors of a tile of columns: two of keys and values, four of queries.
_VECTORS = {DQ: 2, DKV: 4, DK: 4, DV: 4}
_CONSUMERS = 2
_REGISTERS, _BLOCK_MASK_REGISTERS = REGISTERS[_CONSUMERS], (64, 224)
SMEM_ALIGNMENT = 1024


@dataclass(frozen=True)
class Tile:
    """What stays and what is walked (queries and keys of a tile, or the reverse), and buffers of the latter.

    `chunk_columns` are those of a product that is added to a gradient.
    """

    rows: int
    columns: int
    chunk_columns: int = 64
    stages: int = 2
    stages_v: int = 2


@dataclass(frozen=True)
class Row:
    """Kernels for head dims up to this one and their tiles: plain or with a window, and with other options.

    dk and dv have a kernel each where both together do not fit the registers: no kernel spills.
    """

    head_dim: int
    plain: dict[str, Tile]
    with_options: dict[str, Tile]


# By number of parts; the first row that is wide enough is taken, and wider heads take the portable kernels.
_WIDE = {DQ: Tile(128, 32, 64, 2, 1), DK: Tile(128, 32, 64, 2, 1), DV: Tile(128, 64, 64, 2, 1)}
BACKWARD = {
    2: (
        Row(64, {DQ: Tile(128, 64), DKV: Tile(128, 48)}, {DQ: Tile(128, 32), DKV: Tile(128, 32)}),
        Row(128, _WIDE, {**_WIDE, DV: Tile(128, 32, 64)}),
    ),
    1: (
        Row(64, {DQ: Tile(128, 64), DKV: Tile(128, 64)}, {DQ: Tile(128, 64), DKV: Tile(128, 32)}),
        Row(128, {DQ: Tile(128, 64), DKV: Tile(128, 32)}, {DQ: Tile(128, 32), DK: Tile(128, 32), DV: Tile(128, 32)}),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config(KernelConfig):
    """One kernel of this family."""

    of_keys: bool
    of_dk: bool
    of_dv: bool
    deterministic: bool  # whether sums wait for their turn (gradient_schedule.cuh): here nothing needs one
    parts: int  # of weights, values and dout
    key_parts: int  # of queries and keys
    chunk_columns: int
    stages: int
    stages_v: int
    consumers: int  # warpgroups that compute
    producer_registers: int
    consumer_registers: int
    ping_pong: bool
    plain_scores: bool  # a score is a product of q and k times a positive scale

    @property
    def tile(self) -> str:
        """Queries and keys of a tile, and parts."""
        return f"{self.block_m}x{self.block_n}x{self.parts}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.consumers + 1) * WARPGROUP


def config_of(
    entry: str,
    head_dim: int,
    tile: Tile,
    parts: int,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool = True,
) -> Config:
    """The configuration of one kernel; `flags` is a subset of `config.FLAGS`."""
    wanted = KEY_KERNELS.get(entry, ())
    of_keys = bool(wanted)
    assert tile.rows == _CONSUMERS * ROWS_OF_WARPGROUP
    # A walk along a block mask's lists takes registers of the loading thread.
    producer_registers, consumer_registers = _BLOCK_MASK_REGISTERS if "has_block_mask" in flags else _REGISTERS
    row_bytes = whole_rows(HALF_BYTES * head_dim)
    key_parts = KEY_PARTS[parts]
    # dv needs no products of values and dout.
    rows = tile.rows * (key_parts + (parts if entry != DV else 0)) * row_bytes
    columns = tile.columns * (tile.stages * key_parts + tile.stages_v * parts) * row_bytes
    vectors = tile.stages * _VECTORS[entry] * tile.columns * FLOAT_BYTES
    return Config(
        entry=entry,
        element=CPP_TYPES["float32"],
        accum=CPP_TYPES["float32"],
        bias_element=CPP_TYPES[bias_dtype or "float32"],
        head_dim=head_dim,
        head_dim_v=head_dim,
        block_m=tile.columns if of_keys else tile.rows,
        block_n=tile.rows if of_keys else tile.columns,
        of_keys=of_keys,
        of_dk="dk" in wanted,
        of_dv="dv" in wanted,
        deterministic=False,
        parts=parts,
        key_parts=key_parts,
        chunk_columns=tile.chunk_columns,
        stages=tile.stages,
        stages_v=tile.stages_v,
        consumers=_CONSUMERS,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
        ping_pong=False,
        plain_scores=plain_scores and are_products(flags),
        smem_bytes=rows + columns + math.ceil((vectors + SMEM_BESIDE_TILES) / SMEM_ALIGNMENT) * SMEM_ALIGNMENT,
        **{flag: flag in flags for flag in FLAGS},
    )


def _configs(
    row: Row, parts: int, bias_dtype: str | None, flags: tuple[str, ...], plain_scores: bool = True
) -> tuple[Config, ...]:
    tiles = row.plain if set(flags) <= {"has_window"} and plain_scores else row.with_options
    return tuple(
        config_of(entry, row.head_dim, tile, parts, bias_dtype, flags, plain_scores) for entry, tile in tiles.items()
    )


@lru_cache(maxsize=MOST_KEPT)
def backward(problem: AttentionProblem) -> tuple[Config, ...] | None:
    """The kernels for dq, dk and dv of a float32 problem, that for dq first, or None."""
    sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads_q)
    if problem.dtype != "float32" or 0 in sizes:
        return None
    parts = PARTS[problem.precision]
    widest = max(problem.head_dim, problem.head_dim_v)
    row = next((r for r in BACKWARD[parts] if widest <= r.head_dim), None)
    if row is None:
        return None
    return _configs(row, parts, problem.bias_dtype, flags_of(problem), has_plain_scale(problem))


def reason(problem: AttentionProblem) -> str:
    """What the backward pass takes on Hopper, in words; empty unless it is these kernels."""
    configs = backward(problem)
    if configs is None:
        return ""
    tiles = ", ".join(f"{config.entry} {config.tile}" for config in configs)
    return in_words(configs[0].parts, tiles, max(config.smem_bytes for config in configs), configs[0].flags)


def table() -> Iterator[tuple[Config, str]]:
    """Every row (and its dtype), plain, with each option of its own, and with the options of visibility."""
    for parts, rows in BACKWARD.items():
        for row in rows:
            for flags in ((), *((flag,) for flag in FLAGS), ("has_window", "has_block_mask")):
                for config in _configs(row, parts, None, flags):
                    yield config, "float32"
