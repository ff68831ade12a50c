"""One query of many heads seen as many queries of few heads, so that a KV head's keys are read once for its group.

An only query's heads lie behind each other with one stride, as queries do: the query heads of a KV head can be the rows
of one tile by strides alone, and a kernel need not know. `plan.sm80.splits.heads_are_rows` says for which options.
"""

from __future__ import annotations

from cuflash.gpu.params import Arrays
from cuflash.plan.sm80.splits import with_heads_as_rows
from cuflash.problem.attention_problem import Array, AttentionProblem

_OF_QUERIES = ("q", "q_scale", "out", "out_splits")  # (batch, 1, num_heads_q, ...)
_PER_ROW = ("lse", "lse_splits", "bias", "mask")  # (batch, num_heads_q, 1, ...)


def seen(problem: AttentionProblem, arrays: Arrays) -> tuple[AttentionProblem, Arrays]:
    """Return the problem and the views of its arrays in which the query heads of a KV head are queries."""
    heads = problem.num_heads_kv, problem.group_size
    views = {name: _view(name, x, *heads) for name, x in arrays.items()}
    return with_heads_as_rows(problem), views


def _view(name: str, x: Array, num_heads_kv: int, group_size: int) -> Array:
    if name in _OF_QUERIES and x.shape[2] > 1:  # an axis of size 1 is broadcast
        return x[:, 0].reshape(len(x), num_heads_kv, group_size, *x.shape[3:]).swapaxes(1, 2)
    if name in _PER_ROW and x.shape[1] > 1:
        return x[:, :, 0].reshape(len(x), num_heads_kv, group_size, *x.shape[3:])
    return x
