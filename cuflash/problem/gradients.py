"""Checks of the arguments that only backward functions take: dout, out, lse, dlse and grads."""

from __future__ import annotations

from collections.abc import Sequence

from cuflash.problem.attention_problem import EXTRA_GRADS, GRAD_NAMES, Array, AttentionProblem, operand_name
from cuflash.problem.options import Options
from cuflash.problem.own_rules import is_differentiable


def check_like(name: str, x: Array, shape: tuple[int, ...], dtype: str, what: str) -> None:
    """Check an array whose shape and dtype follow from the problem."""
    if x.dtype.name != dtype:
        raise TypeError(f"{name}: expected dtype {dtype} ({what}), got {x.dtype.name}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape} ({what}), got {tuple(x.shape)}")


def extras_of(options: Options) -> dict[str, Array]:
    """Return the differentiable options that were given, by the names and in the order of their gradients."""
    given = {name: getattr(options, name) for name in EXTRA_GRADS}
    operands = {operand_name(n): x for n, x in enumerate(options.operands or ()) if is_differentiable(x)}
    return {name: x for name, x in {**given, **operands}.items() if x is not None}


def check_grads(grads: Sequence[str] | None, problem: AttentionProblem) -> frozenset[str]:
    """Return the names of the wanted gradients; all of them if `grads` is None."""
    available = ("q", "k", "v", *problem.extra_grads, *(("operands",) if problem.operands else ()))
    if grads is None:
        return frozenset(problem.grad_names)
    if isinstance(grads, str) or not isinstance(grads, (tuple, list, set, frozenset)):
        raise TypeError(f"grads: expected a tuple of names out of {available}, got {grads!r}")
    for name in grads:
        if not isinstance(name, str):
            raise TypeError(f"grads: expected names out of {available}, got {name!r}")
        if name not in GRAD_NAMES:
            raise ValueError(f"grads: expected names out of {available}, got {name!r}")
        if name not in available:
            were = "no operands were" if name == "operands" else f"no {name} was"
            raise ValueError(f"grads: {name!r} is asked for, but {were} given; expected names out of {available}")
    of_operands = problem.operand_grads if "operands" in grads else ()
    return frozenset((*(name for name in grads if name != "operands"), *of_operands))
