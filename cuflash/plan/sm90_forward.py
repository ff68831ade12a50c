"""Hopper's forward kernel on 16 bits (wgmma, TMA): when it runs, and with what. The tiles are in sm90_tiles.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from cuflash.hardware import (
    ALIGNMENT,
    FLOAT_BYTES,
    HALF_BYTES,
    L2_BYTES,
    ROWS_OF_WARPGROUP,
    SMEM_ALIGNMENT,
    SMEM_BYTES,
    SWIZZLE_BYTES,
    WARP,
    WARPGROUP,
    whole_rows,
)
from cuflash.kept import kept
from cuflash.plan.config import (
    KNOWN_TO_ALL,
    KernelConfig,
    beside_window,
    common,
    flags_of,
    has_plain_scale,
    unknown,
)
from cuflash.plan.sm90_tiles import FORWARD, Row, Tile
from cuflash.plan.sm90_times import is_timed, parts_worth_a_try, predicted_us
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = KNOWN_TO_ALL
# What may be beside query heads that are rows of one tile: it does not tell heads apart.
_OF_ALL_HEADS = ("has_window", "has_softcap")
# Registers of a thread of the loading warpgroup and of the others, by the number of the latter: 64 K in all. A block
# mask, or a mask or a bias alone, takes more of the first.
REGISTERS = {1: (80, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
_MORE_TO_LOAD = {1: (80, 248), 2: (56, 224), 3: (56, 152), 4: (32, 112)}
OTHER_GPUS = "as on other GPUs"
# A thread's powers come by fours, two of each of its rows.
_POWERS_AT_ONCE = 4
SMEM_BESIDE_TILES = 1024  # of these: barriers, the running tiles, and which keys are seen
# Queries of short and long sequences for the order of tiles, and how many causal tiles even out: four for each of an
# H100's multiprocessors.
_SHORT_QUERIES, _LONG_QUERIES, _EVEN_TILES = 512, 4096, 4 * 132
# Keys of few queries: shorter parts gain less than their merging costs.
_SHORTEST_PART = 128
# Tiles that go to a multiprocessor one after the other; of more, what fills the GPU best is the fastest.
_MOST_WAVES = 7
DTYPES = ("float16", "bfloat16")
_ELEMENT_BYTES_OF = {"float16": HALF_BYTES, "bfloat16": HALF_BYTES, "float32": FLOAT_BYTES}
# Of scores: sums of 2^40 powers times values of 2^15 stay finite, as does the cubic term's factor; none is denormal.
_LARGEST_BOUND, SMALLEST_BOUND = 50, 2**-10
_BOUNDED_DTYPES = ("bfloat16",)  # with exponents like float32's
_MANY_KEYS = 2048
_WIDE_WINDOW = 2048  # keys
_FEW_QUERIES = ROWS_OF_WARPGROUP
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # strides in bytes, shape


@dataclass(frozen=True, kw_only=True)
class HopperConfig(KernelConfig):
    """One kernel by wgmma: a warpgroup that loads, and others."""

    consumers: int  # warpgroups that compute
    producer_registers: int  # of a thread
    consumer_registers: int
    ping_pong: bool  # the warpgroups take turns at the tensor cores
    plain_scores: bool  # (before alibi) a score is a product of q and k times a scale, forward a positive one

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.consumers + 1) * WARPGROUP


@dataclass(frozen=True, kw_only=True)
class Config(HopperConfig):
    """The forward kernel on 16 bits."""

    stages: int
    query_stages: int
    splits_keys: bool  # those of a tile, among thread blocks
    staging_panels: int  # of results that TMA stores at a time; with 0 threads store them
    bias_stages: int
    mask_stages: int
    mask_row_bytes: int  # of its tile
    teams: int
    exact_maxima: bool
    from_last: bool
    held_steps: int
    pair: int
    early_draws: int
    late_wait: bool
    early_powers: int  # of a thread, before it waits for the last product with values
    has_bias_tiles: bool  # TMA brings the bias; else it is read element by element
    has_mask_tiles: bool  # TMA brings the mask; else its rows are read from global memory
    bounded_scores: bool  # their powers need no maximum


def _tile_for(
    row: Row,
    flags: tuple[str, ...],
    plain_scores: bool,
    bias_tiles: bool,
    mask_tiles: bool,
    many_keys: bool,
    narrow_window: bool,
    few_queries: bool,
    bounded_scores: bool,
) -> Tile:
    options = beside_window(flags)
    if not options and plain_scores:
        if few_queries and row.few_queries:
            return row.few_queries
        if flags:
            return (narrow_window and row.narrow_window) or (many_keys and row.many_windowed) or row.windowed
        return (many_keys and row.many_keys) or row.full
    if bounded_scores and row.bounded:
        return row.bounded
    if options <= {"has_softcap"} or options == {"has_alibi"}:
        return row.with_score
    if options == {"has_dropout"}:
        return row.with_dropout
    if options == {"has_block_mask"} and row.with_blocks:
        return row.with_blocks
    if options == {"has_bias"} and bias_tiles:
        return row.with_bias
    if options == {"has_mask"} and mask_tiles and row.with_mask_tiles:
        return row.with_mask_tiles
    return row.with_mask if options in ({"has_mask"}, {"has_block_mask"}) else row.with_more


def forward_config(
    row: Row,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool = True,
    bias_tiles: bool = False,
    splits_keys: bool = False,
    many_keys: bool = False,
    narrow_window: bool = False,
    few_queries: bool = False,
    bounded_scores: bool = False,
    mask_tiles: bool = False,
) -> Config:
    """The configuration of one forward kernel; `flags` is a subset of `FLAGS`."""
    bounded_scores = bounded_scores and dtype in _BOUNDED_DTYPES and beside_window(flags) == {"has_softcap"}
    tile = _tile_for(
        row, flags, plain_scores, bias_tiles, mask_tiles, many_keys, narrow_window, few_queries, bounded_scores
    )
    return config_of(
        row, tile, dtype, bias_dtype, flags, plain_scores, bias_tiles, mask_tiles, splits_keys, bounded_scores
    )


def config_of(
    row: Row,
    tile: Tile,
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool = True,
    bias_tiles: bool = False,
    mask_tiles: bool = False,
    splits_keys: bool = False,
    bounded_scores: bool = False,
) -> Config:
    """The configuration with a tile of the row."""
    options = beside_window(flags)
    consumers, teams = tile.block_m // ROWS_OF_WARPGROUP + tile.alone, 1 + (tile.alone > 0)
    more_to_load = "has_block_mask" in options or options in ({"has_mask"}, {"has_bias"})
    producer_registers, consumer_registers = (_MORE_TO_LOAD if more_to_load else REGISTERS)[consumers]
    row_bytes, row_bytes_v = (whole_rows(HALF_BYTES * d) for d in (row.head_dim, row.head_dim_v))
    most_bytes = SMEM_BYTES // teams
    queries = tile.block_m * row_bytes
    smem_bytes = queries + tile.stages * tile.block_n * (row_bytes + row_bytes_v) + SMEM_BESIDE_TILES
    if plain_scores and options == {"has_alibi"}:
        # Columns' numbers: a row of 16 bytes for each, and eight rows behind that are read, too.
        smem_bytes += -((tile.block_n + 8) * 16 // -SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    mask_row_bytes = _mask_row_bytes(tile.block_n)
    mask_bytes = tile.block_m * mask_row_bytes if mask_tiles else 0
    bias_bytes = tile.block_m * whole_rows(tile.block_n * _ELEMENT_BYTES_OF[bias_dtype or dtype]) if bias_tiles else 0
    mask_stages = 2 if mask_bytes and smem_bytes + bias_bytes + 2 * mask_bytes <= most_bytes else 1
    smem_bytes += mask_stages * mask_bytes
    bias_stages = 2 if bias_bytes and smem_bytes + 2 * bias_bytes <= most_bytes else 1
    smem_bytes += bias_stages * bias_bytes
    # With room for it results leave through shared memory, and the next tile's queries come early.
    staging_bytes = tile.block_m * SWIZZLE_BYTES
    staging_panels = int(smem_bytes + staging_bytes <= most_bytes)
    smem_bytes += staging_panels * staging_bytes
    query_stages = 2 if smem_bytes + queries <= most_bytes else 1
    smem_bytes += (query_stages - 1) * queries
    panels = row_bytes_v // SWIZZLE_BYTES
    while 0 < staging_panels < panels and smem_bytes + staging_bytes <= most_bytes:
        staging_panels += 1
        smem_bytes += staging_bytes
    return Config(
        entry="forward_sm90",
        query_stages=query_stages,
        splits_keys=splits_keys,
        staging_panels=0 if splits_keys else staging_panels,
        bias_stages=bias_stages,
        mask_stages=mask_stages,
        mask_row_bytes=mask_row_bytes,
        consumers=consumers,
        teams=teams,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
        exact_maxima=tile.exact,
        early_powers=tile.block_n // 2 * tile.early_eighths // 8 // _POWERS_AT_ONCE * _POWERS_AT_ONCE,
        has_bias_tiles=bias_tiles,
        has_mask_tiles=mask_tiles,
        bounded_scores=bounded_scores,
        plain_scores=plain_scores and not {"has_softcap", "has_bias"} & set(flags),
        smem_bytes=teams * smem_bytes,
        **common(Config, dtype, bias_dtype, flags, row, tile),
    )


def _mask_row_bytes(block_n: int) -> int:
    """Of a tile of a mask in shared memory: as wide as TMA's swizzle, or rows lie in different banks."""
    return block_n if block_n == SWIZZLE_BYTES or block_n // ALIGNMENT % 2 else block_n + ALIGNMENT


def inputs_obstacle(problem: AttentionProblem) -> str:
    """Why a problem's inputs cannot take the Hopper kernels of either pass; empty if they can."""
    if problem.dtype not in DTYPES:
        return f"wgmma takes 16-bit inputs, not {problem.dtype}"
    if problem.is_empty:
        return "TMA takes no empty arrays"
    return ""


def obstacle(problem: AttentionProblem) -> str:
    """Why a problem's forward pass cannot take the Hopper kernel; empty if it can."""
    of_options = f"no kernel with {unknown(HANDLES, problem)}" if unknown(HANDLES, problem) else ""
    return inputs_obstacle(problem) or of_options


def expressible(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether TMA can walk an array whose last axis is contiguous."""
    axes = zip(strides[:-1], shape[:-1], strict=True)
    return all(size == 1 or (stride > 0 and stride % ALIGNMENT == 0) for stride, size in axes)


def heads_as_rows(problem: AttentionProblem) -> AttentionProblem:
    """The same problem with the query heads of a KV head as rows of one tile, where nothing but q tells them apart."""
    options = unknown(_OF_ALL_HEADS, problem), problem.window_left is not None, problem.sink, problem.q_lengths
    plain = not any(options)
    if problem.packed or problem.seqlen_q != 1 or problem.group_size == 1 or not plain:
        return problem
    # The only query is the last one: causal hides nothing.
    return replace(problem, seqlen_q=problem.group_size, num_heads_q=problem.num_heads_kv, window_right=None)


@kept
def forward(
    problem: AttentionProblem,
    layouts: tuple[Layout, ...],
    bias: Layout | None = None,
    mask: Layout | None = None,
) -> Config | None:
    """The Hopper kernel for a problem on arrays of these `layouts`, or None.

    Their addresses, and those of `bias` and `mask`, are multiples of 16 bytes. The result may lie anywhere, so that
    its bits depend on the inputs alone.
    """
    if obstacle(problem) or not all(expressible(*layout) for layout in layouts):
        return None
    of_bias = _ELEMENT_BYTES_OF[problem.bias_dtype or problem.dtype]
    return _config(problem, has_vectors(bias, of_bias), has_vectors(mask, 1))


def has_vectors(layout: Layout | None, itemsize: int) -> bool:
    """Whether rows of an array like the scores are vectors of 16 bytes; axes may be broadcast."""
    if layout is None:
        return False
    strides, shape = layout
    steps = [s for s, n in zip(strides[:-1], shape[:-1], strict=True) if n > 1]
    return shape[-1] > 1 and strides[-1] == itemsize and all(s >= 0 and s % ALIGNMENT == 0 for s in steps)


def _has_many_keys(problem: AttentionProblem) -> bool:
    if not problem.packed:
        return problem.seqlen_k >= _MANY_KEYS
    # The host knows packed sequences' mean; the longest have most of the work, so half of it will do.
    return 2 * problem.seqlen_k >= _MANY_KEYS * problem.batch


def has_few_queries(problem: AttentionProblem) -> bool:
    """Whether one tile has the queries of a head, so that keys are read once."""
    return problem.seqlen_q <= _FEW_QUERIES


def _has_narrow_window(problem: AttentionProblem) -> bool:
    left, right = problem.window_left, problem.window_right
    bounded = left is not None and right is not None and left + right < _WIDE_WINDOW
    return bounded and _has_many_keys(problem)


def _row_of(problem: AttentionProblem) -> Row:
    return next(r for r in FORWARD if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)


def _config(problem: AttentionProblem, bias_tiles: bool = False, mask_tiles: bool = False) -> Config:
    problem = heads_as_rows(problem)
    row = _row_of(problem)
    plain_scores = has_plain_scale(problem)
    flags = flags_of(problem)
    grow_rarely = not (flags or problem.packed) and problem.seqlen_k >= row.exact_again
    config = forward_config(
        row,
        problem.dtype,
        problem.bias_dtype,
        flags,
        plain_scores,
        bias_tiles,
        many_keys=_has_many_keys(problem) and not grow_rarely,
        narrow_window=_has_narrow_window(problem),
        few_queries=has_few_queries(problem),
        bounded_scores=SMALLEST_BOUND <= problem.softcap <= _LARGEST_BOUND,
        mask_tiles=mask_tiles,
    )
    few = problem.seqlen_q < _LONG_QUERIES or problem.packed or problem.window_left is not None
    return replace(config, pair=1) if few else config


def reason(problem: AttentionProblem) -> str:
    """What the forward pass takes on Hopper, and why, in words."""
    if obstacle(problem):
        return f"{OTHER_GPUS}: {obstacle(problem)}"
    config = _config(problem)
    return (
        f"wgmma and TMA (NVRTC from 12.9 on), tiles of {config.tile}, {config.smem_bytes} bytes of shared memory: "
        f"{config.flags}; {OTHER_GPUS} where an address or a stride of q, k or v is no multiple of 16 bytes"
    )


def _of_small_grids(row: Row, dtype: str) -> Iterator[Config]:
    """What `for_grid` can choose beside the other rows."""
    for tile in row.plain_tiles(windowed=True):
        config = replace(config_of(row, tile, dtype, None, ("has_window",)), pair=1)
        exact = replace(config, exact_maxima=True, early_powers=0) if row.full.exact else config
        for kernel in dict.fromkeys((config, exact)):
            yield replace(kernel, splits_keys=True, staging_panels=0)
        if is_timed(config):
            yield exact


def table() -> Iterator[tuple[Config, str]]:
    """Every row in both dtypes: plain, with a window and any one option, and with all; the plain ones unstaged, too."""
    single = [("has_window", flag) for flag in HANDLES if flag != "has_window"]
    for row in FORWARD:
        for dtype in DTYPES:
            for flags in ((), ("has_window",), *single, HANDLES):
                yield forward_config(row, dtype, None, flags), dtype
            for flags in ((), ("has_window",)):
                yield replace(forward_config(row, dtype, None, flags), staging_panels=0), dtype
            yield forward_config(row, dtype, None, (), splits_keys=True, few_queries=True), dtype
            if row.many_keys:
                yield forward_config(row, dtype, None, (), many_keys=True), dtype
                yield forward_config(row, dtype, None, ("has_window",), many_keys=True), dtype
                if row.narrow_window:
                    yield forward_config(row, dtype, None, ("has_window",), narrow_window=True), dtype
                for flags in ((), ("has_window",)):
                    yield forward_config(row, dtype, None, flags, few_queries=True), dtype
            yield from ((config, dtype) for config in _of_small_grids(row, dtype))
            if dtype in _BOUNDED_DTYPES:
                yield forward_config(row, dtype, None, ("has_window", "has_softcap"), bounded_scores=True), dtype
            for bias_dtype in (dtype, "float32"):
                for flags in (("has_window", "has_bias"), HANDLES):
                    yield forward_config(row, dtype, bias_dtype, flags, bias_tiles=True), dtype
            yield forward_config(row, dtype, None, ("has_window", "has_mask"), mask_tiles=True), dtype
            yield forward_config(row, dtype, None, HANDLES, bias_tiles=True, mask_tiles=True), dtype


class Launches(NamedTuple):
    """The kernel of a problem, and the parts of the keys of each of its tiles."""

    config: Config
    parts: int


@kept
def for_grid(problem: AttentionProblem, config: Config, num_sms: int) -> Launches:
    """What takes the least time where a problem's tiles do not fill the GPU; `config` is what fills it best."""
    if problem.packed or problem.block_mask:
        return Launches(config, 1)
    seen = heads_as_rows(problem)
    tiles = -(-seen.seqlen_q // config.block_m) * seen.num_heads_q * seen.batch
    if has_few_queries(seen):
        return Launches(config, max(min(num_sms // tiles, seen.seqlen_k // _SHORTEST_PART), 1))
    if tiles >= _MOST_WAVES * num_sms:
        return Launches(config, 1)
    found = [
        Launches(_with_exact_maxima(problem, candidate, parts, config.exact_maxima), parts)
        for candidate in _candidates(problem, config)
        for parts in parts_worth_a_try(problem, candidate.block_m, candidate.block_n, num_sms)
    ]
    return min(found, key=lambda launches: predicted_us(problem, launches.config, launches.parts, num_sms))


def _candidates(problem: AttentionProblem, config: Config) -> list[Config]:
    """The configurations of other tiles that a problem without options but a window can take, behind its own."""
    flags = flags_of(problem)
    if beside_window(flags) or not config.plain_scores:
        return [config]
    row = _row_of(problem)
    others = [config_of(row, tile, problem.dtype, None, flags) for tile in row.plain_tiles(bool(flags))]
    timed = [replace(other, pair=1) for other in others if is_timed(other) and other.tile != config.tile]
    return [config, *timed]


def _with_exact_maxima(problem: AttentionProblem, config: Config, parts: int, always: bool) -> Config:
    """Few keys have large weights, so every maximum is followed, if the kernel for few keys does so."""
    few = problem.seqlen_k < _MANY_KEYS * parts and _row_of(problem).full.exact
    plain = config.plain_scores and not beside_window(flags_of(problem))
    if config.exact_maxima or not plain or not (few or always):
        return config
    return replace(config, exact_maxima=True, early_powers=0)


def heads_together(problem: AttentionProblem, block_m: int = 128) -> int:
    """The last query heads (of all sequences), which go together where tiles differ in length, the longest first.

    So many as keys and values fit in L2; of short sequences fewer, so that reading keys goes on beside products all
    the time; of long ones more, so that tiles even out.
    """
    # Packed sequences come one after the other; the host knows their mean.
    sequences, of_mean = (1, problem.batch) if problem.packed else (problem.batch, 1)
    seqlen_q, seqlen_k = -(-problem.seqlen_q // of_mean), -(-problem.seqlen_k // of_mean)
    heads = problem.num_heads_q * sequences
    bytes_of_head = seqlen_k * (problem.head_dim + problem.head_dim_v) * HALF_BYTES
    l2_bytes = L2_BYTES // 2 if seqlen_q <= _SHORT_QUERIES else L2_BYTES
    fitting = max(l2_bytes // bytes_of_head, 1)
    if seqlen_q >= _LONG_QUERIES:
        fitting = max(fitting, -(-_EVEN_TILES * block_m // (seqlen_q * problem.group_size)))
    return min(fitting * problem.group_size, heads)


def merges_by_rows(problem: AttentionProblem, parts: int) -> bool:
    """Whether a warp merges a row's parts; else a thread block does, which reads many of them at once."""
    return parts <= WARP and not has_few_queries(heads_as_rows(problem))
