"""Every run of a tier tries the same drawn examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import strategies
import tiers
from hypothesis import given
from hypothesis import strategies as st

LONG = tiers.PROFILE == "long"


def drawn() -> list[int]:
    """Return the examples that a property is tried on."""
    numbers: list[int] = []

    @strategies.examples(200)
    @given(number=st.integers(0, 2**32 - 1))
    def property_(number: int) -> None:
        numbers.append(number)

    property_()
    return numbers


@pytest.mark.skipif(LONG, reason="the long profile draws anew")
def test_examples_do_not_depend_on_what_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    source = tmp_path / "further.py"
    source.write_text(f"NUMBERS = {list(range(1_000_000, 1_000_500))}\n")
    spec = importlib.util.spec_from_file_location("further", source)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "further", importlib.util.module_from_spec(spec))
    assert drawn() == before
