"""Hopper's own kernels of the backward pass on 16 bits that are compiled ahead of calls and checked.

As in `listing`, the chooser answers problems of every kind as it does in calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

from cuflash.plan.config import KNOWN_TO_ALL
from cuflash.plan.listing import Flags, Listed, Pass, kernels, problem_of
from cuflash.plan.sm90_backward import DQ, ROWS, Sm90BackwardConfig, backward, with_query_splits
from cuflash.plan.sm90_backward_tiles import NARROW_TABLE, WIDE_TABLE, Sm90BackwardTile
from cuflash.problem.attention_problem import HALF_DTYPES, AttentionProblem

Answer = tuple[Sm90BackwardConfig, ...]
_SHORT, _LONG = 4096, 8192  # queries where few see a key, in a window, and where many do
_WINDOW = "has_window"


def table() -> Listed:
    """Yield every kernel with its dtype, those before and behind the gradients included."""
    return kernels(passes())


def passes() -> Iterator[Pass]:
    """Yield the answers to problems with one option at most, and of each tile to that with the most that are listed.

    In order they are those without options, and of each tile those with the fewest and the most. Rules of users' own
    meet their registers when they are compiled.
    """
    dims = dict.fromkeys((line.head_dim, line.head_dim_v) for line in NARROW_TABLE + WIDE_TABLE)
    for dtype, (head_dim, head_dim_v), in_order in product(HALF_DTYPES, dims, (False, True)):
        of_tiles: dict[Any, list[Answer]] = {}
        for flags in _options():
            problem = problem_of(dtype, head_dim, head_dim_v, flags, deterministic=in_order)
            for answer in _answers(problem, flags):
                tile = *(getattr(answer[0], field.name) for field in fields(Sm90BackwardTile)), answer[0].dq_stages
                of_tiles.setdefault(tile, []).append(answer)
                if len(flags) <= (1 if in_order else 2):
                    yield _pass_of(answer, dtype)
                # Thread blocks that share queries have fewer random bits early.
                if flags == (_WINDOW,) or (not in_order and flags in ((), (_WINDOW, "has_dropout"))):
                    yield _pass_of(map(with_query_splits, answer), dtype)
        for known in of_tiles.values():
            yield from (_pass_of(answer, dtype) for answer in ((known[0], known[-1]) if in_order else known[-1:]))


def _pass_of(answer: Iterable[Sm90BackwardConfig], dtype: str) -> Pass:
    rows = ((config, replace(config.of_rows, entry=ROWS)) for config in answer)
    return Pass(tuple((config, row, replace(row, entry=DQ, writes_dslopes=False)) for config, row in rows), dtype)


def _options() -> Iterator[Flags]:
    """Yield up to three options."""
    yield ()
    alone = [flag for flag in KNOWN_TO_ALL if flag != _WINDOW]
    yield from ((_WINDOW, *others) for n in range(4) for others in combinations(alone, n))


def _answers(problem: AttentionProblem, flags: Flags) -> Iterator[Answer]:
    """Yield the answers for a bias and a mask that are read by elements, and by TMA and in vectors."""
    for seqlen_q in (_LONG, _SHORT) if len(flags) <= 1 else (_SHORT,):
        scores = 1, 1, seqlen_q, problem.seqlen_k
        given: dict[str, Any] = {x: scores for x in ("bias", "mask") if f"has_{x}" in flags}
        own = replace(problem, seqlen_q=seqlen_q, **given)
        bias, mask = (_dense(scores, size) if shape else None for shape, size in ((own.bias, 2), (own.mask, 1)))
        found = (backward(own, (), *arrays, dslopes=True) for arrays in ((None,) * 3, (bias, bias, mask)))
        yield from filter(None, dict.fromkeys(found))


def _dense(shape: tuple[int, ...], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layout of an array of elements of `size` bytes that lie side by side."""
    return tuple(math.prod(shape[axis:]) * size for axis in range(1, len(shape) + 1)), shape
