"""Calls with one axis more than attention has: examples, which are folded into the batch.

The functions work on arrays of any library whose namespace `xp` has NumPy's functions. "Stacked" arrays have the
examples as their first axis; others are shared by all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cuflash.adapters.form import Form
from cuflash.frontend.combine import shares_of_sink
from cuflash.frontend.own_rules import FUNCTIONS
from cuflash.problem.attention_problem import HALF_DTYPES, Array, AttentionProblem
from cuflash.problem.own_rules import is_operand

_POOLS = ("k", "v", "k_scale", "v_scale")
# Axes of the arrays whose leading ones may be absent or 1.
_RANKS = {"bias": 4, "mask": 4, "alibi_slopes": 2}


def can_fold(form: Form, problem: AttentionProblem) -> bool:
    """Examples of such calls can be sequences of one batch.

    Packed sequences have gaps between the examples; dropout takes its decisions by the place in the batch, and a block
    mask of several sequences belongs to one example.
    """
    mask = form.options.get("block_mask")
    return not form.is_packed and problem.dropout_p == 0 and (mask is None or mask.shape[0] == 1)


@dataclass
class Folded:
    """The call of all examples at once, and the way back."""

    xp: Any
    form: Form
    arrays: list[Array]
    size: int  # examples
    batch: int  # sequences of an example
    sink: Array | None  # (size * batch, heads) where it is no part of the call

    def unfold(self, x: Array) -> Array:
        """An array over all sequences, by examples."""
        return x.reshape((self.size, self.batch, *x.shape[1:]))


def fold(
    xp: Any,
    form: Form,
    problem: AttentionProblem,
    size: int,
    are_stacked: Sequence[bool],
    arrays: Sequence[Array],
    separate: Sequence[str] = (),
    without_sink: bool = False,
) -> Folded:
    """The calls of `size` examples as one.

    Parameters
    ----------
    xp : namespace
    form, problem
        Of one example's call.
    size : int
    are_stacked, arrays
        Which of the arrays are stacked, and all of them.
    separate : names
        Arrays which each example is to have for itself, because each has a gradient of its own.
    without_sink : bool
        Leave a sink out of the call, shared or not; a stacked one always is, as a call has one for its whole batch.
    """
    stacked = dict(zip(form.names, are_stacked, strict=True))
    given = dict(zip(form.names, arrays, strict=True))
    batch = problem.batch
    are_pools = problem.pages is not None

    def widened(name: str, x: Array) -> Array:
        """(size, *shape of an example) with all axes that the array may have."""
        missing = _RANKS.get(name, 0) - (x.ndim - 1)
        return x.reshape((size, *(1,) * max(missing, 0), *x.shape[1:]))

    def over_examples(x: Array) -> Array:
        return xp.broadcast_to(x[None], (size, *x.shape))

    def in_batch(name: str, x: Array, is_stacked: bool, length: int) -> Array:
        x = widened(name, x if is_stacked else over_examples(x))
        return xp.broadcast_to(x, (size, length, *x.shape[2:])).reshape((size * length, *x.shape[2:]))

    pools_differ = are_pools and any(stacked.get(name, False) or name in separate for name in _POOLS)
    sink = given.get("sink")
    takes_sink_out = sink is not None and (stacked["sink"] or without_sink)
    own_operands = tuple(
        [is_operand(name) and (stacked[name] or name in separate) for name in form.names if is_operand(name)]
    )
    found: dict[str, Array] = {}
    for name, x in given.items():
        its_own = stacked[name] or name in separate
        if name in ("sink", "dropout_seed"):
            if name == "sink" and not takes_sink_out:
                found[name] = x
        elif is_operand(name):
            found[name] = over_examples(x) if its_own and not stacked[name] else x
        elif name == "block_table":
            found[name] = in_batch(name, x, stacked[name], batch)
        elif are_pools and name in _POOLS:
            pages = problem.pages.num_pages if problem.pages is not None else 0
            found[name] = in_batch(name, x, stacked[name], pages) if pools_differ else x
        elif its_own or not _is_shared_by_batch(name, x):
            found[name] = in_batch(name, x, stacked[name], batch)
        else:
            found[name] = x
    if pools_differ and problem.pages is not None:
        pages = problem.pages.num_pages
        first = xp.arange(size, dtype=found["block_table"].dtype)[:, None, None] * pages
        table = xp.clip(found["block_table"], 0, max(pages - 1, 0))
        found["block_table"] = (table.reshape((size, batch, -1)) + first).reshape(table.shape)
    its_sink = None
    if sink is not None and takes_sink_out:
        by_example = sink if stacked["sink"] else over_examples(sink)
        heads = sink.shape[-1]
        its_sink = xp.broadcast_to(by_example[:, None], (size, batch, heads)).reshape((size * batch, heads))
    options = {
        name: _of_example(name, form.options[name], max(batch, 1), own_operands)
        for name in FUNCTIONS
        if name in form.options
    }
    folded_form = Form(tuple(found), form.with_options(**options, dropout_p=None, dropout_seed=None).constants)
    return Folded(xp, folded_form, list(found.values()), size, batch, its_sink)


def _is_shared_by_batch(name: str, x: Array) -> bool:
    """One example's array, which serves all sequences of the batch."""
    if name in _RANKS:
        return x.ndim < _RANKS[name] or x.shape[0] == 1
    return name.endswith("_scale") and x.shape[0] == 1


def with_wide_result(form: Form, problem: AttentionProblem) -> Form:
    """The form of a call whose result is rounded after the sink has joined it."""
    is_rounded = problem.result_dtype in HALF_DTYPES
    return form.with_options(out_dtype="float32") if is_rounded else form


def add_sink(folded: Folded, problem: AttentionProblem, out: Array, lse: Array) -> tuple[Array, Array]:
    """The results of a folded call with the sink that was left out of it."""
    xp = folded.xp
    assert folded.sink is not None
    sink = xp.broadcast_to(folded.sink[:, :, None], lse.shape)
    total = xp.logaddexp(lse, sink)
    given = dict(zip(folded.form.names, folded.arrays, strict=True))
    if "q_lengths" in given:  # padding has no sink
        rows = xp.arange(problem.seqlen_q, dtype=given["q_lengths"].dtype)
        total = xp.where(rows[None, None] < given["q_lengths"][:, None, None], total, -xp.inf)
    weight = xp.where(lse == -xp.inf, xp.zeros_like(lse), 1 / (1 + xp.exp(sink - lse)))
    return out * xp.swapaxes(weight, 1, 2)[..., None], total


def gradient_of_sink(folded: Folded, cotangents: tuple[Array, Array | None], results: tuple[Array, Array]) -> Array:
    """Return the gradient of every example's sink, (size, heads)."""
    assert folded.sink is not None
    shares = shares_of_sink(folded.xp, folded.sink[:, :, None], (cotangents[0], *results, cotangents[1]))
    return folded.unfold(shares.sum(axis=-1)).sum(axis=1)


def gradient_by_example(folded: Folded, name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """A gradient of the folded call as every example's (size, *shape)."""
    if is_operand(name):
        return x.reshape((folded.size, *shape))
    x = x.reshape((folded.size, -1, *x.shape[1:])) if folded.size else x.reshape((0, *shape))
    if name in _RANKS and folded.size and (len(shape) < _RANKS[name] or shape[0] == 1):
        x = x.sum(axis=1)
    return x.reshape((folded.size, *shape))


@lru_cache(maxsize=256)
def _of_example(name: str, function: Any, batch: int, own_operands: tuple[bool, ...]) -> Callable[..., Any]:
    """A rule that sees the sequences of its own example, and that example's operands."""
    b_at = 1 if name == "score_mod" else 0
    inputs = b_at + 4

    def rule(*arguments: Any) -> Any:
        values, operands = list(arguments[:inputs]), arguments[inputs:]
        example, values[b_at] = values[b_at] // batch, values[b_at] % batch
        own = [
            _of(operand, example) if is_own else operand for operand, is_own in zip(operands, own_operands, strict=True)
        ]
        return function(*values, *own)

    rule.__module__ = getattr(function, "__module__", rule.__module__)  # so that a name bound anew in it is noticed
    return rule


def _of(operand: Any, example: Any) -> Any:
    """One example's part of a stacked operand: a number where an example has no axes."""
    return operand[example] if operand.ndim == 1 else _OneExample(operand, example)


class _OneExample:
    """An operand as the rule of one example knows it, indexed on all of its axes."""

    def __init__(self, operand: Any, example: Any) -> None:
        self._operand, self._example = operand, example
        self.shape: tuple[int, ...] = operand.shape[1:]
        self.ndim = len(self.shape)
        self.dtype = operand.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._operand[(self._example, *(index if isinstance(index, tuple) else (index,)))]
