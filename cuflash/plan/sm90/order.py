"""How many heads Hopper's kernels compute together, so that what they share stays in L2 and tiles even out."""

from __future__ import annotations

from cuflash.hardware import FLOAT_BYTES, HALF_BYTES, L2_BYTES, num_sms
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.problem.attention_problem import AttentionProblem

_SHORT_QUERIES = 512  # up to so many queries, the heads that go together fill only half of `L2_BYTES`
_EVEN_TILES = 4 * num_sms("sm_90a")  # causal tiles that even out: four for each multiprocessor


def of_queries(problem: AttentionProblem, block_m: int = 128, packs_heads: bool = False) -> int:
    """The number of last query heads (of all sequences) whose tiles are mixed, the longest first.

    Where a tile has the query heads of a KV head (`packs_heads`), these are one.

    Where tiles differ in length, these heads' tiles even out at the end of a launch. As many heads are taken as have
    keys and values that fit in L2; fewer with short sequences, so that keys are read during products all the time; more
    with long ones, so that tiles even out.
    """
    # Packed sequences are computed one after the other, and the host knows their mean length alone.
    sequences, divisor = (1, problem.batch) if problem.packed else (problem.batch, 1)
    seqlen_q, seqlen_k = -(-problem.seqlen_q // divisor), -(-problem.seqlen_k // divisor)
    heads = problem.num_heads_q * sequences
    bytes_of_head = seqlen_k * (problem.head_dim + problem.head_dim_v) * HALF_BYTES
    l2_bytes = L2_BYTES // 2 if seqlen_q <= _SHORT_QUERIES else L2_BYTES
    fitting = max(l2_bytes // bytes_of_head, 1)
    if seqlen_q >= sm90_forward.LONG_QUERIES:
        fitting = max(fitting, -(-_EVEN_TILES * block_m // (seqlen_q * problem.group_size)))
    mixed = min(fitting * problem.group_size, heads)
    return max(mixed // problem.group_size, 1) if packs_heads else mixed


def of_keys(problem: AttentionProblem) -> int:
    """The number of KV heads (of all sequences) whose queries, dout and sums of dq fit in L2 together."""
    sequences = 1 if problem.packed else problem.batch
    row_bytes = problem.head_dim * (HALF_BYTES + FLOAT_BYTES) + problem.head_dim_v * HALF_BYTES
    fitting = L2_BYTES // (problem.seqlen_q * row_bytes * problem.group_size)
    return min(max(fitting, 1), problem.num_heads_kv * sequences)


def last_of_keys(problem: AttentionProblem, alternates: bool) -> int:
    """The number of last KV heads whose tiles of keys are mixed, the longest first, while dq of others is written.

    Where warpgroups do not alternate at the tensor cores, or additions to dq have an order, it is `of_keys`.
    """
    if not alternates:
        return of_keys(problem)
    # All tiles have one length in a narrow window, so that one head suffices.
    return 1 if 4 * queries_seen(problem) <= problem.seqlen_q else max(of_keys(problem), 8)


def queries_seen(problem: AttentionProblem) -> int:
    """Return the number of queries that see one key."""
    left, right = problem.window_left, problem.window_right
    return problem.seqlen_q if left is None or right is None else min(left + right + 1, problem.seqlen_q)
