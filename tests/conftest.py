"""Fixtures and hooks of every test module: devices of this machine, the tier that runs, skipped GPU tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import devices
import numpy as np
import pytest
import tiers

# The tier leaves out so many of so many items, of this process or of xdist's workers.
_LEFT_OUT: pytest.StashKey[tuple[int, int]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that runs the whole suite."""
    parser.addoption(tiers.FLAG, action="store_true", help="run the whole suite (tests/README.md), not the quick tier")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the tier to modules that are imported later; a test or case that is named runs as a whole."""
    tiers.choose(config.getoption(tiers.FLAG), any("::" in arg for arg in config.args))


@pytest.fixture(
    scope="session",  # Hypothesis refuses function-scoped fixtures
    params=[
        pytest.param(device, marks=pytest.mark.gpu if device.name == "cupy" else (), id=device.name)
        for device in devices.available()
    ],
)
def device(request: pytest.FixtureRequest) -> devices.Device:
    """Give each device of this machine in its order: NumPy always, CuPy where there is a GPU."""
    chosen: devices.Device = request.param
    return chosen


@pytest.fixture(scope="module", autouse=True)
def _one_thread_of_blas(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give BLAS one thread, except in ``cpu/``, whose tests look at BLAS's threads."""
    with nullcontext() if request.path.parent.name == "cpu" else devices.one_thread_of_blas():
        yield


@pytest.fixture(autouse=True)
def _numbers_of_this_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a module's `RNG` anew for every test, so that its numbers do not depend on the tests that ran before."""
    rng = getattr(request.module, "RNG", None)
    if isinstance(rng, np.random.Generator):
        seed = rng.bit_generator.seed_seq
        assert isinstance(seed, np.random.SeedSequence)
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(seed))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test of a device within the device's context, and the tests between without one."""
    chosen = getattr(item, "funcargs", {}).get("device")
    with chosen.active() if isinstance(chosen, devices.Device) else nullcontext():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out items that the tier does not have, and skip items marked ``gpu`` where there is no GPU.

    Items that take long on a GPU come first where there is one.

    Workers that take few tests at a time (``-n 16 --maxschedchunk 1``, which is two) then all end at about the same
    time, as long and short ones alternate.
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
    """Deselect items that the tier does not have."""
    kept = tiers.kept(items)
    ids = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    config.stash[_LEFT_OUT] = len(items) - len(kept), len(items)
    items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that reports what this worker of xdist left out; all workers leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take in, as the process that reports, what the workers left out."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT_OUT] = tuple(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how much was left out, and what runs more."""
    left_out = config.stash.get(_LEFT_OUT, None)
    if left_out and left_out[0]:
        cases, of = left_out
        tier, more = ("whole suite", "CUFLASH_TEST_PROFILE=long") if tiers.is_whole() else ("quick tier", tiers.FLAG)
        terminalreporter.write_line(f"{tier}: {cases} of {of} cases were left out; {more} runs more")


def _takes_long(item: pytest.Item) -> bool:
    """Return True if a test on a GPU compiles many kernels or starts processes, as with drawn problems and tools."""
    is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return item.get_closest_marker("gpu") is not None and (
        is_drawn or item.path.stem in ("test_sanitizer", "test_examples")
    )
