"""The table of the backward kernels by mma.sync on 16 bits (sm_75 and later), and when they run.

Kernels whose thread blocks stay with keys compute dq, dk, dv and the slopes' gradient (`backward`). Those whose thread
blocks stay with queries compute the rest: dq with repeating bits under a block mask and, beside it or beside options
with which the former cannot, the slopes' gradient (`of_queries`), and a bias's gradient (`of_bias`). The latter share
`sm80_forward`'s tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, capability_of, smem_limit
from cuflash.kept import kept
from cuflash.plan import sm80_forward, sm80_wide
from cuflash.plan.config import FLAGS, KNOWN_TO_ALL, OF_RULES, are_products, flags_of, not_taken, with_rules
from cuflash.plan.sm80_forward import (
    ANY,
    BLACKWELL,
    BLOCK_FLAGS,
    BLOCK_SIZES,
    MORE,
    SMEM_BESIDE_TILES,
    Capability,
    Sm80Config,
    Sm80QueryConfig,
    Sm80Row,
    Sm80Tile,
    constants,
    dtypes,
    fits,
    meets_whole_blocks,
)
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.rules.form import NO_RULES

# The flags that these kernels know: those for gradients of scores, for dq in the order of keys, for a bias's gradient.
HANDLES = (*KNOWN_TO_ALL, *OF_RULES)


@dataclass(frozen=True)
class Sm80BackwardTile:
    """The tile of a kernel whose thread blocks stay with keys; fields without a comment are as in `Sm80Tile`."""

    block_m: int
    block_n: int
    num_warps: int
    dq_fragments: int  # groups of 16 queries whose dq one warp computes
    together: bool  # one kernel computes dk and dv, as both fit the registers; else each has a kernel of its own
    stages: int = 1  # buffers of queries and of the scores' gradients; with two a step has one barrier
    min_blocks: int = 1
    query_warps: int = 1  # warps with the same keys; each has a share of a tile's queries and of dk's and dv's columns
    query_passes: int = 1  # groups into which a warp's queries are cut, to be computed one after the other
    bulk_adds: bool = False  # one bulk addition adds all that a warp has of dq (from sm_90 on)
    dq_buffer: bool = False  # the bulk addition reads a buffer of its own, not that of the queries
    short: bool = False  # the tile is taken only where few queries see a key (`_SHORT`)
    below: Capability = ANY
    only: tuple[str, ...] = ()


_LONG = Sm80BackwardTile(64, 128, 4, 2, True, stages=2, min_blocks=2, query_passes=2, below=BLACKWELL)
_HALF = Sm80BackwardTile(64, 64, 4, 2, True, min_blocks=2, query_warps=2)
# The first row is taken whose head dims are no smaller than the problem's.
BACKWARD = (
    Sm80Row(
        64,
        64,
        (
            _LONG,
            _HALF,
            Sm80BackwardTile(64, 64, 4, 2, True, query_warps=2),
        ),
        (
            Sm80BackwardTile(32, 64, 4, 1, True, min_blocks=2, query_warps=2),
            Sm80BackwardTile(32, 64, 4, 1, True, query_warps=2),
        ),
        (
            replace(_LONG, only=MORE),
            replace(_HALF, min_blocks=3, below=BLACKWELL, only=("has_block_mask",)),
            replace(_HALF, only=FLAGS),
        ),
    ),
    Sm80Row(
        128,
        128,
        (
            replace(_HALF, bulk_adds=True, dq_buffer=True, short=True, below=BLACKWELL),
            Sm80BackwardTile(
                64, 128, 8, 2, True, stages=2, query_warps=2, bulk_adds=True, dq_buffer=True, below=BLACKWELL
            ),
            Sm80BackwardTile(64, 128, 8, 2, True, stages=2, query_warps=2),
            _HALF,
            Sm80BackwardTile(64, 64, 8, 2, True, query_warps=2),
            Sm80BackwardTile(32, 64, 4, 1, True, query_warps=2),
        ),
        (Sm80BackwardTile(64, 64, 8, 2, True, query_warps=2), Sm80BackwardTile(32, 64, 4, 1, False)),
        (
            Sm80BackwardTile(64, 128, 8, 2, True, stages=2, query_warps=2, below=BLACKWELL, only=MORE),
            replace(_HALF, bulk_adds=True, dq_buffer=True, below=BLACKWELL, only=("has_block_mask",)),
            replace(_HALF, below=BLACKWELL, only=("has_block_mask",)),
        ),
    ),
    Sm80Row(
        192,
        192,
        (
            Sm80BackwardTile(64, 64, 8, 1, True, stages=2, query_warps=2, bulk_adds=True),
            Sm80BackwardTile(64, 64, 8, 1, True, stages=2, query_warps=2),
            Sm80BackwardTile(64, 64, 8, 1, True, query_warps=2),
            Sm80BackwardTile(32, 64, 4, 1, False),
            Sm80BackwardTile(16, 32, 2, 1, False),
        ),
        (
            Sm80BackwardTile(32, 32, 4, 1, True, query_warps=2, below=BLACKWELL),
            Sm80BackwardTile(16, 32, 2, 1, False, below=BLACKWELL),
            Sm80BackwardTile(32, 16, 2, 1, False, query_warps=2),
        ),
        (
            Sm80BackwardTile(64, 64, 8, 1, True, stages=2, query_warps=2, only=("has_block_mask",)),
            Sm80BackwardTile(64, 64, 8, 1, True, query_warps=2, only=("has_block_mask",)),
        ),
    ),
    Sm80Row(
        256,
        256,
        (
            Sm80BackwardTile(64, 64, 8, 2, True, stages=2, query_warps=4, bulk_adds=True),
            Sm80BackwardTile(64, 64, 8, 1, True, query_warps=4),
            Sm80BackwardTile(32, 64, 4, 1, False),
            Sm80BackwardTile(16, 64, 4, 1, False),
            Sm80BackwardTile(16, 32, 2, 1, False),
        ),
        (
            Sm80BackwardTile(32, 64, 8, 2, True, query_warps=2, below=BLACKWELL),
            Sm80BackwardTile(16, 64, 4, 1, False),
            Sm80BackwardTile(32, 16, 2, 1, False, query_warps=2),  # fits 64 KB of shared memory
        ),
        (
            Sm80BackwardTile(
                64, 64, 8, 2, True, stages=2, query_warps=4, bulk_adds=True, below=BLACKWELL, only=("has_block_mask",)
            ),
        ),
    ),
)
# Rows of the kernel whose thread blocks stay with queries. It adds dq in the order of keys, for bits that repeat where
# there is a block mask, and each row's share of the slopes' gradient where the kernel with keys does not.
OF_QUERIES = tuple(
    Sm80Row(head_dim, head_dim, tiles, tiles)
    for head_dim, tiles in (
        (64, (Sm80Tile(64, 32, 4),)),
        (128, (Sm80Tile(64, 32, 4),)),
        (192, (Sm80Tile(64, 16, 4), Sm80Tile(32, 16, 2))),
        (256, (Sm80Tile(64, 16, 4, 2), Sm80Tile(32, 16, 2))),
    )
)
# Rows of the kernel for the gradient of a bias. `with_options` counts options besides the bias, and several stages are
# chunks of columns, as in `sm80_wide_tiles.BIAS`.
_HALF_OF_KEYS = (Sm80Tile(64, 32, 4, min_blocks=2), Sm80Tile(64, 32, 4), Sm80Tile(32, 32, 2), Sm80Tile(32, 16, 2))
_BIAS_TILES = (
    Sm80Tile(64, 64, 4, min_blocks=3, below=BLACKWELL),
    Sm80Tile(64, 64, 4, min_blocks=2),
    Sm80Tile(64, 64, 4),
    *_HALF_OF_KEYS,
)
OF_BIAS = (
    *(Sm80Row(d, d, _BIAS_TILES, _HALF_OF_KEYS) for d in (64, 128, 192)),
    Sm80Row(256, 256, tuple(replace(tile, stages=2) for tile in _BIAS_TILES), _HALF_OF_KEYS),
)
# Thread blocks that share a multiprocessor are faster where a tile of keys meets at most so many queries.
_SHORT = 1024
_ROW_WARPS = 4  # most warps of a thread block of the kernel before the gradients
# GPUs from this capability on add to global memory by vectors of four floats, or in bulk out of shared memory.
_LARGE_ADDS = (9, 0)
MAIN, ROWS, DQ, ORDERED_DQ = "backward_sm80", "backward_sm80_rows", "backward_sm80_dq", "ordered_dq"
BIAS = "bias_sm80"


@dataclass(frozen=True, kw_only=True)
class Sm80BackwardConfig(Sm80Config):
    """The configuration of a kernel of the backward pass."""

    dq_fragments: int  # see `Sm80BackwardTile`
    query_warps: int
    query_passes: int
    vector_adds: bool  # one instruction adds four floats of dq to global memory
    bulk_adds: bool  # see `Sm80BackwardTile`
    dq_buffer: bool
    computes_dk: bool  # the kernel computes dk, and dq with it
    computes_dv: bool
    deterministic: bool  # tiles of keys add to dq in a fixed order
    writes_dslopes: bool = False  # the kernel, which computes dk, adds up the gradient of ALiBi's slopes
    turns: int = 8  # counters of a query tile that keep this order: one for each warp, at most


def _smem_bytes(tile: Sm80BackwardTile, row: Sm80Row[Sm80BackwardTile], computes_dk: bool) -> int:
    of_key = row.head_dim + (row.head_dim_v if computes_dk else 0)
    of_query = tile.stages * (HALF_BYTES * (row.head_dim + row.head_dim_v) + 2 * FLOAT_BYTES)
    # Warps with the same keys share weights through shared memory, as they do gradients of scores.
    weights = tile.query_warps > 1 and (tile.together or not computes_dk)
    of_score = HALF_BYTES * (weights + (tile.stages if computes_dk else 0))
    of_query += tile.block_n * of_score + (FLOAT_BYTES * row.head_dim if tile.dq_buffer else 0)
    elements = tile.block_n * HALF_BYTES * of_key + tile.block_m * of_query
    return elements + SMEM_BESIDE_TILES


def configs(
    row: Sm80Row[Sm80BackwardTile],
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    aligned: bool = True,
    is_short: bool = False,
    deterministic: bool = False,
    block_keys: int = 0,
) -> tuple[tuple[Sm80BackwardConfig, ...], ...]:
    """The candidates for the kernels for dq, dk and dv of a row, the fastest first; none where no tile fits.

    `flags` is a subset of `FLAGS`, `limit` the bytes of shared memory that a thread block may use, `is_short` says that
    few queries see a key, and `block_keys` are the keys of a mask's block, 0 without one.
    """
    tiles = (
        t
        for t in row.tiles_for(flags, aligned)
        if capability < t.below
        and (capability >= _LARGE_ADDS or not t.bulk_adds)
        and (is_short or not t.short)
        and meets_whole_blocks(t.block_n, block_keys)
        and fits(t.min_blocks, _smem_bytes(t, row, True), limit)
    )

    def config_of(tile: Sm80BackwardTile, computes_dk: bool, computes_dv: bool) -> Sm80BackwardConfig:
        return Sm80BackwardConfig(
            entry=MAIN,
            vector_adds=capability >= _LARGE_ADDS,
            plain_scores=are_products(flags),
            computes_dk=computes_dk,
            computes_dv=computes_dv,
            deterministic=deterministic,
            smem_bytes=_smem_bytes(tile, row, computes_dk),
            **constants(Sm80BackwardConfig, row, tile, dtype, bias_dtype, flags, capability, aligned),
        )

    def of_tile(tile: Sm80BackwardTile) -> tuple[Sm80BackwardConfig, ...]:
        passes = ((True, True),) if tile.together else ((True, False), (False, True))
        return tuple(config_of(tile, *computes) for computes in passes)

    return tuple(dict.fromkeys(map(of_tile, tiles)))


def of_rows(config: Sm80BackwardConfig, entry: str) -> Sm80BackwardConfig:
    """The kernel ROWS before that of `config`, or DQ behind it.

    ROWS has at most `_ROW_WARPS` warps, as in larger thread blocks its reads wait for others.
    """
    constant: dict[str, Any] = {"bias_element": config.element, **dict.fromkeys(FLAGS, False)}
    constant |= {"rules": NO_RULES, "rule_in_blocks": False}
    constant |= dict.fromkeys(("plain_scores", "computes_dk", "computes_dv"), True)
    num_warps = min(config.num_warps, _ROW_WARPS) if entry == ROWS else config.num_warps
    writes_dslopes = config.writes_dslopes and entry == ROWS
    return replace(config, entry=entry, num_warps=num_warps, writes_dslopes=writes_dslopes, **constant)


def with_dslopes(config: Sm80BackwardConfig) -> Sm80BackwardConfig:
    """Return the configuration of a kernel that adds up the slopes' gradient, or the same one where it cannot.

    That gradient comes from those of scores before softcap's derivative, which beside a rule is the rule's.
    """
    writes = config.has_alibi and config.computes_dk and not (config.has_softcap and config.has_score_mod)
    return replace(config, writes_dslopes=writes)


def _is_short(problem: AttentionProblem) -> bool:
    rows = problem.seqlen_q // max(problem.batch, 1) if problem.packed else problem.seqlen_q
    seeing = rows // 2 if problem.window_right is not None else rows
    return seeing * problem.group_size <= _SHORT


@kept
def backward(
    problem: AttentionProblem, aligned: bool, capability: Capability, limit: int, dslopes: bool = False
) -> tuple[tuple[Sm80BackwardConfig, ...], ...]:
    """The candidates for the kernels for dq, dk and dv; none where mma.sync does not take the dtype or an option.

    With `dslopes` they add up the gradient of ALiBi's slopes, where they can.
    """
    if problem.dtype not in dtypes(capability) or not_taken(HANDLES, problem):
        return ()
    row = next(r for r in BACKWARD if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    given = row, problem.dtype, problem.bias_dtype, flags_of(problem), capability, limit, aligned, _is_short(problem)
    in_order = bool(problem.deterministic and not problem.block_mask)
    passes = configs(*given, in_order, problem.block_size[1])
    passes = tuple(tuple(with_rules(config, problem) for config in each) for each in passes)
    return tuple(tuple(map(with_dslopes, each)) for each in passes) if dslopes else passes


def _smem_of_queries(tile: Sm80Tile, row: Sm80Row[Sm80Tile]) -> int:
    rows = tile.block_m + tile.stages * tile.block_n
    # There is room for lse and delta of a tile, which a kernel that iterates over queries loads with them.
    vectors = tile.stages * tile.block_n * 2 * FLOAT_BYTES
    return rows * HALF_BYTES * (row.head_dim + row.head_dim_v) + vectors + SMEM_BESIDE_TILES


_QUERY_KERNEL: dict[str, Any] = {"rows": OF_QUERIES, "entry": ORDERED_DQ, "smem_bytes": _smem_of_queries}


def of_queries(problem: AttentionProblem, *place: Any) -> tuple[Sm80QueryConfig, ...]:
    """The candidates for the kernel that adds dq in the order of keys; `place` is as in `sm80_forward.forward`."""
    return sm80_forward.forward(problem, *place, handled=HANDLES, **_QUERY_KERNEL)


def _smem_of_bias(tile: Sm80Tile, row: Sm80Row[Sm80Tile]) -> int:
    columns = tile.stages * Sm80QueryConfig.chunk if tile.stages > 1 else row.head_dim + row.head_dim_v
    return (tile.block_m + tile.block_n) * columns * HALF_BYTES + SMEM_BESIDE_TILES


_BIAS_KERNEL: dict[str, Any] = {"rows": OF_BIAS, "entry": BIAS, "smem_bytes": _smem_of_bias}


def _with_bias(config: Sm80QueryConfig) -> Sm80QueryConfig:
    return replace(config, has_bias=True, plain_scores=False)


def of_bias(problem: AttentionProblem, *place: Any) -> tuple[Sm80QueryConfig, ...]:
    """The candidates for the gradient of a bias of any shape; `place` is as in `sm80_forward.forward`."""
    configs = sm80_forward.forward(replace(problem, bias=None), *place, handled=HANDLES, **_BIAS_KERNEL)
    return tuple(map(_with_bias, configs)) or sm80_wide.of_bias(problem, *place)


def reason(problem: AttentionProblem) -> str:
    """A sentence for users: the backward kernels that a problem takes on GPUs other than Hopper."""
    tiles = []
    for name in ("sm_80", "sm_86"):
        chosen = backward(problem, True, capability_of(name), smem_limit(name))
        if not chosen:
            own_options = not_taken(HANDLES, problem)
            lacking = f"with {own_options}" if own_options else f"for {problem.dtype} of this size"
            return f"portable kernels: mma.sync has none {lacking}"
        tiles.append(f"{chosen[0][0].tile} on {name}")
    return f"mma.sync, tiles of {', '.join(tiles)}"


def table(capability: Capability, limit: int) -> Iterator[tuple[Sm80BackwardConfig | Sm80QueryConfig, str]]:
    """Every kernel of the backward pass for a GPU, with its dtype."""
    for row in BACKWARD:
        for dtype in dtypes(capability):
            kinds = [(flags, True, False, 0) for flags in sm80_forward.table_flags(row, KNOWN_TO_ALL)]
            kinds += [(flags, True, False, size) for flags, size in product(BLOCK_FLAGS, BLOCK_SIZES)]
            if any(tile.short for tile in row.tiles):
                kinds += [((), True, True, 0), (("has_window",), True, True, 0)]
            for flags, aligned, is_short, block_keys in (*kinds, (KNOWN_TO_ALL, False, False, 0)):
                given = dtype, None, flags, capability, limit, aligned, is_short
                for deterministic in (False,) if "has_block_mask" in flags else (False, True):
                    candidates = configs(row, *given, deterministic, block_keys)
                    yield from ((with_dslopes(config), dtype) for config in (candidates[0] if candidates else ()))
    yield from sm80_forward.table(capability, limit, handled=KNOWN_TO_ALL, **_QUERY_KERNEL)
    for other, dtype in sm80_forward.table(capability, limit, handled=KNOWN_TO_ALL, **_BIAS_KERNEL):
        yield _with_bias(other), dtype
