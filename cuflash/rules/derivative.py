"""Derivatives of expressions, found in the direction of evaluation: of each node with respect to one other.

The derivative of a choice is that of the chosen branch alone, whatever the other one holds. The derivatives of abs,
sign and sqrt at 0 are 0, as are those of floor and ceil; a tie in minimum or maximum has that of the first argument.
"""

from __future__ import annotations

import math
from typing import Protocol

from cuflash.rules.expression import Node, constant, in_order
from cuflash.rules.operations import simplified, where_node


class _Op(Protocol):
    def __call__(self, name: str, *args: Node) -> Node: ...


class _Number(Protocol):
    def __call__(self, value: float) -> Node: ...


def derivative(root: Node, variable: Node) -> Node:
    """Return the derivative of `root`, a floating-point expression, with respect to `variable`, one of its nodes."""
    tangents: dict[Node, Node | None] = {}  # None is 0
    for x in in_order((root,)):
        if x is variable:
            tangents[x] = constant(1, x.dtype)
        elif not x.is_float or x.op in ("constant", "input", "load"):
            tangents[x] = None
        else:
            tangents[x] = _tangent(x, [tangents[arg] for arg in x.args])
    found = tangents[root]
    return constant(0, root.dtype) if found is None else found


def _tangent(x: Node, tangents: list[Node | None]) -> Node | None:
    if all(tangent is None for tangent in tangents):
        return None
    dtype = x.dtype

    def number(value: float) -> Node:
        return constant(value, dtype)

    def op(name: str, *args: Node) -> Node:
        return simplified(name, dtype, list(args))

    def choose(condition: Node, a: Node | None, b: Node | None) -> Node:
        zero = number(0)
        return where_node(condition, zero if a is None else a, zero if b is None else b)

    if x.op == "where":
        return choose(x.args[0], tangents[1], tangents[2])
    if len(x.args) == 1:
        tangent = tangents[0]
        assert tangent is not None
        return _of_one(x, tangent, op, number)
    (a, b), (da, db) = x.args, tangents
    if x.op in ("minimum", "maximum"):
        is_first = simplified("less_equal" if x.op == "minimum" else "greater_equal", "bool", [a, b])
        return choose(is_first, da, db)
    if x.op in ("add", "subtract"):
        if db is None:
            return da
        return (op("negative", db) if x.op == "subtract" else db) if da is None else op(x.op, da, db)
    if x.op == "multiply":
        terms = [op("multiply", tangent, other) for tangent, other in ((da, b), (db, a)) if tangent is not None]
        return terms[0] if len(terms) == 1 else op("add", *terms)
    if x.op == "divide":
        if db is None:
            assert da is not None
            return op("divide", da, b)
        second = op("multiply", x, db)
        return op("divide", op("negative", second) if da is None else op("subtract", da, second), b)
    if x.op == "remainder":  # a - floor(a / b) * b
        if db is None:
            return da
        second = op("multiply", op("floor_divide", a, b), db)
        return op("negative", second) if da is None else op("subtract", da, second)
    if x.op == "power":
        assert da is not None
        exponent = float(b.value)
        lower = op("power", a, number(exponent - 1))
        return op("multiply", da, op("multiply", number(exponent), lower))
    assert x.op == "floor_divide", x.op
    return None


def _of_one(x: Node, tangent: Node, op: _Op, number: _Number) -> Node | None:
    """Return the derivative of a function of one argument."""
    (a,) = x.args
    if x.op in ("sign", "floor", "ceil"):
        return None
    if x.op == "cast":
        return tangent
    if x.op == "negative":
        return op("negative", tangent)
    if x.op == "sqrt":
        is_zero = simplified("equal", "bool", [a, number(0)])
        return where_node(is_zero, number(0), op("divide", op("multiply", tangent, number(0.5)), x))
    if x.op in ("log", "log2"):
        divisor = a if x.op == "log" else op("multiply", a, number(math.log(2)))
        return op("divide", tangent, divisor)
    factors = {
        "absolute": lambda: op("sign", a),
        "exp": lambda: x,
        "exp2": lambda: op("multiply", x, number(math.log(2))),
        "tanh": lambda: op("subtract", number(1), op("multiply", x, x)),
        "sin": lambda: op("cos", a),
        "cos": lambda: op("negative", op("sin", a)),
    }
    return op("multiply", tangent, factors[x.op]())
