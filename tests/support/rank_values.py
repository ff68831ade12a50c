"""Values that ranks tell each other, for tests of how these become bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.tuples(st.integers()), inner)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return True for values that are equal and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)
