"""Values become bytes between processes of one host, some ten times as fast as they become the text of `wire`.

The bytes are those of Python's marshal for plain objects. Nothing that `pack` takes is code, and reading executes
nothing, but whoever writes other bytes can crash the reader: they go through memory that only the user's processes see.
"""

from __future__ import annotations

import marshal
import numbers
from typing import Any

import numpy as np

from cuflash.distributed import wire
from cuflash.distributed.wire import LEAVES, ArrayRef

VERSION = 2  # later ones look for objects that are met twice, which costs time


def pack(value: Any) -> bytes:
    """Write what `wire.encode` takes, or raise its TypeError."""
    refs: list[ArrayRef] = []
    plain = _plain(value, refs, {})
    return marshal.dumps((plain, [(x.where, x.index, x.dtype, x.shape, x.strides) for x in refs]), VERSION)


def unpack(data: bytes | memoryview) -> Any:
    """Read what `pack` wrote; bytes behind it do no harm."""
    plain, refs = marshal.loads(data)
    return _restored(plain, [ArrayRef(*fields) for fields in refs]) if refs else plain


def _plain(value: Any, refs: list[ArrayRef], known: dict[int, int]) -> Any:
    """Return a value of Python's own types, in which ``(..., n)`` stands for the n-th `ArrayRef`."""
    kind = type(value)
    if kind in LEAVES:
        return value
    if kind is tuple or kind is list:
        if LEAVES.issuperset(map(type, value)):
            return value
        return kind([_plain(part, refs, known) for part in value])
    if kind is ArrayRef:
        number = known.setdefault(id(value), len(refs))
        if number == len(refs):
            refs.append(value)
        return ..., number
    if isinstance(value, dict):
        return {_plain(key, refs, known): _plain(part, refs, known) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, refs, known) for part in value]
    if isinstance(value, tuple):
        return tuple([_plain(part, refs, known) for part in value])
    return _leaf(value)


def _leaf(value: Any) -> Any:
    """Return a number of NumPy's, or an object of a class derived from one of Python's, as Python's own."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, bytes):
        return bytes(value)
    raise wire.no_value(value)


def _restored(plain: Any, refs: list[ArrayRef]) -> Any:
    kind = type(plain)
    if kind is tuple:
        if LEAVES.issuperset(map(type, plain)):
            return plain
        if plain[0] is ...:
            return refs[plain[1]]
        return tuple([_restored(part, refs) for part in plain])
    if kind is list:
        return [_restored(part, refs) for part in plain]
    if kind is dict:
        return {_restored(key, refs): _restored(part, refs) for key, part in plain.items()}
    return plain
