"""Rows of the table for the backward pass by mma.sync (sm_75 and later), and when they run. Pure, no CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cuflash.config import FLAGS, FLOAT_BYTES, HALF_BYTES, MOST_KEPT, KernelConfig
from cuflash.plan import CPP_TYPES, are_products, capability_of, flags_of, smem_limit
from cuflash.plan_sm80 import SMEM_BESIDE_TILES, WARP, Capability, dtypes, fits
from cuflash.problem import AttentionProblem


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and how they are computed.

    Attributes
    ----------
    dq_fragments : int
        Sixteens of queries whose dq a warp has.
    together : bool
        Whether dk and dv fit the registers together; else each has a kernel of its own.
    stages : int
        Buffers of queries.
    min_blocks : int
        Thread blocks that share a multiprocessor.
    below : Capability
        GPUs from this one on have too few registers: their compiler spills.
    """

    block_m: int
    block_n: int
    warps: int
    dq_fragments: int
    together: bool
    stages: int = 1
    min_blocks: int = 1
    below: Capability = (99, 0)


@dataclass(frozen=True)
class Row:
    """Tiles for head dims up to these.

    Attributes
    ----------
    tiles : tuple of Tile
        Plain or with a window: the first is taken whose blocks fit a multiprocessor's shared memory together.
    with_options : tuple of Tile
        The same with any other option, as they take registers.
    """

    head_dim: int
    head_dim_v: int
    tiles: tuple[Tile, ...]
    with_options: tuple[Tile, ...]


# The first row that is wide enough is taken.
BACKWARD = (
    Row(
        64,
        64,
        (Tile(32, 128, 4, 1, True, min_blocks=2), Tile(32, 64, 4, 1, True)),
        (Tile(32, 64, 4, 1, True, min_blocks=2), Tile(32, 64, 4, 1, True)),
    ),
    Row(
        128,
        128,
        (Tile(64, 128, 8, 2, True, stages=2), Tile(64, 64, 4, 2, True), Tile(32, 64, 4, 1, True)),
        (Tile(32, 64, 4, 1, False),),
    ),
    Row(
        192,
        192,
        (Tile(64, 128, 8, 1, False), Tile(64, 64, 4, 2, False), Tile(32, 64, 4, 1, False), Tile(16, 32, 2, 1, False)),
        (Tile(32, 64, 4, 1, False, below=(10, 0)), Tile(16, 32, 2, 1, False)),
    ),
    Row(
        256,
        256,
        (Tile(64, 128, 8, 2, False), Tile(32, 64, 4, 1, False), Tile(16, 64, 4, 1, False), Tile(16, 32, 2, 1, False)),
        (Tile(16, 64, 4, 1, False),),
    ),
)
MAIN, ROWS, DQ = "backward_sm80", "backward_sm80_rows", "backward_sm80_dq"
ENTRIES = (MAIN, ROWS, DQ)


@dataclass(frozen=True, kw_only=True)
class Config(KernelConfig):
    """One kernel of a backward pass."""

    num_warps: int
    dq_fragments: int
    stages: int
    min_blocks: int
    product_depth: int  # of one mma.sync
    async_copies: bool  # cp.async, else through registers
    vector_adds: bool  # four floats are added in memory at once
    aligned: bool  # addresses and strides of all arrays that are copied are multiples of 16 bytes
    plain_scores: bool  # a score is a product of q and k times a scale
    computes_dk: bool  # and dq
    computes_dv: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * WARP


def _smem_bytes(tile: Tile, row: Row, computes_dk: bool) -> int:
    of_key = row.head_dim + (row.head_dim_v + tile.block_m if computes_dk else 0)
    of_query = HALF_BYTES * (row.head_dim + row.head_dim_v) + 2 * FLOAT_BYTES
    return tile.block_n * HALF_BYTES * of_key + tile.stages * tile.block_m * of_query + SMEM_BESIDE_TILES


def _fitting(tiles: tuple[Tile, ...], row: Row, capability: Capability, limit: int) -> Tile | None:
    fitting = (
        tile for tile in tiles if fits(tile.min_blocks, _smem_bytes(tile, row, True), limit) and capability < tile.below
    )
    return next(fitting, None)


def configs(
    row: Row,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    aligned: bool = True,
) -> tuple[Config, ...]:
    """The kernels for the gradients of scores, none where no tile fits; `flags` is a subset of `config.FLAGS`."""
    plain = set(flags) <= {"has_window"} and aligned
    tile = _fitting(row.tiles if plain else row.with_options, row, capability, limit)
    if tile is None:
        return ()
    ampere = capability >= (8, 0)
    passes = ((True, True),) if tile.together else ((True, False), (False, True))
    return tuple(
        Config(
            entry=MAIN,
            element=CPP_TYPES[dtype],
            accum="float",
            bias_element=CPP_TYPES[bias_dtype or dtype],
            head_dim=row.head_dim,
            head_dim_v=row.head_dim_v,
            block_m=tile.block_m,
            block_n=tile.block_n,
            num_warps=tile.warps,
            dq_fragments=tile.dq_fragments,
            stages=tile.stages,
            min_blocks=tile.min_blocks,
            product_depth=16 if ampere else 8,
            async_copies=ampere,
            vector_adds=capability >= (9, 0),
            aligned=aligned,
            plain_scores=are_products(flags),
            computes_dk=computes_dk,
            computes_dv=computes_dv,
            smem_bytes=_smem_bytes(tile, row, computes_dk),
            **{flag: flag in flags for flag in FLAGS},
        )
        for computes_dk, computes_dv in passes
    )


@lru_cache(maxsize=MOST_KEPT)
def backward(problem: AttentionProblem, aligned: bool, capability: Capability, limit: int) -> tuple[Config, ...]:
    """The kernels for a problem; none where mma.sync does not take its dtype or no tile fits."""
    if problem.dtype not in dtypes(capability):
        return ()
    row = next(r for r in BACKWARD if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    return configs(row, problem.dtype, problem.bias_dtype, flags_of(problem), capability, limit, aligned)


def reason(problem: AttentionProblem) -> str:
    """What the backward pass takes on GPUs of sm_80 to sm_89 and of sm_100 on, and why, in words."""
    tiles = []
    for name in ("sm_80", "sm_86"):
        chosen = backward(problem, True, capability_of(name), smem_limit(name))
        if not chosen:
            return f"portable kernels: mma.sync here takes 16-bit inputs, not {problem.dtype}"
        tiles.append(f"{chosen[0].tile} on {name}")
    order = "; dq by the portable kernel, as its bits must repeat" if problem.deterministic else ""
    return f"mma.sync, tiles of {', '.join(tiles)}{order}"


def table(capability: Capability, limit: int) -> Iterator[tuple[Config, str]]:
    """Every kernel for a GPU, with its dtype: each row plain, with visibility options and with all flags."""
    for row in BACKWARD:
        for dtype in dtypes(capability):
            for flags in ((), ("has_window",), ("has_window", "has_block_mask"), FLAGS):
                for config in configs(row, dtype, None, flags, capability, limit):
                    yield config, dtype
            for config in configs(row, dtype, None, FLAGS, capability, limit, aligned=False):
                yield config, dtype
