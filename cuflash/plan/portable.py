"""The table of the portable kernels (plain CUDA C++): the tile that a problem takes on any GPU.

These kernels take the problems that no other family takes, and `gpu.portable` launches them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cuflash.hardware import ALIGNMENT, SMALLEST_SMEM
from cuflash.kept import kept
from cuflash.plan.config import (
    HEAD_DIM_CLASSES,
    KNOWN_TO_ALL,
    WIDEST,
    KernelConfig,
    common,
    flags_of,
    head_dim_class,
    table_flags,
    unknown,
    with_rules,
    without_window,
)
from cuflash.plan.entries import key_results
from cuflash.problem.attention_problem import AttentionProblem, accum_of

_SIZES = {"float32": 4, "float64": 8}
SIDE = 16  # threads along either side of a tile
# The flags that the portable kernels know.
HANDLES = (*KNOWN_TO_ALL, "has_place", "has_score_mod", "has_mask_mod")


@dataclass(frozen=True)
class PortableTile:
    """The tile of a portable kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    block_k: int  # columns of a chunk of q, k, v or dout in shared memory
    unroll: int  # steps of the loop over a chunk that are unrolled
    # The columns of a result whose sums over one tile are in registers at once; with 0 no tile is summed by itself.
    sum_columns: int = 128


@dataclass(frozen=True)
class PortableRow:
    """One row of the table; no kernel of it spills registers on any architecture."""

    # The tiles without options but a window; the first whose shared memory the GPU has is taken, and the last fits all.
    tiles: tuple[PortableTile, ...]
    with_options: PortableTile  # the smaller tile with any other option, as options take registers
    # The tile with options of results in slices, whose first column takes a register; the same where there is none.
    in_slices: PortableTile | None = None


# OPERAND_ENTRIES compute the gradients of operands by float additions, or in two passes that repeat their bits.
OPERAND_ENTRIES = ("backward_operands", "operand_maxima", "operand_words")

# Keys are (entry, accumulator, head-dim class of the widest result). The tiles were chosen by measurement on an H200.
PORTABLE: dict[tuple[str, str, int], PortableRow] = {
    ("forward", "float32", 32): PortableRow(
        (PortableTile(128, 128, 16, 16), PortableTile(128, 64, 16, 16)), PortableTile(64, 64, 16, 16)
    ),
    ("forward", "float32", 64): PortableRow(
        (PortableTile(128, 128, 16, 16), PortableTile(128, 64, 16, 16)), PortableTile(64, 64, 16, 16)
    ),
    ("forward", "float32", 128): PortableRow(
        (PortableTile(128, 128, 8, 4), PortableTile(128, 64, 16, 16, 64)), PortableTile(64, 64, 16, 16)
    ),
    ("forward", "float32", 256): PortableRow((PortableTile(64, 64, 16, 16),), PortableTile(64, 64, 8, 8)),
    ("forward", "float64", 32): PortableRow((PortableTile(128, 32, 8, 8),), PortableTile(64, 32, 8, 4)),
    ("forward", "float64", 64): PortableRow((PortableTile(128, 32, 8, 8, 0),), PortableTile(64, 32, 8, 4)),
    ("forward", "float64", 128): PortableRow((PortableTile(64, 32, 8, 4, 64),), PortableTile(32, 32, 16, 4)),
    ("forward", "float64", 256): PortableRow((PortableTile(32, 64, 8, 1, 64),), PortableTile(32, 32, 8, 2, 64)),
    ("backward_dq", "float32", 32): PortableRow((PortableTile(128, 64, 16, 16),), PortableTile(64, 64, 16, 16)),
    ("backward_dq", "float32", 64): PortableRow((PortableTile(128, 64, 16, 16),), PortableTile(64, 64, 16, 16)),
    ("backward_dq", "float32", 128): PortableRow((PortableTile(64, 64, 16, 16),), PortableTile(64, 64, 8, 8)),
    ("backward_dq", "float32", 256): PortableRow((PortableTile(64, 64, 16, 16, 64),), PortableTile(32, 64, 16, 16)),
    ("backward_dq", "float64", 32): PortableRow((PortableTile(64, 32, 16, 16),), PortableTile(64, 32, 8, 4)),
    ("backward_dq", "float64", 64): PortableRow((PortableTile(64, 32, 16, 16),), PortableTile(64, 32, 8, 4)),
    ("backward_dq", "float64", 128): PortableRow((PortableTile(64, 32, 8, 4, 64),), PortableTile(32, 32, 16, 4)),
    ("backward_dq", "float64", 256): PortableRow((PortableTile(32, 64, 8, 2, 64),), PortableTile(32, 32, 4, 4, 64)),
    ("backward_dkv", "float32", 32): PortableRow((PortableTile(64, 128, 8, 8),), PortableTile(64, 64, 16, 16)),
    ("backward_dkv", "float32", 64): PortableRow((PortableTile(64, 128, 8, 8),), PortableTile(64, 64, 16, 16)),
    ("backward_dkv", "float32", 128): PortableRow((PortableTile(64, 64, 16, 16),), PortableTile(32, 64, 16, 16, 0)),
    ("backward_dkv", "float32", 256): PortableRow(
        (PortableTile(64, 32, 16, 4, 0),), PortableTile(32, 32, 16, 4), PortableTile(32, 32, 8, 4)
    ),
    ("backward_dkv", "float64", 32): PortableRow((PortableTile(32, 64, 16, 2),), PortableTile(32, 64, 8, 4)),
    ("backward_dkv", "float64", 64): PortableRow((PortableTile(32, 64, 16, 2, 0),), PortableTile(32, 64, 4, 4, 0)),
    ("backward_dkv", "float64", 128): PortableRow((PortableTile(64, 32, 8, 2, 64),), PortableTile(32, 32, 8, 2, 64)),
    # dk and dv have a kernel each where both together do not fit the registers.
    ("backward_dk", "float64", 256): PortableRow(
        (PortableTile(32, 32, 8, 4, 64),), PortableTile(32, 32, 8, 4, 64), PortableTile(32, 32, 8, 2, 64)
    ),
    ("backward_dv", "float64", 256): PortableRow(
        (PortableTile(32, 32, 8, 4, 64),), PortableTile(32, 32, 8, 4, 64), PortableTile(32, 32, 8, 2, 64)
    ),
    ("backward_bias", "float32", 0): PortableRow((), PortableTile(64, 64, 16, 16)),
    ("backward_bias", "float64", 0): PortableRow((), PortableTile(64, 32, 8, 4)),
    **{
        (entry, accum, 0): PortableRow((), tile)
        for entry in OPERAND_ENTRIES
        for accum, tile in (("float32", PortableTile(64, 64, 16, 16)), ("float64", PortableTile(64, 32, 8, 4)))
    },
}


@dataclass(frozen=True, kw_only=True)
class PortableConfig(KernelConfig):
    """The configuration of a portable kernel."""

    block_k: int  # see `PortableTile`
    unroll: int
    sum_columns: int
    slice_columns: int = 0  # columns of the results that a thread block computes; 0 where it has them all

    @property
    def tile(self) -> str:
        """Queries, keys and columns of a chunk."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return SIDE * SIDE


def key_kernels(problem: AttentionProblem) -> tuple[str, ...]:
    """Return the entries of the kernels that compute dk and dv: one for both, or one each."""
    widest = head_dim_class(max(problem.head_dim, problem.head_dim_v))
    together = ("backward_dkv", problem.accum_dtype, widest) in PORTABLE
    return ("backward_dkv",) if together else ("backward_dk", "backward_dv")


def _smem_bytes(entry: str, tile: PortableTile, accum: str, head_dim: int, head_dim_v: int) -> int:
    """Return the bytes of SharedStorage in cuda_src/portable/, whose kernels assert that they are enough."""
    size = _SIZES[accum]
    pad = ALIGNMENT // size
    widest = max(head_dim, head_dim_v)
    chunk = tile.block_k * max(tile.block_m + tile.block_n + 2 * pad, widest)
    if key_results(entry):
        factor, seen = tile.block_m * (tile.block_n + pad), tile.block_m
    elif entry == "backward_bias":
        factor, seen = SIDE * max(tile.block_m, tile.block_n), tile.block_n
    elif entry in OPERAND_ENTRIES:
        factor, seen = 0, tile.block_n
    else:
        factor, seen = tile.block_n * (tile.block_m + pad), tile.block_n
    return (2 * chunk + factor) * size + math.ceil(seen / 16) * 16


@cache
def configs_of(
    entry: str,
    dtype: str,
    bias_dtype: str | None,
    head_dim: int,
    head_dim_v: int,
    flags: tuple[str, ...],
    smem_limit: int = SMALLEST_SMEM,
    in_slices: bool = False,
) -> tuple[PortableConfig, ...]:
    """Return the configurations of a portable kernel, the fastest tile first.

    Head dims are classes, `flags` a subset of `FLAGS`, and `smem_limit` the bytes that a thread block may use. Results
    of more columns than the widest class has are computed `in_slices` of so many.
    """
    accum = accum_of(dtype)
    row = PORTABLE[entry, accum, max(head_dim, head_dim_v)]
    last = row.in_slices if in_slices and row.in_slices else row.with_options
    tiles = (last,) if without_window(flags) else (*row.tiles, last)
    smem_bytes = {tile: _smem_bytes(entry, tile, accum, head_dim, head_dim_v) for tile in tiles}
    return tuple(
        PortableConfig(
            entry=entry,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            smem_bytes=size,
            slice_columns=WIDEST if in_slices else 0,
            **common(PortableConfig, dtype, bias_dtype, flags, tile),
        )
        for tile, size in smem_bytes.items()
        if size <= smem_limit or tile == last
    )


def config_of(*given: Any, **others: Any) -> PortableConfig:
    """Return the first of `configs_of`."""
    return configs_of(*given, **others)[0]


def _of_results(entry: str, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return those of two numbers (of q, of v) on whose side the kernel accumulates results; 0 where it does not."""
    of_k = entry in ("backward_dq", "backward_dkv", "backward_dk")
    of_v = entry in ("forward", "backward_dkv", "backward_dv")
    return head_dim if of_k else 0, head_dim_v if of_v else 0


@kept
def plan(problem: AttentionProblem, entry: str, smem_limit: int = SMALLEST_SMEM) -> tuple[PortableConfig, ...]:
    """Return the candidates for the kernel `entry`; raise NotImplementedError for an option that it does not know."""
    if unknown(HANDLES, problem):
        raise NotImplementedError(f"{entry}: no kernel takes these inputs with {unknown(HANDLES, problem)}")
    flags = flags_of(problem)
    if entry in ("backward_dk", "backward_dv"):
        head_dim, head_dim_v = _of_results(entry, WIDEST, WIDEST)
    else:
        head_dim, head_dim_v = _of_results(entry, head_dim_class(problem.head_dim), head_dim_class(problem.head_dim_v))
    in_slices = max(_of_results(entry, problem.head_dim, problem.head_dim_v)) > WIDEST
    configs = configs_of(entry, problem.dtype, problem.bias_dtype, head_dim, head_dim_v, flags, smem_limit, in_slices)
    return tuple(with_rules(config, problem) for config in configs)


def types_of(problem: AttentionProblem) -> PortableConfig:
    """Return the configuration for a problem's kernels in around/reduce.cu, which know its types and no options.

    Elements have the type of results.
    """
    return config_of("forward", problem.result_dtype, problem.bias_dtype, 0, HEAD_DIM_CLASSES[0], ())


# _OF_CALLS leaves out places, which only parts have and no public call: their kernels are compiled with parts.
_OF_CALLS = tuple(flag for flag in HANDLES if flag != "has_place")
_ONLY_WITH = {
    "backward_bias": (("has_bias",), _OF_CALLS),
    **dict.fromkeys(OPERAND_ENTRIES, (("has_score_mod",), _OF_CALLS)),
}


def table(smem_limit: int) -> Iterator[tuple[PortableConfig, str]]:
    """Yield every kernel for a GPU of so much shared memory, with its dtype."""
    for entry, accum, widest in PORTABLE:
        head_dim, head_dim_v = _of_results(entry, widest, widest)
        for dtype in ("float64",) if accum == "float64" else ("float16", "bfloat16", "float32"):
            for flags in _ONLY_WITH.get(entry, table_flags(_OF_CALLS)):
                for in_slices in (False, True) if widest == WIDEST else (False,):
                    yield config_of(entry, dtype, None, head_dim, head_dim_v, flags, smem_limit, in_slices), dtype
