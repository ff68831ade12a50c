"""The rules of a call as kernels compile them in.

Functions are traced by `rules.rule`, which is imported by the first call that has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cuflash.rules.expression import Node


class OperandType(NamedTuple):
    """An operand as the traced function sees it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Rules:
    """The rules that the kernels of a call compile in; equal ones are equal, whichever functions they came from."""

    score: Node | None = None  # the new score; None leaves it alone
    visible: Node | None = None  # bool; None hides nothing
    operands: tuple[tuple[str, int], ...] = ()  # dtype and number of axes of each operand


NO_RULES = Rules()


def trace_rules(score_mod: Any, mask_mod: Any, operands: tuple[OperandType, ...], accum: str) -> Rules:
    """Trace the rules of a call whose arithmetic is in dtype `accum`."""
    axes = tuple([(x.dtype, len(x.shape)) for x in operands])
    if score_mod is None and mask_mod is None:
        return Rules(operands=axes) if axes else NO_RULES
    traced = import_module("cuflash.rules.rule").traced
    return Rules(
        None if score_mod is None else traced("score_mod", score_mod, operands, accum),
        None if mask_mod is None else traced("mask_mod", mask_mod, operands, accum),
        axes,
    )
