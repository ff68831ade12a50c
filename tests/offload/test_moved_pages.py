"""Which pages leave the device, in what order they are copied, and drawn histories of caches with host pages."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_pages import (
    HEADS_Q,
    LAYERS,
    PAGE,
    WIDTH,
    LazyMover,
    Pair,
    compare,
    late,
    state,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_device import LazyDevice
from numpy.typing import NDArray

from cuflash.offload import pools, tiers
from cuflash.offload.pools import GpuMover
from cuflash.pages import Pages

Array = NDArray[Any]
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)


def test_the_coldest_pages_leave_first() -> None:
    pages = Pages(6, 4, 20, host_pages=20)
    a, b, c = pages.add(), pages.add(), pages.add()
    pages.reserve([a], [9])  # two full pages and one that is begun
    pages.reserve([b], [8])
    pages.reserve([c], [1])
    assert pages.num_free == 0

    def on_device(sequence: int) -> list[bool]:
        return (pages[sequence].pages < 6).tolist()

    pages.reserve([c], [4])
    assert [on_device(s) for s in (a, b, c)] == [[False, True, True], [True, True], [True, True]]
    pages.reserve([c], [8])
    assert [on_device(s) for s in (a, b, c)] == [[False, False, True], [False, True], [True] * 4]
    pages.reserve([c], [8])  # then its own, before pages that others have only begun
    assert [on_device(s) for s in (a, b, c)] == [[False, False, True], [False, False], [False] + [True] * 5]
    pages.free(c)
    reserved = pages.reserve([b], [0])  # what it has comes back where there is room
    assert on_device(b) == [True, True]
    assert len(reserved.copies) == 2
    pages.reserve([a], [1])
    assert on_device(a) == [True] * 3


def test_a_begun_page_comes_back_before_it_is_written() -> None:
    pair = Pair(2, 30)
    sequences = [pair.add() for _ in range(5)]
    for _ in range(3):
        for sequence in sequences:
            pair.grow([sequence], 3)
    pair.grow(sequences, 2)
    pair.small.truncate(sequences[0], 5)
    pair.large.truncate(sequences[0], 5)
    pair.grow(sequences[:2], [2, 9])


def test_a_step_stays_valid_when_its_pages_move() -> None:
    pair = Pair(6, 30)
    a, b = pair.add(), pair.add()
    pair.grow([a], 13)
    first = pair.step([a], 5)
    q = pair.append(first, 5, 1)
    table = first[0].block_table
    pair.grow([b], [22])
    assert first[0].num_host_pages
    assert first[0].block_table is table
    compare(first, q)


def test_new_steps_fill_the_same_arrays() -> None:
    pair = Pair(6, 30)
    a = pair.add()
    pair.grow([a], 30)
    first = pair.small.step([a], 1)
    table: Any = first.block_table
    lengths = first.kv_lengths
    second = pair.small.step([a], 1)
    assert second is first
    assert lengths.tolist() == [32]
    assert ((table >= 0).sum(), second.num_host_pages) == (6, 2)
    assert second.block_table is table


@pytest.mark.parametrize("most_pitch", [1 << 31, 1])
def test_a_gpu_copies_pages_of_all_layers(monkeypatch: pytest.MonkeyPatch, most_pitch: int) -> None:
    monkeypatch.setattr(pools, "_MOST_PITCH", most_pitch)
    calls: list[Any] = []

    def rows_of(
        to: int, to_pitch: int, at: int, at_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        calls.append((kind, stream))
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, at + row * at_pitch, width)

    def flat(to: int, at: int, size: int, kind: int, stream: int) -> None:
        calls.append((kind, stream))
        ctypes.memmove(to, at, size)

    class OnDevice(np.ndarray[Any, Any]):
        @property
        def data(self) -> Any:
            return SimpleNamespace(ptr=self.ctypes.data)

    stream = SimpleNamespace(ptr=7, is_capturing=lambda: True)
    event = SimpleNamespace(record=lambda s: calls.append(("event", s.ptr)), synchronize=lambda: calls.append("waited"))
    mover = GpuMover.__new__(GpuMover)
    mover._event = None
    mover._cuda = SimpleNamespace(
        get_current_stream=lambda: stream,
        Event=lambda disable_timing: event,
        runtime=SimpleNamespace(memcpy2DAsync=rows_of, memcpyAsync=flat, memcpyHostToDevice=1, memcpyDeviceToHost=2),
    )
    mover.finish()
    assert calls == []  # nothing was copied
    monkeypatch.setattr(pools, "mover_for", lambda xp: mover)
    device = [RNG.normal(size=(3, 5, PAGE, 2, columns)) for columns in (8, 5)]
    expected = [x.copy() for x in device]
    host = pools.HostPools([x.view(OnDevice) for x in device], 6, np)
    host.copy([(1, 7), (2, 8), (4, 5), (7, 0), (0, 3), (8, 6)])
    for x, y, z in zip((host.k, host.v), device, expected, strict=True):
        np.testing.assert_array_equal(x[:, [2, 3, 0, 1]], z[:, [1, 2, 4, 2]])
        np.testing.assert_array_equal(y[:, [0, 3]], z[:, [1, 1]])
    assert calls.count("waited") == 1  # for the copy within the host
    assert ("event", 7) in calls
    assert mover.is_capturing()
    stream.ptr = 0
    assert not mover.is_capturing()


Options = Callable[[], dict[str, Any]]
DRAWN: tuple[Options, ...] = (
    dict,
    lambda: {"window": (6, 1), "causal": False},
    lambda: {"alibi_slopes": RNG.uniform(0.01, 0.2, HEADS_Q)},
    lambda: {"mask": RNG.random(WIDTH * PAGE) > 0.3, "sink": RNG.normal(size=HEADS_Q)},
    lambda: {"dropout_p": 0.3, "dropout_seed": 5},
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_pages=st.integers(1, 9), host_pages=st.integers(1, 30))
def test_any_history(data: st.DataObject, num_pages: int, host_pages: int) -> None:
    """Drawn histories give the results of a cache with room for all, and lose no page; what fails changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "mover_for", lambda xp: LazyMover())
        patch.setattr(tiers, "device_of", lambda q: LazyDevice())
        pair = Pair(num_pages, host_pages)
        alive: list[int] = []
        for _ in range(data.draw(st.integers(2, 10))):
            kind = data.draw(st.sampled_from(["add", "fork", "truncate", "free", *["step"] * 5]))
            if kind == "add" or not alive:
                alive.append(pair.add())
                continue
            one = data.draw(st.sampled_from(alive))
            if kind == "fork":
                alive.append(pair.small.fork(one))
                assert pair.large.fork(one) == alive[-1]
            elif kind == "truncate":
                length = data.draw(st.integers(0, pair.small.length(one)))
                pair.small.truncate(one, length)
                pair.large.truncate(one, length)
            elif kind == "free":
                alive.remove(one)
                pair.small.free(one)
                pair.large.free(one)
            else:
                draw_step(data, pair, alive)
        for sequence in alive:
            pair.small.free(sequence)
        assert (pair.small.num_free_pages, pair.small.num_free_host_pages) == (num_pages, host_pages)


def draw_step(data: st.DataObject, pair: Pair, alive: list[int]) -> None:
    chosen = data.draw(st.lists(st.sampled_from(alive), unique=True, min_size=1))
    count = st.integers(0, 3 * PAGE)
    each = st.lists(count, min_size=len(chosen), max_size=len(chosen))
    counts = data.draw(st.one_of(count, each))
    before = state(pair.small)
    lengths = [pair.small.length(sequence) for sequence in chosen]
    each_count = [counts] * len(chosen) if isinstance(counts, int) else counts
    if max(length + own for length, own in zip(lengths, each_count, strict=True)) > WIDTH * PAGE:
        with pytest.raises(ValueError, match="max_pages_per_sequence"):
            pair.small.step(chosen, counts)
        assert state(pair.small) == before
        return
    books, free = copy.deepcopy(pair.large._pages), pair.large.num_free_pages
    expected = pair.large.step(chosen, counts)
    wanted = free - pair.large.num_free_pages
    if wanted > pair.small.num_free_pages + pair.small.num_free_host_pages:
        with pytest.raises(MemoryError, match=f"{wanted} pages are wanted"):
            pair.small.step(chosen, counts)
        assert state(pair.small) == before
        pair.large._pages = books
        return
    steps = pair.small.step(chosen, counts), expected
    options = data.draw(st.sampled_from(DRAWN))()
    share = data.draw(st.sampled_from([0, 0.5, 1.0]))
    for layer in range(LAYERS):
        q = pair.append(steps, counts, len(chosen), layer)
        compare(steps, q, layer, share=share, **options)
