"""PagedCache with pages in host memory gives the results of one that has room for all, whatever happened before."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_device import LazyDevice
from numpy.typing import NDArray
from offload_cases import options_by_name

import cuflash
from cuflash import PagedCache
from cuflash.offload import pools, tiers
from cuflash.offload.pools import GpuMover, Mover
from cuflash.pages import Pages

Array = NDArray[Any]
RNG = np.random.default_rng(0)
LAYERS, HEADS_Q, HEADS_KV, DIM, DIM_V, PAGE = 2, 4, 2, 8, 5, 4
WIDTH = 15  # pages of the longest sequence


class LazyMover(Mover):
    """Copies on a stream whose work is done as late as it may be.

    What the host reads too early is NaN, and it must not write pages that are still being read.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Array, Array]] = []
        self.being_read: list[tuple[Array, Array]] = []
        self.is_in_capture = False
        self.finished = 0

    def to_host(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        view = target[:, to : to + count]
        self._do_all()
        self.being_read = []  # their reads come before this on the stream
        self.pending.append((view, source[:, at : at + count].copy()))
        view.fill(np.iinfo(view.dtype).max)

    def to_device(self, target: Array, source: Array, to: int, at: int, count: int) -> None:
        self._do_all()
        view = source[:, at : at + count]
        target[:, to : to + count] = view
        self.being_read.append((view, view.copy()))

    def _do_all(self) -> None:
        for view, values in self.being_read:
            np.testing.assert_array_equal(view, values, err_msg="a page was written while it was read")
        for view, values in self.pending:
            view[...] = values
        self.pending = []

    def finish(self) -> None:
        self.finished += 1
        self._do_all()
        self.being_read = []

    def is_capturing(self) -> bool:
        return self.is_in_capture


class Run:
    """A run holds the lazy devices and movers that a test has made."""

    def __init__(self) -> None:
        self.devices: list[LazyDevice] = []
        self.mover = LazyMover()

    def device_of(self, q: Array) -> LazyDevice:
        self.devices.append(LazyDevice())
        return self.devices[-1]


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Let every pass and every copy be late."""
    made = Run()
    monkeypatch.setattr(tiers, "device_of", made.device_of)

    def mover_for(xp: Any) -> LazyMover:
        made.mover = LazyMover()
        return made.mover

    monkeypatch.setattr(pools, "mover_for", mover_for)
    return made


def cache_of(num_pages: int, host_pages: int = 0, dtype: str = "float64", **more: Any) -> PagedCache:
    sizes = {"page_size": PAGE, "max_pages_per_sequence": WIDTH, **more}
    return PagedCache(
        LAYERS, num_pages, num_heads_kv=HEADS_KV, head_dim=DIM, dtype=dtype, xp=np, head_dim_v=DIM_V,
        host_pages=host_pages, **sizes,
    )  # fmt: skip


def rows(*shape: int, dtype: str = "float64") -> tuple[Array, Array, Array]:
    dims = ((HEADS_Q, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V))
    q, k, v = (RNG.normal(size=(*shape, *own)).astype(dtype) for own in dims)
    return q, k, v


class Pair:
    """A cache with host pages, and one of the same sequences that has room for all on its device."""

    def __init__(self, num_pages: int, host_pages: int, dtype: str = "float64", **more: Any) -> None:
        self.dtype = dtype
        self.small, self.large = cache_of(num_pages, host_pages, dtype, **more), cache_of(200, 0, dtype, **more)

    @property
    def both(self) -> tuple[PagedCache, PagedCache]:
        return self.small, self.large

    def add(self) -> int:
        first, second = (cache.add() for cache in self.both)
        assert first == second
        return first

    def step(self, sequences: list[int], counts: int | list[int]) -> tuple[Any, Any]:
        step = self.small.step(sequences, counts)
        return step, self.large.step(sequences, counts)

    def append(
        self, steps: tuple[Any, Any], counts: int | list[int], batch: int, layer: int = 0, **options: Any
    ) -> Array:
        """Append the same new rows to both, and return q."""
        shape = (batch, counts) if isinstance(counts, int) else (sum(counts),)
        q, k, v = rows(*shape, dtype=self.dtype if self.dtype != "float8_e4m3fn" else "float32")
        rotated = [step.append(layer, q, k, v, **options) for step in steps]
        np.testing.assert_array_equal(*rotated)
        found: Array = rotated[0]
        return found

    def grow(self, sequences: list[int], counts: int | list[int], **options: Any) -> None:
        """Make a step of all layers, whose results are compared."""
        steps = self.step(sequences, counts)
        for layer in range(LAYERS):
            q = self.append(steps, counts, len(sequences), layer)
            compare(steps, q, layer, **options)


def compare(steps: tuple[Any, Any], q: Array, layer: int = 0, share: Any = 0.4, **options: Any) -> None:
    out, lse = steps[0].attend(layer, q, share=share, return_lse=True, **options)
    expected, expected_lse = steps[1].attend(layer, q, return_lse=True, **options)
    tolerance = {"float64": 1e-12, "float32": 2e-5}.get(expected_lse.dtype.name)
    assert tolerance is not None
    assert out.dtype == expected.dtype
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=tolerance)


def filled(counts: int | list[int], num_pages: int = 12) -> tuple[Pair, tuple[Any, Any], Array]:
    """Return two long sequences that end in a step of these counts, and its queries."""
    pair = Pair(num_pages, 30)
    a, b = pair.add(), pair.add()
    pair.grow([a, b], [46, 53])
    steps = pair.step([a, b], counts)
    return pair, steps, pair.append(steps, counts, 2)


NAMES = tuple(options_by_name())


@pytest.mark.parametrize("name", NAMES)
def test_every_option(run: Run, name: str) -> None:
    for counts in (7, [3, 7]):
        _, steps, q = filled(counts)
        assert steps[0].num_host_pages >= 10
        assert steps[1].num_host_pages == 0
        for share in (0, 0.4, 1.0, "auto"):
            options = options_by_name()[name]
            compare(steps, q, share=share, **{"causal": False, **options})
    assert all(device.is_closed for device in run.devices)


@pytest.mark.parametrize("options", [{}, {"window": (30, 0)}, {"sink": RNG.normal(size=HEADS_Q)}, {"softcap": 2.0}])
def test_pages_in_the_middle_and_sequences_without_host_pages(options: dict[str, Any]) -> None:
    """A prefix that others share stays on the device while the pages behind it leave."""
    pair = Pair(12, 40)
    a, short = pair.add(), pair.add()
    pair.grow([a], 16)
    pair.grow([short], 3)
    b = pair.small.fork(a)
    assert pair.large.fork(a) == b
    pair.grow([a], 20, **options)
    pair.grow([b], 8, **options)
    for _ in range(3):
        pair.grow([b, short], 5, **options)
        pair.grow([a, b, short], [1, 0, 2], **options)
    steps = pair.step([a, b, short], 1)
    on_host = [(own >= 12).tolist() for own in steps[0]._tiers.pages]
    assert any(own != sorted(own, reverse=True) for own in on_host)  # not their first pages alone
    compare(steps, pair.append(steps, 1, 3), **options)


def test_where_all_fits_a_cache_with_host_pages_is_one_without(run: Run) -> None:
    pair = Pair(40, 30)
    a, b = pair.add(), pair.add()
    steps = pair.step([a, b], [20, 31])
    q = pair.append(steps, [20, 31], 2)
    np.testing.assert_array_equal(steps[0].attend(0, q), steps[1].attend(0, q))
    assert steps[0].num_host_pages == 0
    assert not run.devices
    assert not run.mover.finished


def test_sequences_on_the_device_keep_their_bits_beside_others() -> None:
    pair = Pair(6, 30, "float32")
    long, short = pair.add(), pair.add()
    pair.grow([long], 40)
    steps = pair.step([long, short], 3)
    q = pair.append(steps, 3, 2)
    assert steps[0].num_host_pages
    found, expected = (step.attend(0, q, split_size=None) for step in steps)
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_window_that_does_not_reach_cold_pages_touches_none(run: Run) -> None:
    _, steps, q = filled(7)
    before = len(run.devices), run.mover.finished
    steps[0]._memory.host.k[...] = np.nan
    run.mover.is_in_capture = True  # so that it may be captured
    np.testing.assert_array_equal(steps[0].attend(0, q, window=(4, 0)), steps[1].attend(0, q, window=(4, 0)))
    assert (len(run.devices), run.mover.finished) == before
    with pytest.raises(RuntimeError, match="attend: expected no graph capture where pages in host memory"):
        steps[0].attend(0, q)


def test_a_key_in_host_memory_is_read_once_and_only_if_it_is_seen(run: Run) -> None:
    _, steps, q = filled(7)
    of_key = HEADS_KV * (DIM + DIM_V) * 8
    steps[0].attend(0, q, share=0)
    assert run.devices[-1].brought == steps[0].num_host_pages * PAGE * of_key
    steps[0].attend(0, q, share=1)
    assert run.devices[-1].brought == 0
    hidden = cuflash.BlockMask.from_dense(np.arange(WIDTH * PAGE)[None] + np.zeros((7, 1)) >= 32, block_size=(16, 16))
    steps[0].attend(0, q, share=0, block_mask=hidden)
    assert run.devices[-1].brought == 0 or min(own.argmin() for own in steps[0]._tiers.pages) * PAGE > 32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_are_rounded_once(dtype: str) -> None:
    pair = Pair(6, 40, dtype)
    a = pair.add()
    pair.step([a], 50)
    steps = pair.step([a], 2)
    for cache in pair.both:
        cache.k[...], cache.v[...] = 0, 0
    q = pair.append(steps, 2, 1)
    found, expected = (step.attend(0, q, out_dtype="float32") for step in steps)
    if pair.small._memory.host is not None:
        pair.small._memory.host.k[...], pair.small._memory.host.v[...] = 0, 0
        found = steps[0].attend(0, q, out_dtype="float32")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(steps[0].attend(0, q), found.astype(q.dtype))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_prompt_longer_than_the_device_is_appended_in_both_memories(run: Run, interleaved: bool) -> None:
    angles = RNG.normal(size=(60, DIM // 2))
    rotary = np.cos(angles), np.sin(angles)
    for counts in (50, [50]):
        pair = Pair(3, 20)
        steps = pair.step([pair.add()], counts)
        assert steps[0].num_host_pages == 10
        assert pair.small.num_free_pages == 0
        assert pair.small.num_free_host_pages == 10
        q = pair.append(steps, counts, 1, rotary=rotary, interleaved=interleaved)
        compare(steps, q)
        compare(steps, q, window=(5, 0), share=0)
        run.mover.is_in_capture = True
        with pytest.raises(RuntimeError, match="append: expected no graph capture"):
            steps[0].append(0, *rows(*q.shape[:-2]))


@pytest.mark.parametrize("queries", ["fp8", "float16"])
def test_fp8(queries: str) -> None:
    pair = Pair(4, 40, "float8_e4m3fn")
    a, b = pair.add(), pair.add()
    scale = np.full((1, 1, HEADS_KV), 0.25, np.float32)
    scales: dict[str, Any] = {"k_scale": scale, "v_scale": scale[..., :1] * 2}
    for counts in (20, [13, 3]):
        steps = pair.step([a, b], counts)
        q: Array = pair.append(steps, counts, 2, **{name: x if counts == 20 else x[0] for name, x in scales.items()})
        own: dict[str, Any] = dict(scales)
        if queries == "fp8":
            q, own["q_scale"] = cuflash.quantize_fp8(q, per="token")
        else:
            q = q.astype(np.float16)
        out = steps[0].attend(0, q, share=0.4, out_dtype="float32", **own)
        expected = steps[1].attend(0, q, out_dtype="float32", **own)
        np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6 if queries == "fp8" else 2e-4)
        for name in ("k_scale", "v_scale"):
            with pytest.raises(NotImplementedError, match=rf"{name}: expected shape \(1, 1, num_heads_kv\)"):
                steps[0].attend(0, q, **{name: np.ones((4, PAGE, HEADS_KV), np.float32)})
    assert steps[0].num_host_pages


def test_lengths_of_the_caller() -> None:
    _, steps, q = filled(7)
    for lengths in ([41, 7], [0, 53], [53, 60], [-3, 99]):
        compare(steps, q, kv_lengths=np.array(lengths, np.int32))
    with pytest.raises(ValueError, match=r"kv_lengths\[0\]: expected at most the 56 positions of its pages"):
        steps[0].attend(0, q, kv_lengths=np.array([57, 7], np.int32))
    with pytest.raises(TypeError, match="kv_lengths: expected dtype int32, got int64"):
        steps[0].attend(0, q, kv_lengths=np.array([4, 6]))
    with pytest.raises(ValueError, match=r"kv_lengths: expected shape \(batch,\) = \(2,\), got \(1,\)"):
        steps[0].attend(0, q, kv_lengths=np.array([4], np.int32))


def test_what_is_refused() -> None:
    _, steps, q = filled(7)
    with pytest.raises(NotImplementedError, match="split_size: expected None where queries see pages in host memory"):
        steps[0].attend(0, q, split_size=8)
    np.testing.assert_array_equal(*(step.attend(0, q, split_size=8, window=(4, 0)) for step in steps))
    with pytest.raises(ValueError, match="block_table: expected None, as .* pages of the step lie in host memory"):
        steps[0].attend(0, q, block_table=steps[0].block_table)
    with pytest.raises(ValueError, match='share: expected "auto", as the cache has no host_pages, got 0.5'):
        steps[1].attend(0, q, share=0.5)
    with pytest.raises(ValueError, match='share: expected "auto" or a number from 0 to 1'):
        steps[0].attend(0, q, share=2)
    with pytest.raises(TypeError, match="softmax_scales"):
        steps[0].attend(0, q, softmax_scales=2)
    with pytest.raises(ValueError, match="out: expected shape"):
        steps[0].attend(0, q, out=np.empty((2, 7, 4, 6)))
    with pytest.raises(ValueError, match="host_pages: expected at least 0, got -1"):
        cache_of(3, -1)
    with pytest.raises(TypeError, match="host_pages: expected an integer, got float"):
        cache_of(3, 1.0)  # type: ignore[arg-type]
    out = np.empty((2, 7, HEADS_Q, DIM_V))
    assert steps[0].attend(0, q, out=out) is out
    np.testing.assert_allclose(out, steps[1].attend(0, q), atol=1e-12)


def test_memory_ends_where_both_are_full() -> None:
    cache = cache_of(3, 4)
    a, b = cache.add(), cache.add()
    cache.step([a, b], [9, 9])  # three pages each
    before = state(cache)
    with pytest.raises(
        MemoryError, match="2 pages are wanted for this step, 0 of the device and 1 of the host are free"
    ):
        cache.step([a, b], 4)
    assert state(cache) == before
    cache.step([b], 4)
    assert (cache.num_free_pages, cache.num_free_host_pages) == (0, 0)
    cache.free(a)
    assert cache.num_free_pages + cache.num_free_host_pages == 3


def state(cache: PagedCache) -> tuple[Any, ...]:
    pages = cache._pages
    held = {number: (own.length, own.pages.tolist(), own.last_use) for number, own in pages._held.items()}
    return held, pages._holders.tolist(), list(pages._free), list(pages._free_on_host), pages._clock


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


@pytest.mark.skipif(not cpu_device.available(), reason=cpu_device.NO_COMPILER)
def test_the_kernels_compute_what_lies_on_the_device() -> None:
    pair = Pair(6, 30, "float32")
    a, b = pair.add(), pair.add()
    pair.step([a, b], [40, 3])
    steps = pair.step([a, b], 2)
    for memory in (pair.small._memory, pair.large._memory):
        if memory.host is not None:
            memory.host.finish()
        for x in (memory.k, memory.v, *((memory.host.k, memory.host.v) if memory.host else ())):
            x[...] = 0.5
    q = pair.append(steps, 2, 2)
    expected = steps[1].attend(0, q)
    with hook.kernels_on(CpuDevice((8, 0), 3)):
        found = steps[0].attend(0, q, share=0)
    assert steps[0].num_host_pages
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


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
