"""Calls on NumPy arrays are known again by all that the checks look at, so that only their arrays are looked at anew.

The checks of a short call, and making its problem, take as long as its arithmetic. Results are those of the first call,
as both compute the same problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cuflash.frontend import metadata
from cuflash.frontend.call import Call, backend_of
from cuflash.kept import Kept
from cuflash.problem.attention_problem import Array, AttentionProblem
from cuflash.problem.operands import Operands

# Options that are arrays, and are used as they are given where their last axis is contiguous.
_ARRAYS = frozenset(("kv_lengths", "block_table"))
_VALUES = frozenset((bool, int, float, str, type(None)))

Key = tuple[Any, ...]


class _Known(NamedTuple):
    problem: AttentionProblem
    dtype: Any  # of the result


_known: Kept[Key, _Known] = Kept()


def key_of(inputs: tuple[Array, ...], options: Mapping[str, Any]) -> Key | None:
    """Return a key of padded arrays and options; None if there is more to a call than NumPy's arrays and numbers."""
    q, k, v = inputs
    if type(q) is not np.ndarray or type(k) is not np.ndarray or type(v) is not np.ndarray:
        return None
    if metadata.host_device is not None:
        return None
    of_inputs = q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype
    if not options:
        return of_inputs
    key: list[Any] = [of_inputs]
    for name, x in options.items():
        kind = type(x)
        if kind in _VALUES:
            key += (name, kind, x)  # the kind tells apart what compares equal, such as True and 1
        elif name in _ARRAYS and kind is np.ndarray:
            key += (name, x.shape, x.strides, x.dtype)
        elif name == "window" and kind is tuple:
            key += (name, repr(x))
        else:
            return None
    return tuple(key)


def remember(key: Key, call: Call, inputs: tuple[Array, ...], options: Mapping[str, Any], dtype: Any) -> None:
    """Let `forward` know a call whose result has this dtype, if its arrays are used as they are given."""
    if all(used is x for used, x in zip(call.operands, _operands(inputs, options), strict=True)):
        _known[key] = _Known(call.problem, dtype)


def forward(key: Key, inputs: tuple[Array, ...], options: Mapping[str, Any], with_lse: bool) -> Any:
    """Return out and lse, None if it is not wanted; None instead of both if the call is not known."""
    known = _known.get(key)
    if known is None:
        return None
    problem = known.problem
    operands = _operands(inputs, options)
    out = np.empty(problem.out_shape, known.dtype)
    lse = np.empty(problem.lse_shape, problem.accum_dtype) if with_lse else None
    backend_of(True).forward(problem, operands, out, lse)
    return out, lse


def _operands(inputs: tuple[Array, ...], options: Mapping[str, Any]) -> Operands:
    q, k, v = inputs
    if not options:
        return Operands(q, k, v)
    return Operands(q, k, v, kv_lengths=options.get("kv_lengths"), block_table=options.get("block_table"))
