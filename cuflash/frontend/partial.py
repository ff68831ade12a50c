"""Attention over a part of a longer problem: some of its queries and some of its keys, at known positions.

Results are in the accumulation's dtype, so that parts are merged without being rounded between.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuflash import interop
from cuflash.frontend import call
from cuflash.problem.attention_problem import Array, AttentionProblem, Place, operand_name
from cuflash.problem.make import make_problem
from cuflash.problem.operands import Operands, make_operands, with_contiguous_rows
from cuflash.problem.options import Options

Window = tuple[int | None, int | None]


def window_of_part(window: Window, seqlen_q: int, seqlen_k: int, place: Place) -> Window:
    """The window that a part of a problem with as many queries as keys has between its own rows and keys.

    Query i sees key j iff ``-left <= position(j) - position(i) <= right``. A part's own window is aligned to its last
    query and key, and either side may be negative: then it lies beside the part's diagonal.
    """
    left, right = window
    behind, diagonal = place.first_q - place.first_k, seqlen_k - seqlen_q
    return (
        None if left is None else (left - behind) // place.stride + diagonal,
        None if right is None else (right + behind) // place.stride - diagonal,
    )


def sees_anything(window: Window, seqlen_q: int, seqlen_k: int) -> bool:
    """Some query of a part sees a key."""
    if not seqlen_q or not seqlen_k:
        return False
    left, right = window
    # The last query sees keys up to the last but -right; the first sees those from the one `left` before its diagonal.
    is_beyond = right is not None and right < 1 - seqlen_k
    is_before = left is not None and left < 1 - seqlen_q
    return not is_beyond and not is_before and (left is None or right is None or left + right >= 0)


def sees_everything(window: Window, seqlen_q: int, seqlen_k: int) -> bool:
    """Every query of a part sees every key."""
    left, right = window
    return (left is None or left >= seqlen_k - 1) and (right is None or right >= seqlen_q - 1)


class Part:
    """One part, checked; `options` are those of the whole problem, with the part's heads.

    A packed part has `cu_seqlens` and holds whole sequences.
    """

    def __init__(
        self, q: Array, k: Array, v: Array, options: Options, place: Place, cu_seqlens: Array | None = None
    ) -> None:
        arrays = {"q": q, "k": k, "v": v}
        if cu_seqlens is not None:
            arrays |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        for name in ("alibi_slopes", "sink"):
            if (x := getattr(options, name)) is not None:
                arrays[name] = x
        arrays |= {operand_name(n): x for n, x in enumerate(options.operands)}
        problem = make_problem(arrays, options)
        window = problem.window_left, problem.window_right
        self.sees_anything = True
        if cu_seqlens is None:
            window = window_of_part(window, problem.seqlen_q, problem.seqlen_k, place)
            self.sees_anything = sees_anything(window, problem.seqlen_q, problem.seqlen_k)
            if sees_everything(window, problem.seqlen_q, problem.seqlen_k):
                window = None, None
        self._problem = replace(problem, window_left=window[0], window_right=window[1], place=place)
        self._operands = make_operands(self._problem, arrays, options)

    def forward(self) -> tuple[Array, Array]:
        """(out, lse), both in the accumulation's dtype."""
        problem, operands = self._wide()
        xp = interop.namespace_of(operands.q)
        out = xp.empty(problem.out_shape, problem.accum_dtype)
        lse = xp.empty(problem.lse_shape, problem.accum_dtype)
        call.backend_of(isinstance(out, np.ndarray)).forward(problem, operands, out, lse)
        return out, lse

    def backward(
        self, dout: Array, out: Array, lse: Array, dlse: Array | None, wanted: frozenset[str]
    ) -> dict[str, Array]:
        """The part's shares of the wanted gradients of q, k, v, sink, slopes and operands, in the accumulation's dtype.

        `out` and `lse` are the whole problem's, so that the shares add up to its gradients.
        """
        problem, operands = self._wide()
        xp = interop.namespace_of(operands.q)
        inputs = operands._asdict() | {operand_name(n): x for n, x in enumerate(operands.of_rules)}
        names = [name for name in problem.grad_names if name in wanted]
        grads = {name: xp.empty(inputs[name].shape, problem.accum_dtype) for name in names}
        if not isinstance(out, np.ndarray):
            dout, out = dout.astype(problem.dtype), out.astype(problem.dtype)
        rows = with_contiguous_rows(dout), with_contiguous_rows(out)
        call.backend_of(isinstance(out, np.ndarray)).backward(problem, operands, *rows, lse, dlse, grads)
        return grads

    def _wide(self) -> tuple[AttentionProblem, Operands]:
        """The problem whose results have the accumulation's dtype: on a GPU that of wide inputs."""
        problem, operands = self._problem, self._operands
        if isinstance(operands.q, np.ndarray) or problem.dtype == problem.accum_dtype:
            return problem, operands
        wide = {name: getattr(operands, name).astype(problem.accum_dtype) for name in ("q", "k", "v")}
        return replace(problem, dtype=problem.accum_dtype), operands._replace(**wide)
