"""The operands of users' own rules: their checks, and their names in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.problem.attention_problem import DTYPES, operand_name
from cuflash.rules.form import OperandType

_OF_INTEGERS = tuple(np.dtype(code).name for code in "?bBhHiIlLqQ")
_OPERAND = operand_name(0)[:-1]


def is_operand(name: str) -> bool:
    """Return True for the name of an operand among a call's arrays."""
    return name.startswith(_OPERAND)


def label_of(name: str) -> str:
    """Return the name of a call's array in messages."""
    return f"operands[{name.removeprefix(_OPERAND)}]" if is_operand(name) else name


def is_differentiable(operand: Any) -> bool:
    """Return True for an operand with a gradient: floats have one, integers and bools have none."""
    return "float" in interop.dtype_name(operand.dtype)


def check_operands(operands: object) -> tuple[Any, ...]:
    """Return the operands as a tuple."""
    if operands is None:
        return ()
    if not isinstance(operands, (tuple, list)):
        raise TypeError(f"operands: expected a tuple of arrays, got {type(operands).__name__}")
    # NumPy's scalars are welcome, as arithmetic on 0-d arrays gives them.
    return tuple([np.asarray(x) if isinstance(x, np.generic) else x for x in operands])


def operand_types(operands: Sequence[Any]) -> tuple[OperandType, ...]:
    """Return shapes and dtypes of adopted operands; TypeError for dtypes that no rule computes with."""
    kinds = []
    for number, x in enumerate(check_operands(operands)):
        dtype = x.dtype.name
        if dtype not in DTYPES and dtype not in _OF_INTEGERS:
            raise TypeError(f"operands[{number}]: expected floats, integers or bools, got dtype {dtype}")
        kinds.append(OperandType(tuple(x.shape), dtype))
    return tuple(kinds)
