"""Operations on expressions follow NumPy's promotion, and simplify expressions where these are made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuflash.rules.expression import COMPARISONS, Node, constant, node

# A rule may use these functions of NumPy, of one and of two arguments; all are ufuncs, and nodes have their names.
UNARY = (
    *("absolute", "sign", "floor", "ceil", "exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos"),
    *("negative", "positive", "invert", "logical_not"),
)
BINARY = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "minimum", "maximum"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", *COMPARISONS),
)
# NumPy does these operations on bools under the names of arithmetic.
_OF_BOOLS = {
    **{"add": "bitwise_or", "multiply": "bitwise_and", "minimum": "bitwise_and", "maximum": "bitwise_or"},
    **{"logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "bitwise_xor", "logical_not": "invert"},
    **{"not_equal": "bitwise_xor"},
}
_MOST_FACTORS = 16  # a power of more factors is the function of that name

Operand = Node | bool | int | float  # a number of Python adapts to the dtype of the other operand


def cast(x: Node, dtype: str) -> Node:
    """Return `x` in a dtype."""
    if x.dtype == dtype:
        return x
    if x.is_constant:
        return constant(x.value, dtype)
    if dtype == "bool":
        return node("not_equal", "bool", (x, constant(0, x.dtype)))
    return node("cast", dtype, (x,))


def as_node(x: Operand, accum: str) -> Node:
    """Return the node of a number of Python, or a node as it is."""
    if isinstance(x, Node):
        return x
    return constant(x, "bool" if isinstance(x, bool) else "int64" if isinstance(x, int) else accum)


def _own(dtype: np.dtype[Any], accum: str) -> str:
    """Return the dtype of a node where NumPy has `dtype`."""
    if dtype.kind == "f":
        return accum
    if dtype.kind not in "biu":
        raise TypeError(f"expected floats, integers or bools, got {dtype}")
    return dtype.name


def _asked(x: Operand) -> Any:
    """Return what stands for an operand in NumPy's promotion: float64 for floats, which no integer makes wider."""
    if isinstance(x, Node):
        return np.dtype("float64" if x.is_float else x.dtype)
    return np.dtype(bool) if isinstance(x, bool) else type(x)


def apply(name: str, operands: tuple[Operand, ...], accum: str) -> Node:
    """Return the node of NumPy's function `name` of operands of which one is a node."""
    if name == "power":
        return _power(operands[0], operands[1], accum)
    if name in COMPARISONS:
        operands = _by_value(operands)
    found = [_asked(x) for x in operands]
    *dtypes, result = getattr(np, name).resolve_dtypes((*found, None))
    args = [_in_dtype(x, _own(dtype, accum), accum) for x, dtype in zip(operands, dtypes, strict=True)]
    if name in COMPARISONS and args[0].dtype != args[1].dtype:
        return _compare_signs(name, args[0], args[1])
    if name.startswith("logical_"):
        args = [cast(x, "bool") for x in args]
    return simplified(name, _own(result, accum), args)


def _by_value(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Make a number of Python beyond an integer's dtype infinite, as NumPy compares the two by value."""
    kinds = [np.iinfo(x.dtype) for x in operands if isinstance(x, Node) and _is_integer(x.dtype)]
    if not kinds:
        return operands

    def by_value(x: Operand) -> Operand:
        if not isinstance(x, int) or kinds[0].min <= x <= kinds[0].max:
            return x
        return math.inf if x > 0 else -math.inf

    return tuple([by_value(x) for x in operands])


def is_no_bound(function: str, x: Operand, bound: Operand) -> bool:
    """Return True if an integer's whole dtype is within a bound of Python, which NumPy's clip then leaves out."""
    if not isinstance(x, Node) or not _is_integer(x.dtype) or not isinstance(bound, int) or isinstance(bound, bool):
        return False
    info = np.iinfo(x.dtype)
    return bound <= info.min if function == "maximum" else bound >= info.max


def _is_integer(dtype: str) -> bool:
    return dtype.lstrip("u").startswith("int")


def _in_dtype(x: Operand, dtype: str, accum: str) -> Node:
    if isinstance(x, int) and not isinstance(x, bool) and _is_integer(dtype):
        info = np.iinfo(dtype)
        if not info.min <= x <= info.max:
            raise OverflowError(f"the Python integer {x} is out of bounds for {dtype}")
    return cast(as_node(x, accum), dtype)


def _compare_signs(name: str, a: Node, b: Node) -> Node:
    """Compare a signed and an unsigned number by value, as NumPy does."""
    is_first = a.dtype.startswith("int")
    signed, wide = (a, b) if is_first else (b, a)
    is_below = simplified("less", "bool", [signed, constant(0, signed.dtype)])
    compared = [cast(a, wide.dtype), cast(b, wide.dtype)]
    # A negative number is less than any unsigned one.
    outcome = {"equal": False, "not_equal": True}.get(name, name.startswith("less") == is_first)
    return where_node(is_below, constant(outcome, "bool"), simplified(name, "bool", compared))


def where(condition: Operand, a: Operand, b: Operand, accum: str) -> Node:
    """Choose `a` where the condition holds, else `b`."""
    numbers = [x for x in (a, b) if not isinstance(x, Node)]
    if len(numbers) == 2:
        dtype = _own(np.result_type(*[np.dtype(type(x)) for x in numbers]), accum)
    else:
        dtype = _own(np.result_type(*[_asked(x) if isinstance(x, (Node, bool)) else x for x in (a, b)]), accum)
    chosen = cast(as_node(condition, accum), "bool")
    return where_node(chosen, _in_dtype(a, dtype, accum), _in_dtype(b, dtype, accum))


def where_node(condition: Node, a: Node, b: Node) -> Node:
    """Choose as `where` does between nodes `a` and `b` of one dtype."""
    if condition.is_constant:
        return a if condition.value else b
    if a is b:
        return a
    return node("where", a.dtype, (condition, a, b))


def _power(base: Operand, exponent: Operand, accum: str) -> Node:
    if isinstance(exponent, Node) and not exponent.is_constant:
        raise TypeError("**: expected a constant exponent; of a base that is constant, exp2 and exp are powers")
    base = as_node(base, accum)
    if isinstance(exponent, Node):
        base = cast(base, _own(np.result_type(_asked(base), _asked(exponent)), accum))
        exponent = exponent.value
    assert isinstance(exponent, (bool, int, float))
    if isinstance(exponent, float) and not base.is_float:
        base = cast(base, accum)
    if base.dtype == "bool":
        base = cast(base, "int8")
    if not base.is_float:
        if exponent < 0:
            raise ValueError(f"**: expected an exponent >= 0 of an integer, got {exponent}")
        return _product_of(base, int(exponent))
    if exponent == 0.5:
        return simplified("sqrt", accum, [base])
    if float(exponent).is_integer() and 0 <= exponent <= _MOST_FACTORS:
        return _product_of(base, int(exponent))
    return simplified("power", accum, [base, constant(exponent, accum)])


def _product_of(base: Node, count: int) -> Node:
    """Return `base` to the power `count` by repeated squares, which wraps as NumPy's integers do."""
    result = constant(1, base.dtype)
    while count:
        if count & 1:
            result = simplified("multiply", base.dtype, [result, base])
        count >>= 1
        if count:
            base = simplified("multiply", base.dtype, [base, base])
    return result


def simplified(name: str, dtype: str, args: list[Node]) -> Node:
    """Return the node of an operation, or a shorter expression of the same value.

    An argument that could be NaN or infinite is never dropped.
    """
    if args[0].dtype == "bool" and name in _OF_BOOLS and all(x.dtype == "bool" for x in args):
        name = _OF_BOOLS[name]
    if all(x.is_constant for x in args):
        with np.errstate(all="ignore"):
            value = getattr(np, name)(*[np.dtype(x.dtype).type(x.value) for x in args])
        return constant(value, dtype)
    first = args[0]
    if name == "positive" or (name == "absolute" and dtype == "bool"):
        return first
    if name in ("floor", "ceil") and not first.is_float:
        return cast(first, dtype)
    if name == "negative" and first.op == "negative":
        return first.args[0]
    if name == "invert" and first.op == "invert":
        return first.args[0]
    if len(args) == 2:
        shorter = _of_neutral(name, args[0], args[1])
        if shorter is not None and shorter.dtype == dtype:
            return shorter
    return node(name, dtype, args)


def _of_neutral(name: str, a: Node, b: Node) -> Node | None:
    """Return the other argument where one is neutral."""

    def is_number(x: Node, value: int) -> bool:
        return x.is_constant and x.value == value

    if name == "add" and is_number(a, 0):
        return b
    if name in ("add", "subtract") and is_number(b, 0):
        return a
    if name == "multiply" and is_number(a, 1):
        return b
    if name in ("multiply", "divide") and is_number(b, 1):
        return a
    if name in ("bitwise_and", "bitwise_or") and a.dtype == "bool":
        for one, other in ((a, b), (b, a)):
            if one.is_constant:
                return other if one.value == (name == "bitwise_and") else one
        return a if a is b else None
    return None
