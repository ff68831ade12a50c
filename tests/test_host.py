"""What a repeated call costs the host before its first launch: whichever options it has, no more than looking it up."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "benchmarks" / "host.py"
# A repeated call is to cost tens of microseconds; ten times that is a cache that does not serve.
FORWARD_MICROSECONDS, BACKWARD_MICROSECONDS = 300, 1000
# Of the plain call's, at most: a given result is held against the other arrays, a seed and a mask are looked at.
VARIANT_SHARE = 2.5
# Whatever else the machine does slows some measurements down, and none speeds up: the least of a few is the cost.
TRIALS = 5


@pytest.fixture(scope="module")
def host() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_host_costs_before_the_launch(host: ModuleType) -> None:
    least: dict[str, float] = {}
    for _ in range(TRIALS):
        for name, cost in host.host_costs(np).items():
            least[name] = min(cost, least.get(name, cost))
        dear = too_dear(least, host.VARIANTS)
        if not dear:
            break
    assert not dear, least
    assert len(least) == 2 * len(host.VARIANTS)


def too_dear(costs: dict[str, float], variants: tuple[str, ...]) -> list[str]:
    """The calls that cost more than they may."""
    most = {}
    for name, of_plain in (("forward", FORWARD_MICROSECONDS), ("backward", BACKWARD_MICROSECONDS)):
        of_variants = VARIANT_SHARE * costs[f"{name}_before_launch"]
        most.update({f"{name}{variant}_before_launch": of_variants if variant else of_plain for variant in variants})
    return [name for name, limit in most.items() if costs[name] >= limit]
