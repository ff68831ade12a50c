"""One line says what keeps the CPU device from running, and is the reason with which its tests are skipped."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
from cpu_device import build, device

pytestmark = pytest.mark.skipif(
    (platform.machine(), platform.system()) != ("x86_64", "Linux"), reason="the CPU device runs on x86-64 Linux alone"
)


@pytest.fixture(autouse=True)
def found_anew() -> Iterator[None]:
    build.obstacle.cache_clear()
    yield
    build.obstacle.cache_clear()


def test_headers_that_are_absent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `test` alone gives headers of the compiler's own part and of the C++ library."""
    monkeypatch.setattr(build, "compiler", lambda: ("g++",))
    monkeypatch.setattr(build, "_folders", lambda: ())
    with pytest.raises(device.DeviceError, match=r"CUDA's headers \(vector_types.h, .*\): pip install .*cuda13"):
        device.compile('extern "C" __global__ void k() {}')
    assert not device.available() and "\n" not in build.obstacle()


def test_a_compiler_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: ())
    assert not device.available() and "apt install g++" in build.obstacle() and "\n" not in build.obstacle()


def test_skips_have_the_reason() -> None:
    assert build.obstacle() == device.NO_COMPILER
    assert device.available() == (not device.NO_COMPILER)
