"""Checks of the arguments that only backward functions take: dout, out, lse, dlse and grads."""

from __future__ import annotations

from collections.abc import Sequence

from cuflash.problem.attention_problem import GRAD_NAMES, Array, AttentionProblem


def check_like(name: str, x: Array, shape: tuple[int, ...], dtype: str, what: str) -> None:
    """Check an array whose shape and dtype follow from the problem."""
    if x.dtype.name != dtype:
        raise TypeError(f"{name}: expected dtype {dtype} ({what}), got {x.dtype.name}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape} ({what}), got {tuple(x.shape)}")


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
