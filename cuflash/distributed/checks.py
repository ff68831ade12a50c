"""Checks of a rank's arguments, from metadata alone but for cu_seqlens, which lie on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.problem import checks
from cuflash.problem.attention_problem import DTYPES, AttentionProblem
from cuflash.problem.gradients import check_like
from cuflash.problem.make import make_problem
from cuflash.problem.options import Options

Array = Any


def check_edges(cu_seqlens: Any) -> list[int]:
    """Return where the packed sequences of all ranks together begin and end."""
    if not isinstance(cu_seqlens, np.ndarray):
        raise TypeError(
            f"cu_seqlens: expected a NumPy int32 array (num_sequences + 1,), of all ranks together, "
            f"got {type(cu_seqlens).__name__}"
        )
    interop.refuse_masked("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype != np.int32:
        raise TypeError(f"cu_seqlens: expected dtype int32, got {cu_seqlens.dtype.name}")
    if cu_seqlens.ndim != 1 or not cu_seqlens.size:
        raise ValueError(f"cu_seqlens: expected shape (num_sequences + 1,), got {cu_seqlens.shape}")
    edges: list[int] = cu_seqlens.tolist()
    return edges


def check_heads(heads: object, world: int) -> int:
    """Return the number of ranks that deal heads among them, which divides that of all ranks."""
    count = checks.check_int("heads", heads)
    if count < 1 or world % count:
        raise ValueError(f"heads: expected a divisor of the {world} ranks, of which so many deal heads, got {count}")
    return count


def check_problem(q: Array, k: Array, v: Array, options: Options, edges: list[int] | None) -> AttentionProblem:
    """Make the problem of this rank's queries and its own keys; for packed arrays that of one sequence.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`; ValueError where there are not as many queries as keys.
    """
    packed = edges is not None
    rank = 3 if packed else 4
    form = "(tokens, num_heads, head_dim)" if packed else "(batch, tokens, num_heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != rank:
            raise ValueError(f"{name}: expected {form}, got {tuple(x.shape)}")
    if q.shape[-3] != k.shape[-3]:
        raise ValueError(f"k: expected as many tokens as q = {q.shape[-3]}, got {k.shape[-3]}")
    slopes = options.alibi_slopes
    arrays = {name: x[None] if packed else x for name, x in (("q", q), ("k", k), ("v", v))}
    problem = make_problem(arrays, replace(options, alibi_slopes=None) if packed else options)
    if problem.has_fp8_keys:
        raise NotImplementedError(f"k: expected dtype {', '.join(DTYPES)} over ranks, got FP8")
    checks.check_seed(options.dropout_seed, problem.dropout_p)
    if edges is None or slopes is None:
        return problem
    batch, heads = len(edges) - 1, problem.num_heads_q
    shapes: list[tuple[int, ...]] = [(heads,), (1, heads), (batch, heads)]
    checks.check_extra(
        "alibi_slopes", slopes, problem.accum_dtype, shapes, "(num_heads_q,) or (num_sequences, num_heads_q)"
    )
    return replace(problem, alibi=(1 if slopes.ndim == 1 else len(slopes), heads))


def check_residuals(residuals: dict[str, Array | None], problem: AttentionProblem, packed: bool) -> None:
    """Check that this rank's dout, out, lse and dlse, where given, are like the forward pass's results."""
    leading = 1 if packed else 0
    for name, x in residuals.items():
        if x is None:
            continue
        if name in ("dout", "out"):
            check_like(name, x, problem.out_shape[leading:], problem.dtype, "as the forward result")
        else:
            check_like(name, x, problem.lse_shape[leading:], problem.accum_dtype, "as the forward pass returns lse")
