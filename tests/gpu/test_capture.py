"""Captured calls of one capture and stream share scratch memory, and share it with nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from cuflash.gpu import capture


@pytest.fixture(autouse=True)
def _nothing_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_free", {})


def _allocate(size: int) -> tuple[int, Any]:
    memory = bytearray(size)
    return id(memory), memory


def test_later_calls_of_a_capture_take_what_earlier_ones_gave_back() -> None:
    small, large = (capture.take(1, 0, size, _allocate) for size in (100, 1000))
    capture.give_back(1, 0, [large, small])
    assert capture.take(1, 0, 50, _allocate) is small
    assert capture.take(1, 0, 50, _allocate) is large
    assert capture.take(1, 0, 50, _allocate) not in (small, large)


@pytest.mark.parametrize(("number", "stream"), [(2, 0), (1, 7)])
def test_other_captures_and_streams_have_their_own(number: int, stream: int) -> None:
    block = capture.take(1, 0, 100, _allocate)
    capture.give_back(1, 0, [block])
    assert capture.take(number, stream, 100, _allocate) is not block


def test_a_call_without_scratch_memory_gives_nothing_back() -> None:
    capture.give_back(1, 0, [])
    assert capture.take(1, 0, 100, _allocate).size == 100
