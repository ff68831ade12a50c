"""The suite has two tiers: the quick one, which runs unless told otherwise, and the whole (``--all``).

The quick tier has every test, with so many of its cases that every value of every parameter occurs. Where a case is
a record of a table, its test says by the marker ``features`` what has to occur in place of the record itself; what a
test draws is drawn less often, and a test with the marker ``whole`` belongs to the whole suite alone. Nothing of that
is a skip: cases that are left out are deselected, and a line at the end counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import pytest

Item = TypeVar("Item")
FLAG = "--all"

_is_whole = False


def choose(is_whole: bool) -> None:
    """Say which tier runs, before any test module is imported."""
    global _is_whole
    _is_whole = is_whole


def is_whole() -> bool:
    """Return True if the whole suite runs."""
    return _is_whole


def covering(items: Sequence[Item], features: Callable[[Item], Iterable[Hashable]]) -> list[Item]:
    """Return a few of the items in which every feature of any of them occurs, in their order.

    The choice is greedy: the next item is the first of those with the most features that have not occurred.
    """
    missing = [set(features(item)) for item in items]
    chosen = set()
    while any(missing):
        best = max(range(len(items)), key=lambda i: len(missing[i]))
        chosen.add(best)
        found = set(missing[best])
        for of_item in missing:
            of_item -= found
    return [item for i, item in enumerate(items) if i in chosen]


def some(items: Sequence[Item], features: Callable[[Item], Iterable[Hashable]]) -> list[Item]:
    """Return the items of a loop within a test: all in the whole suite, a covering choice in the quick tier."""
    return list(items) if is_whole() else covering(items, features)


def features_of(item: pytest.Item) -> set[Hashable]:
    """Return what has to occur of a test's case: each row of its lists of parameters or the features it names."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {"the test"}
    named = item.get_closest_marker("features")
    if named is not None:
        return set(named.kwargs["of"](callspec.params))
    lists = [argnames_of(mark.args[0]) for mark in item.iter_markers("parametrize")]
    lists += [(name,) for name in callspec.params if not any(name in names for names in lists)]  # of fixtures
    # A value stands for itself by its identity, as it may be no key of a dictionary.
    return {(names, *(id(callspec.params[name]) for name in names)) for names in lists}


def argnames_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names that a list of parameters is for."""
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)


def is_of_whole(item: pytest.Item) -> bool:
    """Return True if the test belongs to the whole suite alone."""
    return item.get_closest_marker("whole") is not None


def group_of(item: pytest.Item) -> Hashable:
    """Return the test that a case belongs to; cases on a GPU, which may be skipped, stand for no others."""
    return item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None


def quick(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items of the quick tier, in their order."""
    groups: dict[Hashable, list[pytest.Item]] = {}
    for item in items:
        if not is_of_whole(item):
            groups.setdefault(group_of(item), []).append(item)
    kept = {id(item) for group in groups.values() for item in covering(group, features_of)}
    return [item for item in items if id(item) in kept]
