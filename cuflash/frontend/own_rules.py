"""Users' own rules in a call: operands as arrays with names, and the traced functions by which it is known again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.problem.attention_problem import Array, accum_of, operand_name
from cuflash.problem.own_rules import check_operands, operand_types
from cuflash.rules.form import NO_RULES, Rules, trace_rules

FUNCTIONS = ("score_mod", "mask_mod")


def arrays_of(keywords: Mapping[str, Any]) -> dict[str, Array]:
    """Return the operands by name."""
    return {operand_name(n): x for n, x in enumerate(check_operands(keywords.get("operands")))}


def with_adopted(keywords: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return the options with the operands as NumPy's or CuPy's arrays."""
    if "operands" not in keywords:
        return dict(keywords)
    return {**keywords, "operands": tuple([arrays[name] for name in arrays_of(keywords)])}


def arrays_in_order(keywords: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the options that are arrays, in the order of the keywords."""
    found: dict[str, Array] = {}
    for name in keywords:
        if name == "operands":
            found |= {operand: arrays[operand] for operand in arrays_of(keywords)}
        elif name in arrays:
            found[name] = arrays[name]
    return found


def of_call(q: Array, keywords: Mapping[str, Any]) -> Rules:
    """Trace the rules of a call."""
    score_mod, mask_mod = keywords.get("score_mod"), keywords.get("mask_mod")
    if score_mod is None and mask_mod is None:
        return NO_RULES
    operands = operand_types(check_operands(keywords.get("operands")))
    return trace_rules(score_mod, mask_mod, operands, accum_of(q.dtype.name))
