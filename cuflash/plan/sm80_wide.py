"""Rows of the table for mma.sync on wide elements: float64, and float32 in float16 parts (from sm_80 on)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, capability_of, smem_limit
from cuflash.kept import kept
from cuflash.plan.config import (
    FLAGS,
    KNOWN_TO_ALL,
    are_products,
    beside_window,
    common,
    flags_of,
    has_plain_scale,
    table_flags,
    unknown,
)
from cuflash.plan.entries import key_results
from cuflash.plan.sm80_forward import BLACKWELL, SMEM_BESIDE_TILES, Capability, Row, Tile, first_fitting
from cuflash.plan.sm80_forward import Config as HalfConfig
from cuflash.plan.split import BY_HALVES, KEY_PARTS, PARTS, of_half
from cuflash.problem.attention_problem import AttentionProblem

HANDLES = KNOWN_TO_ALL
# float16 parts of values and dout by kind of products; float64 has whole elements.
_PARTS = {"float32": PARTS[None], "tf32": PARTS["tf32"], "float64": 0}
_PRODUCTS = {
    "float32": "float16 parts, float32's error",
    "tf32": "one product of float16 each, TF32's error",
    "float64": "float64 products",
}

# Of a key and its value in forward's two buffers.
_FACTORS = 4
# lse and delta of a row of a gradient's tile in float64, or these and two factors in float32.
_NUMBERS_BYTES = 16
_64X48 = Tile(64, 48, 4, below=BLACKWELL)
# Exact float32 has these tiles beside several options, and beside one: on Blackwell all together spill with 32 keys.
_SEVERAL = Tile(64, 32, 4, below=BLACKWELL), Tile(64, 16, 4)
_ONE = (Tile(64, 32, 4, only=FLAGS),)
# By kind; the first row that is wide enough is taken.
FORWARD = {
    "float32": (
        Row(64, 64, (Tile(64, 64, 4, 1, 2),), (Tile(64, 32, 4, 1, 2),)),
        Row(128, 128, (_64X48, Tile(64, 32, 4)), _SEVERAL, _ONE),
        Row(192, 128, (Tile(64, 64, 4, below=BLACKWELL), _64X48, Tile(64, 32, 4)), _SEVERAL, _ONE),
        Row(256, 128, (Tile(64, 64, 4, below=BLACKWELL), Tile(64, 32, 4)), _SEVERAL, _ONE),
    ),
    "tf32": (
        Row(64, 64, (Tile(128, 64, 4, 2, 2), Tile(128, 64, 4, 1, 2)), (Tile(64, 64, 4, 2, 2),)),
        Row(128, 128, (Tile(64, 64, 4, 1, 2), Tile(64, 32, 4, 1, 2)), (Tile(64, 32, 4, 1, 2),)),
        Row(256, 256, (Tile(64, 64, 4),), (Tile(64, 32, 4, 2),)),
    ),
    "float64": (
        Row(64, 64, (Tile(64, 32, 4, 2, 2), Tile(64, 32, 4)), (Tile(64, 32, 4),)),
        Row(128, 128, (Tile(64, 16, 4, 1, 2), Tile(64, 32, 4)), (Tile(64, 32, 4),)),
        Row(256, 128, (Tile(64, 16, 4), Tile(32, 16, 2)), (Tile(32, 32, 2),)),
    ),
}
_AMPERE = (8, 0)
# The GPUs whose products of float64 are faster than their multiply-adds.
_FLOAT64 = (8, 0), (9, 0)
# Words in names of cards that add products of float16 in float32 at half the rate; nothing else tells them apart. Exact
# float32 takes 4.5 for a multiply-add, which pays there in gradients to head dim 64 alone.
_HALF_RATE = "GeForce", "A10G", "L20", "L40", "GB10"


@dataclass(frozen=True)
class GradientRow:
    """Tiles for head dims up to this, whose rows stay with a block: plain or with a window, and with other options."""

    head_dim: int
    key_kernels: tuple[str, ...]
    tile: Tile | None  # portable kernels are faster
    with_options: Tile

    @property
    def head_dim_v(self) -> int:
        """The same class: rows do not tell them apart."""
        return self.head_dim


_TOGETHER, _APART = ("dkv",), ("dk", "dv")  # where both do not fit the registers
_SHARED = Tile(64, 32, 8, key_warps=2)  # or fewer rows, as many as fit
_PAIRS = Tile(32, 32, 4, min_blocks=2, key_warps=2)
_SHARED_BY_FOUR, _SHARED_BY_TWO = Tile(32, 32, 8, key_warps=4), Tile(64, 16, 8, key_warps=2)  # of float64
BACKWARD = {
    "float32": (
        GradientRow(64, _TOGETHER, Tile(64, 32, 4, 1, 2), Tile(64, 32, 4)),
        GradientRow(128, _APART, Tile(64, 48, 4), Tile(64, 32, 4)),
        GradientRow(192, _APART, _SHARED, _SHARED),
        GradientRow(256, _APART, _SHARED, _SHARED),
    ),
    "tf32": (
        GradientRow(64, _TOGETHER, Tile(64, 48, 4, 2, 2), Tile(64, 32, 4, 2, 2)),
        GradientRow(128, _TOGETHER, Tile(64, 32, 4, 2), Tile(64, 16, 4, 2)),
        GradientRow(256, _APART, Tile(64, 32, 4), Tile(64, 16, 4)),
    ),
    "float64": (
        GradientRow(64, _APART, _PAIRS, _PAIRS),
        GradientRow(128, _APART, _SHARED, _SHARED),
        GradientRow(192, _APART, _SHARED_BY_FOUR, _SHARED_BY_FOUR),
        GradientRow(256, _APART, _SHARED_BY_TWO, _SHARED_BY_TWO),
    ),
}
# Exact float32 in 99 KB of shared memory, where that should be faster than multiply-adds.
_FEWER_COLUMNS = replace(_SHARED, block_n=16)
_FORWARD_IN_99_KB = (
    Row(64, 64, *2 * ((Tile(128, 64, 8),),)),
    Row(128, 128, (Tile(64, 32, 4),), (Tile(64, 32, 4, below=(12, 0)), Tile(64, 16, 4))),
)
_BACKWARD_IN_99_KB = (
    GradientRow(64, _TOGETHER, Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    GradientRow(128, _APART, None, _SHARED),
    GradientRow(192, _APART, None, _FEWER_COLUMNS),
)
# Of the kernel for the gradient of a bias; options are those beside it. Several stages are of chunks of columns.
_IN_CHUNKS, _FEWER_KEYS = Tile(64, 64, 4, 2, 2, only=FLAGS), Tile(64, 32, 4, 2, 2)
_ALONE = replace(_FEWER_KEYS, min_blocks=1)  # float64 on sm_80, or 99 KB
BIAS = {
    "float32": (
        Row(
            64,
            64,
            (Tile(64, 64, 4, 1, 2), Tile(64, 32, 4, 1, 2), Tile(64, 64, 4, 2)),
            (Tile(64, 32, 4, 1, 2), Tile(64, 64, 4, 2)),
        ),
        *(
            Row(
                d, d, (_IN_CHUNKS, _FEWER_KEYS, replace(_IN_CHUNKS, min_blocks=1)), (_FEWER_KEYS, _ALONE), (_IN_CHUNKS,)
            )
            for d in (128, 192, 256)
        ),
    ),
    "tf32": (
        Row(64, 64, (Tile(64, 64, 4, 1, 3, below=BLACKWELL), Tile(64, 64, 4, 1, 2)), (Tile(64, 32, 4, 1, 2),)),
        Row(128, 128, (Tile(128, 64, 8, 1, 2), Tile(64, 64, 4, 1, 2), Tile(64, 64, 4)), (Tile(64, 32, 4),)),
        Row(256, 256, (Tile(64, 64, 4, 2, 3, below=BLACKWELL), Tile(64, 64, 4, 2, 2)), (Tile(64, 32, 4),)),
    ),
    "float64": (
        Row(64, 64, (Tile(64, 32, 4, 1, 2), Tile(64, 32, 4)), (Tile(64, 32, 4),)),
        *(Row(d, d, *2 * ((_FEWER_KEYS, _ALONE),)) for d in (128, 192, 256)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config(HalfConfig):
    """One kernel of this family."""

    whole_products: bool  # float64 by 16 x 8 x 8
    unroll: int  # steps of a product of queries and keys
    sum_columns: int  # of results whose sums over a tile are in registers at once
    parts: int  # of values and dout, 0 for whole elements
    key_parts: int  # of queries and keys


@dataclass(frozen=True, kw_only=True)
class GradientConfig(Config):
    """One gradient kernel of this family."""

    of_keys: bool  # thread blocks stay with keys
    computes_dk: bool
    computes_dv: bool


def kind_of(problem: AttentionProblem) -> str:
    """The products that a problem is computed with."""
    return problem.precision if problem.dtype == "float32" and problem.precision else problem.dtype


def pays(problem: AttentionProblem, name: str, gradients: bool) -> bool:
    """Whether a card of this name is faster so than by multiply-adds."""
    is_small = gradients and max(problem.head_dim, problem.head_dim_v) <= 64
    return is_small or kind_of(problem) != "float32" or set(_HALF_RATE).isdisjoint(re.findall(r"\w+", name))


def _multiplies(kind: str, capability: Capability) -> bool:
    """Whether products of this kind are faster than multiply-adds."""
    return capability in _FLOAT64 if kind == "float64" else kind in _PARTS and capability >= _AMPERE


def _dtype_of(kind: str) -> str:
    return "float32" if _PARTS[kind] else kind


def _family(kind: str) -> str:
    return "parts" if _PARTS[kind] else "wide"


def _bytes(kind: str) -> tuple[int, int]:
    """Bytes of an element of queries and keys, and of values and dout, in shared memory."""
    parts = _PARTS[kind]
    return (KEY_PARTS[parts] * HALF_BYTES, parts * HALF_BYTES) if parts else (2 * FLOAT_BYTES, 2 * FLOAT_BYTES)


def _is_plain(flags: tuple[str, ...], plain_scores: bool, aligned: bool) -> bool:
    return plain_scores and aligned and not beside_window(flags)


def _constants(
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    plain_scores: bool,
    aligned: bool,
    row: Row[Tile] | GradientRow,
    tile: Tile,
    sum_columns: int,
    unroll: int,
) -> dict[str, Any]:
    """`sum_columns` are of plain scores, `unroll` is of others."""
    parts = _PARTS[kind]
    is_plain = _is_plain(flags, plain_scores, aligned)
    return {
        **common(Config, _dtype_of(kind), bias_dtype, flags, row, tile),
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
    """Steps that gradients with options unroll."""
    return 2 if _PARTS[kind] else 3


def _has_few_registers(kind: str, capability: Capability) -> bool:
    return kind == "float32" and capability >= BLACKWELL


def forward_config(
    row: Row[Tile],
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
) -> Config:
    """The configuration of one forward kernel; `flags` is a subset of `FLAGS`."""
    is_plain = _is_plain(flags, plain_scores, aligned)
    size, size_v = _bytes(kind)
    columns = size * row.head_dim + size_v * row.head_dim_v

    def smem_bytes(tile: Tile) -> int:
        factors = FLOAT_BYTES * (_FACTORS * tile.block_n + 2 * tile.block_m) if _PARTS[kind] else 0
        elements = tile.block_m * size * row.head_dim + tile.stages * tile.block_n * columns
        return elements + factors + SMEM_BESIDE_TILES

    tile = first_fitting(row.tiles if is_plain else row.with_options, smem_bytes, capability, limit)
    has_room = _PARTS[kind] > 0 and not _has_few_registers(kind, capability)
    sum_columns = 64 if has_room and row.head_dim <= 192 and tile.block_n != 32 else 32
    return Config(
        entry=f"{_family(kind)}_forward",
        whole_products=kind == "float64" and capability >= (9, 0) and is_plain,
        smem_bytes=smem_bytes(tile),
        **_constants(kind, bias_dtype, flags, plain_scores, aligned, row, tile, sum_columns, 2 if has_room else 1),
    )


def gradient_configs(
    row: GradientRow,
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
) -> tuple[GradientConfig, ...]:
    """The configurations of a pass, that of dq first; `flags` is a subset of `FLAGS`."""
    is_plain = _is_plain(flags, plain_scores, aligned)
    tile = row.tile if is_plain else row.with_options
    if tile is None:
        return ()
    # These spilled 8 bytes.
    is_tight = row.head_dim > 192 and set(flags) == {"has_window", "has_block_mask"}
    if _has_few_registers(kind, capability) and not is_plain and (tile.key_warps == 1 or is_tight):
        tile = replace(tile, block_n=16)
    parts, shares = _PARTS[kind], tile.key_warps > 1
    takes_wider = not parts and capability >= (9, 0)
    # Half of a result is many sums.
    unroll = 1 if takes_wider and tile.key_warps == 2 else _unroll(kind) - (is_tight and not parts)
    sum_columns = 64 if parts > 1 and tile.stages > 1 else 32  # 32 spilled 8 bytes
    configs = []
    size, size_v = _bytes(kind)
    for name in ("dq", *row.key_kernels):
        entry = f"{_family(kind)}_{name}"
        wanted = key_results(entry)
        row_bytes = row.head_dim * (size if wanted == ("dv",) else size + size_v) + _NUMBERS_BYTES
        column_bytes = row.head_dim * (size + size_v) + _NUMBERS_BYTES
        columns_bytes = tile.stages * tile.block_n * column_bytes + SMEM_BESIDE_TILES
        own = tile
        if shares and not parts:
            row_bytes += tile.block_n * size  # to trade in
        while shares and own.block_m * row_bytes + columns_bytes > limit:
            less = 16 if parts else own.block_m // 2  # copies of whole elements want rows for all warps alike
            own = replace(own, block_m=own.block_m - less, num_warps=own.num_warps - less // 16 * tile.key_warps)
        turned = replace(own, block_m=own.block_n, block_n=own.block_m) if wanted else own
        config = GradientConfig(
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


def bias_config(
    row: Row[Tile],
    kind: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    aligned: bool = True,
) -> GradientConfig:
    """The kernel for the gradient of a bias; `flags` are those of options beside it."""

    def smem_bytes(tile: Tile) -> int:
        whole, chunks = row.head_dim * sum(_bytes(kind)), tile.stages * Config.chunk * max(_bytes(kind))
        row_bytes = (chunks if tile.stages > 1 else whole) + _NUMBERS_BYTES
        return (tile.block_m + tile.block_n) * row_bytes + SMEM_BESIDE_TILES

    tile = first_fitting(row.tiles_for(flags, aligned), smem_bytes, capability, limit)
    in_chunks = tile.stages > 1
    config = GradientConfig(
        entry=f"{_family(kind)}_bias",
        whole_products=kind == "float64" and capability >= (9, 0) and (in_chunks or _is_plain(flags, True, aligned)),
        of_keys=False,
        computes_dk=False,
        computes_dv=False,
        smem_bytes=smem_bytes(tile),
        **_constants(kind, bias_dtype, (*flags, "has_bias"), False, aligned, row, tile, 32, _unroll(kind)),
    )
    return replace(config, unroll=1) if in_chunks and config.parts else config


def _rows(table: dict[str, Any], in_99_kb: Any, kind: str, limit: int) -> Any:
    return in_99_kb if kind == "float32" and limit < smem_limit("sm_80") else table[kind]


_forward_rows = partial(_rows, FORWARD, _FORWARD_IN_99_KB)
_backward_rows = partial(_rows, BACKWARD, _BACKWARD_IN_99_KB)


def _made(make: Any, rows: Any, problem: AttentionProblem, *place: Any, **given: Any) -> Any:
    """The kernels by the first row that is wide enough; None where others are faster, or know more options."""
    aligned, capability, limit = place
    if unknown(HANDLES, problem):
        return None
    kind = kind_of(problem)
    for row in rows(kind, limit) if _multiplies(kind, capability) else ():
        if problem.head_dim <= row.head_dim and problem.head_dim_v <= row.head_dim_v:
            aligned |= _PARTS[kind] > 0  # parts are
            return make(row, kind, problem.bias_dtype, flags_of(problem), capability, limit, aligned=aligned, **given)
    return None


@kept
def forward(problem: AttentionProblem, *place: Any) -> Config | None:
    """The forward kernel for a problem, or None; `place` as for `sm80_forward.forward`."""
    return _made(forward_config, _forward_rows, problem, *place, plain_scores=has_plain_scale(problem))


@kept
def backward(problem: AttentionProblem, *place: Any) -> tuple[GradientConfig, ...]:
    """The kernels for dq, dk and dv of a problem, that for dq first; none where others are faster."""
    return _made(gradient_configs, _backward_rows, problem, *place, plain_scores=has_plain_scale(problem)) or ()


@kept
def of_bias(problem: AttentionProblem, *place: Any) -> GradientConfig | None:
    """The kernel for the gradient of a bias of any shape, or None."""
    return _made(bias_config, lambda kind, _: BIAS[kind], replace(problem, bias=None), *place)


def reason(problem: AttentionProblem, gradients: bool) -> str:
    """What a pass takes, in words; empty unless it is these kernels."""
    kind = kind_of(problem)
    if kind not in _PARTS or not _tiles(problem, False, "sm_80"):
        return ""
    architectures = ", ".join("sm_{}{}".format(*x) for x in _FLOAT64) if kind == "float64" else "sm_80 and later"
    tiles = _tiles(problem, gradients, "sm_80")
    what = f"mma.sync on {architectures}, {_PRODUCTS[kind]}, tiles of {tiles}"
    if kind == "float32":
        in_99_kb = _tiles(problem, gradients, "sm_86")
        if in_99_kb and not pays(problem, _HALF_RATE[0], gradients):
            in_99_kb += f" (portable on {', '.join(_HALF_RATE)})"
        what += f"; in 99 KB of shared memory {in_99_kb or 'portable'}"
    return what if tiles else "portable kernels"


def _tiles(problem: AttentionProblem, gradients: bool, name: str) -> str:
    place = True, capability_of(name), smem_limit(name)
    if gradients:
        return ", ".join(f"{c.entry} {c.tile}" for c in backward(problem, *place))
    whole, half = (forward(p, *place) for p in (problem, of_half(problem)))
    config = whole or half
    return f"{config.entry} {config.tile}{'' if whole else BY_HALVES}" if config else ""


def table(capability: Capability, limit: int) -> Iterator[tuple[Config, str]]:
    """Every kernel for a GPU, with its dtype: `plan.table`."""
    for kind in [kind for kind in _PARTS if _multiplies(kind, capability)]:
        for flags in table_flags(HANDLES):
            forward_rows, backward_rows = _forward_rows(kind, limit), _backward_rows(kind, limit)
            passes = [forward_config(row, kind, None, flags, capability, limit) for row in forward_rows]
            gradients = [gradient_configs(row, kind, None, flags, capability, limit) for row in backward_rows]
            of_bias = [bias_config(row, kind, None, flags, capability, limit) for row in BIAS[kind]]
            for config in (*passes, *sum(gradients, ()), *of_bias):
                yield config, _dtype_of(kind)
