"""The benchmark of few queries: its pools and masks are the same problem as its contiguous keys."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("few_queries")


@pytest.mark.parametrize("sizes", [(4, 2, 32, 2, 3, 40), (3, 1, 64, 1, 7, 300)])
def test_pages_and_masks_are_the_contiguous_problem(script: ModuleType, sizes: tuple[int, ...]) -> None:
    arrays = script.Arrays(script.Cell(*sizes), np, 0)
    assert script.check(arrays) <= script.LARGEST_DIFFERENCE
    results = {name: np.asarray(call()) for name, call in script.calls_of(arrays)}
    assert len({x.shape for x in results.values()}) == 1
    mask = arrays.tree_mask()
    assert mask[..., : -sizes[4]].all()
    assert not np.triu(mask[..., -sizes[4] :], 1).any()


def test_cells_are_drawn_behind_the_first_ones(script: ModuleType) -> None:
    cells = script.cells(3, 60)
    assert tuple(cells[: len(script.FIRST)]) == script.FIRST
    assert cells != script.cells(4, 60)
    assert all(1 <= cell.queries <= 64 and cell.key_bytes <= script.MOST_BYTES for cell in cells)
