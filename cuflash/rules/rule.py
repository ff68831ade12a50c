"""The rules of a call: their functions are traced once and found again by the objects that they read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from cuflash.kept import Kept
from cuflash.rules.cupy_functions import cupy_traces
from cuflash.rules.errors import RuleAttributeError, RuleError, line_in, meets_traced, place_of
from cuflash.rules.expression import INDICES, SCORE, Node, input_node
from cuflash.rules.form import OperandType
from cuflash.rules.operations import Operand, as_node, cast
from cuflash.rules.tracing import FUNCTIONS, Traced, TracedArray, operand_of, traced_operand

PARAMETERS = {"score_mod": (SCORE, *INDICES), "mask_mod": INDICES}
_MOST_SIGNATURES = 64  # of one function
_MISSING = object()


# Each function has, by operands and dtype, the bindings that it read when it was traced, and its expression.
_traced: WeakKeyDictionary[Any, Kept[Any, tuple[_Bindings, Node]]] = WeakKeyDictionary()


def traced(name: str, function: Any, operands: tuple[OperandType, ...], accum: str) -> Node:
    """Return the expression of a function, option `name`.

    A function object is traced once, and again only where a name that it reads is bound to another object, or the
    operands' shapes or dtypes differ.
    """
    if not isinstance(function, FunctionType):  # nobody knows what another callable reads
        return _trace(name, function, operands, accum)
    own = _traced.get(function)
    if own is None:
        own = _traced[function] = Kept(_MOST_SIGNATURES)
    key = name, operands, accum
    found = own.get(key)
    if found is None or not found[0].hold(function):
        # The bindings are noted first: a name that the function itself binds anew is met by the next call.
        bindings = _Bindings(function)
        found = own[key] = bindings, _trace(name, function, operands, accum)
    return found[1]


class _Bindings:
    """The objects to which the names of a function are bound, those of functions among them included."""

    def __init__(self, function: FunctionType) -> None:
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._defaults: list[tuple[FunctionType | None, Any, Any, Any]] = []
        self._note(function, {id(function)}, is_own=True)

    def _note(self, function: FunctionType, seen: set[int], is_own: bool = False) -> None:
        keyword = function.__kwdefaults__
        # The function itself is not kept alive: the table of all functions forgets it when its owner does.
        self._defaults.append((None if is_own else function, function.__defaults__, keyword, dict(keyword or {})))
        found = []
        for cell in function.__closure__ or ():
            value = _contents(cell)
            self._cells.append((cell, value))
            found.append(value)
        for name in sorted(_names(function.__code__)):
            value = function.__globals__.get(name, _MISSING)
            self._globals.append((function.__globals__, name, value))
            found.append(value)
        for value in found:
            if isinstance(value, FunctionType) and id(value) not in seen and value.__module__ == function.__module__:
                seen.add(id(value))
                self._note(value, seen)

    def hold(self, function: FunctionType) -> bool:
        """Return True if every name of the function is bound to the same object as before."""
        for cell, value in self._cells:
            if _contents(cell) is not value:
                return False
        for names, name, value in self._globals:
            if names.get(name, _MISSING) is not value:
                return False
        for other, defaults, keyword, values in self._defaults:
            owner = function if other is None else other
            own = owner.__kwdefaults__
            if owner.__defaults__ is not defaults or own is not keyword:
                return False
            if own and any(own.get(name) is not value for name, value in values.items()):
                return False
        return True


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is not bound yet
        return _MISSING


def _names(code: CodeType) -> set[str]:
    """Return names that may be global ones, those in functions within the function included."""
    names = set(code.co_names)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            names |= _names(value)
    return names


def _trace(name: str, function: Callable[..., Any], operands: tuple[OperandType, ...], accum: str) -> Node:
    if not callable(function):
        instead = "; block_mask takes it" if type(function).__name__ == "BlockMask" else ""
        raise TypeError(f"{name}: expected a function {form_of(name)}, got {type(function).__name__}{instead}")
    inputs = [Traced(input_node(x, accum if x == SCORE else "int32"), accum) for x in PARAMETERS[name]]
    given = [traced_operand(number, kind, accum) for number, kind in enumerate(operands)]
    _check_parameters(name, function, len(inputs), len(given))
    with cupy_traces():
        try:
            result = function(*inputs, *given)
        except Exception as error:
            if isinstance(error, (RuleError, RuleAttributeError)) or not meets_traced(error):
                raise
            raise RuleError(
                f"{name}: a function or an array of another library met a traced value: pass arrays in operands; "
                f"expected one of {', '.join(FUNCTIONS)}, of NumPy, of CuPy or of s.__array_namespace__()"
                f"{line_in(function, error)}"
            ) from error
    return _result(name, function, result, accum)


def form_of(name: str) -> str:
    """Tell in words how an option's function is called."""
    return f"({', '.join((*PARAMETERS[name], '*operands'))})"


def _check_parameters(name: str, function: Callable[..., Any], inputs: int, operands: int) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of another language has none
        return
    try:
        signature.bind(*range(inputs + operands))
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a function {form_of(name)} that takes {inputs} values and {operands} operands, "
            f"got {signature}, {_count_in_words(signature, error)}{_place(function)}"
        ) from None


def _count_in_words(signature: inspect.Signature, error: TypeError) -> str:
    """Say how many arguments a function takes; if that is not what is wrong with it, what Python says."""
    kinds = signature.parameters.values()
    by_place = [x for x in kinds if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    required = sum(x.default is x.empty for x in by_place)
    if any(x.kind is x.KEYWORD_ONLY and x.default is x.empty for x in kinds):
        return f"which Python does not call so: {error}"
    if any(x.kind is x.VAR_POSITIONAL for x in kinds):
        return f"which takes at least {required}"
    return f"which takes {required}" if required == len(by_place) else f"which takes {required} to {len(by_place)}"


def _place(function: Any) -> str:
    return place_of(getattr(inspect.unwrap(function), "__code__", None))


def _result(name: str, function: Any, result: Any, accum: str) -> Node:
    where = _place(function)
    what = "a bool, such as a comparison" if name == "mask_mod" else "the new score"
    if isinstance(result, TracedArray):
        raise RuleError(f"{name}: {result.not_indexed()}{where}")
    try:
        value: Operand = operand_of(result, accum)
    except TypeError:
        raise RuleError(f"{name}: expected {what}, got {type(result).__name__}{where}") from None
    found = as_node(value, accum)
    if name == "score_mod":
        if found.dtype == "bool":
            raise RuleError(
                f"{name}: expected {what}, got bool{where}: a condition, whether query i may see key j, belongs into "
                "mask_mod, which is given (b, h, i, j, *operands)"
            )
        return cast(found, accum)
    if found.dtype != "bool":
        raise RuleError(f"{name}: expected {what}, got {found.dtype}{where}")
    return found
