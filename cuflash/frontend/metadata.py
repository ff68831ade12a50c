"""Calls are known again by their metadata, so that their launches are repeated without checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cuflash.frontend import own_rules
from cuflash.kept import Kept
from cuflash.problem.attention_problem import Array
from cuflash.problem.checks import MAX_SEED
from cuflash.problem.operands import Metadata


class _HasAddresses(Protocol):
    def pointer(self, x: Array) -> int: ...


# A repetition takes the metadata of a call and returns its results; None, with nothing done, where launches do not fit.
Repeat = Callable[[Metadata], "list[Array | None] | None"]

# Tests set a device here whose arrays are NumPy's.
host_device: _HasAddresses | None = None
_VALUES = (bool, int, float, str, type(None))


def metadata_of(
    what: Any, arrays: Iterable[Array | None], keywords: Mapping[str, Any], targets: Sequence[Array | None] = ()
) -> Metadata | None:
    """Return the metadata of a call of kind `what`; None if it cannot be repeated by addresses alone.

    The addresses are those of `arrays`, `targets` and the arrays among `keywords`, in this order, without the Nones.
    """
    key: list[Any] = [what]
    addresses: list[int] = []
    extras: list[Array] = []
    seed, block_mask, has_rules = None, None, False
    for name, x in keywords.items():
        kind = type(x)
        if name == "dropout_seed" and (kind is int or isinstance(x, np.integer)):
            if not 0 <= x <= MAX_SEED:
                return None
            seed = int(x)
            key += (name, kind)
        elif kind in _VALUES or isinstance(x, np.generic):
            key += (name, kind, x)  # the kind tells apart what compares equal, such as True and 1
        elif name in own_rules.FUNCTIONS:
            has_rules = True
            key.append(name)
        elif name == "operands":
            if x is None:
                continue
            if not isinstance(x, (tuple, list)):
                return None
            key += (name, len(x))
            extras += x
        elif kind is tuple:
            key += (name, repr(x))
        elif name == "block_mask" and hasattr(x, "serial"):
            block_mask = x
            key += (name, x.serial)
        else:
            key.append(name)
            extras.append(x)
    for x in (*arrays, *targets, *extras):
        if x is None:
            key.append(None)
        elif type(x).__module__ == "cupy":
            memory = x.data
            key.append((x.shape, x.strides, x.dtype, memory.device_id))
            addresses.append(memory.ptr)
        elif host_device is not None and type(x) is np.ndarray:
            key.append((x.shape, x.strides, x.dtype, x.flags.writeable))
            addresses.append(host_device.pointer(x))
        else:
            return None
    if has_rules:
        # In every call the first array has q's dtype.
        key.append(own_rules.of_call(next(iter(arrays)), keywords))
    return Metadata(tuple(key), addresses, targets, seed, block_mask)


_repeats: Kept[tuple[Any, ...], Repeat] = Kept()


def address_of(x: Array) -> int:
    """Return the address of an array of a GPU, or of the device that stands for one."""
    if host_device is not None and type(x) is np.ndarray:
        return host_device.pointer(x)
    address: int = x.data.ptr
    return address


def remember(metadata: Metadata, repeat: Repeat) -> None:
    """Let `repeated` know a call."""
    _repeats[metadata.key] = repeat


def recorded(metadata: Metadata | None) -> Repeat | None:
    """Return the repetition of a call, if one with its metadata has been recorded."""
    return None if metadata is None else _repeats.get(metadata.key)


def repeated(metadata: Metadata | None) -> list[Array | None] | None:
    """Return a call's results, if one with its metadata has been recorded."""
    known = recorded(metadata)
    return None if known is None or metadata is None else known(metadata)
