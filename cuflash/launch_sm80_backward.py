"""The backward pass by mma.sync: its buffers and its kernels, one before and one behind the gradients of scores."""

from __future__ import annotations

import math
from collections.abc import Callable

from cuflash.plan_sm80_backward import DQ, MAIN, ROWS, Config
from cuflash.problem import Array, AttentionProblem

Arrays = dict[str, Array]


def _tiles(problem: AttentionProblem, rows: int, block: int) -> int:
    """Tiles of one head; packed: tile slots (work_of in sequence.cuh)."""
    return rows // block + problem.batch + 2 if problem.packed else math.ceil(rows / block)


def query_tiles(problem: AttentionProblem, config: Config) -> int:
    """Tiles of queries of one head."""
    return _tiles(problem, problem.seqlen_q, config.block_m)


def _images(problem: AttentionProblem, heads: int) -> int:
    """Heads of all sequences; packed sequences are one."""
    return heads if problem.packed else heads * problem.batch


def grid(entry: str, problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """(tiles of one head, thread blocks of the launch)."""
    if entry == MAIN:
        tiles, heads = _tiles(problem, problem.seqlen_k, config.block_n), problem.num_heads_kv
    else:
        tiles, heads = query_tiles(problem, config), problem.num_heads_q
    return tiles, tiles * _images(problem, heads)


def launch(
    run: Callable[..., object],
    problem: AttentionProblem,
    configs: tuple[Config, ...],
    arrays: Arrays,
    grads: Arrays,
    empty: Callable[..., Array],
) -> Arrays:
    """Write dk and dv, and dq unless its bits must repeat, as far as they are in `grads`; return the others.

    `run` launches an entry on arrays, `empty` makes scratch memory.
    """
    first = configs[0]
    others = {name: x for name, x in grads.items() if name not in ("k", "v")}
    of_queries: Arrays = {}
    # The sum of dq has no fixed order.
    if "q" in grads and not problem.deterministic:
        tiles = _images(problem, problem.num_heads_q) * query_tiles(problem, first)
        of_queries["dq_sum"] = empty((tiles, first.block_m * first.head_dim), problem.accum_dtype)
        del others["q"]
    run(ROWS, arrays={**arrays, **of_queries}, chosen=first)
    inputs = {name: x for name, x in arrays.items() if name not in ("out", "dlse")}
    for config in configs:
        sums = of_queries if config.computes_dk else {}
        computed = (("k", config.computes_dk), ("v", config.computes_dv))
        of_keys = {f"d{name}": grads[name] for name, here in computed if here and name in grads}
        if of_keys or sums:
            run(MAIN, arrays={**inputs, **sums, **of_keys}, chosen=config)
    if of_queries:
        run(DQ, arrays={**inputs, **of_queries, "dq": grads["q"]}, chosen=first)
    return others
