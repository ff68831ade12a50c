"""One call of append_kv: arguments of any library in, the rotated queries as the caller's kind of array out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash import interop
from cuflash.frontend import call
from cuflash.kept import Kept
from cuflash.problem.append import AppendProblem, make_append_problem
from cuflash.problem.attention_problem import Array
from cuflash.problem.overlap import Distances, check_written

_CACHES = ("k_cache", "v_cache")


class _Checked(NamedTuple):
    """The result of the checks for one combination of metadata."""

    problem: AppendProblem
    library: interop.Library
    # Places of a cache and another array among the arrays, and the distances at which these share nothing.
    distances: tuple[tuple[int, int, Distances], ...]


# The checks read metadata, and the distances of the caches from all else, so that a repeated call costs one look-up.
_checked: Kept[Any, _Checked] = Kept()


def append(given: dict[str, Any], interleaved: bool) -> Any:
    """Write the new rows into the caches, and return the rotated q, or None without q.

    `given` has append_kv's arguments by name, but for those that are None; cos and sin are those of `rotary`.
    """
    key = None
    if interop.are_own(given.values()):
        key = interleaved, tuple([(name, *_signature(x)) for name, x in given.items()])
        checked = _checked.get(key)
        if checked is not None:
            _check_addresses(checked, given)
            return _run(checked.problem, checked.library, given)
    for name in _CACHES:
        library = interop.library_of(name, given[name])
        if library.name in interop.IMMUTABLE:
            raise TypeError(
                f"{name}: expected an array that can be written in place, got one of {library.name}, whose arrays are "
                "immutable: keep the cache in NumPy or CuPy arrays"
            )
    library = interop.library_of("k", given["k"])
    arrays = interop.adopt_all(library, given)
    problem = make_append_problem(arrays, interleaved)
    for name in _CACHES:
        _check_cache(name, arrays)
    if key is not None:
        _checked[key] = _Checked(problem, library, _distances(arrays))
    return _run(problem, library, arrays)


def _run(problem: AppendProblem, library: interop.Library, arrays: dict[str, Array]) -> Any:
    k, q = arrays["k"], arrays.get("q")
    with interop.on_stream_of(library, k):
        q_out = None if q is None else interop.namespace_of(k).empty(q.shape, q.dtype)
        call.backend_of(isinstance(k, np.ndarray)).append(problem, arrays, q_out)
        return None if q_out is None else library.release(q_out)


def _signature(x: Array) -> tuple[Any, ...]:
    """Return everything about an argument that the checks look at, but for its address."""
    if isinstance(x, np.ndarray):
        return x.shape, x.strides, x.dtype
    return x.shape, x.strides, x.dtype, x.data.device_id


def _check_cache(name: str, arrays: dict[str, Array]) -> None:
    check_written(name, arrays[name], {other: x for other, x in arrays.items() if other != name})


def _distances(arrays: dict[str, Array]) -> tuple[tuple[int, int, Distances], ...]:
    """Return the distances of each cache from every other array; empty arrays share nothing anywhere."""
    names = list(arrays)
    return tuple(
        (names.index(cache), place, Distances.between(arrays[cache], x))
        for cache in _CACHES
        for place, (name, x) in enumerate(arrays.items())
        if name != cache and x.size and arrays[cache].size
    )


def _check_addresses(checked: _Checked, arrays: dict[str, Array]) -> None:
    """Raise ValueError for a cache that cannot be written or shares memory with another array."""
    addresses = [_address(x) for x in arrays.values()]
    for name in _CACHES:
        x = arrays[name]
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            _check_cache(name, arrays)
    for cache, other, distances in checked.distances:
        if not distances.allow(addresses[cache] - addresses[other]):
            _check_cache(list(arrays)[cache], arrays)


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data.ptr
    return address
