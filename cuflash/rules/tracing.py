"""Traced values stand for the numbers that a rule's function is given, and do what the function may do with these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuflash.rules import operations
from cuflash.rules.errors import RuleAttributeError, RuleError, here
from cuflash.rules.expression import Node, constant, node
from cuflash.rules.form import OperandType

_ALIASES = {
    **{"abs": "absolute", "true_divide": "divide", "mod": "remainder", "amax": "maximum", "bitwise_not": "invert"},
    **{"bitwise_invert": "invert", "pow": "power"},
}
FUNCTIONS = (
    *("where", "minimum", "maximum", "clip", "abs", "sign", "floor", "ceil", "exp", "exp2", "log", "log2", "sqrt"),
    *("tanh", "sin", "cos"),
)
_USE_WHERE = "choose by where(condition, a, b)"


class Traced:
    """A number that is known only in the kernel."""

    __slots__ = ("_accum", "_node")
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 1000
    shape: tuple[int, ...] = ()
    ndim = 0
    size = 1

    def __init__(self, node: Node, accum: str) -> None:
        self._node = node
        self._accum = accum

    def __repr__(self) -> str:
        return f"<traced {self._node.dtype}>"

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype; every floating one is that of the accumulation."""
        return np.dtype(self._node.dtype)

    def astype(self, dtype: Any, **_: Any) -> Traced:
        """Return the number in another dtype."""
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise RuleError(f"astype: {error}{here()}") from error
        if kind.kind not in "biuf" and kind.name != "bfloat16":
            raise RuleError(f"astype: expected a float, integer or bool, got {kind}{here()}")
        name = kind.name if kind.kind in "biu" else self._accum
        return Traced(operations.cast(self._node, name), self._accum)

    def clip(self, min: Any = None, max: Any = None) -> Any:
        """Return the number bounded by two others."""
        return call("clip", (self, min, max), {})

    def __getitem__(self, index: Any) -> Traced:
        if index == () or index is Ellipsis:
            return self
        raise RuleError(f"[...]: expected an operand, got an index of a number{here()}")

    def __array_namespace__(self, api_version: str | None = None) -> _Namespace:
        return _NAMESPACE

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__":
            raise RuleError(f"{ufunc.__name__}.{method}: expected one of {', '.join(FUNCTIONS)}{here()}")
        return call(ufunc.__name__, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return call(function.__name__, args, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuleAttributeError(
            f"{name}: a traced value has no such function; expected one of {', '.join(FUNCTIONS)}, of NumPy, of CuPy "
            f"or of __array_namespace__(){here()}"
        )

    def __bool__(self) -> bool:
        raise RuleError(
            f"bool() of a traced value, as in if, and, or, not, min and max: its number is known only in the kernel; "
            f"{_USE_WHERE}, and combine conditions by & | ~{here()}"
        )

    def __float__(self) -> float:
        raise RuleError(
            f"float() of a traced value, as by the functions of math: its number is known only in the kernel; use "
            f"those of NumPy or CuPy, and {_USE_WHERE}{here()}"
        )

    def __int__(self) -> int:
        raise RuleError(
            f"int() of a traced value: its number is known only in the kernel; use .astype, and {_USE_WHERE}{here()}"
        )

    def __complex__(self) -> complex:
        raise RuleError(f"complex() of a traced value: expected real numbers; {_USE_WHERE}{here()}")

    def __index__(self) -> int:
        raise RuleError(
            f"a traced value as the index of an array, or the end of a range: only an operand can be indexed by it: "
            f"pass the array in operands; {_USE_WHERE}{here()}"
        )

    def __iter__(self) -> Any:
        raise RuleError(f"iter() of a traced value: expected an array, got a number; {_USE_WHERE}{here()}")

    def __len__(self) -> int:
        raise RuleError(
            f"len() of a traced value, or the index of an array that is no operand: its number is known only in the "
            f"kernel; pass arrays in operands{here()}"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuleError(
            f"an array of a traced value, or the index of an array that is no operand: its number is known only in the "
            f"kernel; pass arrays in operands; {_USE_WHERE}; expected one of {', '.join(FUNCTIONS)}{here()}"
        )


def _unary(name: str) -> Callable[[Traced], Any]:
    return lambda self: call(name, (self,), {})


def _binary(name: str) -> Callable[[Traced, Any], Any]:
    return lambda self, other: call(name, (self, other), {})


def _reflected(name: str) -> Callable[[Traced, Any], Any]:
    return lambda self, other: call(name, (other, self), {})


def _refused(sign: str) -> Callable[..., Any]:
    def refuse(self: Traced, *_: Any) -> Any:
        raise RuleError(f"{sign}: no such operation on a traced value{here()}")

    return refuse


_OPERATORS = {
    **{"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide"},
    **{"mod": "remainder", "pow": "power", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
}
for _sign, _name in _OPERATORS.items():
    setattr(Traced, f"__{_sign}__", _binary(_name))
    setattr(Traced, f"__r{_sign}__", _reflected(_name))
for _sign, _name in {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}.items():
    setattr(Traced, f"__{_sign}__", _binary(_name))
for _sign, _name in {"gt": "greater", "ge": "greater_equal"}.items():
    setattr(Traced, f"__{_sign}__", _binary(_name))
for _sign, _name in {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}.items():
    setattr(Traced, f"__{_sign}__", _unary(_name))
for _sign in ("lshift", "rshift", "rlshift", "rrshift", "matmul", "rmatmul", "divmod", "rdivmod", "round"):
    setattr(Traced, f"__{_sign}__", _refused(_sign))
for _sign, _name in {"trunc": "trunc", "floor": "floor", "ceil": "ceil"}.items():
    setattr(Traced, f"__{_sign}__", _refused(f"math.{_name}"))


def call(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Apply NumPy's function `name` to arguments of which one is traced."""
    name = _ALIASES.get(name, name)
    given = {key: x for key, x in options.items() if x is not None}
    if name == "clip":
        args, given = _clip_arguments(args, given)
    count = {"where": 3, "clip": 3}.get(name, 1 if name in operations.UNARY else 2)
    if name not in ("where", "clip", *operations.UNARY, *operations.BINARY):
        raise RuleError(f"{name}: no such function of a traced value; expected one of {', '.join(FUNCTIONS)}{here()}")
    if given:
        raise RuleError(f"{name}: expected no options, got {', '.join(given)}{here()}")
    accum = next(x._accum for x in args if isinstance(x, (Traced, TracedArray)))
    if len(args) != count:
        raise RuleError(f"{name}: expected {count} arguments, got {len(args)}{here()}")
    try:
        operands = tuple([None if x is None else operand_of(x, accum) for x in args])
        return Traced(_applied(name, operands, accum), accum)
    except (RuleError, OverflowError):
        raise
    except (TypeError, ValueError) as error:
        raise (
            type(error)(f"{error}{here()}")
            if type(error) in (TypeError, ValueError)
            else RuleError(f"{name}: {error}{here()}")
        ) from error


def _clip_arguments(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = ("a", "a_min", "a_max")
    values = dict(zip(names, args, strict=False))
    for name, other in (("a_min", "min"), ("a_max", "max")):
        for key in (name, other):
            if key in options:
                values[name] = options.pop(key)
    return (*(values.get(name) for name in names), *args[3:]), options


def _applied(name: str, operands: tuple[Any, ...], accum: str) -> Node:
    if name == "where":
        condition, a, b = operands
        return operations.where(condition, a, b, accum)
    if name == "clip":
        x, low, high = operands
        for function, bound in (("maximum", low), ("minimum", high)):
            if bound is not None and not operations.is_no_bound(function, x, bound):
                x = operations.apply(function, (x, bound), accum)
        return operations.as_node(x, accum)
    return operations.apply(name, operands, accum)


def operand_of(x: Any, accum: str) -> operations.Operand:
    """Return an argument as an expression takes it: a node, or a number of Python's that adapts to the others."""
    if isinstance(x, Traced):
        return x._node
    if isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        return x
    if isinstance(x, TracedArray):
        raise RuleError(x.not_indexed() + here())
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0):
        kind = x.dtype
        if kind.kind in "biuf":
            return constant(x.item(), kind.name if kind.kind in "biu" else accum)
    if hasattr(x, "shape"):
        raise RuleError(f"expected a number or a traced value, got an array {x.shape}: pass it in operands{here()}")
    raise RuleError(f"expected a number or a traced value, got {type(x).__name__}{here()}")


class TracedArray:
    """An operand with axes: a rule indexes all of them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int, kind: OperandType, accum: str) -> None:
        self._number, self._accum = number, accum
        self.shape = kind.shape
        self.ndim = len(kind.shape)
        self.size = int(np.prod(kind.shape))
        self.dtype = np.dtype(_node_dtype(kind.dtype, accum))

    def __len__(self) -> int:
        return self.shape[0]

    def not_indexed(self) -> str:
        """The sentence of an error that met an operand in place of one of its elements."""
        return f"operands[{self._number}]: expected an index on each of its {self.ndim} axes {self.shape}"

    def __getitem__(self, index: Any) -> Traced:
        indices = list(index) if isinstance(index, tuple) else [index]
        places = [n for n, x in enumerate(indices) if x is Ellipsis]
        if len(places) == 1 and len(indices) - 1 == self.ndim:
            indices.pop(places[0])
        if len(indices) != self.ndim or any(x is Ellipsis for x in indices):
            raise RuleError(f"{self.not_indexed()}, got {len(indices)}{here()}")
        return Traced(load(self._number, self.dtype.name, self.shape, [self._index(x) for x in indices]), self._accum)

    def _index(self, x: Any) -> Node:
        if isinstance(x, Traced):
            if x._node.is_float or x._node.dtype == "bool":
                raise RuleError(
                    f"operands[{self._number}]: expected an integer index, got {x._node.dtype}; use .astype(int)"
                    f"{here()}"
                )
            return x._node
        try:
            if isinstance(x, (bool, np.bool_)):
                raise TypeError
            return constant(operator.index(x), "int64")
        except TypeError:
            raise RuleError(
                f"operands[{self._number}]: expected a traced or Python integer on each axis, got {type(x).__name__}"
                f"{here()}"
            ) from None

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuleError(self.not_indexed() + here())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuleAttributeError(f"{self.not_indexed()}, got .{name}{here()}")

    __array_ufunc__ = __array_function__ = __array__ = __bool__ = __float__ = __int__ = __iter__ = _refuse
    __setitem__ = _refuse


for _sign in (*(f"{prefix}{x}" for x in _OPERATORS for prefix in ("", "r")), "eq", "ne", "lt", "le", "gt", "ge", "neg"):
    setattr(TracedArray, f"__{_sign}__", TracedArray._refuse)


def load(number: int, dtype: str, shape: tuple[int, ...], indices: list[Node]) -> Node:
    """Return the element of an operand; 0 of an operand that has none."""
    if 0 in shape:
        return constant(0, dtype)
    return node("load", dtype, indices, number)


def _node_dtype(dtype: str, accum: str) -> str:
    return accum if "float" in dtype else dtype


def traced_operand(number: int, kind: OperandType, accum: str) -> Traced | TracedArray:
    """Return what a rule is given for an operand; an operand without axes is a number already."""
    if kind.shape:
        return TracedArray(number, kind, accum)
    return Traced(load(number, _node_dtype(kind.dtype, accum), (), []), accum)


class _Namespace:
    """The functions by their names in the array API, and what else a rule takes from a namespace."""

    pi, e, inf, nan, newaxis = np.pi, np.e, np.inf, np.nan, None
    bool = bool_ = np.bool_
    int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
    uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
    float16, float32, float64 = np.float16, np.float32, np.float64

    @staticmethod
    def astype(x: Traced, dtype: Any) -> Traced:
        """``x.astype(dtype)``."""
        return x.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np, name):
            raise RuleAttributeError(f"{name}: no such function; expected one of {', '.join(FUNCTIONS)}{here()}")

        def function(*args: Any, **options: Any) -> Any:
            if any(isinstance(x, (Traced, TracedArray)) for x in (*args, *options.values())):
                return call(name, args, options)
            return getattr(np, name)(*args, **options)

        return function


_NAMESPACE = _Namespace()
