"""What every test module uses: the devices of this machine, the tier that runs, why a GPU test is skipped."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import devices
import numpy as np
import pytest
import tiers

# Of the items of this process, or of xdist's workers: how many the quick tier leaves out, and of how many.
_LEFT_OUT: pytest.StashKey[tuple[int, int]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flag that runs the whole suite."""
    parser.addoption(tiers.FLAG, action="store_true", help="run the whole suite (tests/README.md), not the quick tier")


def pytest_configure(config: pytest.Config) -> None:
    """Modules that are imported later know their tier; who names a test or a case gets the whole of it."""
    tiers.choose(config.getoption(tiers.FLAG) or any("::" in arg for arg in config.args))


@pytest.fixture(
    scope="session",  # Hypothesis refuses function-scoped fixtures
    params=[
        pytest.param(device, marks=pytest.mark.gpu if device.name == "cupy" else (), id=device.name)
        for device in devices.available()
    ],
)
def device(request: pytest.FixtureRequest) -> devices.Device:
    """Each device of this machine in turn: NumPy always, CuPy where there is a GPU."""
    chosen: devices.Device = request.param
    return chosen


@pytest.fixture(autouse=True)
def _numbers_of_this_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's `RNG` begins anew for every test: its numbers are the same whichever tests ran before, and where."""
    rng = getattr(request.module, "RNG", None)
    if isinstance(rng, np.random.Generator):
        seed = rng.bit_generator.seed_seq
        assert isinstance(seed, np.random.SeedSequence)
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(seed))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test of a device runs within the device's context, the tests between do not."""
    chosen = getattr(item, "funcargs", {}).get("device")
    with chosen.active() if isinstance(chosen, devices.Device) else nullcontext():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier does not have, skip what is marked ``gpu`` where there is no GPU.

    Where there is one, begin with what takes long there.

    Workers that take few tests at a time (``-n 16 --maxschedchunk 1``, which is two) then all end at about the same
    time: long and short ones stand in turns.
    """
    _leave_out(config, items)
    if devices.has_gpu():
        long = [item for item in items if _takes_long(item)]
        short = [item for item in items if not _takes_long(item)]
        items[:] = [item for pair in zip_longest(long, short) for item in pair if item is not None]
        return
    skip = pytest.mark.skip(reason="no GPU: CuPy is not installed, or cupy.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the quick tier does not have."""
    if tiers.is_whole():
        return
    kept = tiers.quick(items)
    ids = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    config.stash[_LEFT_OUT] = len(items) - len(kept), len(items)
    items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the process that reports what it left out; all leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The process that reports hears of it."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT_OUT] = tuple(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and the flag that runs it."""
    if left_out := config.stash.get(_LEFT_OUT, None):
        cases, of = left_out
        terminalreporter.write_line(f"quick tier: {cases} of {of} cases were left out; {tiers.FLAG} runs them, too")


def _takes_long(item: pytest.Item) -> bool:
    """Whether a test on a GPU has many kernels to compile or starts processes: those of drawn problems and of tools."""
    is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return item.get_closest_marker("gpu") is not None and (
        is_drawn or item.path.stem in ("test_sanitizer", "test_examples")
    )
