"""The benchmark of few queries: its pools and masks are the same problem as its contiguous keys."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import load_script

from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.problem.attention_problem import AttentionProblem


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


def test_drawn_problems_hold_results_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds nothing wrong with 16-bit results of the CPU, and sees a planted error."""
    check = load_script("few_queries_check")
    for seed in (0, 1, 2, 3, 11, 14, 17):
        assert check.wrong(seed, np) == ""
    drawn = [check.drawn(seed) for seed in range(40)]
    assert {x.packed for x in drawn} == {"block_table" in x.options for x in drawn} == {False, True}
    monkeypatch.setattr(check.inputs, "as_float64", lambda x: np.asarray(x).astype(np.float64) + 0.5)
    assert "out is off by 0.5" in check.wrong(0, np)


def test_the_first_look_times_what_its_cells_say(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers repeat, and its pages are its rows; heads are apart within `gathered` alone."""
    quick = load_script("few_queries_quick")
    cell = quick.Cell(4, 2, 32, 2, 3, 300)
    assert len(quick.cells(1)) == len(quick.FIRST) + quick.DRAWN
    asked = AttentionProblem(1, 4, 512, 8, 2, 64, 64, "bfloat16")
    seen = []

    def microseconds(call: Any, xp: Any) -> float:
        config = sm90_forward.forward(asked, ())
        assert config is not None
        seen.append((np.asarray(call()).astype(np.float32), config.packs_heads))
        return 2.0

    monkeypatch.setattr(quick, "microseconds", microseconds)
    rows = list(quick.rows_of(cell, np))
    assert [name for name, *_ in rows] == ["rows", *(f"page {size}" for size in quick.PAGE_SIZES)]
    assert [other for *_, other in rows] == [2.0, None, None, None, 2.0]
    assert [packs for _, packs in seen] == [True, False, True, True, True, True, False]
    for out, _ in seen:
        np.testing.assert_allclose(out, seen[0][0], atol=script.LARGEST_DIFFERENCE)
    assert np.ptp(seen[0][0]) > 0.01
