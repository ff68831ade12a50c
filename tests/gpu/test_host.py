"""A repeated call costs the host no more before its first launch than looking it up, whichever options it has."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import load_script

# A repeated call is to cost tens of microseconds; ten times as many show a cache that does not serve.
FORWARD_MICROSECONDS, BACKWARD_MICROSECONDS = 300, 1000
# A variant may cost so many times the plain call, as a given result, a seed or a mask is looked at.
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
