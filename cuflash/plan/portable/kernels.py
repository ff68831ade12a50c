"""The configurations of the portable kernels (plain CUDA C++), which take what no other family does on any GPU.

`tiles` has their records, and `gpu.portable` launches them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from cuflash.hardware import ALIGNMENT, SMALLEST_SMEM
from cuflash.kept import kept
from cuflash.plan.config import (
    KNOWN_TO_ALL,
    WIDEST,
    KernelConfig,
    common,
    flags_of,
    head_dim_class,
    unknown,
    with_rules,
    without_window,
)
from cuflash.plan.entries import key_results
from cuflash.plan.portable.tiles import IN_SLICES, OPERAND_ENTRIES, PORTABLE, PortableTile
from cuflash.plan.record import Record, candidates
from cuflash.problem.attention_problem import AttentionProblem

_SIZES = {"float32": 4, "float64": 8}
OLDEST = (7, 0)  # the capability from which on there are portable kernels
_APART = ("backward_dk", "backward_dv")
SIDE = 16  # threads along either side of a tile
# The flags that the portable kernels know.
HANDLES = (*KNOWN_TO_ALL, "has_place", "has_score_mod", "has_mask_mod")


@dataclass(frozen=True, kw_only=True)
class PortableConfig(KernelConfig):
    """The configuration of a portable kernel."""

    block_k: int  # see `portable.tiles.PortableTile`
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
    together = bool(_lines_of("backward_dkv", problem.accum_dtype, widest))
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
def _lines_of(entry: str, accum: str, widest: int) -> tuple[Record[PortableTile], ...]:
    return tuple(line for line in PORTABLE if (*line.entries, line.kind, line.head_dim) == (entry, accum, widest))


def _time(line: Record[PortableTile]) -> float:
    """Predict the time of a score by what its thread reads from shared memory; see `record.candidates`."""
    return 1 / line.tile.block_m + 1 / line.tile.block_n


def _of_results(entry: str, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return those of two numbers (of q, of v) on whose side the kernel accumulates results; 0 where it does not."""
    of_k = entry in ("backward_dq", "backward_dkv", "backward_dk")
    of_v = entry in ("forward", "backward_dkv", "backward_dv")
    return head_dim if of_k else 0, head_dim_v if of_v else 0


@kept
def plan(problem: AttentionProblem, entry: str, smem_limit: int = SMALLEST_SMEM) -> tuple[PortableConfig, ...]:
    """Return the candidates for a kernel of `PORTABLE` where a thread block may use so many bytes of shared memory.

    NotImplementedError is raised for an option that the kernel does not know.
    """
    if unknown(HANDLES, problem):
        raise NotImplementedError(f"{entry}: no kernel takes these inputs with {unknown(HANDLES, problem)}")
    flags, accum = flags_of(problem), problem.accum_dtype
    classes = head_dim_class(problem.head_dim), head_dim_class(problem.head_dim_v)
    head_dim, head_dim_v = _of_results(entry, *((WIDEST, WIDEST) if entry in _APART else classes))
    in_slices = max(_of_results(entry, problem.head_dim, problem.head_dim_v)) > WIDEST
    asked = without_window(flags) | ({IN_SLICES} if in_slices else set())
    lines = _lines_of(entry, accum, max(head_dim, head_dim_v))

    def smem_bytes(line: Record[PortableTile]) -> int:
        return _smem_bytes(entry, line.tile, accum, head_dim, head_dim_v)

    def fits(line: Record[PortableTile]) -> bool:
        return smem_bytes(line) <= smem_limit

    def config_of(line: Record[PortableTile]) -> PortableConfig:
        config = PortableConfig(
            entry=entry,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            smem_bytes=smem_bytes(line),
            slice_columns=WIDEST if in_slices else 0,
            **common(PortableConfig, problem.dtype, problem.bias_dtype, flags, line.tile),
        )
        return with_rules(config, problem)

    return tuple(map(config_of, candidates(lines, asked, OLDEST, fits, _time)))


def types_of(problem: AttentionProblem) -> PortableConfig:
    """Return the configuration for a problem's kernels in around/reduce.cu, which know its types and no options.

    Elements have the type of results.
    """
    of_types = AttentionProblem(1, 1, 1, 1, 1, 1, 1, problem.result_dtype, bias_dtype=problem.bias_dtype)
    return plan(of_types, "forward")[0]
