"""Expressions as CUDA text: the body of functions of one element, which `cuda_src/rules/user.cuh` includes."""

from __future__ import annotations

from collections.abc import Sequence

from cuflash.rules.derivative import derivative
from cuflash.rules.expression import COMPARISONS, SCORE, Node, in_order, input_node, loads_of
from cuflash.rules.form import Rules

# The name by which the sources include the text; before it stands operands(), which gives what is read of operands.
HEADER = "UserRule.functions"
_TYPES = {
    **{"bool": "bool", "int8": "signed char", "int16": "short", "int32": "int", "int64": "i64"},
    **{"uint8": "u8", "uint16": "unsigned short", "uint32": "u32", "uint64": "u64"},
}
_SIGNS = {
    **dict(zip(COMPARISONS, ("==", "!=", "<", "<=", ">", ">="), strict=True)),
    **{"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"},
}
_OF_FLOATS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


def functions_of(rules: Rules) -> str:
    """Write the functions of a rule: value, derivative, visible and differentiate."""
    score = input_node(SCORE, _accum(rules)) if rules.score is None else rules.score
    accum_score = input_node(SCORE, score.dtype)
    parts = [
        _function("Accum value(Accum s, int i, int j) const", [score], "return {};"),
        _function("Accum derivative(Accum s, int i, int j) const", [derivative(score, accum_score)], "return {};"),
    ]
    if rules.visible is None:
        parts.append("DEVICE bool visible(int i, int j) const { return true; }\n")
    else:
        parts.append(_function("bool visible(int i, int j) const", [rules.visible], "return {};"))
    head = "template <class Add>\nDEVICE void differentiate(Accum s, Accum ds, int i, int j, Add add) const {\n"
    loads = () if rules.score is None else loads_of(rules.score)
    parts.append(f"static constexpr int NUM_TERMS = {len(loads)};")
    if not loads:
        return "\n".join([*parts, head + "}\n"])
    slopes = [derivative(score, load) for load in loads]
    lines, names = _statements([*slopes, *(index for load in loads for index in load.args)])
    for number, (load, slope) in enumerate(zip(loads, slopes, strict=True)):
        lines.append(f"add({number}, {_place_of_sum(load, names)}, ds * {names[slope]});")
    return "\n".join([*parts, head + "".join(f"  {line}\n" for line in lines) + "}\n"])


def _accum(rules: Rules) -> str:
    return "float32" if rules.score is None else rules.score.dtype


def _function(signature: str, roots: Sequence[Node], end: str) -> str:
    lines, names = _statements(roots)
    lines.append(end.format(*[names[x] for x in roots]))
    return f"DEVICE {signature} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def _statements(roots: Sequence[Node]) -> tuple[list[str], dict[Node, str]]:
    """Return lines that compute the roots, and the name of each node."""
    lines: list[str] = []
    names: dict[Node, str] = {}
    for x in in_order(roots):
        if x.op == "input":
            names[x] = str(x.value)
        elif x.op == "constant":
            names[x] = _constant(x)
        else:
            names[x] = f"t{len(lines)}"
            lines.append(f"const {type_of(x.dtype)} {names[x]} = {_expression(x, names)};")
    return lines, names


def type_of(dtype: str) -> str:
    """Return the C++ type of a node's dtype."""
    return _TYPES.get(dtype, "Accum")


def _constant(x: Node) -> str:
    if x.dtype == "bool":
        return str(x.value).lower()
    if not x.is_float:
        # The lowest number of 64 bits has no literal in C++, so that it is written as a difference.
        text = f"{x.value}ull" if x.value >= 0 else f"-{-x.value - 1}ll - 1"
        return f"static_cast<{type_of(x.dtype)}>({text})"
    if x.value != x.value:
        return "(infinity() - infinity())"
    if x.value in (float("inf"), float("-inf")):
        return "infinity()" if x.value > 0 else "(-infinity())"
    return f"Accum({x.value!r})"


def _expression(x: Node, names: dict[Node, str]) -> str:
    args = [names[arg] for arg in x.args]
    kind = type_of(x.dtype)
    if x.op == "load":
        return f"rule::element<{kind}>(operands().operand_{x.value}, {_place(x, names)})"
    if x.op == "cast":
        return f"static_cast<{kind}>({args[0]})"
    if x.op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if x.op in _SIGNS:
        text = f"{args[0]} {_SIGNS[x.op]} {args[1]}"
        return text if x.dtype == "bool" else f"static_cast<{kind}>({text})"
    if x.is_float and x.op in _OF_FLOATS:
        return f"{args[0]} {_OF_FLOATS[x.op]} {args[1]}"
    if x.is_float and x.op == "negative":
        return f"-{args[0]}"
    if x.op == "invert":
        return f"!{args[0]}" if x.dtype == "bool" else f"static_cast<{kind}>(~{args[0]})"
    return f"rule::{x.op}<{kind}>({', '.join(args)})"


def _place(load: Node, names: dict[Node, str]) -> str:
    """Write the offset of an element in its operand, with every index clamped to its axis."""
    operand = f"operands().operand_{load.value}"
    terms = [
        f"rule::clamped({names[index]}, {operand}_size_{axis}) * {operand}_stride_{axis}"
        for axis, index in enumerate(load.args)
    ]
    return " + ".join(terms) or "i64(0)"


def _place_of_sum(load: Node, names: dict[Node, str]) -> str:
    """Write the place of an element's gradient among the sums of all operands."""
    operand = f"operands().operand_{load.value}"
    flat = "0"
    for axis, index in enumerate(load.args):
        flat = f"({flat} * {operand}_size_{axis} + rule::clamped({names[index]}, {operand}_size_{axis}))"
    return f"{operand}_begin + {flat}"


EMPTY = functions_of(Rules())  # of kernels without a rule
