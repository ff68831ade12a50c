"""PagedCache with pages in host memory gives the results of one that has room for all, whatever happened before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_device import device as cpu_device
from cpu_device import hook
from cpu_device.device import CpuDevice
from host_pages import (
    DIM,
    DIM_V,
    HEADS_KV,
    HEADS_Q,
    PAGE,
    WIDTH,
    Pair,
    Run,
    cache_of,
    compare,
    filled,
    late,
    rows,
    state,
)
from numpy.typing import NDArray
from offload_cases import options_by_name

import cuflash

Array = NDArray[Any]
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Let every pass and every copy be late."""
    return late(monkeypatch)


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
