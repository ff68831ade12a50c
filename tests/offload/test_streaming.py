"""Keys come once and in order, in two chunks of memory, gradients leave, and the CPU's share is found."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lazy_device import LazyDevice
from numpy.typing import NDArray

import cuflash
from cuflash import offload
from cuflash.offload import passes
from cuflash.offload import share as share_module
from cuflash.offload.call import Side
from cuflash.offload.devices import HostDevice
from cuflash.offload.stream import Piece, chunks_of, is_part_of

Array = NDArray[Any]
RNG = np.random.default_rng(0)
forward_of = passes._forward_of  # tests replace it by slower ones


@pytest.fixture(autouse=True)
def nothing_measured() -> Iterator[None]:
    share_module._measured.clear()
    yield
    share_module._measured.clear()


def run(device: LazyDevice, given: tuple[Array, Array, Array], share: Any = 0, **options: Any) -> tuple[Any, ...]:
    """Return out, and dq, dk, dv, of both passes on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "device_of", lambda q: device)
        out, backward = offload.attention_vjp(*given, share=share, **options)
        return out, *backward(np.ones_like(out))


def forward(device: LazyDevice, given: tuple[Array, Array, Array], share: Any = 0, **options: Any) -> Array:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "device_of", lambda q: device)
        out: Array = offload.attention(*given, share=share, **options)
        return out


def make(batch: int = 2, sq: int = 3, sk: int = 500, heads: int = 2, dim: int = 8) -> tuple[Array, Array, Array]:
    shapes = (batch, sq, heads, dim), (batch, sk, heads, dim), (batch, sk, heads, dim)
    q, k, v = (RNG.standard_normal(shape) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize(("share", "part"), [(0, 1), (0.25, 0.75), (1, 0)])
def test_a_key_is_read_once_a_direction(share: float, part: float) -> None:
    given = make()
    device = LazyDevice()
    forward(device, given, share)
    assert device.brought == part * (given[1].nbytes + given[2].nbytes)
    device = LazyDevice()
    run(device, given, share)
    assert device.brought == 2 * part * (given[1].nbytes + given[2].nbytes)
    assert device.taken == part * (given[1].nbytes + given[2].nbytes)


def test_keys_that_nobody_sees_are_not_read() -> None:
    q, k, v = make()
    of_key = (k.nbytes + v.nbytes) // 1000
    cases: list[tuple[dict[str, Any], int]] = [
        ({"kv_lengths": np.array([100, 7], np.int32)}, 107),
        ({"window": (9, 0)}, 2 * 12),
        ({"causal": True}, 1000),
        ({"q_lengths": np.array([0, 1], np.int32)}, 500),
    ]
    for options, keys in cases:
        device = LazyDevice()
        forward(device, (q, k, v), **options)
        assert device.brought == keys * of_key, options


def test_hidden_blocks_are_not_read() -> None:
    q, k, v = make(batch=1, sk=1024)
    visible = np.zeros((3, 1024), bool)
    visible[:, 300:310] = True
    block_mask = cuflash.BlockMask.from_dense(visible)
    device = LazyDevice(chunk_bytes=64 * 2 * 2 * 8 * 8)
    out = forward(device, (q, k, v), block_mask=block_mask)
    assert device.brought == 64 * 2 * 2 * 8 * 8
    np.testing.assert_allclose(out, cuflash.attention(q, k, v, block_mask=block_mask), rtol=0, atol=1e-13)


def test_the_device_holds_two_chunks() -> None:
    given = make(sk=4000)
    device = LazyDevice(chunk_bytes=10_000)
    forward(device, given)
    assert 0 < device.memory <= 2 * device.chunk_bytes
    run(device := LazyDevice(chunk_bytes=10_000), given)
    assert device.memory <= 2 * 2 * device.chunk_bytes  # of two passes
    assert 0 < device.most_outgoing <= 4  # dk and dv of two chunks


def test_values_that_are_columns_of_keys_come_with_them() -> None:
    q, k, _ = make()
    v = k[..., :5]
    assert is_part_of(v, k)
    assert not is_part_of(k[..., 1:], k)
    assert not is_part_of(k[:, ::2], k)
    assert not is_part_of(v.copy(), k)
    device = LazyDevice()
    out = forward(device, (q, k, v), causal=True)
    assert device.brought == k.nbytes
    np.testing.assert_allclose(out, cuflash.attention(q, k, v, causal=True), rtol=0, atol=1e-13)


def test_any_strides() -> None:
    q, k, v = make()
    expected = cuflash.attention(q, k, v)
    by_head = np.ascontiguousarray(k.swapaxes(1, 2)).swapaxes(1, 2)
    fused = np.concatenate([k, v], axis=-1)
    for own_k, own_v in ((by_head, v), (fused[..., :8], fused[..., 8:]), (np.asfortranarray(k), v[::-1].copy()[::-1])):
        for share in (0, 0.5):
            np.testing.assert_allclose(forward(LazyDevice(), (q, own_k, own_v), share), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("per_key", [1, 7, 1000, 10**9])
@pytest.mark.parametrize(("first", "stop"), [(0, 0), (0, 1), (3, 1000), (5, 130)])
def test_chunks_cover_keys_once(first: int, stop: int, per_key: int) -> None:
    piece = Piece(1, 3, 4, 1000)
    chunks = chunks_of(piece, first, stop, per_key, 5000)
    assert [key for chunk in chunks for key in range(chunk.first, chunk.stop)] == list(range(first, stop))
    for chunk in chunks:
        assert (chunk.stop - chunk.first) * 2 * per_key <= 5000 or chunk.stop - chunk.first == 1


@pytest.mark.parametrize("cores", [1, 5])
def test_bits_on_the_host_do_not_depend_on_the_number_of_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of few queries are computed at once, and merged in the order of the keys."""
    monkeypatch.setattr(HostDevice, "chunk_bytes", 9000)
    given = make(batch=1)
    expected = offload.attention(*given, causal=True)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    np.testing.assert_array_equal(offload.attention(*given, causal=True), expected)
    np.testing.assert_allclose(expected, cuflash.attention(*given, causal=True), rtol=0, atol=1e-13)


def test_chunks_at_once_tell_errors_and_need_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDevice, "chunk_bytes", 9000)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    given = make(batch=1)
    expected = offload.attention(*given)
    with monkeypatch.context() as patch:
        patch.setattr(Side, "part", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            offload.attention(*given)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    np.testing.assert_array_equal(offload.attention(*given), expected)


def test_an_error_on_one_side_ends_both(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(LazyDevice):
        def wait(self, event: Any) -> None:
            raise OSError("link down")

    device = Broken()
    with pytest.raises(OSError, match="link down"):
        forward(device, make(), 0.5)
    assert device.is_closed

    def fail(*_: Any) -> Any:
        raise ArithmeticError("no CPU")

    monkeypatch.setattr(passes, "cpu_side_of", lambda call, device: None)
    monkeypatch.setattr(passes, "_forward_of", lambda side, *rest: fail() if side is None else forward_of(side, *rest))
    other = LazyDevice()
    with pytest.raises(ArithmeticError, match="no CPU"):
        forward(other, make(), 0.5)
    assert other.is_closed


class Slow(LazyDevice):
    """A device on whose link a chunk takes a while."""

    seconds = 0.004

    def wait(self, event: Any) -> None:
        time.sleep(self.seconds)
        super().wait(event)


def shares_of(device: LazyDevice, calls: int = 3) -> list[float]:
    """Return the CPU's share of the keys in several calls."""
    given = make(batch=1, sk=20_000)
    both = given[1].nbytes + given[2].nbytes
    found = []
    for _ in range(calls):
        before = device.brought
        out = forward(device, given, "auto")
        found.append(1 - (device.brought - before) / both)
        np.testing.assert_allclose(out, cuflash.attention(*given), rtol=0, atol=1e-12)
    return found


def test_auto_is_measured_once_and_then_fixed() -> None:
    first, second, third = shares_of(Slow(chunk_bytes=50_000))
    assert first == pytest.approx(1 / 8, abs=0.01)  # the trial
    assert second > 0.3  # the CPU is faster than so slow a link
    assert third == second


def test_auto_gives_a_slow_cpu_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(side: Any, chunks: Any, *rest: Any) -> Any:
        if side.device.is_host:
            time.sleep(1.5)
        return forward_of(side, chunks, *rest)

    monkeypatch.setattr(passes, "_forward_of", slowly)
    first, second, third = shares_of(LazyDevice(chunk_bytes=50_000))
    assert first == pytest.approx(1 / 8, abs=0.01)
    assert second == third == 0


def test_auto_gives_the_cpu_nothing_where_both_together_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side alone is fast, but together they take longer than the device alone; the second call shows it."""
    device, given = Slow(chunk_bytes=50_000), make(batch=1, sk=20_000)

    def slowly(side: Any, chunks: Any, *rest: Any) -> Any:
        for known in share_module._measured.values() if side.device.is_host else ():
            time.sleep(1.5 * given[1].shape[1] / known.keys_per_second)
        return forward_of(side, chunks, *rest)

    monkeypatch.setattr(passes, "_forward_of", slowly)
    first, second, third = shares_of(device)
    assert first == pytest.approx(1 / 8, abs=0.01)
    assert second > 0.3
    assert third == 0


class Alone(LazyDevice):
    """A device that needs nothing of the host while chunks arrive."""

    def brings_alone(self, source: Any) -> bool:
        return True


def test_the_cpu_works_behind_the_streams_that_need_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(side: Any, chunks: Any, *rest: Any) -> Any:
        assert threading.current_thread() is threading.main_thread()
        order.append("cpu" if side.device.is_host else "device")
        return forward_of(side, chunks, *rest)

    monkeypatch.setattr(passes, "_forward_of", noted)
    given = make(batch=2, sk=500)
    out = forward(Alone(chunk_bytes=5_000), given, 0.4)
    np.testing.assert_allclose(out, cuflash.attention(*given), rtol=0, atol=1e-12)
    assert order == ["device", "cpu"]


def test_auto_does_not_try_the_cpu_with_many_queries() -> None:
    device = LazyDevice(chunk_bytes=1 << 20)
    given = make(batch=1, sq=3000, sk=600, heads=12, dim=128)
    forward(device, given, "auto")
    assert device.brought == given[1].nbytes + given[2].nbytes
    assert [known.share for known in share_module._measured.values()] == [0.0]


def test_passes_are_measured_apart() -> None:
    given = make(batch=1, sk=20_000)
    device = Slow(chunk_bytes=100_000)
    for _ in range(2):
        run(device, given, "auto")
    assert {key[0] for key in share_module._measured} == {"forward", "backward"}


def test_auto_with_queries_in_host_memory_measures_nothing() -> None:
    given = make(batch=1, sk=20_000)
    offload.attention(*given)
    assert not share_module._measured


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", np.float64, np.dtype("uint8")])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), 7, (), (0, 3)])
def test_pinned_empty(shape: Any, dtype: Any) -> None:
    x = offload.pinned_empty(shape, dtype)
    assert type(x) is np.ndarray
    assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert x.dtype.name == (dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    assert x.flags.c_contiguous
    assert x.flags.writeable
    x.fill(1)
    assert (x == 1).all()


def test_pinned_empty_tells_bad_shapes() -> None:
    with pytest.raises(ValueError, match="shape: expected no negative size"):
        offload.pinned_empty((2, -1), "float32")
    with pytest.raises(TypeError, match="shape: expected integers, got float"):
        offload.pinned_empty((2, 1.5), "float32")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_sees_that_memory_is_pinned() -> None:
    from cuflash.offload.gpu_device import _is_direct

    assert _is_direct(offload.pinned_empty((2, 3), "float32"))
    assert not _is_direct(np.empty((2, 3), np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("is_pinned", [True, False])
def test_chunks_of_a_gpu_arrive_in_order(is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small chunks of several calls arrive in order, though memory is written as soon as a call has returned."""
    import cupy

    from cuflash.offload.gpu_device import GpuDevice

    monkeypatch.setattr(GpuDevice, "chunk_bytes", 1 << 20)
    q, k, v = (x.astype(np.float32) for x in make(sk=20_000, dim=64))
    if is_pinned:
        own = [offload.pinned_empty(x.shape, x.dtype) for x in (k, v)]
        for target, x in zip(own, (k, v), strict=True):
            target[...] = x
        k, v = own
    on_gpu = cupy.asarray(q)
    for scale in (1.0, 0.5, 2.0):
        k *= np.float32(scale)
        expected, expected_backward = cuflash.attention_vjp(q, k, v)
        out, backward = offload.attention_vjp(on_gpu, k, v, share=0)
        grads = backward(cupy.ones_like(out))
        for x, y in zip((out, *grads), (expected, *expected_backward(np.ones_like(expected))), strict=True):
            np.testing.assert_allclose(cupy.asnumpy(x), y, rtol=0, atol=1e-5)
