"""Values and messages become bytes between processes, and bytes become values and messages.

Values are JSON, in which tuples, bytes and dicts are marked: what arrives is data and never code, unlike a pickle.
Arrays are not in the text. An `ArrayRef` stands in their place there, and their bytes follow the text or travel between
GPUs.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from cuflash import interop
from cuflash.distributed.copies import has_wide_rows

Array = Any
HOST, GPU = "host", "gpu"
LEAVES = frozenset({type(None), bool, int, float, str, bytes})  # of values, which need no look inside
NUMBERS = "biufc"  # kinds of dtypes whose bytes are the values


@dataclass(slots=True, unsafe_hash=True)  # frozen ones take thrice as long to make
class ArrayRef:
    """The place of an array in a message; it never changes."""

    where: str  # HOST or GPU
    index: int  # among the message's arrays of that kind
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # of an array that is not contiguous

    @property
    def nbytes(self) -> int:
        """The bytes of the array that this stands for."""
        return prod(self.shape) * interop.dtype_of(self.dtype).itemsize


def encode(value: Any) -> bytes:
    """Write a value as text: None, bools, numbers, strings, bytes, `ArrayRef`, and tuples, lists and dicts of such."""
    return json.dumps(_marked(value), separators=(",", ":")).encode()


def decode(text: bytes) -> Any:
    """Read the value of a text; ValueError where it is none."""
    return _unmarked(json.loads(text))


def mapped(message: Any, change: Callable[[Any], Any]) -> Any:
    """Change every leaf of a message of nested tuples and lists."""
    if isinstance(message, (tuple, list)):
        return type(message)(mapped(part, change) for part in message)
    return change(message)


def detach(message: Any, *, copies_rows: bool = False) -> tuple[Any, list[Array], list[Array], list[ArrayRef]]:
    """Return the message with an `ArrayRef` for each array, its NumPy arrays, its CuPy arrays, and the latter's places.

    All become contiguous, but for those of CuPy that have wide rows where the link `copies_rows`.

    Raises
    ------
    TypeError
        For an array whose bytes mean nothing to another process.
    """
    host: list[Array] = []
    gpu: list[Array] = []
    refs: list[ArrayRef] = []

    def detached(leaf: Any) -> Any:
        kind = type(leaf)
        if kind in LEAVES:
            return leaf
        if issubclass(kind, (tuple, list)):
            return kind([detached(part) for part in leaf])
        where = _where_of(kind)  # type: ignore[arg-type]
        if where is None:
            return leaf
        strides = None
        if not leaf.flags.c_contiguous:
            if where is GPU and copies_rows and has_wide_rows(leaf.shape, leaf.itemsize, leaf.strides):
                strides = leaf.strides
            else:
                leaf = leaf.copy(order="C")
        found = host if where is HOST else gpu
        ref = ArrayRef(where, len(found), _dtype_name(leaf.dtype), leaf.shape, strides)
        found.append(leaf)
        if where is GPU:
            refs.append(ref)
        return ref

    return detached(message), host, gpu, refs


def attach(message: Any, host: list[Array], gpu: list[Array]) -> Any:
    """Undo `detach`."""
    kind = type(message)
    if kind is ArrayRef:
        return (host if message.where == HOST else gpu)[message.index]
    if issubclass(kind, (tuple, list)):
        return kind([attach(part, host, gpu) for part in message])
    return message


def refs_of(message: Any, where: str) -> list[ArrayRef]:
    """Return the places of a message's arrays of one kind, by index."""
    found: list[ArrayRef] = []

    def keep(leaf: Any) -> None:
        if isinstance(leaf, ArrayRef) and leaf.where == where:
            found.append(leaf)

    mapped(message, keep)
    return found


def empty(ref: ArrayRef) -> Array:
    """Allocate a NumPy array for what an `ArrayRef` stands for."""
    return np.empty(ref.shape, interop.dtype_of(ref.dtype))


def bytes_of(x: Array) -> memoryview:
    """View the bytes of a contiguous NumPy array."""
    return memoryview(x.reshape(-1).view(np.uint8))


def no_value(value: Any) -> TypeError:
    """Return the error of what does not travel."""
    return TypeError(
        "value: expected None, bools, numbers, strings, bytes, and tuples, lists and dicts of such, "
        f"got {type(value).__name__}"
    )


@cache
def _where_of(kind: type) -> str | None:
    """Return where arrays of a class are; None of what are no arrays."""
    if issubclass(kind, np.ndarray):
        return HOST
    return GPU if kind.__module__.split(".")[0] == "cupy" else None


@cache
def _dtype_name(dtype: Any) -> str:
    if dtype.name == "bfloat16":
        return "bfloat16"
    if dtype.kind in NUMBERS and dtype.type.__module__ == "numpy":
        name: str = dtype.str  # with its byte order
        return name
    raise TypeError(f"message: expected arrays of numbers or bools, got dtype {dtype}")


def _marked(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, list):
        return [_marked(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [_marked(part) for part in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[_marked(key), _marked(part)] for key, part in value.items()]}
    if isinstance(value, ArrayRef):
        strides = None if value.strides is None else list(value.strides)
        return {"array": [value.where, value.index, value.dtype, list(value.shape), strides]}
    raise no_value(value)


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(part) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"value: expected one mark, got {len(value)}")
    ((mark, held),) = value.items()
    if mark == "tuple":
        return tuple(_unmarked(part) for part in held)
    if mark == "bytes":
        return bytes.fromhex(held)
    if mark == "dict":
        return {_unmarked(key): _unmarked(part) for key, part in held}
    if mark == "array":
        where, index, dtype, shape, strides = held
        lengths = None if strides is None else tuple([int(n) for n in strides])
        return ArrayRef(str(where), int(index), str(dtype), tuple([int(n) for n in shape]), lengths)
    raise ValueError(f"value: expected a mark of this encoding, got {mark!r}")
