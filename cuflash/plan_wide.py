"""Rows of the table for mma.sync on float64, and on float32 by TF32 (sm_80 and later). Pure, no CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cuflash.config import FLAGS, MOST_KEPT
from cuflash.plan import CPP_TYPES, are_products, flags_of, has_plain_scale, smem_limit
from cuflash.plan_sm80 import SMEM_BESIDE_TILES, Capability, Row, Tile, fits
from cuflash.plan_sm80 import Config as NarrowConfig
from cuflash.problem import AttentionProblem

# By kind of products.
_BYTES = {"tf32": 4, "float64": 8}
_DTYPES = {"tf32": "float32", "float64": "float64"}
FORWARD_ENTRY, DQ = "forward_wide", "wide_dq"
# Kernels that stay with keys, and what they compute.
KEY_KERNELS = {"wide_dkv": ("dk", "dv"), "wide_dk": ("dk",), "wide_dv": ("dv",)}

# By kind; the first row that is wide enough is taken. Without tiles for options the portable kernels run.
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
class GradientRow:
    """Tiles for head dims up to this, whose rows stay with a thread block and whose columns it walks.

    Plain or with a window, and with other options; without one they would spill, and the portable kernels run.
    """

    head_dim: int
    key_kernels: tuple[str, ...]
    tile: Tile
    with_options: Tile | None


_APART = ("wide_dk", "wide_dv")  # together they do not fit the registers
BACKWARD = {
    "tf32": (
        GradientRow(64, ("wide_dkv",), Tile(64, 32, 4, 2, 2), Tile(64, 32, 4)),
        GradientRow(128, _APART, Tile(64, 32, 4), Tile(64, 32, 4)),
    ),
    "float64": (
        GradientRow(64, ("wide_dkv",), Tile(64, 16, 4), Tile(64, 16, 4)),
        GradientRow(128, _APART, Tile(32, 16, 2), None),
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


def _is_plain(flags: tuple[str, ...], plain_scores: bool, aligned: bool) -> bool:
    return set(flags) <= {"has_window"} and plain_scores and aligned


def _constants(
    kind: str, bias_dtype: str | None, flags: tuple[str, ...], plain_scores: bool, aligned: bool, tile: Tile
) -> dict[str, Any]:
    dtype = _DTYPES[kind]
    return {
        "element": CPP_TYPES[dtype],
        "accum": CPP_TYPES[dtype],
        "bias_element": CPP_TYPES[bias_dtype or dtype],
        "num_warps": tile.warps,
        "stages": tile.stages,
        "min_blocks": tile.min_blocks,
        "key_warps": tile.key_warps,
        "product_depth": 8,
        "async_copies": True,
        "aligned": aligned,
        "plain_scores": plain_scores and are_products(flags),
        "unroll": 4,
        "sum_columns": 32 if _is_plain(flags, plain_scores, aligned) else 8,
        **{flag: flag in flags for flag in FLAGS},
    }


def forward_config(
    row: Row[Tile],
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
) -> Config | None:
    """The configuration of one forward kernel, if its tile fits; `flags` is a subset of `FLAGS`."""
    is_plain = _is_plain(flags, plain_scores, aligned)
    for tile in row.tiles if is_plain else row.with_options:
        elements = tile.block_m * row.head_dim + tile.stages * tile.block_n * (row.head_dim + row.head_dim_v)
        smem_bytes = elements * _BYTES[kind] + SMEM_BESIDE_TILES
        if fits(tile.min_blocks, smem_bytes, limit):
            return Config(
                entry=FORWARD_ENTRY,
                head_dim=row.head_dim,
                head_dim_v=row.head_dim_v,
                block_m=tile.block_m,
                block_n=tile.block_n,
                whole_products=kind == "float64" and capability >= (9, 0) and is_plain,
                smem_bytes=smem_bytes,
                **_constants(kind, bias_dtype, flags, plain_scores, aligned, tile),
            )
    return None


def gradient_configs(
    row: GradientRow,
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    plain_scores: bool = True,
    aligned: bool = True,
) -> tuple[GradientConfig, ...]:
    """The configurations of a pass, that of dq first, if there are any; `flags` is a subset of `FLAGS`."""
    is_plain = _is_plain(flags, plain_scores, aligned)
    tile = row.tile if is_plain else row.with_options
    # The wider product takes registers.
    takes_wider = kind == "float64" and capability >= (9, 0) and is_plain and not flags and row.head_dim <= 64
    configs = []
    for entry in (DQ, *row.key_kernels) if tile is not None else ():
        assert tile is not None
        wanted = KEY_KERNELS.get(entry, ())
        elements = tile.block_m * row.head_dim * (1 if wanted == ("dv",) else 2)
        elements += tile.stages * tile.block_n * 2 * (row.head_dim + 1)
        config = GradientConfig(
            entry=entry,
            head_dim=row.head_dim,
            head_dim_v=row.head_dim,
            block_m=tile.block_n if wanted else tile.block_m,
            block_n=tile.block_m if wanted else tile.block_n,
            whole_products=takes_wider and not wanted,
            of_keys=bool(wanted),
            of_dk="dk" in wanted,
            of_dv="dv" in wanted,
            smem_bytes=elements * _BYTES[kind] + SMEM_BESIDE_TILES,
            **_constants(kind, bias_dtype, flags, plain_scores, aligned, tile),
        )
        configs.append(config)
    return tuple(configs)


@lru_cache(maxsize=MOST_KEPT)
def forward(problem: AttentionProblem, aligned: bool, capability: Capability, limit: int) -> Config | None:
    """The forward kernel for a problem, or None."""
    kind = kind_of(problem)
    widest = max(problem.head_dim, problem.head_dim_v)
    for row in FORWARD.get(kind, ()) if capability in CAPABILITIES else ():
        if widest <= row.head_dim:
            options = problem.bias_dtype, flags_of(problem)
            return forward_config(row, kind, *options, capability, limit, has_plain_scale(problem), aligned)
    return None


@lru_cache(maxsize=MOST_KEPT)
def backward(problem: AttentionProblem, aligned: bool, capability: Capability) -> tuple[GradientConfig, ...]:
    """The kernels for dq, dk and dv of a problem, that for dq first; none where others are faster."""
    kind = kind_of(problem)
    widest = max(problem.head_dim, problem.head_dim_v)
    for row in BACKWARD.get(kind, ()) if capability in CAPABILITIES else ():
        if widest <= row.head_dim:
            options = problem.bias_dtype, flags_of(problem)
            return gradient_configs(row, kind, *options, capability, has_plain_scale(problem), aligned)
    return ()


def reason(problem: AttentionProblem) -> str:
    """What both passes take on sm_80, and on Hopper without its own kernels, in words; empty unless it is these."""
    capability = CAPABILITIES[0]
    config = forward(problem, True, capability, smem_limit("sm_80"))
    if config is None:
        return ""
    gradients = backward(problem, True, capability)
    names = ", ".join(f"{c.entry} {c.tile}" for c in gradients) or "gradients by the portable kernels"
    return f"mma.sync on sm_80 and sm_90, {kind_of(problem)} products, tiles of {config.tile}; {names}"


def table(capability: Capability, limit: int) -> Iterator[tuple[Config, str]]:
    """Every kernel for a GPU, with its dtype: each row plain, with visibility options and with all flags."""
    flag_sets: tuple[tuple[str, ...], ...] = ((), ("has_window",), ("has_window", "has_block_mask"), FLAGS)
    for kind in FORWARD if capability in CAPABILITIES else ():
        for flags in flag_sets:
            passes = [forward_config(row, kind, None, flags, capability, limit) for row in FORWARD[kind]]
            gradients = [gradient_configs(row, kind, None, flags, capability) for row in BACKWARD[kind]]
            for config in (*passes, *sum(gradients, ())):
                if config is not None:
                    yield config, _DTYPES[kind]
