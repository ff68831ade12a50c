"""The configurations of the forward kernels by mma.sync on keys and values in e4m3 (sm_80 and later), and their uses.

Queries have 16 bits or are e4m3 codes, too. Codes are multiplied as they are where there are products of them and the
queries are codes; else a thread block makes numbers of 16 bits of each tile (`cuda_src/sm80/codes_tile.cuh`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from cuflash.hardware import CODE_BYTES, FLOAT_BYTES, HALF_BYTES
from cuflash.kept import kept
from cuflash.plan.config import CPP_TYPES, not_taken
from cuflash.plan.record import AMPERE, Capability, Place, Record
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80.forward import Sm80QueryConfig, query_configs
from cuflash.plan.sm80.tiles import FP8 as RECORDS
from cuflash.plan.sm80.tiles import FP8_ENTRY as ENTRY
from cuflash.plan.sm80.tiles import Sm80Tile
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.problem.fp8 import FP8

__all__ = ["ENTRY"]
FLAG = "has_fp8"
HANDLES = (*sm80_forward.HANDLES, FLAG)  # the flags that the kernel knows
PAGED_ENTRY = "paged_fp8_forward_sm80"
DTYPES = (*HALF_DTYPES, FP8)  # of queries
_OF_PRODUCTS: Capability = (8, 9)  # from here on mma.sync multiplies e4m3
_KEYS_OF_PRODUCT = 32
_BUFFERS = 2  # of scales, and of codes where they are multiplied
COMPUTED = "float16"  # what codes of queries become where they are not multiplied
# Bytes of shared memory that are neither a tile's nor scales: which keys are seen, where rows lie, and padding.
_SMEM_BESIDE_TILES = 512


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Sm80QueryConfig):
    """The configuration of a forward kernel on keys and values in e4m3."""

    result: str  # C++ type of the results
    query_codes: bool  # queries are codes, too, and weights are rounded to e4m3
    multiplies_codes: bool  # codes are the factors of products; else numbers of 16 bits


def _smem_bytes(tile: Sm80Tile, row: Record[Sm80Tile], query_codes: bool, multiplies_codes: bool) -> int:
    query = CODE_BYTES if multiplies_codes else HALF_BYTES
    key = _BUFFERS * CODE_BYTES if multiplies_codes else HALF_BYTES + CODE_BYTES
    tiles = tile.block_m * row.head_dim * query + tile.block_n * (row.head_dim + row.head_dim_v) * key
    scales = _BUFFERS * 2 * tile.block_n + (tile.block_m if query_codes else 0)
    return tiles + scales * FLOAT_BYTES + tile.block_n + _SMEM_BESIDE_TILES


def _has_whole_products(tile: Sm80Tile) -> bool:
    """Return True if the keys of a warp are a multiple of those that one product of codes has."""
    return not tile.splits_warps or tile.block_n // tile.num_warps % _KEYS_OF_PRODUCT == 0


def takes(problem: AttentionProblem, capability: Capability) -> bool:
    """Return True if there is a kernel for a problem on e4m3 keys on GPUs of a capability."""
    return problem.has_fp8_keys and capability >= AMPERE and not not_taken(HANDLES, problem)


@kept
def forward(problem: AttentionProblem, *place: Any) -> tuple[Fp8Config, ...]:
    """The candidates for a problem on e4m3 keys; none where the GPU is too old or an option has none.

    `place` has the fields of `Place`.
    """
    own = Place(*place)
    if not takes(problem, own.capability):
        return ()
    query_codes = problem.dtype == FP8
    multiplies = query_codes and own.capability >= _OF_PRODUCTS
    computed = COMPUTED if query_codes else problem.dtype
    halves = replace(problem, dtype=computed, has_fp8_keys=False, out_dtype=None)
    smem_bytes = partial(_smem_bytes, query_codes=query_codes, multiplies_codes=multiplies)
    records = tuple(record for record in RECORDS if not multiplies or _has_whole_products(record.tile))
    configs = query_configs(halves, own, records, HANDLES, smem_bytes)
    of_codes: dict[str, Any] = {
        FLAG: True,
        "result": CPP_TYPES[problem.result_dtype],
        "query_codes": query_codes,
        "multiplies_codes": multiplies,
    }
    return tuple(Fp8Config(**{f.name: getattr(c, f.name) for f in fields(c)} | of_codes) for c in configs)
