"""Splits of the keys: memory for their partial results, and the kernels of around/reduce.cu that merge them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cuflash.gpu.launch import Kernel, Work, batch_heads
from cuflash.gpu.params import Arrays
from cuflash.gpu.portable import SUM_ROWS, Sum
from cuflash.plan.portable import types_of
from cuflash.problem.attention_problem import AttentionProblem


@dataclass(frozen=True)
class Merge(Sum):
    """The kernel that merges partial results over splits of the keys: a row has a thread block, or a warp."""

    def grid(self, problem: AttentionProblem, arrays: Arrays) -> tuple[int, int]:
        """(blocks of one head, blocks in all)."""
        rows = SUM_ROWS if self.entry == "merge_rows" else 1
        blocks = math.ceil(problem.seqlen_q / rows)
        return blocks, blocks * batch_heads(problem, problem.num_heads_q)

    def seen(self, problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
        """Packed sequences as one, as each row is merged by itself; where keys lie does not matter any more."""
        if not problem.packed:
            return replace(problem, pages=None), arrays
        whole = {name: x if name.endswith("_splits") else x[None] for name, x in arrays.items()}
        return replace(problem, packed=False, batch=1, pages=None), whole


def partial_results(work: Work, num_splits: int) -> Arrays:
    """Scratch memory for the partial results over splits of the keys; none where keys stay whole."""
    if num_splits == 1:
        return {}
    problem = work.problem
    batch, rows, heads = num_splits * (1 if problem.packed else problem.batch), problem.seqlen_q, problem.num_heads_q
    return {
        "out_splits": work.empty((batch, rows, heads, problem.head_dim_v), problem.accum_dtype),
        "lse_splits": work.empty((batch, heads, rows), problem.accum_dtype),
    }


def merge(work: Work, partials: Arrays, by_rows: bool) -> None:
    """Write out and lse from the partial results; a warp merges a row, or a thread block, which reads many at once."""
    results = {name: work.arrays[name] for name in ("out", "lse")}
    work.run(Merge("merge_rows" if by_rows else "merge_splits", types_of(work.problem)), results | partials)


def run(work: Work, kernel: Kernel, num_splits: int, by_rows: bool) -> None:
    """Run a kernel whose thread blocks have so many splits of the keys, and merge their results."""
    partials = partial_results(work, num_splits)
    work.run(kernel, work.arrays | partials)
    if partials:
        merge(work, partials, by_rows)
