"""Rows of the table for tensor cores by mma.sync (sm_75 and later), and when they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Generic, TypeVar

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, WARP, capability_of, smem_limit
from cuflash.kept import kept
from cuflash.plan.config import (
    FLAGS,
    KNOWN_TO_ALL,
    KernelConfig,
    are_products,
    beside_window,
    common,
    flags_of,
    has_plain_scale,
    unknown,
)
from cuflash.plan.config import table_flags as common_flags
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = KNOWN_TO_ALL  # forward
# Which keys are seen, and the alignment before.
SMEM_BESIDE_TILES = 256
# What the driver takes of shared memory for each thread block.
_RESERVED_SMEM = 1024


Capability = tuple[int, int]
ANY: Capability = (99, 0)  # beyond all
BLACKWELL: Capability = (10, 0)  # from here on some kernels take more registers


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, warps, buffers of keys and values, blocks that share a multiprocessor.

    Of `key_warps` warps with the same queries each has a part of the keys, and of the result's columns. The keys are
    those of `listed` tiles in a block mask's list, where there is no window.
    GPUs from `below` on would have too few registers; `only` these options leave enough.
    """

    block_m: int
    block_n: int
    num_warps: int
    stages: int = 1
    min_blocks: int = 1
    key_warps: int = 1
    listed: int = 1
    below: Capability = ANY
    only: tuple[str, ...] = ()


T = TypeVar("T")
NO_BLOCKS = (0, 0)
# The finest tiles are no larger, whatever a mask's blocks.
_FINE = 64


@dataclass(frozen=True)
class Row(Generic[T]):
    """Tiles for head dims up to these.

    `tiles` are for plain scores, or a window: the first is taken whose blocks fit a multiprocessor's shared memory
    together. `with_options` are for any other options, as they take registers; before them `with_one` for one alone.
    """

    head_dim: int
    head_dim_v: int
    tiles: tuple[T, ...]
    with_options: tuple[T, ...]
    with_one: tuple[Any, ...] = ()

    def tiles_for(self, flags: tuple[str, ...], is_plain: bool) -> tuple[T, ...]:
        """The tiles for these options."""
        beside = beside_window(flags)
        if is_plain and not beside:
            return self.tiles
        with_one = self.with_one if is_plain and len(beside) == 1 else ()
        return (*(t for t in with_one if beside <= {*t.only}), *self.with_options)


def meets_whole_blocks(size: int, of_block: int) -> bool:
    """Whether a tile of so many queries or keys has no halves of a mask's blocks: most would see half of it."""
    return size <= _FINE or of_block % size == 0


ENTRY = "forward_sm80"
FEW = ("has_softcap", "has_alibi")
MORE = (*FEW, "has_dropout", "has_block_mask")
_64X64 = (
    Tile(64, 64, 4, min_blocks=4, only=("has_mask", "has_block_mask")),
    Tile(64, 64, 4, min_blocks=3, only=("has_mask", "has_block_mask")),
    Tile(64, 64, 4, stages=2, min_blocks=2, only=MORE),
    Tile(64, 64, 4, min_blocks=2, only=FLAGS),
)
_SHARED = Tile(64, 64, 4, min_blocks=2, key_warps=2, only=("has_block_mask",))
# The first row that is wide enough is taken.
FORWARD = (
    Row(
        64,
        64,
        (
            Tile(128, 128, 4, stages=2, min_blocks=2, below=BLACKWELL),
            Tile(128, 64, 4, stages=2, min_blocks=2),
            Tile(128, 64, 4),
        ),
        (Tile(64, 32, 4, min_blocks=2),),
        (
            Tile(128, 128, 4, stages=2, min_blocks=2, listed=2, below=BLACKWELL, only=("has_block_mask",)),
            Tile(128, 64, 4, stages=2, min_blocks=2, only=(*FEW, "has_block_mask")),
            Tile(128, 64, 4, min_blocks=2, only=("has_bias",)),
            *_64X64,
        ),
    ),
    Row(96, 96, (Tile(128, 64, 4, min_blocks=2), Tile(64, 64, 4)), (Tile(64, 32, 4, min_blocks=2),)),
    Row(
        128,
        128,
        (
            Tile(128, 64, 4, stages=2, min_blocks=2),
            Tile(128, 64, 4, min_blocks=2),
            Tile(128, 32, 4, min_blocks=2),
            Tile(64, 64, 4),
        ),
        (Tile(64, 32, 4, min_blocks=2), Tile(64, 32, 4)),
        (
            Tile(128, 64, 4, stages=2, min_blocks=2, only=(*FEW, "has_block_mask")),
            Tile(128, 64, 4, min_blocks=2, only=(*FEW, "has_block_mask")),
            Tile(64, 64, 2, min_blocks=4, only=("has_block_mask",)),
            *_64X64[1:],
        ),
    ),
    *(Row(192, d, (_SHARED, Tile(64, 64, 4), Tile(64, 32, 4)), (Tile(64, 32, 4),), (_SHARED,)) for d in (128, 192)),
    Row(
        256,
        256,
        (_SHARED, Tile(128, 64, 8), Tile(64, 64, 4), Tile(32, 32, 2)),
        (Tile(64, 32, 4), Tile(32, 32, 2)),
        (replace(_SHARED, below=BLACKWELL), Tile(64, 64, 4, only=FLAGS)),
    ),
)


@dataclass(frozen=True, kw_only=True)
class MmaConfig(KernelConfig):
    """One kernel of either pass by mma.sync."""

    num_warps: int
    stages: int
    min_blocks: int
    product_depth: int  # of one mma.sync
    async_copies: bool  # cp.async, else through registers
    aligned: bool  # addresses and strides of all arrays that are copied are multiples of 16 bytes
    plain_scores: bool  # a score is a product of q and k times a scale, forward a positive one

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * WARP


@dataclass(frozen=True, kw_only=True)
class Config(MmaConfig):
    """One kernel of this family."""

    key_warps: int
    listed: int
    chunk: int = 64  # columns that the gradient of a bias brings at once, where there are stages
    has_bias_tiles: bool = False  # those of a bias come with the values', where its rows are vectors


def dtypes(capability: Capability) -> tuple[str, ...]:
    """What mma.sync multiplies on a GPU."""
    if capability < (7, 5):
        return ()
    return ("float16",) if capability < (8, 0) else ("float16", "bfloat16")


def _forward_smem(tile: Tile, row: Row[Tile]) -> int:
    columns = row.head_dim + row.head_dim_v
    elements = tile.block_m * row.head_dim + tile.stages * tile.block_n * columns
    shared = tile.block_m * (tile.block_n * HALF_BYTES + tile.key_warps * FLOAT_BYTES) if tile.key_warps > 1 else 0
    return elements * HALF_BYTES + shared + tile.block_n + SMEM_BESIDE_TILES


def fits(min_blocks: int, smem_bytes: int, limit: int) -> bool:
    """Whether a multiprocessor whose blocks may have `limit` bytes holds so many together."""
    return min_blocks * (smem_bytes + _RESERVED_SMEM) <= limit + _RESERVED_SMEM


def first_fitting(
    tiles: tuple[Tile, ...], smem_bytes: Callable[[Tile], int], capability: Capability, limit: int
) -> Tile:
    """The first tile for a GPU whose blocks it holds together."""
    return next(t for t in tiles if capability < t.below and fits(t.min_blocks, smem_bytes(t), limit))


def constants(
    family: type[KernelConfig],
    row: Row[Any],
    tile: Any,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    aligned: bool,
) -> dict[str, Any]:
    """Fields of all kernels on 16 bits."""
    return {
        **common(family, dtype, bias_dtype, flags, row, tile),
        "product_depth": 16 if capability >= (8, 0) else 8,
        "async_copies": capability >= (8, 0),
        "aligned": aligned,
    }


def forward_config(
    row: Row[Tile],
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
    block_size: tuple[int, int] = NO_BLOCKS,
    entry: str = ENTRY,
    smem_bytes: Callable[[Tile, Row[Tile]], int] = _forward_smem,
) -> Config:
    """The configuration of one kernel that stays with queries; `flags` is a subset of `FLAGS`."""
    tiles = row.tiles_for(flags, plain_scores and aligned)
    # Listed tiles of a step are neighbours where a block has them all.
    of_block = 0 if "has_window" in flags else block_size[1]
    tiles = tuple(
        t
        for t in tiles
        if (t.listed == 1 or (of_block and of_block % t.block_n == 0)) and meets_whole_blocks(t.block_m, block_size[0])
    )
    plain_scores = plain_scores and are_products(flags)

    def of_bias(t: Tile) -> int:
        alone = entry == ENTRY and beside_window(flags) == {"has_bias"}
        return t.block_m * t.block_n * HALF_BYTES if alone and t.stages == 1 else 0

    def all_bytes(t: Tile) -> int:
        return smem_bytes(t, row) + of_bias(t)

    tile = first_fitting(tiles, all_bytes, capability, limit)
    config = Config(
        entry=entry,
        plain_scores=plain_scores,
        smem_bytes=all_bytes(tile),
        **constants(Config, row, tile, dtype, bias_dtype, flags, capability, aligned),
    )
    is_copied = config.async_copies and aligned and config.bias_element == config.element
    return replace(config, has_bias_tiles=of_bias(tile) > 0 and is_copied)


@kept
def forward(
    problem: AttentionProblem,
    aligned: bool,
    capability: Capability,
    limit: int,
    rows: tuple[Row[Tile], ...] = FORWARD,
    handled: tuple[str, ...] = (),
    **of: Any,
) -> Config | None:
    """The forward kernel for a problem, or None where mma.sync does not take its dtype or an option.

    Other kernels that stay with queries have `rows`, what they handle, and the entry.
    """
    if problem.dtype not in dtypes(capability) or unknown(handled or HANDLES, problem):
        return None
    row = next(r for r in rows if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    given = row, problem.dtype, problem.bias_dtype, flags_of(problem), capability, limit
    return forward_config(*given, has_plain_scale(problem), aligned, problem.block_size, **of)


def reason(problem: AttentionProblem) -> str:
    """What the forward pass takes on GPUs but Hopper's, in words."""
    if problem.dtype not in dtypes((8, 0)):
        return f"portable kernel: mma.sync has none for {problem.dtype} of this size"
    if unknown(HANDLES, problem):
        return f"portable kernel: mma.sync has none with {unknown(HANDLES, problem)}"
    older = (
        "" if problem.dtype in dtypes((7, 5)) else f"; portable kernel on sm_75, which multiplies no {problem.dtype}"
    )
    tiles = {name: forward(problem, True, capability_of(name), smem_limit(name)) for name in ("sm_80", "sm_86")}
    return f"mma.sync, tiles of {', '.join(f'{c.tile} on {name}' for name, c in tiles.items() if c is not None)}{older}"


BLOCK_FLAGS = ("has_block_mask",), ("has_window", "has_block_mask")
BLOCK_SIZES = 64, 128  # that are listed


def table_flags(row: Row[Any], handled: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Options with which the kernels of a row are listed."""
    of_one = (("has_window", "has_alibi"), ("has_window", "has_bias")) if row.with_one else ()
    return *common_flags(handled), *of_one


def table(
    capability: Capability,
    limit: int,
    rows: tuple[Row[Tile], ...] = FORWARD,
    handled: tuple[str, ...] = HANDLES,
    **of: Any,
) -> Iterator[tuple[Config, str]]:
    """Every kernel for a GPU, with its dtype: `plan.table`."""
    for row in rows:
        for dtype in dtypes(capability):
            for flags in table_flags(row, handled):
                yield forward_config(row, dtype, None, flags, capability, limit, **of), dtype
            for flags, size in product(BLOCK_FLAGS, BLOCK_SIZES) if row.with_one else ():
                blocks = row, dtype, None, flags, capability, limit
                yield forward_config(*blocks, block_size=(size, size), **of), dtype
            yield forward_config(row, dtype, None, handled, capability, limit, aligned=False, **of), dtype
