"""What a repeated call costs the host before its first launch: whichever options it has, no more than looking it up."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import load_script

# A repeated call is to cost tens of microseconds; ten times that is a cache that does not serve.
FORWARD_MICROSECONDS, BACKWARD_MICROSECONDS = 300, 1000
# Of the plain call's, at most: a given result is held against the other arrays, a seed and a mask are looked at.
VARIANT_SHARE = 2.5


@pytest.fixture(scope="module")
def host() -> ModuleType:
    return load_script("host")


def test_host_costs_before_the_launch(host: ModuleType) -> None:
    costs = host.host_costs(np)
    for name, most in (("forward", FORWARD_MICROSECONDS), ("backward", BACKWARD_MICROSECONDS)):
        plain = costs.pop(f"{name}_before_launch")
        assert plain < most
        for variant in host.VARIANTS[1:]:
            assert costs.pop(f"{name}{variant}_before_launch") < VARIANT_SHARE * plain, variant
    assert not costs
