"""Each tier leaves out cases; the quick one touches what the whole does: families, dtypes, options, every value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
from cases import DTYPES, Case
from hypothesis import given
from strategies import OPTIONS, cases, examples

from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.sm90 import backward as sm90_backward

SUPPORT = Path(tiers.__file__).parent
HOPPER_SMEM = 232448
OF_ROWS = listing.of_forward, listing.of_backward, listing.of_wide


def test_a_covering_choice_has_every_feature_and_few_items() -> None:
    pairs = [(a, b) for a in range(4) for b in range(7)]
    chosen = tiers.covering(pairs, lambda pair: enumerate(pair))
    assert {a for a, _ in chosen} == set(range(4)) and {b for _, b in chosen} == set(range(7))
    assert len(chosen) == 7
    assert chosen == sorted(chosen)
    assert tiers.covering([], lambda pair: enumerate(pair)) == []


def numbered(triple: tuple[int, int, int]) -> Iterator[tuple[int, int]]:
    yield from enumerate(triple)


def test_the_whole_suite_has_every_pair_of_features() -> None:
    triples = [(a, b, c) for a in range(4) for b in range(5) for c in range(6)]
    features = tiers.paired(numbered)
    chosen = tiers.covering(triples, features)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(x[first], x[second]) for x in chosen} == {(x[first], x[second]) for x in triples}
    assert len(chosen) < 60, "of 120, and 30 at the least"


def collected(folder: Path, *flags: str) -> dict[str, Any]:
    """Return what a tier touches."""
    file = folder / "touched.json"
    environment = {**os.environ, "CUFLASH_TEST_TOUCHED": str(file), "PYTHONPATH": str(SUPPORT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "touched", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *flags], cwd=SUPPORT.parents[1], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found: dict[str, Any] = json.loads(file.read_text())
    found["cases"] = int(run.stdout.rsplit(" tests collected", 1)[0].rsplit("\n", 1)[-1].split("/")[0])
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiers")
    return collected(folder), collected(folder, tiers.FLAG)


def test_the_quick_tier_has_every_test_and_every_value_of_its_parameters(both: tuple[Any, Any]) -> None:
    quick, whole = both
    assert quick["whole"] == []
    assert quick["tests"] == {test: x for test, x in whole["tests"].items() if test not in whole["whole"]}
    assert 0 < quick["cases"] < whole["cases"]


def test_the_quick_tier_runs_every_family_with_its_dtypes_and_options(both: tuple[Any, Any]) -> None:
    """The families include those of Hopper's tables, which are read here without what the tests make of them."""
    quick, whole = both
    assert quick["records"] == whole["records"]
    of_rows = {x.partition(" ")[2] for x in quick["records"] if "test_cpu_device_rows" in x}
    tables: list[Any] = [
        *listing.kernels(listing.of_portable(HOPPER_SMEM)),
        *(pair for family in OF_ROWS for pair in listing.kernels(family((9, 0), HOPPER_SMEM))),
        *(
            pair
            for family in (
                sm90_listing.of_forward,
                sm90_listing.of_backward,
                sm90_listing.of_split_forward,
                sm90_listing.of_split_backward,
            )
            for pair in listing.kernels(family())
        ),
    ]
    companions = sm90_backward.ROWS, sm90_backward.DQ
    entries = {config.entry for config, _ in tables} - set(companions)
    assert entries
    assert {entry for entry in entries if f"{entry}: head_dim=" not in " ".join(of_rows)} == set()


def test_draws_have_every_dtype_and_option() -> None:
    """Draws have all even with a fifth of the examples, as the properties of the quick tier have."""
    dtypes: set[str] = set()
    options: set[str] = set()

    @examples(200)
    @given(case=cases())
    def draw(case: Case) -> None:
        dtypes.add(case.dtype.name)
        options.update(case.options)

    draw()
    assert dtypes == set(DTYPES)
    assert options == {name for name in OPTIONS if name != "dropout"} | {"dropout_p", "dropout_seed"}
