"""The table of the forward kernels by mma.sync on keys and values in e4m3 (sm_80 and later), and when they run.

Queries have 16 bits or are e4m3 codes, too. Codes are multiplied as they are where there are products of them and the
queries are codes; else a thread block makes numbers of 16 bits of each tile (`cuda_src/sm80/codes_tile.cuh`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, capability_of, smem_limit
from cuflash.kept import kept
from cuflash.plan import sm80_forward
from cuflash.plan.config import CPP_TYPES, flags_of, has_plain_scale, not_taken, with_rules
from cuflash.plan.sm80_forward import Capability, Sm80QueryConfig, Sm80Row, Sm80Tile, forward_configs
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.problem.fp8 import FP8

FLAG = "has_fp8"
HANDLES = (*sm80_forward.HANDLES, FLAG)  # the flags that the kernel knows
ENTRY, PAGED_ENTRY = "fp8_forward_sm80", "paged_fp8_forward_sm80"
DTYPES = (*HALF_DTYPES, FP8)  # of queries
RESULTS = (*HALF_DTYPES, "float32")
_OLDEST: Capability = (8, 0)
_OF_PRODUCTS: Capability = (8, 9)  # from here on mma.sync multiplies e4m3
_CODE_BYTES = 1
_BUFFERS = 2  # of scales, and of codes where they are multiplied
_COMPUTED = "float16"  # what codes of queries become where they are not multiplied
# Bytes of shared memory that are neither a tile's nor scales: which keys are seen, where rows lie, and padding.
_SMEM_BESIDE_TILES = 512

# The first row is taken whose head dims are no smaller than the problem's, and of it the first tile that fits. A loop
# loads the codes of a step while it computes the one before: all tiles have two stages.
FORWARD = tuple(
    Sm80Row(d, d_v, tuple(replace(t, stages=2) for t in tiles), tuple(replace(t, stages=2) for t in with_options))
    for d, d_v, tiles, with_options in (
        (64, 64, (Sm80Tile(64, 64, 4, min_blocks=2), Sm80Tile(64, 64, 4)), (Sm80Tile(64, 32, 4, min_blocks=2),)),
        (96, 96, (Sm80Tile(64, 64, 4, min_blocks=2), Sm80Tile(64, 64, 4)), (Sm80Tile(64, 32, 4, min_blocks=2),)),
        (128, 128, (Sm80Tile(64, 64, 4, min_blocks=2), Sm80Tile(64, 64, 4)), (Sm80Tile(64, 32, 4, min_blocks=2),)),
        (192, 128, (Sm80Tile(64, 64, 4), Sm80Tile(64, 32, 4)), (Sm80Tile(64, 32, 4),)),
        (192, 192, (Sm80Tile(64, 64, 4), Sm80Tile(64, 32, 4)), (Sm80Tile(64, 32, 4),)),
        (256, 256, (Sm80Tile(64, 32, 4),), (Sm80Tile(64, 32, 4),)),
    )
)


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Sm80QueryConfig):
    """The configuration of a forward kernel on keys and values in e4m3."""

    result: str  # C++ type of the results
    query_codes: bool  # queries are codes, too, and weights are rounded to e4m3
    multiplies_codes: bool  # codes are the factors of products; else numbers of 16 bits


def _smem_bytes(tile: Sm80Tile, row: Sm80Row[Sm80Tile], query_codes: bool, multiplies_codes: bool) -> int:
    query = _CODE_BYTES if multiplies_codes else HALF_BYTES
    key = _BUFFERS * _CODE_BYTES if multiplies_codes else HALF_BYTES + _CODE_BYTES
    tiles = tile.block_m * row.head_dim * query + tile.block_n * (row.head_dim + row.head_dim_v) * key
    scales = _BUFFERS * 2 * tile.block_n + (tile.block_m if query_codes else 0)
    return tiles + scales * FLOAT_BYTES + tile.block_n + _SMEM_BESIDE_TILES


def fp8_configs(
    row: Sm80Row[Sm80Tile],
    dtype: str,
    bias_dtype: str | None,
    flags: tuple[str, ...],
    capability: Capability,
    limit: int,
    plain_scores: bool = True,
    aligned: bool = True,
    block_size: tuple[int, int] = sm80_forward.NO_BLOCKS,
    result_dtype: str = "bfloat16",
) -> tuple[Fp8Config, ...]:
    """The configurations of a kernel for queries of a dtype of `DTYPES`; the others are `forward_configs`'."""
    query_codes = dtype == FP8
    multiplies = query_codes and capability >= _OF_PRODUCTS
    computed = _COMPUTED if query_codes else dtype
    options = tuple(flag for flag in flags if flag != FLAG)
    found = forward_configs(
        row, computed, bias_dtype, options, capability, limit, plain_scores, aligned, block_size, ENTRY,
        lambda tile, own: _smem_bytes(tile, own, query_codes, multiplies),
    )  # fmt: skip
    own: dict[str, Any] = {
        "result": CPP_TYPES[result_dtype],
        "query_codes": query_codes,
        "multiplies_codes": multiplies,
    }
    given: list[dict[str, Any]] = [
        {f.name: getattr(base, f.name) for f in fields(base)} | {"entry": ENTRY, FLAG: True} for base in found
    ]
    return tuple(Fp8Config(**each, **own) for each in given)


def fp8_config(*given: Any, **others: Any) -> Fp8Config:
    """The first of `fp8_configs`."""
    return fp8_configs(*given, **others)[0]


def takes(problem: AttentionProblem, capability: Capability) -> bool:
    """Return True if there is a kernel for a problem on e4m3 keys on GPUs of a capability."""
    return problem.has_fp8_keys and capability >= _OLDEST and not not_taken(HANDLES, problem)


@kept
def forward(problem: AttentionProblem, aligned: bool, capability: Capability, limit: int) -> tuple[Fp8Config, ...]:
    """The candidates for a problem on e4m3 keys; none where the GPU is too old or an option has none.

    `aligned` says that addresses and strides are multiples of 16 bytes, `limit` is the shared memory of a thread block
    in bytes.
    """
    if not takes(problem, capability):
        return ()
    row = next(r for r in FORWARD if problem.head_dim <= r.head_dim and problem.head_dim_v <= r.head_dim_v)
    given = row, problem.dtype, problem.bias_dtype, flags_of(problem), capability, limit
    plain = has_plain_scale(problem)
    configs = fp8_configs(*given, plain, aligned, problem.block_size, problem.result_dtype)
    return tuple(with_rules(config, problem) for config in configs)


def reason(problem: AttentionProblem) -> str:
    """A sentence for users: the forward kernels that a problem on e4m3 keys takes."""
    if not_taken(HANDLES, problem):
        return f"converted to float32: mma.sync on e4m3 has none with {not_taken(HANDLES, problem)}"
    tiles = {name: forward(problem, True, capability_of(name), smem_limit(name)) for name in ("sm_80", "sm_89")}
    named = ", ".join(
        f"{configs[0].tile} on {name}{' by products of codes' if configs[0].multiplies_codes else ''}"
        for name, configs in tiles.items()
        if configs
    )
    return f"mma.sync on e4m3 keys, tiles of {named}; converted to float32 on GPUs older than sm_80"


def table(capability: Capability, limit: int) -> Iterator[tuple[Fp8Config, str]]:
    """Every kernel for a GPU, with its queries' dtype."""
    if capability < _OLDEST:
        return
    for row in FORWARD:
        for dtype in DTYPES:
            for flags in sm80_forward.table_flags(row, sm80_forward.HANDLES):
                result = RESULTS[len(flags) % len(RESULTS)] if dtype == FP8 else dtype
                yield fp8_config(row, dtype, None, (*flags, FLAG), capability, limit, result_dtype=result), dtype
            yield fp8_config(row, dtype, None, HANDLES, capability, limit, aligned=False), dtype
