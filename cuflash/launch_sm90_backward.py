"""Hopper's backward pass: its buffers and its three kernels, one before and one behind the gradients of scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash.params import SCORE_TENSORS
from cuflash.plan_sm90 import WARPGROUP
from cuflash.plan_sm90_backward import DQ, ROWS, Config
from cuflash.problem import Array, AttentionProblem

_ROWS_THREADS = 256  # of cuda_src/sm90/backward_rows.cu
Arrays = dict[str, Array]


def query_tiles(problem: AttentionProblem, config: Config) -> int:
    """Tiles of queries of one head; packed: tile slots (work_of in sequence.cuh)."""
    if problem.packed:
        return problem.seqlen_q // config.block_m + problem.batch + 2
    return math.ceil(problem.seqlen_q / config.block_m)


def images(problem: AttentionProblem, heads: int) -> int:
    """Heads of all sequences; packed sequences are one."""
    return heads if problem.packed else heads * problem.batch


def grid(entry: str, problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """(tiles of one head, thread blocks or tiles of the launch)."""
    if entry == config.entry:
        tiles = math.ceil(problem.seqlen_k / config.block_n)
        if problem.packed:
            tiles = problem.seqlen_k // config.block_n + problem.batch + 2
        return tiles, tiles * images(problem, problem.num_heads_kv)
    tiles = query_tiles(problem, config)
    return tiles, tiles * images(problem, problem.num_heads_q)


def threads(entry: str, config: Config) -> int:
    """Threads of a block."""
    return {ROWS: _ROWS_THREADS, config.entry: config.threads, DQ: config.dq_parts * WARPGROUP}[entry]


def launch(
    run: Callable[..., object],
    problem: AttentionProblem,
    config: Config,
    arrays: Arrays,
    grads: dict[str, Array],
    empty: Callable[[tuple[int, ...], Any], Array],
) -> None:
    """Write dq, dk and dv, those of them that are in `grads`.

    `run` launches an entry on arrays, `empty` allocates.
    """
    tiles = images(problem, problem.num_heads_q) * query_tiles(problem, config)
    rows: dict[str, Any] = {
        "row_lse": empty((tiles, config.block_m), problem.accum_dtype),
        "row_delta": empty((tiles, config.block_m), problem.accum_dtype),
    }
    if "q" in grads:
        rows["dq_sum"] = empty((tiles, config.dq_tile), problem.accum_dtype)
    if config.deterministic and "q" in grads:
        rows["dq_turns"] = empty((1 + tiles * config.dq_parts,), np.int32)
    run(ROWS, arrays={**arrays, **rows})
    of_keys = {f"d{name}": grads[name] for name in ("k", "v") if name in grads}
    run(config.entry, arrays={**_select(arrays, _MAIN_INPUTS), **rows, **of_keys})
    if "q" in grads:
        run(DQ, arrays={**_select(arrays, _LENGTHS), "dq_sum": rows["dq_sum"], "dq": grads["q"]})


_LENGTHS = ("q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k")
_MAIN_INPUTS = ("q", "k", "v", "dout", "alibi_slopes", *SCORE_TENSORS, *_LENGTHS)


def _select(arrays: Arrays, names: tuple[str, ...]) -> Arrays:
    return {name: x for name, x in arrays.items() if name in names}
