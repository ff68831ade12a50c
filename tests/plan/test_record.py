"""Records of the tables become a problem's candidates, the fastest first, and every one of them is of use."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from compiling import ARCHITECTURES

from cuflash.hardware import capability_of, smem_limit
from cuflash.plan.config import KNOWN_TO_ALL, OF_RULES
from cuflash.plan.listing import families as listing
from cuflash.plan.listing import sm90 as sm90_listing
from cuflash.plan.record import (
    ANY_ONE,
    ANYTHING,
    BLACKWELL,
    PLAIN,
    UNALIGNED,
    UNUSUAL_SCALE,
    Place,
    Record,
    Takes,
    asked_of_scaled,
    candidates,
    narrowest,
    one_of,
)
from cuflash.plan.sm80 import backward as sm80_backward
from cuflash.plan.sm80 import forward as sm80_forward
from cuflash.plan.sm80 import fp8 as sm80_fp8
from cuflash.plan.sm80 import tiles as sm80_tiles
from cuflash.plan.sm80 import times as sm80_times
from cuflash.plan.sm80 import wide_tiles as sm80_wide_tiles
from cuflash.plan.sm80.tiles import Sm80Tile
from cuflash.plan.sm90 import backward as sm90_backward
from cuflash.plan.sm90 import backward_tiles as sm90_backward_tiles
from cuflash.plan.sm90 import forward as sm90_forward
from cuflash.plan.sm90 import grid as sm90_grid
from cuflash.plan.sm90 import tiles as sm90_tiles

A100 = Place(True, (8, 0), smem_limit("sm_80"))


def tiles_of(problem: Any, place: Place = A100) -> list[str]:
    return [config.tile for config in sm80_forward.forward(problem, *place)]


@pytest.mark.parametrize(
    ("takes", "asked", "expected"),
    [
        (PLAIN, set(), True),
        (PLAIN, {"has_bias"}, False),
        (ANY_ONE, {"has_bias"}, True),
        (ANY_ONE, {"has_bias", "has_mask"}, False),
        (ANY_ONE, {UNALIGNED}, False),
        (ANY_ONE, {"has_mask_mod", "has_block_mask"}, True),  # the block mask is the rule's own
        (one_of("has_mask"), {"has_bias"}, False),
        (ANYTHING, {*KNOWN_TO_ALL, UNALIGNED, UNUSUAL_SCALE}, True),
        (replace(ANYTHING, least=1), set(), False),
        (replace(ANYTHING, lacks=(UNALIGNED,)), {UNALIGNED}, False),
        (ANYTHING, {"has_unknown"}, True),
    ],
)
def test_what_a_record_takes(takes: Takes, asked: set[str], expected: bool) -> None:
    assert takes.all_of(asked) is expected


def test_candidates_stand_in_the_order_of_their_times_each_once() -> None:
    lines = [Record(n) for n in (3, 1, 2, 1)] + [Record(0, PLAIN), Record(4, below=BLACKWELL), Record(5)]
    found = candidates(lines, {"has_bias"}, BLACKWELL, lambda line: line.tile < 5, lambda line: -line.tile)
    assert [line.tile for line in found] == [3, 2, 1]


def test_the_narrowest_head_dims_that_hold_a_problem() -> None:
    def dims(*of: int) -> set[tuple[int, int]]:
        return {(line.head_dim, line.head_dim_v) for line in narrowest(sm80_tiles.FORWARD, *of)}

    assert dims(1, 64) == {(64, 64)} and dims(65, 1) == {(96, 96)}
    assert dims(129, 128) == {(192, 128)} and dims(129, 129) == {(192, 192)}
    assert dims(257, 1) == set()


def test_a_scale_and_strides_take_registers_as_options_do() -> None:
    problem = listing.problem_of("float16", 64, 64, ("has_window", "has_mask"), softmax_scale=-1.0)
    assert asked_of_scaled(problem, A100._replace(aligned=False)) == {"has_mask", UNALIGNED, UNUSUAL_SCALE}
    plain = replace(problem, mask=None, softmax_scale=0.125)
    assert tiles_of(problem) == tiles_of(plain, A100._replace(aligned=False)) == ["64x32"]
    assert tiles_of(plain)[:2] == ["128x128", "128x64"]


def test_predicted_times_keep_the_order_of_the_tables() -> None:
    """The tiles of a table, the fastest first, are in the order of the predicted times."""

    def order(*lines: Record[Sm80Tile]) -> list[Sm80Tile]:
        shuffled = random.Random(0).sample(lines, len(lines))
        return [line.tile for line in sorted(shuffled, key=sm80_times.of_queries)]

    half = [Sm80Tile(128, 64, 4, 2, 2), Sm80Tile(128, 64, 4, 1, 2), Sm80Tile(128, 32, 4, 1, 2), Sm80Tile(64, 64, 4)]
    half += [Sm80Tile(64, 32, 4, 1, 2), Sm80Tile(64, 32, 4), Sm80Tile(32, 32, 2)]
    assert order(*(Record(tile, kind="half") for tile in half)) == half
    whole = [Sm80Tile(64, 16, 4, 1, 2), Sm80Tile(64, 32, 4)]
    assert order(*(Record(tile, kind="float64") for tile in whole)) == whole


def without_cluster(line: Record[Any]) -> Record[Any]:
    """Return the line of the table from which a line for a cluster was made."""
    if not isinstance(line.tile, sm80_tiles.Sm80BackwardTile):
        return line
    return replace(line, tile=replace(line.tile, cluster_keys=1, cluster_queries=1, adds_apart=False))


def test_every_record_of_16_bits_is_a_candidate_of_a_listed_problem() -> None:
    found: set[Any] = set()

    def note(lines: Any, *given: Any) -> Any:
        chosen = candidates(lines, *given)
        found.update(chosen, map(without_cluster, chosen))
        return chosen

    with pytest.MonkeyPatch.context() as patched:
        for module in (sm80_forward, sm80_backward):
            patched.setattr(module, "candidates", note)
        for plan in (sm80_forward.forward, sm80_fp8.forward, sm80_backward.backward):
            plan.cache_clear()
        for plan in (sm80_backward.of_queries, sm80_backward.of_bias, sm80_backward.all_keys):
            plan.cache_clear()
        for arch in ARCHITECTURES:
            place = capability_of(arch), smem_limit(arch)
            for family in (listing.of_forward, listing.of_backward, listing.of_fp8):
                assert list(family(*place)) or place[0] < (8, 0)
    tables: tuple[Any, ...] = sm80_tiles.FORWARD, sm80_tiles.BACKWARD, sm80_tiles.FP8
    tables += sm80_tiles.OF_QUERIES, sm80_tiles.OF_BIAS, sm80_tiles.ALONE, sm80_tiles.IN_CLUSTERS
    assert [line for table in tables for line in table if line not in found] == []


def test_every_record_of_hoppers_forward_pass_is_the_first_of_a_listed_problem() -> None:
    """Behind lines that take anything there are those that only a kernel which spills asks for."""
    found: set[Any] = set()

    def note(lines: Any, asked: Any) -> Any:
        chosen = taken(lines, asked)
        found.update(chosen[:1])
        return chosen

    taken = sm90_forward.taken
    sm90_grid.for_grid.cache_clear()
    with mock.patch.object(sm90_forward, "taken", note):
        configs = [config for config, _ in listing.kernels(sm90_listing.of_forward())]
    assert any(config.copies_rows for config in configs)
    for head_dims in sm90_tiles.HEAD_DIMS:
        lines = [
            replace(line, head_dim=line.most_columns, head_dim_v=line.most_columns)
            if line.most_columns < max(head_dims)
            else line
            for line in narrowest(sm90_tiles.FORWARD, *head_dims)
        ]
        general = lines[: [line.takes for line in lines].index(ANYTHING) + 1]
        assert [line for line in general if line not in found and sm90_tiles.COPIED_ROWS not in line.needs] == []
        assert {line.takes for line in lines[len(general) :]} <= {ANYTHING}


def test_every_tile_of_hoppers_gradients_comes_first_for_a_listed_problem() -> None:
    found: set[Any] = set()
    tables = sm90_backward_tiles.NARROW_TABLE, sm90_backward_tiles.WIDE_TABLE

    def key(line: Any) -> Any:
        """Return a line's tile with the head dims that its table has, as its own may be narrower."""
        (table,) = (table for table in tables if table[0].entries == line.entries)
        widest = narrowest(table, line.head_dim, line.head_dim_v)[0]
        return line.entries, widest.head_dim, widest.head_dim_v, line.tile

    def note(*given: Any) -> Any:
        chosen = candidates(*given)
        found.update(map(key, chosen[:1]))
        return chosen

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sm90_backward, "candidates", note)
        sm90_backward.backward.cache_clear()
        assert list(listing.kernels(sm90_listing.of_backward()))
    listed = [line for table in tables for line in table if {*OF_RULES}.isdisjoint(line.needs)]
    assert set(map(key, listed)) == found


def test_every_kind_of_products_has_records_of_every_pass() -> None:
    for table in (sm80_wide_tiles.FORWARD, sm80_wide_tiles.BACKWARD, sm80_wide_tiles.BIAS):
        assert {kind: {line.kind for line in lines} for kind, lines in table.items()} == {k: {k} for k in table}


def test_sets_of_options_are_drawn_alike_in_every_process() -> None:
    code = "from cuflash.plan.listing import families; print(families.option_sets('a kernel', ()))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{listing.option_sets('a kernel', ())}\n"}
