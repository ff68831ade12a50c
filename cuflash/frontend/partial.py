"""Attention over a part of a longer problem: some of its queries and some of its keys, at known positions.

Results are in the accumulation's dtype, so that parts are merged without being rounded between.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuflash import interop
from cuflash.frontend import call
from cuflash.problem.attention_problem import WHOLE, Array, AttentionProblem, Place
from cuflash.problem.make import make_problem
from cuflash.problem.operands import Operands, make_operands, with_contiguous_rows
from cuflash.problem.options import Options

Window = tuple[int | None, int | None]


def window_of_part(window: Window, seqlen_q: int, seqlen_k: int, place: Place) -> Window:
    """The window that a part of a problem has between its own rows and keys.

    Query i sees key j iff ``-left <= position(j) - position(i) <= right``, where positions of queries begin at the
    whole's diagonal. A part's own window is aligned to its last
    query and key, and either side may be negative: then it lies beside the part's diagonal.
    """
    left, right = window
    behind, diagonal = place.first_q + place.diagonal - place.first_k, seqlen_k - seqlen_q
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
    """One part, checked; `options` are those of the whole problem, with the part's heads, its piece of bias and mask.

    A packed part has `cu_seqlens` and holds whole sequences.
    """

    def __init__(
        self, q: Array, k: Array, v: Array, options: Options, place: Place, cu_seqlens: Array | None = None
    ) -> None:
        arrays = {"q": q, "k": k, "v": v}
        if cu_seqlens is not None:
            arrays |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        for name in ("bias", "mask", "alibi_slopes", "sink"):
            if (x := getattr(options, name)) is not None:
                arrays[name] = x
        problem = make_problem(arrays, options)
        window = problem.window_left, problem.window_right
        self.sees_anything = True
        if cu_seqlens is None:
            window = window_of_part(window, problem.seqlen_q, problem.seqlen_k, place)
            self.sees_anything = sees_anything(window, problem.seqlen_q, problem.seqlen_k)
            if sees_everything(window, problem.seqlen_q, problem.seqlen_k):
                window = None, None
            if place == Place(diagonal=problem.seqlen_k - problem.seqlen_q):
                place = WHOLE  # every kernel aligns the whole so
        self._problem = replace(problem, window_left=window[0], window_right=window[1], place=place)
        self._operands = make_operands(self._problem, arrays, options)

    def forward(self, *, rounded: bool = False) -> tuple[Array, Array]:
        """(out, lse), both in the accumulation's dtype; `rounded`: out in q's, for a part that has all its keys."""
        problem, operands = (self._problem, self._operands) if rounded else self._wide()
        xp = interop.namespace_of(operands.q)
        out = xp.empty(problem.out_shape, operands.q.dtype if rounded else problem.accum_dtype)
        lse = xp.empty(problem.lse_shape, problem.accum_dtype)
        call.backend_of(isinstance(out, np.ndarray)).forward(problem, operands, out, lse)
        return out, lse

    def backward(
        self,
        dout: Array,
        out: Array,
        lse: Array,
        dlse: Array | None,
        wanted: frozenset[str],
        *,
        rounded: bool = False,
    ) -> dict[str, Array]:
        """The part's shares of the wanted gradients of q, k, v, bias, sink and slopes, in the accumulation's dtype.

        `out` and `lse` are the whole problem's, so that the shares add up to its gradients. `rounded`: each in its
        input's dtype, as the only share.
        """
        problem, operands = (self._problem, self._operands) if rounded else self._wide()
        xp = interop.namespace_of(operands.q)
        names = [name for name in ("q", "k", "v", *problem.extra_grads) if name in wanted]
        like = {name: getattr(operands, name) for name in names}
        grads = {name: xp.empty(x.shape, x.dtype if rounded else problem.accum_dtype) for name, x in like.items()}
        if not isinstance(out, np.ndarray):
            dout, out = dout.astype(problem.dtype), out.astype(problem.dtype)
        rows = with_contiguous_rows(dout), with_contiguous_rows(out)
        call.backend_of(isinstance(out, np.ndarray)).backward(problem, operands, *rows, lse, dlse, grads)
        return grads

    def _wide(self) -> tuple[AttentionProblem, Operands]:
        """The problem whose results have the accumulation's dtype: on a GPU that of wide inputs."""
        problem, operands = self._problem, self._operands
        accum = problem.accum_dtype
        if isinstance(operands.q, np.ndarray) or (problem.dtype == accum and problem.bias_dtype in (None, accum)):
            return problem, operands
        names = ("q", "k", "v") if operands.bias is None else ("q", "k", "v", "bias")
        wide = {name: getattr(operands, name).astype(accum, copy=False) for name in names}
        bias_dtype = None if operands.bias is None else accum
        return replace(problem, dtype=accum, bias_dtype=bias_dtype), operands._replace(**wide)
