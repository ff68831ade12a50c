"""NumPy computes expressions of many elements at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.rules.expression import Node, in_order

Array = NDArray[Any]


class Evaluation:
    """The values of expressions for given inputs, each node computed once.

    Parameters
    ----------
    inputs : mapping of str to array
        The score and the indices, which broadcast together.
    operands : sequence of arrays
    """

    def __init__(self, inputs: Mapping[str, Array], operands: Sequence[Array]) -> None:
        self._inputs = inputs
        self._operands = operands
        self._values: dict[Node, Any] = {}

    def __call__(self, root: Node) -> Any:
        """Return the value of an expression, which broadcasts to the inputs' shape."""
        with np.errstate(all="ignore"):
            for x in in_order((root,)):
                if x not in self._values:
                    self._values[x] = self._value(x)
        return self._values[root]

    def indices(self, load: Node) -> tuple[Any, ...]:
        """Return the place of an element in its operand, with each index clamped to its axis."""
        shape = self._operands[load.value].shape
        return tuple([np.clip(self(x), 0, size - 1) for x, size in zip(load.args, shape, strict=True)])

    def _value(self, x: Node) -> Any:
        if x.op == "constant":
            return np.dtype(x.dtype).type(x.value)
        if x.op == "input":
            return self._inputs[x.value]
        if x.op == "load":
            return self._operands[x.value][self.indices(x)].astype(x.dtype)
        args = [self._values[arg] for arg in x.args]
        if x.op == "cast":
            return np.asarray(args[0]).astype(x.dtype)
        function = np.where if x.op == "where" else getattr(np, x.op)
        return np.asarray(function(*args)).astype(x.dtype, copy=False)
