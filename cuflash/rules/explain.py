"""The texts that a rule becomes, for its author to read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash.rules.derivative import derivative
from cuflash.rules.expression import SCORE, input_node, loads_of, text_of
from cuflash.rules.form import OperandType, Rules
from cuflash.rules.rule import PARAMETERS, form_of, traced
from cuflash.rules.to_cuda import functions_of


def explain(function: Callable[..., Any], *operands: Any, option: str | None = None, dtype: str = "float32") -> str:
    """Return the expression of a rule, its derivatives, and the CUDA text that the kernels compile in.

    Parameters
    ----------
    function : callable
        As for the options ``score_mod`` and ``mask_mod``.
    *operands : arrays
        As for the option ``operands``; only shapes and dtypes matter.
    option : "score_mod" or "mask_mod", optional
        By default the one that fits the number of the function's parameters.
    dtype : "float32" or "float64"
        The dtype of the arithmetic.

    Returns
    -------
    str

    Raises
    ------
    TypeError
        As `cuflash.attention` raises it for the function.
    ValueError
        For another option or dtype.

    Examples
    --------
    >>> import cuflash
    >>> text = cuflash.rules.explain(lambda s, b, h, i, j: s * s)
    >>> print(text.partition("CUDA")[0].rstrip())
    score_mod(s, b, h, i, j, *operands)
    (s * s)
    <BLANKLINE>
    derivative by s
    (s + s)
    """
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype: expected float32 or float64, got {dtype!r}")
    if option not in (None, *PARAMETERS):
        raise ValueError(f"option: expected score_mod or mask_mod, got {option!r}")
    kinds = tuple([OperandType(tuple(np.shape(x)), _dtype_name(x)) for x in operands])
    option = option or _option_of(function, len(kinds))
    root = traced(option, function, kinds, dtype)
    parts = [f"{option}{form_of(option)}", text_of(root)]
    types = tuple([(x.dtype, len(x.shape)) for x in kinds])
    if option == "score_mod":
        variables = [(SCORE, input_node(SCORE, dtype)), *((text_of(load), load) for load in loads_of(root))]
        for name, variable in variables:
            parts += ["", f"derivative by {name}", text_of(derivative(root, variable))]
    rules = Rules(root, None, types) if option == "score_mod" else Rules(None, root, types)
    return "\n".join([*parts, "", "CUDA", functions_of(rules)])


def _dtype_name(x: Any) -> str:
    found: str = np.dtype(x.dtype).name if hasattr(x, "dtype") else np.asarray(x).dtype.name
    return found


def _option_of(function: Any, operands: int) -> str:
    if not callable(function):
        raise TypeError(f"function: expected a function, got {type(function).__name__}")
    kinds = inspect.signature(function).parameters.values()
    count = sum(x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) and x.default is x.empty for x in kinds)
    takes_any = any(x.kind is x.VAR_POSITIONAL for x in kinds)
    for name, inputs in PARAMETERS.items():
        if count == len(inputs) + (0 if takes_any else operands):
            return name
    raise TypeError(
        f"function: expected {' or '.join(map(form_of, PARAMETERS))}, with {operands} operands as given, "
        f"got {inspect.signature(function)}"
    )
