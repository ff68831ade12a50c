"""The table of the forward kernels by mma.sync on 16 bits (sm_75 and later), and when they run.

It also has what its neighbours share: `sm80_backward` (gradients) and `sm80_wide` (float32 and float64) take its tiles,
its rows and its choice of the first tile that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Generic, TypeVar

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, WARP, capability_of, smem_limit
from cuflash.kept import kept
from cuflash.plan.config import (
    BY_HALVES,
    FLAGS,
    KNOWN_TO_ALL,
    OF_RULES,
    KernelConfig,
    are_products,
    common,
    flags_of,
    has_plain_scale,
    not_taken,
    of_half,
    with_rules,
    without_blocks_of_rule,
    without_window,
)
from cuflash.plan.config import table_flags as common_flags
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that the forward kernel knows
# So many bytes of shared memory are no tile's: they tell which keys are seen, with the padding before them.
SMEM_BESIDE_TILES = 256
# The driver takes so many bytes of shared memory for each thread block.
_RESERVED_SMEM = 1024


Capability = tuple[int, int]
ANY: Capability = (99, 0)  # a capability that no GPU reaches
BLACKWELL: Capability = (10, 0)  # from here on the compiler gives some kernels more registers


@dataclass(frozen=True)
class Sm80Tile:
    """The tile of a kernel whose thread blocks stay with queries, and on which GPUs and options it is taken."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    num_warps: int  # warps of a thread block
    stages: int = 1  # buffers of keys and values
    min_blocks: int = 1  # thread blocks that share a multiprocessor
    key_warps: int = 1  # warps with the same queries; each has a share of the keys and of the result's columns
    listed: int = 1  # entries of a block mask's list whose keys are one tile, where there is no window
    below: Capability = ANY  # GPUs from this capability on have too few registers
    only: tuple[str, ...] = ()  # flags that leave enough registers, where `Sm80Row.with_one` has the tile


T = TypeVar("T")
NO_BLOCKS = (0, 0)  # the block size of a problem without a block mask
_FINE = 64  # a tile of at most so many queries or keys is taken whatever the size of a mask's blocks


@dataclass(frozen=True)
class Sm80Row(Generic[T]):
    """Tiles for head dims up to these, the fastest first, of which those are candidates that fit a multiprocessor."""

    head_dim: int  # widest q and k
    head_dim_v: int  # widest v
    tiles: tuple[T, ...]  # tiles for plain scores, or with a window
    with_options: tuple[T, ...]  # tiles for any other options, which take registers
    with_one: tuple[Any, ...] = ()  # tiles that come before `with_options` where one option stands alone

    def tiles_for(self, flags: tuple[str, ...], is_plain: bool) -> tuple[T, ...]:
        """The tiles for these flags; `is_plain` says that scores are scaled as usual and arrays are aligned."""
        options = without_window(flags)
        if is_plain and not options:
            return *self.tiles, *self.with_options
        alone = without_blocks_of_rule(options)
        with_one = self.with_one if is_plain and len(alone) == 1 else ()
        return (*(t for t in with_one if options <= {*t.only}), *self.with_options)


def meets_whole_blocks(size: int, block: int) -> bool:
    """Return True if tiles of `size` queries or keys lie within one block of a mask, as most are half hidden if not."""
    return size <= _FINE or block % size == 0


ENTRY = "forward_sm80"
FEW = ("has_softcap", "has_alibi")
MORE = (*FEW, "has_dropout", "has_block_mask", *OF_RULES)
_64X64 = (
    Sm80Tile(64, 64, 4, min_blocks=4, only=("has_mask", "has_block_mask")),
    Sm80Tile(64, 64, 4, min_blocks=3, only=("has_mask", "has_block_mask")),
    Sm80Tile(64, 64, 4, stages=2, min_blocks=2, only=MORE),
    Sm80Tile(64, 64, 4, min_blocks=2, only=FLAGS),
)
_SHARED = Sm80Tile(64, 64, 4, min_blocks=2, key_warps=2, only=("has_block_mask",))
# The first row is taken whose head dims are no smaller than the problem's.
FORWARD = (
    Sm80Row(
        64,
        64,
        (
            Sm80Tile(128, 128, 4, stages=2, min_blocks=2, below=BLACKWELL),
            Sm80Tile(128, 64, 4, stages=2, min_blocks=2),
            Sm80Tile(128, 64, 4),
        ),
        (Sm80Tile(64, 32, 4, min_blocks=2),),
        (
            Sm80Tile(128, 128, 4, stages=2, min_blocks=2, listed=2, below=BLACKWELL, only=("has_block_mask",)),
            Sm80Tile(128, 64, 4, stages=2, min_blocks=2, only=(*FEW, "has_block_mask", *OF_RULES)),
            Sm80Tile(128, 64, 4, min_blocks=2, only=("has_bias",)),
            *_64X64,
        ),
    ),
    Sm80Row(96, 96, (Sm80Tile(128, 64, 4, min_blocks=2), Sm80Tile(64, 64, 4)), (Sm80Tile(64, 32, 4, min_blocks=2),)),
    Sm80Row(
        128,
        128,
        (
            Sm80Tile(128, 64, 4, stages=2, min_blocks=2),
            Sm80Tile(128, 64, 4, min_blocks=2),
            Sm80Tile(128, 32, 4, min_blocks=2),
            Sm80Tile(64, 64, 4),
        ),
        (Sm80Tile(64, 32, 4, min_blocks=2), Sm80Tile(64, 32, 4)),
        (
            Sm80Tile(128, 64, 4, stages=2, min_blocks=2, only=(*FEW, "has_block_mask", *OF_RULES)),
            Sm80Tile(128, 64, 4, min_blocks=2, only=(*FEW, "has_block_mask", *OF_RULES)),
            Sm80Tile(64, 64, 2, min_blocks=4, only=("has_block_mask",)),
            *_64X64[1:],
        ),
    ),
    *(
        Sm80Row(192, d, (_SHARED, Sm80Tile(64, 64, 4), Sm80Tile(64, 32, 4)), (Sm80Tile(64, 32, 4),), (_SHARED,))
        for d in (128, 192)
    ),
    Sm80Row(
        256,
        256,
        (_SHARED, Sm80Tile(128, 64, 8), Sm80Tile(64, 64, 4), Sm80Tile(32, 32, 2)),
        (Sm80Tile(64, 32, 4), Sm80Tile(32, 32, 2)),
        (replace(_SHARED, below=BLACKWELL), Sm80Tile(64, 64, 4, only=FLAGS)),
    ),
)


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

    key_warps: int  # see `Sm80Tile`
    listed: int
    chunk: int = 64  # columns that the kernel for the gradient of a bias loads at once, where it has several stages
    has_bias_tiles: bool = (
        False  # a tile of the bias is copied with the values', where its rows are vectors of 16 bytes
    )
    splits_keys: bool = False  # several thread blocks share the keys of a tile, and a kernel merges their results


def dtypes(capability: Capability) -> tuple[str, ...]:
    """The 16-bit dtypes that mma.sync multiplies on a GPU of this capability."""
    if capability < (7, 5):
        return ()
    return ("float16",) if capability < (8, 0) else ("float16", "bfloat16")


def _forward_smem(tile: Sm80Tile, row: Sm80Row[Sm80Tile]) -> int:
    columns = row.head_dim + row.head_dim_v
    elements = tile.block_m * row.head_dim + tile.stages * tile.block_n * columns
    shared = tile.block_m * (tile.block_n * HALF_BYTES + tile.key_warps * FLOAT_BYTES) if tile.key_warps > 1 else 0
    return elements * HALF_BYTES + shared + tile.block_n + SMEM_BESIDE_TILES


def fits(min_blocks: int, smem_bytes: int, limit: int) -> bool:
    """Return True if a multiprocessor holds `min_blocks` thread blocks, of which one alone may use `limit` bytes."""
    return min_blocks * (smem_bytes + _RESERVED_SMEM) <= limit + _RESERVED_SMEM


def fitting(
    tiles: Iterable[Sm80Tile], smem_bytes: Callable[[Sm80Tile], int], capability: Capability, limit: int
) -> tuple[Sm80Tile, ...]:
    """The tiles for a GPU whose thread blocks fit one of its multiprocessors together, each once."""
    found = (t for t in tiles if capability < t.below and fits(t.min_blocks, smem_bytes(t), limit))
    return tuple({replace(t, below=ANY, only=()): t for t in found}.values())


def constants(
    family: type[KernelConfig],
    row: Sm80Row[Any],
    tile: Any,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    aligned: bool,
) -> dict[str, Any]:
    """Values for the fields that `Sm80Config` and its base have."""
    return {
        **common(family, dtype, bias_dtype, flags, row, tile),
        "product_depth": 16 if capability >= (8, 0) else 8,
        "async_copies": capability >= (8, 0),
        "aligned": aligned,
    }


def forward_configs(
    row: Sm80Row[Sm80Tile],
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
    block_size: tuple[int, int] = NO_BLOCKS,
    entry: str = ENTRY,
    smem_bytes: Callable[[Sm80Tile, Sm80Row[Sm80Tile]], int] = _forward_smem,
) -> tuple[Sm80QueryConfig, ...]:
    """The configurations of a kernel whose thread blocks stay with queries, that with the fastest tile first.

    `flags` is a subset of `FLAGS`, `limit` the bytes of shared memory that a thread block may use, and `smem_bytes` the
    need of a tile.
    """
    tiles = row.tiles_for(flags, plain_scores and aligned)
    # A step takes several listed tiles only where they are neighbours, which means that one block has them all.
    keys_of_block = 0 if "has_window" in flags else block_size[1]
    tiles = tuple(
        t
        for t in tiles
        if (t.listed == 1 or (keys_of_block and keys_of_block % t.block_n == 0))
        and meets_whole_blocks(t.block_m, block_size[0])
    )
    plain_scores = plain_scores and are_products(flags)

    def bias_bytes(t: Sm80Tile) -> int:
        alone = entry == ENTRY and without_window(flags) == {"has_bias"}
        return t.block_m * t.block_n * HALF_BYTES if alone and t.stages == 1 else 0

    def all_bytes(t: Sm80Tile) -> int:
        return smem_bytes(t, row) + bias_bytes(t)

    def config_of(tile: Sm80Tile) -> Sm80QueryConfig:
        config = Sm80QueryConfig(
            entry=entry,
            plain_scores=plain_scores,
            smem_bytes=all_bytes(tile),
            **constants(Sm80QueryConfig, row, tile, dtype, bias_dtype, flags, capability, aligned),
        )
        is_copied = config.async_copies and aligned and config.bias_element == config.element
        return replace(config, has_bias_tiles=bias_bytes(tile) > 0 and is_copied)

    return tuple(map(config_of, fitting(tiles, all_bytes, capability, limit)))


def forward_config(*given: Any, **of: Any) -> Sm80QueryConfig:
    """The first of `forward_configs`."""
    return forward_configs(*given, **of)[0]


@kept
def forward(
    problem: AttentionProblem,
    aligned: bool,
    capability: Capability,
    limit: int,
    rows: tuple[Sm80Row[Sm80Tile], ...] = FORWARD,
    handled: tuple[str, ...] = (),
    **of: Any,
) -> tuple[Sm80QueryConfig, ...]:
    """The candidates for a problem's forward kernel; none where mma.sync does not take its dtype or an option.

    `aligned` says that addresses and strides are multiples of 16 bytes, `limit` is the shared memory of a thread block
    in bytes. Other kernels whose thread blocks stay with queries give their own `rows`, the flags `handled`, and
    `forward_configs`' entry and smem_bytes.
    """
    if problem.dtype not in dtypes(capability) or not_taken(handled or HANDLES, problem):
        return ()
    row = next(r for r in rows if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    given = row, problem.dtype, problem.bias_dtype, flags_of(problem), capability, limit
    configs = forward_configs(*given, has_plain_scale(problem), aligned, problem.block_size, **of)
    return tuple(with_rules(config, problem) for config in configs)


def reason(problem: AttentionProblem) -> str:
    """A sentence for users: the forward kernels that a problem takes on GPUs other than Hopper."""
    if problem.dtype not in dtypes((8, 0)):
        return f"portable kernel: mma.sync has none for {problem.dtype} of this size"
    whole = problem
    if not_taken(HANDLES, whole):
        problem = of_half(whole)
    if not_taken(HANDLES, problem):
        return f"portable kernel: mma.sync has none with {not_taken(HANDLES, whole)}"
    older = (
        "" if problem.dtype in dtypes((7, 5)) else f"; portable kernel on sm_75, which multiplies no {problem.dtype}"
    )
    tiles = {name: forward(problem, True, capability_of(name), smem_limit(name)) for name in ("sm_80", "sm_86")}
    in_words = ", ".join(f"{configs[0].tile} on {name}" for name, configs in tiles.items() if configs)
    return f"mma.sync, tiles of {in_words}{'' if problem is whole else BY_HALVES}{older}"


BLOCK_FLAGS = ("has_block_mask",), ("has_window", "has_block_mask")
BLOCK_SIZES = 64, 128  # block sizes of masks with which kernels are listed


def table_flags(row: Sm80Row[Any], handled: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Combinations of flags with which the kernels of a row are listed."""
    alone = (("has_window", "has_alibi"), ("has_window", "has_bias")) if row.with_one else ()
    return *common_flags(handled), *alone


def table(
    capability: Capability,
    limit: int,
    rows: tuple[Sm80Row[Sm80Tile], ...] = FORWARD,
    handled: tuple[str, ...] = HANDLES,
    **of: Any,
) -> Iterator[tuple[Sm80QueryConfig, str]]:
    """Every kernel of `rows` for a GPU, with its dtype."""
    for row in rows:
        for dtype in dtypes(capability):
            for flags in table_flags(row, handled):
                yield forward_config(row, dtype, None, flags, capability, limit, **of), dtype
            for flags, size in product(BLOCK_FLAGS, BLOCK_SIZES) if row.with_one else ():
                blocks = row, dtype, None, flags, capability, limit
                yield forward_config(*blocks, block_size=(size, size), **of), dtype
            yield forward_config(row, dtype, None, handled, capability, limit, aligned=False, **of), dtype
