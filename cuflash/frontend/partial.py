"""Attention over a part of a longer problem: some of its queries and some of its keys, at known positions.

Results are in the accumulation's dtype, so that parts are merged without being rounded between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.frontend import call
from cuflash.frontend.metadata import Repeat, metadata_of, recorded, repeated
from cuflash.kept import Kept
from cuflash.problem.attention_problem import WHOLE, Array, AttentionProblem, PartialResult, Place, operand_name
from cuflash.problem.fp8 import SCALES
from cuflash.problem.make import make_problem
from cuflash.problem.operands import Metadata, Operands, make_operands, with_contiguous_rows
from cuflash.problem.options import OPTION_NAMES, Options
from cuflash.rules.form import NO_RULES

Window = tuple[int | None, int | None]


def window_of_part(window: Window, seqlen_q: int, seqlen_k: int, place: Place) -> Window:
    """Return the window that a part of a problem has between its own rows and keys.

    Query i sees key j iff ``-left <= position(j) - position(i) <= right``, where positions of queries begin at the
    whole's diagonal. A part's own window is aligned to its last query and key, and either side may be negative: then
    the window lies off the part's diagonal.
    """
    left, right = window
    behind, diagonal = place.first_q + place.diagonal - place.first_k, seqlen_k - seqlen_q
    return (
        None if left is None else (left - behind) // place.stride + diagonal,
        None if right is None else (right + behind) // place.stride - diagonal,
    )


def sees_anything(window: Window, seqlen_q: int, seqlen_k: int) -> bool:
    """Return True if some query of a part sees a key."""
    if not seqlen_q or not seqlen_k:
        return False
    left, right = window
    # Even the last query's keys end before the first key where the right side is below 1 - seqlen_k, and even the first
    # query's begin behind the last key where the left side is below 1 - seqlen_q.
    is_beyond = right is not None and right < 1 - seqlen_k
    is_before = left is not None and left < 1 - seqlen_q
    return not is_beyond and not is_before and (left is None or right is None or left + right >= 0)


def sees_everything(window: Window, seqlen_q: int, seqlen_k: int) -> bool:
    """Return True if every query of a part sees every key."""
    left, right = window
    return (left is None or left >= seqlen_k - 1) and (right is None or right >= seqlen_q - 1)


class Part:
    """A checked part of a problem, with the options of the whole and its own heads, piece of bias and piece of mask.

    A packed part has `cu_seqlens`; queries and keys of each of its sequences begin at the same token.
    """

    def __init__(
        self, q: Array, k: Array, v: Array, options: Options, place: Place, cu_seqlens: Array | None = None
    ) -> None:
        arrays = {"q": q, "k": k, "v": v}
        if cu_seqlens is not None:
            arrays |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        for name in ("bias", "mask", "alibi_slopes", "sink", *SCALES):
            if (x := getattr(options, name)) is not None:
                arrays[name] = x
        arrays |= {operand_name(n): x for n, x in enumerate(options.operands or ())}
        self._problem, self._with_wide_out, self.sees_anything = _checked(arrays, options, place)
        self._arrays, self._options = arrays, options
        # The latest call, if its launches can be repeated, and the arrays whose addresses it takes, by name.
        self.repeat: Repeat | None = None
        self.addressed: dict[str, Array] = {}
        # Calls are known again by the addresses of arrays, so an option that is more than arrays makes a call its own.
        more = options.dropout_seed, options.block_mask, options.score_mod, options.mask_mod
        self._is_repeatable = all(x is None for x in more)

    @cached_property
    def _operands(self) -> Operands:
        return make_operands(self._problem, self._arrays, self._options)

    def _metadata(self, what: Any, arrays: Mapping[str, Array | None]) -> Metadata | None:
        """Return the metadata by which a call on these arrays is known again; None where it cannot be."""
        if not self._is_repeatable:
            return None
        return metadata_of((what, self._problem), arrays.values(), {})

    def forward(self, *, rounded: bool = False) -> tuple[Array, Array]:
        """Return (out, lse) in the accumulation's dtype; a part that has all its keys may have out `rounded` to q's."""
        metadata = self._metadata("rounded part" if rounded else "part", self._arrays)
        self.repeat, self.addressed = recorded(metadata), self._arrays
        results = repeated(metadata)
        if results is not None:
            return results[0], results[1]
        problem, operands = self._problem if rounded else self._with_wide_out, self._operands
        xp = interop.namespace_of(operands.q)
        out = xp.empty(problem.out_shape, operands.q.dtype if rounded else problem.accum_dtype)
        lse = xp.empty(problem.lse_shape, problem.accum_dtype)
        recording = call.backend_of(isinstance(out, np.ndarray)).forward(problem, operands, out, lse)
        if metadata is not None and recording is not None:
            call.remember_repeat(metadata, recording.repeat(self._arrays, {"out": out, "lse": lse}, {}))
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
        """Return the part's shares of the wanted gradients, extras' and operands' too, in the accumulation's dtype.

        `out` and `lse` are the whole problem's, so that the shares add up to its gradients. With `rounded` the share is
        the only one, and each gradient has its input's dtype.
        """
        names = [name for name in self._problem.grad_names if name in wanted]
        residuals = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
        what = "backward of a part", tuple(names), rounded
        metadata = self._metadata(what, {**residuals, **self._arrays})
        given = {name: x for name, x in residuals.items() if x is not None}
        self.repeat, self.addressed = recorded(metadata), {**given, **self._arrays}
        results = repeated(metadata)
        if results is not None:
            return dict(zip(names, results, strict=True))
        problem, operands = self._problem.unsplit, self._operands
        xp, accum = interop.namespace_of(operands.q), problem.accum_dtype
        inputs = operands._asdict() | {operand_name(n): x for n, x in enumerate(operands.of_rules)}
        grads = {}
        for name in names:
            like = inputs[name]
            grads[name] = xp.empty(like.shape, like.dtype if rounded else accum)
        rows = with_contiguous_rows(dout), with_contiguous_rows(out)
        backend = call.backend_of(isinstance(out, np.ndarray))
        recording = backend.backward(problem, operands, *rows, lse, dlse, grads)
        if metadata is not None and recording is not None:
            found = {f"d{name}": grads[name] for name in names}
            call.remember_repeat(metadata, recording.repeat({**given, **self._arrays}, found, dict.fromkeys(found)))
        return grads


_problems: Kept[Any, tuple[AttentionProblem, AttentionProblem, bool]] = Kept()


def _checked(
    arrays: dict[str, Array], options: Options, place: Place
) -> tuple[AttentionProblem, AttentionProblem, bool]:
    """Find `_problem_of_part` once for all parts of the same metadata, as nothing else is checked."""
    if options.score_mod is not None or options.mask_mod is not None:
        return _problem_of_part(arrays, options, place)  # what a function reads may have changed
    values = tuple([call.signature(getattr(options, name)) for name in OPTION_NAMES])
    key = place, values, tuple([(name, x.shape, x.dtype) for name, x in arrays.items()])
    found = _problems.get(key)
    if found is None:
        found = _problems[key] = _problem_of_part(arrays, options, place)
    return found


def _problem_of_part(
    arrays: dict[str, Array], options: Options, place: Place
) -> tuple[AttentionProblem, AttentionProblem, bool]:
    """Return a part's problem with its own window, the one whose out is not rounded, and whether a query sees a key."""
    problem = make_problem(arrays, options)
    window = problem.window_left, problem.window_right
    is_visible = True
    if problem.packed:
        window = window_of_part(window, 0, 0, place)  # a sequence's own rows and keys begin at one token
    else:
        window = window_of_part(window, problem.seqlen_q, problem.seqlen_k, place)
        is_visible = sees_anything(window, problem.seqlen_q, problem.seqlen_k)
        if sees_everything(window, problem.seqlen_q, problem.seqlen_k):
            window = None, None
        # Every kernel aligns the whole so. A part at its beginning has the same numbers, but not the same alignment.
        is_aligned = place == Place(diagonal=problem.seqlen_k - problem.seqlen_q)
        place = WHOLE if is_aligned else place._replace(is_part=True)
    # A place that nothing depends on is dropped, so that parts which differ in it alone share plans and launches.
    depends = problem.alibi is not None or problem.dropout_p or problem.rules != NO_RULES
    place = place if depends else WHOLE
    problem = replace(problem, window_left=window[0], window_right=window[1], place=place)
    accum = problem.accum_dtype
    return problem, replace(problem, out_dtype=None if problem.dtype == accum else accum), is_visible


def merge_parts(parts: Sequence[PartialResult], out: Array, lse: Array) -> None:
    """Merge attentions over disjoint parts of the keys, which may each have some of the rows alone, into one.

    Parameters
    ----------
    parts : sequence of PartialResult
        Contiguous, in the accumulation's dtype.
    out : array (batch, rows, heads, columns), packed without batch
        Contiguous, of any dtype; 0 where no part has the row.
    lse : array (batch, heads, rows), packed without batch
        Contiguous; -inf where no part has the row.
    """
    call.backend_of(isinstance(out, np.ndarray)).merge_parts(parts, out, lse)


def sum_parts(parts: Sequence[PartialResult], total: Array) -> None:
    """Add shares of a gradient, which may each have some of the rows alone; the arrays are as for `merge_parts`."""
    call.backend_of(isinstance(total, np.ndarray)).sum_parts(parts, total)
