"""The table of the kernels by mma.sync on wide elements: float64, and float32 as float16 parts (from sm_80 on).

It is for both passes. The kinds of products are in `sm80_kinds`, their tiles in `sm80_wide_tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cuflash.hardware import FLOAT_BYTES, capability_of, smem_limit
from cuflash.kept import kept
from cuflash.plan.config import (
    BY_HALVES,
    KNOWN_TO_ALL,
    OF_RULES,
    are_products,
    common,
    flags_of,
    has_plain_scale,
    not_taken,
    of_half,
    table_flags,
    with_rules,
    without_window,
)
from cuflash.plan.entries import key_results
from cuflash.plan.sm80_forward import (
    SMEM_BESIDE_TILES,
    Capability,
    Sm80QueryConfig,
    Sm80Row,
    Sm80Tile,
    fitting,
)
from cuflash.plan.sm80_kinds import (
    FLOAT64,
    HALF_RATE,
    PARTS_OF,
    PRODUCTS,
    dtype_of,
    element_bytes,
    family_of,
    has_few_registers,
    kind_of,
    multiplies,
    pays,
)
from cuflash.plan.sm80_wide_tiles import BIAS, WideGradientRow, backward_rows_of, forward_rows_of
from cuflash.plan.split import KEY_PARTS
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = (*KNOWN_TO_ALL, *OF_RULES)  # the flags that these kernels know
_FACTORS = 4  # floats a key takes in the forward kernel: its factor and its value's, in two buffers each
# A row of a gradient's tile takes so many bytes besides its elements: lse and delta in float64, or both and two factors
# in float32.
_NUMBERS_BYTES = 16
_FEWEST_COLUMNS = 16  # of a gradient's tile


@dataclass(frozen=True, kw_only=True)
class WideConfig(Sm80QueryConfig):
    """The configuration of a kernel of either pass on wide elements."""

    whole_products: bool  # float64 is multiplied by mma.sync of 16 x 8 x 8
    unroll: int  # steps of a product of queries and keys that are unrolled
    sum_columns: int  # columns of a result whose sums over one tile are in registers at once
    parts: int  # float16 parts of an element of v and dout; 0 for whole elements
    key_parts: int  # float16 parts of an element of q and k; 0 for whole elements


@dataclass(frozen=True, kw_only=True)
class WideGradientConfig(WideConfig):
    """The configuration of a gradient kernel on wide elements."""

    of_keys: bool  # thread blocks stay with keys, not with queries
    computes_dk: bool
    computes_dv: bool


def _is_plain(flags: tuple[str, ...], plain_scores: bool, aligned: bool) -> bool:
    return plain_scores and aligned and not without_window(flags)


def _constants(
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool,
    aligned: bool,
    row: Sm80Row[Sm80Tile] | WideGradientRow,
    tile: Sm80Tile,
    sum_columns: int,
    unroll: int,
) -> dict[str, Any]:
    """Values for the fields of all kernels; `sum_columns` holds for plain scores, `unroll` for all others."""
    parts = PARTS_OF[kind]
    is_plain = _is_plain(flags, plain_scores, aligned)
    return {
        **common(WideConfig, dtype_of(kind), bias_dtype, flags, row, tile),
        "product_depth": 16 if parts else 8,
        "async_copies": True,
        "aligned": aligned,
        "plain_scores": plain_scores and are_products(flags),
        "unroll": (2 if parts else 4) if is_plain else unroll,
        "sum_columns": sum_columns if is_plain else 16 if parts else 8,
        "parts": parts,
        "key_parts": KEY_PARTS[parts] if parts else 0,
    }


def _unroll(kind: str) -> int:
    """Steps of a product that a gradient kernel with options unrolls."""
    return 2 if PARTS_OF[kind] else 3


def forward_configs(
    row: Sm80Row[Sm80Tile],
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
) -> tuple[WideConfig, ...]:
    """The configurations of a forward kernel, that with the fastest tile first.

    `flags` is a subset of `FLAGS`, `limit` in bytes of shared memory.
    """
    is_plain = _is_plain(flags, plain_scores, aligned)
    size, size_v = element_bytes(kind)
    columns = size * row.head_dim + size_v * row.head_dim_v

    def smem_bytes(tile: Sm80Tile) -> int:
        factors = FLOAT_BYTES * (_FACTORS * tile.block_n + 2 * tile.block_m) if PARTS_OF[kind] else 0
        elements = tile.block_m * size * row.head_dim + tile.stages * tile.block_n * columns
        return elements + factors + SMEM_BESIDE_TILES

    has_room = PARTS_OF[kind] > 0 and not has_few_registers(kind, capability)

    def config_of(tile: Sm80Tile) -> WideConfig:
        sum_columns = 64 if has_room and row.head_dim <= 192 and tile.block_n != 32 else 32
        return WideConfig(
            entry=f"{family_of(kind)}_forward",
            whole_products=kind == "float64" and capability >= (9, 0) and is_plain,
            smem_bytes=smem_bytes(tile),
            **_constants(kind, bias_dtype, flags, plain_scores, aligned, row, tile, sum_columns, 2 if has_room else 1),
        )

    tiles = (*(row.tiles if is_plain else ()), *row.with_options)
    return tuple(map(config_of, fitting(tiles, smem_bytes, capability, limit)))


def gradient_passes(
    row: WideGradientRow,
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
) -> tuple[tuple[WideGradientConfig, ...], ...]:
    """The candidates for a backward pass, the fastest first, each with the configuration of dq first.

    `flags` is a subset of `FLAGS`.
    """
    is_plain = _is_plain(flags, plain_scores, aligned)
    tile = row.tile if is_plain else row.with_options
    if tile is None:
        return ()
    # Kernels of the widest head dims have no register left with these flags, so they unroll less, or have
    # smaller tiles.
    is_tight = row.head_dim > 192 and set(flags) == {"has_window", "has_block_mask"}
    if has_few_registers(kind, capability) and not is_plain and (tile.key_warps == 1 or is_tight):
        tile = replace(tile, block_n=_FEWEST_COLUMNS)
    fewer = replace(tile, block_n=_FEWEST_COLUMNS)
    # mma.sync computes eight columns of scores at least.
    tiles = (tile, fewer) if 8 * tile.key_warps <= _FEWEST_COLUMNS < tile.block_n else (tile,)
    given = kind, bias_dtype, flags, capability, limit, plain_scores, aligned, is_tight
    return tuple(_gradient_pass(row, each, *given) for each in tiles)


def _gradient_pass(
    row: WideGradientRow,
    tile: Sm80Tile,
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool,
    aligned: bool,
    is_tight: bool,
) -> tuple[WideGradientConfig, ...]:
    """The configurations of a backward pass with this tile."""
    parts, shares = PARTS_OF[kind], tile.key_warps > 1
    takes_wider = not parts and capability >= (9, 0)
    # A warp that has half of a result's columns holds many sums, so its loop is not unrolled.
    unroll = 1 if takes_wider and tile.key_warps == 2 else _unroll(kind) - (is_tight and not parts)
    sum_columns = 64 if parts > 1 and tile.stages > 1 else 32  # 32 columns take more registers than two stages leave
    configs = []
    size, size_v = element_bytes(kind)
    for name in ("dq", *row.key_kernels):
        entry = f"{family_of(kind)}_{name}"
        wanted = key_results(entry)
        row_bytes = row.head_dim * (size if wanted == ("dv",) else size + size_v) + _NUMBERS_BYTES
        column_bytes = row.head_dim * (size + size_v) + _NUMBERS_BYTES
        columns_bytes = tile.stages * tile.block_n * column_bytes + SMEM_BESIDE_TILES
        own = tile
        if shares and not parts:
            row_bytes += tile.block_n * size  # warps exchange weights and gradients through this room
        while shares and own.block_m * row_bytes + columns_bytes > limit:
            # Whole elements are copied by all warps alike, so that their rows are halved.
            less = 16 if parts else own.block_m // 2
            own = replace(own, block_m=own.block_m - less, num_warps=own.num_warps - less // 16 * tile.key_warps)
        turned = replace(own, block_m=own.block_n, block_n=own.block_m) if wanted else own
        config = WideGradientConfig(
            entry=entry,
            head_dim_v=row.head_dim_v,
            whole_products=takes_wider,
            of_keys=bool(wanted),
            computes_dk="dk" in wanted,
            computes_dv="dv" in wanted,
            smem_bytes=own.block_m * row_bytes + columns_bytes,
            **_constants(kind, bias_dtype, flags, plain_scores, aligned, row, turned, sum_columns, unroll),
        )
        configs.append(config)
    return tuple(configs)


def gradient_configs(*given: Any, **others: Any) -> tuple[WideGradientConfig, ...]:
    """The first of `gradient_passes`; none where portable kernels are faster."""
    return next(iter(gradient_passes(*given, **others)), ())


def bias_configs(
    row: Sm80Row[Sm80Tile],
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    aligned: bool = True,
) -> tuple[WideGradientConfig, ...]:
    """The candidates for the gradient of a bias, the fastest first; `flags` are those of the other options."""

    def smem_bytes(tile: Sm80Tile) -> int:
        whole, chunks = (
            row.head_dim * sum(element_bytes(kind)),
            tile.stages * WideConfig.chunk * max(element_bytes(kind)),
        )
        row_bytes = (chunks if tile.stages > 1 else whole) + _NUMBERS_BYTES
        return (tile.block_m + tile.block_n) * row_bytes + SMEM_BESIDE_TILES

    def config_of(tile: Sm80Tile) -> WideGradientConfig:
        in_chunks = tile.stages > 1
        is_plain = in_chunks or _is_plain(flags, True, aligned)
        config = WideGradientConfig(
            entry=f"{family_of(kind)}_bias",
            whole_products=kind == "float64" and capability >= (9, 0) and is_plain,
            of_keys=False,
            computes_dk=False,
            computes_dv=False,
            smem_bytes=smem_bytes(tile),
            **_constants(kind, bias_dtype, (*flags, "has_bias"), False, aligned, row, tile, 32, _unroll(kind)),
        )
        return replace(config, unroll=1) if in_chunks and config.parts else config

    return tuple(map(config_of, fitting(row.tiles_for(flags, aligned), smem_bytes, capability, limit)))


def _made(make: Any, rows: Any, problem: AttentionProblem, *place: Any, **given: Any) -> Any:
    """The result of `make` for the first of `rows` that is wide enough; empty where other kernels serve better.

    `place` is (aligned, capability, limit) as in `sm80_forward.forward`.
    """
    aligned, capability, limit = place
    if not_taken(HANDLES, problem):
        return ()
    kind = kind_of(problem)
    for row in rows(kind, limit) if multiplies(kind, capability) else ():
        if problem.head_dim <= row.head_dim and problem.head_dim_v <= row.head_dim_v:
            aligned |= PARTS_OF[kind] > 0  # the work space has every row of parts at a multiple of 16 bytes
            return make(row, kind, problem.bias_dtype, flags_of(problem), capability, limit, aligned=aligned, **given)
    return ()


@kept
def forward(problem: AttentionProblem, *place: Any) -> tuple[WideConfig, ...]:
    """The candidates for the forward kernel of a problem; `place` is as in `sm80_forward.forward`."""
    configs = _made(forward_configs, forward_rows_of, problem, *place, plain_scores=has_plain_scale(problem))
    return tuple(with_rules(config, problem) for config in configs)


@kept
def backward(problem: AttentionProblem, *place: Any) -> tuple[tuple[WideGradientConfig, ...], ...]:
    """The candidates for the kernels for dq, dk and dv of a problem, that for dq first in each."""
    passes = _made(gradient_passes, backward_rows_of, problem, *place, plain_scores=has_plain_scale(problem))
    return tuple(tuple(with_rules(config, problem) for config in each) for each in passes)


@kept
def of_bias(problem: AttentionProblem, *place: Any) -> tuple[WideGradientConfig, ...]:
    """The candidates for the gradient of a bias of any shape."""
    configs = _made(bias_configs, lambda kind, _: BIAS[kind], replace(problem, bias=None), *place)
    return tuple(with_rules(config, problem) for config in configs)


def reason(problem: AttentionProblem, gradients: bool) -> str:
    """A sentence for users on the kernels of a pass; empty where it has none of these."""
    kind = kind_of(problem)
    if kind not in PARTS_OF or not _tiles(problem, False, "sm_80"):
        return ""
    architectures = ", ".join("sm_{}{}".format(*x) for x in FLOAT64) if kind == "float64" else "sm_80 and later"
    tiles = _tiles(problem, gradients, "sm_80")
    what = f"mma.sync on {architectures}, {PRODUCTS[kind]}, tiles of {tiles}"
    if kind == "float32":
        in_99_kb = _tiles(problem, gradients, "sm_86")
        if in_99_kb and not pays(problem, HALF_RATE[0], gradients):
            in_99_kb += f" (portable on {', '.join(HALF_RATE)})"
        what += f"; in 99 KB of shared memory {in_99_kb or 'portable'}"
    return what if tiles else "portable kernels"


def _tiles(problem: AttentionProblem, gradients: bool, name: str) -> str:
    place = True, capability_of(name), smem_limit(name)
    if gradients:
        return ", ".join(f"{c.entry} {c.tile}" for c in next(iter(backward(problem, *place)), ()))
    whole, half = (forward(p, *place) for p in (problem, of_half(problem)))
    return f"{(whole or half)[0].entry} {(whole or half)[0].tile}{'' if whole else BY_HALVES}" if half else ""


def table(capability: Capability, limit: int) -> Iterator[tuple[WideConfig, str]]:
    """Every kernel of both passes on wide elements for a GPU but those with users' own rules, with its dtype."""
    for kind in [kind for kind in PARTS_OF if multiplies(kind, capability)]:
        for flags in table_flags(KNOWN_TO_ALL):
            forward_rows, backward_rows = forward_rows_of(kind, limit), backward_rows_of(kind, limit)
            passes = [forward_configs(row, kind, None, flags, capability, limit)[0] for row in forward_rows]
            gradients = [gradient_configs(row, kind, None, flags, capability, limit) for row in backward_rows]
            of_bias = [bias_configs(row, kind, None, flags, capability, limit)[0] for row in BIAS[kind]]
            for config in (*passes, *sum(gradients, ()), *of_bias):
                yield config, dtype_of(kind)
