"""Rows of the table for Hopper's float32 kernels, with operands in float16 parts, and when they run. No CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cuflash.config import FLAGS, FLOAT_BYTES, HALF_BYTES, MOST_KEPT, SMEM_BESIDE_TILES, KernelConfig
from cuflash.plan import CPP_TYPES, are_products, flags_of, has_plain_scale
from cuflash.plan_sm90 import REGISTERS, ROWS_OF_WARPGROUP, SMEM_BYTES, WARPGROUP
from cuflash.problem import AttentionProblem
from cuflash.tensor_map import whole_rows

# float16 parts of weights and values, and of queries and keys, by precision; one has the 11 bits of TF32.
PARTS = {None: 2, "tf32": 1}
KEY_PARTS = {2: 3, 1: 1}
# The factors of four tiles of keys and values.
_FACTOR_STAGES = 4


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, columns of a product with values, and buffers for keys and for values."""

    block_m: int
    block_n: int
    out_columns: int
    key_stages: int = 2
    value_stages: int = 2
    ping_pong: bool = True


@dataclass(frozen=True)
class Row:
    """Tiles for head dims up to these: without a window, with one, with other options, with a bias or a mask.

    No kernel spills; None where that leaves no tile: the portable kernel runs.
    """

    head_dim: int
    head_dim_v: int
    full: Tile
    windowed: Tile
    with_options: Tile | None
    with_arrays: Tile | None


# By number of parts; the first row that is wide enough is taken.
FORWARD = {
    2: (
        Row(64, 64, Tile(128, 112, 64), Tile(128, 112, 64), Tile(128, 64, 64), Tile(128, 64, 64)),
        Row(128, 128, Tile(128, 64, 64, 2, 1), Tile(128, 48, 64), Tile(128, 32, 64), Tile(128, 16, 64)),
        Row(192, 128, Tile(128, 32, 64, 1, 1), Tile(128, 32, 64, 1, 1), Tile(128, 32, 64, 1, 1), Tile(128, 16, 64)),
        Row(192, 192, Tile(128, 32, 64, 1, 1), Tile(128, 32, 64, 1, 1), None, None),
        Row(256, 256, Tile(64, 16, 64, ping_pong=False), Tile(64, 16, 64, ping_pong=False), None, None),
    ),
    1: (
        Row(64, 64, Tile(128, 128, 64), Tile(128, 128, 64), Tile(128, 64, 64), Tile(128, 64, 64)),
        Row(128, 128, Tile(128, 96, 64), Tile(128, 96, 64), Tile(128, 64, 64), Tile(128, 32, 64)),
        Row(192, 192, Tile(128, 64, 64), Tile(128, 64, 64), Tile(128, 32, 64), Tile(128, 32, 64)),
        Row(256, 256, Tile(128, 32, 64), Tile(128, 32, 64), None, None),
    ),
}
# A block mask is read in words of this many keys.
_MASK_WORD = 32


@dataclass(frozen=True, kw_only=True)
class Config(KernelConfig):
    """One kernel of this family."""

    parts: int  # of weights and values
    key_parts: int  # of queries and keys
    out_columns: int
    key_stages: int
    value_stages: int
    query_stages: int
    consumers: int  # warpgroups that compute
    producer_registers: int
    consumer_registers: int
    ping_pong: bool
    plain_scores: bool  # a score is a product of q and k times a positive scale

    @property
    def tile(self) -> str:
        """Queries and keys of a tile."""
        return f"{self.block_m}x{self.block_n}x{self.parts}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.consumers + 1) * WARPGROUP


def _tile_of(row: Row, flags: tuple[str, ...], plain_scores: bool) -> Tile | None:
    if {"has_bias", "has_mask"} & set(flags):
        tile = row.with_arrays
    elif set(flags) <= {"has_window"} and plain_scores:
        tile = row.windowed if flags else row.full
    else:
        tile = row.with_options
    if tile is not None and "has_block_mask" in flags and tile.block_n % _MASK_WORD:
        return None
    return tile


def forward_config(
    row: Row, parts: int, bias_dtype: str | None, flags: tuple[str, ...], plain_scores: bool = True
) -> Config | None:
    """The configuration of one forward kernel, if there is one; `flags` is a subset of `config.FLAGS`."""
    tile = _tile_of(row, flags, plain_scores)
    if tile is None:
        return None
    consumers = tile.block_m // ROWS_OF_WARPGROUP
    producer_registers, consumer_registers = REGISTERS[consumers]
    key_parts = KEY_PARTS[parts]
    row_bytes, row_bytes_v = (
        count * whole_rows(HALF_BYTES * d) for count, d in ((key_parts, row.head_dim), (parts, row.head_dim_v))
    )
    queries = tile.block_m * row_bytes
    keys = tile.block_n * (tile.key_stages * row_bytes + tile.value_stages * row_bytes_v)
    smem_bytes = queries + keys + _FACTOR_STAGES * 2 * tile.block_n * FLOAT_BYTES + SMEM_BESIDE_TILES
    # With room for them the next tile's queries come early.
    query_stages = 2 if smem_bytes + queries <= SMEM_BYTES else 1
    smem_bytes += (query_stages - 1) * queries
    return Config(
        entry="split_forward",
        element=CPP_TYPES["float32"],
        accum=CPP_TYPES["float32"],
        bias_element=CPP_TYPES[bias_dtype or "float32"],
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        block_m=tile.block_m,
        block_n=tile.block_n,
        parts=parts,
        key_parts=key_parts,
        out_columns=tile.out_columns,
        key_stages=tile.key_stages,
        value_stages=tile.value_stages,
        query_stages=query_stages,
        consumers=consumers,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
        ping_pong=tile.ping_pong,
        plain_scores=plain_scores and are_products(flags),
        smem_bytes=smem_bytes,
        **{flag: flag in flags for flag in FLAGS},
    )


@lru_cache(maxsize=MOST_KEPT)
def forward(problem: AttentionProblem) -> Config | None:
    """The Hopper kernel for the forward pass of a float32 problem, or None."""
    if problem.dtype != "float32" or 0 in (
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads_q,
    ):
        return None
    parts = PARTS[problem.precision]
    row = next(r for r in FORWARD[parts] if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    return forward_config(row, parts, problem.bias_dtype, flags_of(problem), has_plain_scale(problem))


def reason(problem: AttentionProblem) -> str:
    """What the forward pass takes on Hopper, in words; empty unless it is this kernel."""
    config = forward(problem)
    return "" if config is None else in_words(config.parts, config.tile, config.smem_bytes, config.flags)


def in_words(parts: int, tile: str, smem_bytes: int, flags: str) -> str:
    """A kernel on split operands, for a reader."""
    exactness = "one product of float16 each, TF32's error" if parts == 1 else "float16 parts, float32's error"
    limits = f"tiles of {tile}, {smem_bytes} bytes of shared memory: {flags}"
    return f"wgmma and TMA (NVRTC from 12.9 on), {exactness}, {limits}"


def table() -> Iterator[tuple[Config, str]]:
    """Every row (and its dtype), plain, with each option of its own, and with the options of visibility."""
    for parts, rows in FORWARD.items():
        for row in rows:
            for flags in ((), *((flag,) for flag in FLAGS), ("has_window", "has_block_mask")):
                config = forward_config(row, parts, None, flags)
                if config is not None:
                    yield config, "float32"
