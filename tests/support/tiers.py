"""The suite has two tiers: the quick one, which runs unless told otherwise, and the whole (``--all``).

Both have every test. The quick tier has so many of a test's cases that every value of every parameter occurs, the
whole suite so many that every two values of two parameters occur together (pairwise testing), and the profile ``long``
(``CUFLASH_TEST_PROFILE``) has all. Where a case is a record of a table, its test says by the marker ``features`` what
has to occur in place of the record itself. What a test draws is drawn less often in the quick tier, and a test with the
marker ``whole`` is left out there. Nothing of that is a skip: cases that are left out are deselected, and a line at the
end counts them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain, combinations
from typing import TypeVar

import pytest

Item = TypeVar("Item")
FLAG = "--all"

PROFILE = os.environ.get("CUFLASH_TEST_PROFILE", "")
assert PROFILE in ("", "long"), f"CUFLASH_TEST_PROFILE: expected long or nothing, got {PROFILE}"

_is_whole = False
_is_named = False


def choose(is_whole: bool, is_named: bool) -> None:
    """Say which tier runs, and whether tests were named, before any test module is imported."""
    global _is_whole, _is_named
    _is_whole, _is_named = is_whole or is_named, is_named


def is_whole() -> bool:
    """Return True if the whole suite runs."""
    return _is_whole


def has_every_case() -> bool:
    """Return True if no case is left out: of tests that were named, and in the profile ``long``."""
    return _is_named or PROFILE == "long"


def covering(
    items: Sequence[Item], features: Callable[[Item], Iterable[Hashable]], beside: Iterable[Item] = ()
) -> list[Item]:
    """Return a few of the items in which, and in those beside, every feature of any item occurs, in their order.

    The choice is greedy: the next item is the first of those with the most features that have not occurred.
    """
    bits: dict[Hashable, int] = {}
    known = set(chain.from_iterable(map(features, beside)))
    missing = [sum({1 << bits.setdefault(x, len(bits)) for x in features(i) if x not in known}) for i in items]
    chosen = set()
    while any(missing):
        best = max(range(len(items)), key=lambda i: missing[i].bit_count())
        chosen.add(best)
        found = missing[best]
        missing = [of_item & ~found for of_item in missing]
    return [item for i, item in enumerate(items) if i in chosen]


def paired(features: Callable[[Item], Iterable[Hashable]]) -> Callable[[Item], Iterable[Hashable]]:
    """Return the features of an item together with all pairs of them."""

    def singles_and_pairs(item: Item) -> Iterable[Hashable]:
        of_item = set(features(item))
        return [*of_item, *map(frozenset, combinations(of_item, 2))]

    return singles_and_pairs


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


def kept(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items of the tier that runs, in their order."""
    if has_every_case():
        return list(items)
    groups: dict[Hashable, list[pytest.Item]] = {}
    for item in items:
        if is_whole() or not is_of_whole(item):
            groups.setdefault(group_of(item), []).append(item)
    features = paired(features_of) if is_whole() else features_of
    of_tier = {id(item) for group in groups.values() for item in covering(group, features)}
    return [item for item in items if id(item) in of_tier]
