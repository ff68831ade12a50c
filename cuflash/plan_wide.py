"""Rows of the table for mma.sync on float64, and on float32 by TF32 (sm_80 and later). Pure, no CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cuflash.config import FLAGS
from cuflash.plan import CPP_TYPES, flags_of, smem_limit
from cuflash.plan_sm80 import PLAIN_SCALES, RESERVED_SMEM, SMEM_BESIDE_TILES, Capability, Tile
from cuflash.plan_sm80 import Config as NarrowConfig
from cuflash.problem import AttentionProblem

_BYTES = {"tf32": 4, "float64": 8}
_DTYPES = {"tf32": "float32", "float64": "float64"}
FORWARD_ENTRY, DQ = "forward_wide", "wide_dq"
# Kernels that stay with keys, and what they compute.
KEY_KERNELS = {"wide_dkv": ("dk", "dv"), "wide_dk": ("dk",), "wide_dv": ("dv",)}


@dataclass(frozen=True)
class Row:
    """Tiles for head dims up to these, and how many steps of a product of queries and keys are unrolled.

    Attributes
    ----------
    tiles : tuple of Tile
        The first is taken whose blocks fit a multiprocessor's shared memory together.
    with_options : tuple of Tile
        The same with any option but a window, as they take registers.
    """

    head_dim: int
    head_dim_v: int
    tiles: tuple[Tile, ...]
    with_options: tuple[Tile, ...]
    unroll: int = 4


# By kind of products; the first row that is wide enough is taken.
FORWARD = {
    "tf32": (
        Row(64, 64, (Tile(128, 64, 4, 1, 2), Tile(64, 64, 4)), (Tile(64, 32, 4, 1, 2),)),
        Row(128, 128, (Tile(64, 64, 4, 1, 2), Tile(64, 32, 4)), (Tile(64, 32, 4),)),
        Row(256, 256, (Tile(64, 32, 4),), (Tile(64, 32, 4),)),
    ),
    "float64": (
        Row(64, 64, (Tile(64, 32, 4, 2, 2), Tile(64, 32, 4)), (Tile(64, 32, 4),)),
        Row(128, 128, (Tile(64, 16, 4, 1, 2), Tile(64, 32, 4)), ()),
    ),
}
# Measured on sm_90, where its own kernels for TF32 stand before these. The tensor cores of sm_80, too, have twice the
# rate of its other units in float64 and eight times that in TF32. Others have little advantage, or were not measured.
CAPABILITIES = ((8, 0), (9, 0))


@dataclass(frozen=True)
class GradientTile:
    """Rows that stay with a thread block, a warp to each 16, rows that are walked, their buffers, blocks that share."""

    rows: int
    columns: int
    stages: int = 1
    min_blocks: int = 1


@dataclass(frozen=True)
class GradientRow:
    """Kernels for head dims up to this and their tiles, plain or with a window and with other options.

    Where there are none, they would spill: the portable ones run.
    """

    head_dim: int
    tiles: dict[str, GradientTile]
    with_options: dict[str, GradientTile]
    unroll: int = 4


def _key_tiles(dq: GradientTile, *of_keys: GradientTile) -> dict[str, GradientTile]:
    names = ("wide_dkv",) if len(of_keys) == 1 else ("wide_dk", "wide_dv")
    return {DQ: dq, **dict(zip(names, of_keys, strict=True))}


_TILE = GradientTile
BACKWARD = {
    "tf32": (
        GradientRow(64, _key_tiles(_TILE(64, 32, 2, 2), _TILE(64, 32, 2, 2)), _key_tiles(_TILE(64, 32), _TILE(64, 32))),
        GradientRow(
            128,
            _key_tiles(_TILE(64, 32), _TILE(64, 32), _TILE(64, 32)),
            _key_tiles(_TILE(64, 32), _TILE(64, 32), _TILE(64, 32)),
        ),
    ),
    "float64": (
        GradientRow(64, _key_tiles(_TILE(64, 16), _TILE(64, 16)), _key_tiles(_TILE(64, 16), _TILE(64, 16))),
        GradientRow(
            128,
            _key_tiles(_TILE(32, 16), _TILE(32, 16), _TILE(32, 16)),
            {},
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config(NarrowConfig):
    """One kernel of this family."""

    whole_products: bool  # float64 by 16 x 8 x 8
    unroll: int  # steps of a product of queries and keys
    sum_columns: int  # of results whose sums over a tile are in registers at once


@dataclass(frozen=True, kw_only=True)
class GradientConfig(Config):
    """One gradient kernel of this family."""

    of_keys: bool  # thread blocks stay with keys
    of_dk: bool
    of_dv: bool


def kind_of(problem: AttentionProblem) -> str:
    """The products that a problem is computed with."""
    return problem.precision if problem.dtype == "float32" and problem.precision else problem.dtype


def _smem_bytes(tile: Tile, row: Row, size: int) -> int:
    columns = row.head_dim + row.head_dim_v
    return (tile.block_m * row.head_dim + tile.stages * tile.block_n * columns) * size + SMEM_BESIDE_TILES


def forward_config(
    row: Row,
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
) -> Config | None:
    """The configuration of one forward kernel, if its tile fits; `flags` is a subset of `FLAGS`."""
    plain_scores = plain_scores and not {"has_softcap", "has_bias", "has_alibi"} & set(flags)
    is_plain = set(flags) <= {"has_window"} and plain_scores and aligned
    tiles = row.tiles if is_plain else row.with_options
    size = _BYTES[kind]
    fitting = (t for t in tiles if t.min_blocks * (_smem_bytes(t, row, size) + RESERVED_SMEM) <= limit + RESERVED_SMEM)
    tile = next(fitting, None)
    if tile is None:
        return None
    dtype = _DTYPES[kind]
    return Config(
        entry=FORWARD_ENTRY,
        element=CPP_TYPES[dtype],
        accum=CPP_TYPES[dtype],
        bias_element=CPP_TYPES[bias_dtype or dtype],
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.warps,
        stages=tile.stages,
        min_blocks=tile.min_blocks,
        product_depth=8,
        async_copies=True,
        aligned=aligned,
        plain_scores=plain_scores,
        whole_products=kind == "float64" and capability >= (9, 0) and is_plain,
        unroll=row.unroll,
        sum_columns=32 if is_plain else 8,
        smem_bytes=_smem_bytes(tile, row, size),
        **{flag: flag in flags for flag in FLAGS},
    )


def _gradient_tiles(
    row: GradientRow, flags: tuple[str, ...], plain_scores: bool, aligned: bool
) -> tuple[bool, dict[str, GradientTile]]:
    is_plain = set(flags) <= {"has_window"} and plain_scores and aligned
    return is_plain, row.tiles if is_plain else row.with_options


def gradient_config(
    entry: str,
    row: GradientRow,
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    plain_scores: bool = True,
    aligned: bool = True,
) -> GradientConfig:
    """The configuration of one gradient kernel; `flags` is a subset of `FLAGS`."""
    is_plain, tiles = _gradient_tiles(row, flags, plain_scores, aligned)
    plain_scores = plain_scores and not {"has_softcap", "has_bias", "has_alibi"} & set(flags)
    tile, size, wanted = tiles[entry], _BYTES[kind], KEY_KERNELS.get(entry, ())
    elements = tile.rows * row.head_dim * (1 if wanted == ("dv",) else 2)
    elements += tile.stages * tile.columns * 2 * (row.head_dim + 1)
    dtype = _DTYPES[kind]
    return GradientConfig(
        entry=entry,
        element=CPP_TYPES[dtype],
        accum=CPP_TYPES[dtype],
        bias_element=CPP_TYPES[bias_dtype or dtype],
        head_dim=row.head_dim,
        head_dim_v=row.head_dim,
        block_m=tile.columns if wanted else tile.rows,
        block_n=tile.rows if wanted else tile.columns,
        num_warps=tile.rows // 16,
        stages=tile.stages,
        min_blocks=tile.min_blocks,
        product_depth=8,
        async_copies=True,
        aligned=aligned,
        plain_scores=plain_scores,
        # The wider product takes registers.
        whole_products=kind == "float64" and capability >= (9, 0) and is_plain and row.head_dim <= 64,
        unroll=row.unroll,
        sum_columns=32 if is_plain else 8,
        of_keys=bool(wanted),
        of_dk="dk" in wanted,
        of_dv="dv" in wanted,
        smem_bytes=elements * size + SMEM_BESIDE_TILES,
        **{flag: flag in flags for flag in FLAGS},
    )


def _gradient_configs(
    row: GradientRow,
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
) -> tuple[GradientConfig, ...]:
    configs = tuple(
        gradient_config(entry, row, kind, bias_dtype, flags, capability, plain_scores, aligned)
        for entry in _gradient_tiles(row, flags, plain_scores, aligned)[1]
    )
    return configs if all(config.smem_bytes <= limit for config in configs) else ()


@lru_cache(maxsize=4096)
def forward(problem: AttentionProblem, aligned: bool, capability: Capability, limit: int) -> Config | None:
    """The forward kernel for a problem, or None."""
    kind = kind_of(problem)
    if kind not in FORWARD or capability not in CAPABILITIES:
        return None
    fitting = (r for r in FORWARD[kind] if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    row = next(fitting, None)
    if row is None:
        return None
    low, high = PLAIN_SCALES
    plain_scores = low <= problem.softmax_scale <= high
    return forward_config(row, kind, problem.bias_dtype, flags_of(problem), capability, limit, plain_scores, aligned)


@lru_cache(maxsize=4096)
def backward(
    problem: AttentionProblem, aligned: bool, capability: Capability, limit: int
) -> tuple[GradientConfig, ...]:
    """The kernels for dq, dk and dv of a problem, that for dq first; none where others are faster."""
    kind = kind_of(problem)
    if kind not in BACKWARD or capability not in CAPABILITIES:
        return ()
    widest = max(problem.head_dim, problem.head_dim_v)
    row = next((r for r in BACKWARD[kind] if widest <= r.head_dim), None)
    if row is None:
        return ()
    low, high = PLAIN_SCALES
    plain_scores = low <= problem.softmax_scale <= high
    return _gradient_configs(row, kind, problem.bias_dtype, flags_of(problem), capability, limit, plain_scores, aligned)


def reason(problem: AttentionProblem) -> str:
    """What both passes take on sm_80, and on Hopper without its own kernels, in words; empty unless it is these."""
    capability = CAPABILITIES[0]
    config = forward(problem, True, capability, smem_limit("sm_80"))
    if config is None:
        return ""
    gradients = backward(problem, True, capability, smem_limit("sm_80"))
    names = ", ".join(f"{c.entry} {c.tile}" for c in gradients) or "gradients by the portable kernels"
    return f"mma.sync on sm_80 and sm_90, {kind_of(problem)} products, tiles of {config.tile}; {names}"


def table(capability: Capability, limit: int) -> Iterator[tuple[Config, str]]:
    """Every kernel for a GPU, with its dtype: each row plain, with visibility options and with all flags."""
    flag_sets: tuple[tuple[str, ...], ...] = ((), ("has_window",), ("has_window", "has_block_mask"), FLAGS)
    for kind in FORWARD if capability in CAPABILITIES else ():
        dtype = _DTYPES[kind]
        for flags in flag_sets:
            for row in FORWARD[kind]:
                config = forward_config(row, kind, None, flags, capability, limit)
                if config is not None:
                    yield config, dtype
            for gradient_row in BACKWARD[kind]:
                for gradient in _gradient_configs(gradient_row, kind, None, flags, capability, limit):
                    yield gradient, dtype
