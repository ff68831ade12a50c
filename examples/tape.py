"""Reverse-mode automatic differentiation on a tape, small enough to read in one sitting.

A *primitive* is a plain function on arrays that returns its result together with its derivative, as
``cuflash.attention_vjp`` does::

    out, backward = primitive_vjp(*arrays, **options)
    dx, dy, ... = backward(dout)          # one gradient for each array, None for a constant

:func:`primitive` lifts it to :class:`Variable` operands: each call leaves one record on the tape, to which
:meth:`Tape.gradient` applies the chain rule, the last record first. On plain arrays it records nothing, so the same
model code trains and infers. CuPy arrays work, too: NumPy's functions hand them to their own library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray
Backward = Callable[[Array], Sequence[Array | None]]


class Variable:
    """An array whose history is on a tape."""

    __slots__ = ("tape", "value")

    def __init__(self, value: Array, tape: Tape) -> None:
        self.value = value
        self.tape = tape


class Tape:
    """The record of one forward computation, in the order in which it ran."""

    def __init__(self) -> None:
        self._records: list[tuple[Variable, Sequence[Any], Backward]] = []

    def variable(self, value: Array) -> Variable:
        """Wrap an array whose gradient will be wanted."""
        return Variable(value, self)

    def record(self, value: Array, inputs: Sequence[Any], backward: Backward) -> Variable:
        """Note that ``value`` was computed from ``inputs``, and how its gradient flows back to them."""
        output = Variable(value, self)
        self._records.append((output, inputs, backward))
        return output

    def gradient(self, loss: Variable, sources: Sequence[Variable]) -> list[Array]:
        """Gradients of the scalar ``loss`` with respect to ``sources`` (made by :meth:`variable`)."""
        grads: dict[Variable, Array] = {loss: np.ones_like(loss.value)}
        for output, inputs, backward in reversed(self._records):  # all uses of an output come behind it
            dout = grads.pop(output, None)
            if dout is None:
                continue  # the loss does not depend on this output
            for x, dx in zip(inputs, backward(dout), strict=True):
                if isinstance(x, Variable) and dx is not None:
                    grads[x] = grads[x] + dx if x in grads else dx
        return [grads[x] if x in grads else np.zeros_like(x.value) for x in sources]


def primitive(vjp: Callable[..., tuple[Array, Backward]]) -> Callable[..., Any]:
    """Lift ``vjp(*arrays, **options) -> (out, backward)`` to a function of variables (or of plain arrays)."""

    @wraps(vjp)
    def apply(*inputs: Any, **options: Any) -> Any:
        arrays = [x.value if isinstance(x, Variable) else x for x in inputs]
        out, backward = vjp(*arrays, **options)
        tape = next((x.tape for x in inputs if isinstance(x, Variable)), None)
        return out if tape is None else tape.record(out, inputs, backward)

    return apply


@primitive
def add(x: Array, y: Array) -> tuple[Array, Backward]:
    """``x + y`` of equal shapes."""
    return x + y, lambda dout: (dout, dout)


@primitive
def reshape(x: Array, shape: tuple[int, ...]) -> tuple[Array, Backward]:
    """``x`` in another shape."""
    return x.reshape(shape), lambda dout: (dout.reshape(x.shape), None)


@primitive
def linear(x: Array, weight: Array) -> tuple[Array, Backward]:
    """``x @ weight.T`` for ``x`` (..., d_in) and ``weight`` (d_out, d_in)."""
    rows = x.reshape(-1, x.shape[-1])  # one large product; NumPy would loop over the leading axes of x

    def backward(dout: Array) -> tuple[Array, Array]:
        drows = dout.reshape(-1, dout.shape[-1])
        return (drows @ weight).reshape(x.shape), drows.T @ rows

    return (rows @ weight.T).reshape(*x.shape[:-1], -1), backward


@primitive
def embedding(indices: Array, table: Array) -> tuple[Array, Backward]:
    """Rows ``table[indices]`` of a ``table`` (vocabulary, d)."""

    def backward(dout: Array) -> tuple[None, Array]:
        # A product with the one-hot matrix adds up the rows of equal index, in a fixed order on every device.
        one_hot = indices.reshape(-1, 1) == np.arange(len(table), like=indices)
        return None, one_hot.astype(dout.dtype).T @ dout.reshape(-1, dout.shape[-1])

    return table[indices], backward


@primitive
def rms_norm(x: Array) -> tuple[Array, Backward]:
    """``x`` scaled to a root mean square of one along its last axis (Zhang and Sennrich, 2019), without a gain."""
    epsilon = 1e-6  # keeps an all-zero row finite
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)
    out = x * inverse

    def backward(dout: Array) -> tuple[Array]:
        return ((dout - out * np.mean(dout * out, axis=-1, keepdims=True)) * inverse,)

    return out, backward


@primitive
def relu_squared(x: Array) -> tuple[Array, Backward]:
    """``max(x, 0) ** 2`` (So et al., Primer, 2021): as good as GELU in small models, and much cheaper."""
    positive = np.maximum(x, 0)
    return positive * positive, lambda dout: (2 * positive * dout,)


@primitive
def cast(x: Array, dtype: Any) -> tuple[Array, Backward]:
    """``x`` in another floating-point type."""
    return x.astype(dtype, copy=False), lambda dout: (dout.astype(x.dtype, copy=False), None)


@primitive
def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Backward]:
    """Mean of ``-log softmax(logits)[target]`` in nats, for ``logits`` (..., classes) and integer ``targets`` (...)."""
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = np.sum(exponentials, axis=-1, keepdims=True)
    hit = targets[..., None] == np.arange(logits.shape[-1], like=targets)
    loss = np.mean(np.log(sums)) - np.sum(shifted * hit) / targets.size

    def backward(dout: Array) -> tuple[Array, None]:
        return (exponentials / sums - hit) * (dout / targets.size), None

    return loss, backward
