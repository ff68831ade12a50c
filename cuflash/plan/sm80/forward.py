"""The configurations of the forward kernels by mma.sync on 16 bits (sm_75 and later), and when they run.

`tiles` has their records. The neighbours share what stands here: `backward` and `fp8` have kernels whose
thread blocks stay with queries, too, and `wide` (float32 and float64) has the same constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, WARP
from cuflash.kept import kept
from cuflash.plan.config import (
    KNOWN_TO_ALL,
    OF_RULES,
    KernelConfig,
    common,
    flags_of,
    has_plain_scores,
    not_taken,
    with_rules,
    without_window,
)
from cuflash.plan.record import AMPERE, Capability, Place, Record, asked_of_scaled, candidates, narrowest
from cuflash.plan.sm80 import times as sm80_times
from cuflash.plan.sm80.tiles import ENTRY, FORWARD, Records, Sm80Tile
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that the forward kernel knows
# So many bytes of shared memory are no tile's: they tell which keys are seen, with the padding before them.
SMEM_BESIDE_TILES = 256
# The driver takes so many bytes of shared memory for each thread block.
_RESERVED_SMEM = 1024
_FINE = 64  # a tile of at most so many queries or keys is taken whatever the size of a mask's blocks


def meets_whole_blocks(size: int, block: int) -> bool:
    """Return True if tiles of `size` queries or keys lie within one block of a mask, as most are half hidden if not."""
    return size <= _FINE or block % size == 0


@dataclass(frozen=True, kw_only=True)
class Sm80Config(KernelConfig):
    """The configuration of a kernel of either pass by mma.sync."""

    num_warps: int  # warps of a thread block
    stages: int  # buffers of what is loaded step by step
    min_blocks: int  # thread blocks that share a multiprocessor
    product_depth: int  # columns that one mma.sync multiplies: its K
    async_copies: bool  # cp.async copies to shared memory, else threads do through registers
    aligned: bool  # addresses and strides of all arrays that are copied are multiples of 16 bytes
    plain_scores: bool  # a score is a product of q and k times a scale, which is positive in the forward pass

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return self.num_warps * WARP


@dataclass(frozen=True, kw_only=True)
class Sm80QueryConfig(Sm80Config):
    """The configuration of a kernel whose thread blocks stay with queries."""

    key_warps: int  # see `sm80.tiles.Sm80Tile`
    listed: int
    chunk: int = 64  # columns that the kernel for the gradient of a bias loads at once, where it has several stages
    has_bias_tiles: bool = (
        False  # a tile of the bias is copied with the values', where its rows are vectors of 16 bytes
    )
    splits_warps: bool = False  # see `sm80.tiles.Sm80Tile`
    splits_keys: bool = False  # several thread blocks share the keys of a tile, and a kernel merges their results


def dtypes(capability: Capability) -> tuple[str, ...]:
    """The 16-bit dtypes that mma.sync multiplies on a GPU of this capability."""
    if capability < (7, 5):
        return ()
    return ("float16",) if capability < AMPERE else HALF_DTYPES


def _forward_smem(tile: Sm80Tile, row: Record[Sm80Tile]) -> int:
    columns = row.head_dim + row.head_dim_v
    elements = tile.block_m * row.head_dim + tile.stages * tile.block_n * columns
    shared = tile.block_m * (tile.block_n * HALF_BYTES + tile.key_warps * FLOAT_BYTES) if tile.key_warps > 1 else 0
    return elements * HALF_BYTES + shared + tile.block_n + SMEM_BESIDE_TILES


def fits(min_blocks: int, smem_bytes: int, limit: int) -> bool:
    """Return True if a multiprocessor holds `min_blocks` thread blocks, of which one alone may use `limit` bytes."""
    return min_blocks * (smem_bytes + _RESERVED_SMEM) <= limit + _RESERVED_SMEM


def constants(
    family: type[KernelConfig], record: Record[Any], problem: AttentionProblem, place: Place
) -> dict[str, Any]:
    """Values for the fields that `Sm80Config` and its base have."""
    return {
        **common(family, problem.dtype, problem.bias_dtype, flags_of(problem), record, record.tile),
        "product_depth": 16 if place.capability >= AMPERE else 8,
        "async_copies": place.capability >= AMPERE,
        "aligned": place.aligned,
    }


def query_configs(
    problem: AttentionProblem,
    place: Place,
    table: Records,
    handled: tuple[str, ...],
    smem_bytes: Callable[[Sm80Tile, Record[Sm80Tile]], int],
) -> tuple[Sm80QueryConfig, ...]:
    """The candidates for a kernel whose thread blocks stay with queries; none where mma.sync does not take a problem.

    `handled` are the flags that the kernel knows, and `smem_bytes` is the need of a record's tile.
    """
    if problem.dtype not in dtypes(place.capability) or not_taken(handled, problem):
        return ()
    flags, asked = flags_of(problem), asked_of_scaled(problem, place)
    # A step takes several listed tiles only where they are neighbours, which means that one block has them all.
    queries_of_block, keys_of_block = problem.block_size
    if "has_window" in flags:
        keys_of_block = 0

    def bias_bytes(record: Record[Sm80Tile]) -> int:
        alone = record.entries == (ENTRY,) and without_window(flags) == {"has_bias"}
        tile = record.tile
        return tile.block_m * tile.block_n * HALF_BYTES if alone and tile.stages == 1 else 0

    def all_bytes(record: Record[Sm80Tile]) -> int:
        return smem_bytes(record.tile, record) + bias_bytes(record)

    def takes(record: Record[Sm80Tile]) -> bool:
        tile = record.tile
        are_neighbours = tile.listed == 1 or (keys_of_block > 0 and keys_of_block % tile.block_n == 0)
        has_room = fits(tile.min_blocks, all_bytes(record), place.limit)
        # Packed calls do not know a sequence's rows; with splits of one size they have the same bits as padded ones.
        if tile.splits_warps and (problem.packed or problem.split_size or problem.seqlen_q > tile.block_m):
            return False
        return are_neighbours and meets_whole_blocks(tile.block_m, queries_of_block) and has_room

    def config_of(record: Record[Sm80Tile]) -> Sm80QueryConfig:
        of_all = constants(Sm80QueryConfig, record, problem, place)
        is_copied = of_all["async_copies"] and place.aligned and of_all["bias_element"] == of_all["element"]
        return Sm80QueryConfig(
            entry=record.entries[0],
            plain_scores=has_plain_scores(problem),
            smem_bytes=all_bytes(record),
            has_bias_tiles=bias_bytes(record) > 0 and is_copied,
            **of_all,
        )

    lines = narrowest(table, problem.head_dim, problem.head_dim_v)
    found = candidates(lines, asked, place.capability, takes, sm80_times.of_queries)
    return tuple(with_rules(config_of(record), problem) for record in found)


@kept
def forward(problem: AttentionProblem, *place: Any) -> tuple[Sm80QueryConfig, ...]:
    """The candidates for a problem's forward kernel; `place` has the fields of `Place`."""
    return query_configs(problem, Place(*place), FORWARD, HANDLES, _forward_smem)
