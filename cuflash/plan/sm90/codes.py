"""When Hopper's forward kernel on 16 bits takes e4m3 keys and values, under queries of 16 bits.

Codes become elements of 16 bits, which is exact, in a launch of their own before the kernel, whose tiles are those of
16-bit keys then. In pages, which may be many more than a call reads, and where elements would take much memory, the
kernel's loading warps make them (`cuda_src/sm90/forward/page_rows.cuh`), each time that a tile of queries reads a key;
tiles are those for pages, which leave such warps registers. Few queries and block masks are for `sm80.fp8`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, SMEM_ALIGNMENT, SMEM_BYTES, SWIZZLE_BYTES
from cuflash.kept import kept
from cuflash.plan.config import has_plain_scores, unknown
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90.config import Sm90ForwardConfig
from cuflash.plan.sm90.forward import Layout, expressible, has_few_queries
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem
from cuflash.problem.pages import Pages

_KNOWN = tuple(flag for flag in (*sm90_forward.HANDLES, "has_fp8") if flag != "has_block_mask")
# Registers of a thread that loads and decodes, and of one that computes, by the columns of v: results of fewer columns
# leave more to the loaders, which hold codes on their way.
_REGISTERS = ((64, (104, 200)), (128, (88, 208)), (256, (72, 216)))
# Scales of tokens take registers, of which results of more columns than the first leave enough for so many keys.
_COLUMNS_OF_TOKENS, _MOST_KEYS = 128, 96
_BARRIERS = 16  # bytes of the two barriers of a buffer
MOST_ELEMENTS = 1 << 31  # bytes of keys and values as elements
Launches = tuple[Sm90ForwardConfig, int]  # a kernel, and the splits of the keys of each of its tiles


def obstacle(problem: AttentionProblem) -> str:
    """Say why a problem on FP8 keys cannot take the kernel; empty if it can."""
    if problem.dtype not in HALF_DTYPES or not problem.has_fp8_keys:
        return "wgmma on 16 bits takes queries of 16 bits over FP8 keys"
    if problem.is_empty:
        return "TMA takes no empty arrays"
    if problem.out_dtype not in (None, problem.dtype, problem.accum_dtype):
        return f"results of {problem.dtype} queries in {problem.out_dtype}"
    if problem.split_size is not None:
        return "no kernel with splits of one size"
    if has_few_queries(problem):
        return "no kernel for few queries"
    return f"no kernel with {unknown(_KNOWN, problem)}" if unknown(_KNOWN, problem) else ""


def makes_elements(problem: AttentionProblem) -> bool:
    """Return True if keys and values become elements of 16 bits before the kernel."""
    keys = problem.seqlen_k * (1 if problem.packed else problem.batch)
    numbers = keys * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
    return problem.pages is None and numbers * HALF_BYTES <= MOST_ELEMENTS


@kept
def forward(
    problem: AttentionProblem,
    layouts: tuple[Layout, ...],
    bias: Layout | None = None,
    mask: Layout | None = None,
    token_scales: bool = False,
    *,
    num_sms: int,
) -> tuple[Launches, ...]:
    """The candidates for a problem whose q, k and v have these `layouts`, at multiples of 16 bytes.

    `token_scales` says that the rows of a head, or pages, have scales of their own.
    """
    if obstacle(problem) or not all(expressible(*layout) for layout in layouts):
        return ()
    halves = _as_halves(problem)
    config = sm90_forward.forward(halves, (), bias, mask)
    if config is None:
        return ()
    own, num_splits = sm90_grid.for_grid(halves, config, num_sms)
    # Codes leave no registers to rows of several heads in tiles of a third warpgroup.
    if own.has_work_list or problem.result_dtype != problem.dtype or own.consumers > config.consumers:
        own, num_splits = config, 1
    if num_splits > 1:
        own = replace(own, splits_keys=True, staging_panels=0)
    found = sm90_forward.candidates(halves, replace(own, pair=1))
    most_keys = _MOST_KEYS if token_scales and config.head_dim_v > _COLUMNS_OF_TOKENS else config.block_n
    codes = (_of_codes(problem, each, token_scales) for each in found if each.block_n <= most_keys)
    return tuple((each, num_splits) for each in codes if each.smem_bytes <= SMEM_BYTES)


def _as_halves(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem on 16 bits, whose tiles are those of a problem on codes."""
    rows = None if makes_elements(problem) else Pages(problem.batch, max(problem.seqlen_k, 1), 1)
    return replace(problem, has_fp8_keys=False, out_dtype=None, pages=problem.pages or rows)


def _of_codes(problem: AttentionProblem, config: Sm90ForwardConfig, token_scales: bool) -> Sm90ForwardConfig:
    """Return the configuration on codes of one on pages of 16 bits."""
    copies_rows = not makes_elements(problem)
    loading, computing = config.producer_registers, config.consumer_registers
    if copies_rows and config.consumers == 2:
        loading, computing = next(found for widest, found in _REGISTERS if config.head_dim_v <= widest)
    smem_bytes, staging_panels = config.smem_bytes, config.staging_panels
    if token_scales:
        scales_bytes = config.stages * (2 * config.block_n * FLOAT_BYTES + _BARRIERS)
        smem_bytes += math.ceil(scales_bytes / SMEM_ALIGNMENT) * SMEM_ALIGNMENT
        if smem_bytes > SMEM_BYTES and staging_panels > 1:
            smem_bytes, staging_panels = smem_bytes - config.block_m * SWIZZLE_BYTES, staging_panels - 1
    is_wide = problem.result_dtype != problem.dtype
    return replace(
        config,
        has_fp8=True,
        token_scales=token_scales,
        smem_bytes=smem_bytes,
        has_pages=problem.pages is not None,
        copies_rows=copies_rows,
        # The error of a row with a large weight is the smallest then, by which FP8 is judged.
        follows_every_maximum=True,
        early_powers=0,
        bounded_scores=False,
        producer_registers=loading,
        consumer_registers=computing,
        plain_scores=has_plain_scores(problem),
        hides_queries=sm90_forward.may_hide_queries(problem),
        splits_keys=config.splits_keys or is_wide,
        staging_panels=0 if is_wide else staging_panels,
    )
