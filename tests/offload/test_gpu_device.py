"""The GPU's side of streaming works without a GPU: CuPy's calls have stand-ins, staging and its order are real.

Copies are done at once, on memory of the host, so that the tests show which bytes go where, and that no staging buffer
is used again before its event was waited for.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from cpu_device import device as cpu_device
from numpy.typing import NDArray

import cuflash
from cuflash import offload
from cuflash.cuda import device as cuda_device

Array = NDArray[Any]


class OnDevice(np.ndarray[Any, Any]):
    """A NumPy array that has an address as CuPy's have it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class Event:
    """An event that counts how often the host waited for it."""

    made: ClassVar[list[Event]] = []

    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing  # timing events take longer
        self.stream: Stream | None = None
        self.waits = 0
        Event.made.append(self)

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None
        self.waits += 1


class Stream:
    """A stream that remembers what it waits for."""

    def __init__(self, non_blocking: bool = True) -> None:
        assert non_blocking  # another one would wait for the legacy stream
        self.ptr = id(self)
        self.waited_for: list[Event] = []
        self.is_synchronized = False

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None
        self.waited_for.append(event)

    def synchronize(self) -> None:
        self.is_synchronized = True


class Cuda:
    """A stand-in for CuPy, with what `gpu_device` calls."""

    def __init__(self) -> None:
        self.current = Stream()
        self.copies: list[tuple[int, int, int]] = []
        self.pinned: list[Array] = []
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            get_current_stream=lambda: self.current,
            alloc_pinned_memory=self.alloc,
            runtime=SimpleNamespace(
                memcpyAsync=self.copy,
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
                pointerGetAttributes=self.attributes,
                CUDARuntimeError=OSError,
            ),
        )

    def alloc(self, size: int) -> Array:
        self.pinned.append(np.full(size, 255, np.uint8))
        return self.pinned[-1]

    def attributes(self, pointer: int) -> Any:
        is_pinned = any(x.ctypes.data <= pointer < x.ctypes.data + x.nbytes for x in self.pinned)
        return SimpleNamespace(type=1 if is_pinned else 0)

    def copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.copies.append((kind, size, source if kind == 1 else target))
        ctypes.memmove(target, source, size)

    def empty(self, count: int, dtype: Any) -> Array:
        return np.full(count, np.nan, dtype).view(OnDevice)

    def asarray(self, x: Array) -> Array:
        return np.asarray(x).view(OnDevice)

    def asnumpy(self, x: Array) -> Array:
        return np.array(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    pytest.importorskip("cupy", reason="no CuPy, whose calls are stood in for")
    from cuflash.offload import gpu_device

    standing_in = Cuda()
    monkeypatch.setattr(gpu_device, "cupy", standing_in)
    monkeypatch.setattr(gpu_device.GpuDevice, "xp", standing_in)
    monkeypatch.setattr(gpu_device.GpuDevice, "chunk_bytes", 6000)
    monkeypatch.setattr(gpu_device, "_LEAST_BYTES", 1000)

    class Device(gpu_device.GpuDevice):
        def take(self, target: Array, source: Array) -> Any:
            return super().take(target, source.view(OnDevice))

    monkeypatch.setattr(offload, "device_of", lambda q: Device())
    Event.made.clear()
    return standing_in


def make(batch: int, dtype: str = "float32") -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    shapes = (batch, 3, 4, 8), (batch, 400, 2, 8), (batch, 400, 2, 8)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def compare(q: Array, k: Array, v: Array, share: float, out: Any = None) -> None:
    expected, expected_backward = cuflash.attention_vjp(q, k, v, causal=True)
    found, backward = offload.attention_vjp(q.view(OnDevice), k, v, causal=True, share=share)
    grads = backward(np.ones_like(found), out=out)
    for x, y in zip((found, *grads), (expected, *expected_backward(np.ones_like(expected))), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share", [0, 0.4])
@pytest.mark.parametrize("batch", [1, 3])
def test_pageable_memory_goes_through_staging(cuda: Cuda, batch: int, share: float) -> None:
    compare(*make(batch), share)
    # There are four buffers for each direction of a pass: in for the forward one, in and out for the backward one.
    assert 0 < len(cuda.pinned) <= 12
    staged = {x.ctypes.data for x in cuda.pinned}
    sizes = {x.ctypes.data: x.nbytes for x in cuda.pinned}
    for _, size, pointer in cuda.copies:
        assert any(first <= pointer and pointer + size <= first + sizes[first] for first in staged)


def test_pinned_memory_is_copied_where_it_lies(cuda: Cuda) -> None:
    q, *host = make(2)
    k, v, dk, dv = (np.frombuffer(cuda.alloc(x.nbytes), x.dtype).reshape(x.shape) for x in (*host, *host))
    k[...], v[...] = host
    compare(q, k, v, 0, out=(None, dk, dv))
    assert len(cuda.pinned) == 4  # no staging
    # Each key travels once in each direction of a pass: k and v twice to the GPU, dk and dv once from it.
    assert sum(size for kind, size, _ in cuda.copies if kind == 1) == 2 * (k.nbytes + v.nbytes)
    assert sum(size for kind, size, _ in cuda.copies if kind == 2) == dk.nbytes + dv.nbytes


def test_views_by_head_are_staged_though_pinned(cuda: Cuda) -> None:
    q, *host = make(2)
    by_head = []
    for x in host:
        swapped = np.ascontiguousarray(x.swapaxes(1, 2))
        own = np.frombuffer(cuda.alloc(x.nbytes), x.dtype).reshape(swapped.shape)
        own[...] = swapped
        by_head.append(own.swapaxes(1, 2))
    before = len(cuda.pinned)
    compare(q, by_head[0], by_head[1], 0)
    assert len(cuda.pinned) > before


def test_staging_buffers_are_waited_for(cuda: Cuda) -> None:
    """The host waits for a buffer's event before it fills the buffer again, and for both streams before the end."""
    q, k, v = make(1)
    offload.attention(q.view(OnDevice), k, v, share=0)
    from cuflash.offload.gpu_device import _NUM_STAGES

    of_copies = [event for event in Event.made if event.stream is not cuda.current]
    assert len(of_copies) > 2 * _NUM_STAGES
    assert all(event.waits == 1 for event in of_copies[:-_NUM_STAGES])
    assert all(event.stream is not None and event.stream.is_synchronized for event in of_copies)


def test_copies_wait_for_the_computation_before(cuda: Cuda) -> None:
    """Each copy in waits for an event of the current stream, and each chunk for its copies."""
    q, k, v = make(1)
    offload.attention(q.view(OnDevice), k, v, share=0)
    incoming = next(event.stream for event in Event.made if event.stream is not cuda.current)
    assert incoming is not None
    assert len(incoming.waited_for) == len(cuda.copies)
    assert all(event.stream is cuda.current for event in incoming.waited_for)
    assert {id(event) for event in cuda.current.waited_for} == {
        id(event) for event in Event.made if event.stream is incoming
    }


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU runs the kernel that gathers rows of pools; the streams that it was enqueued on."""
    if not cpu_device.available():
        pytest.skip(cpu_device.NO_COMPILER)
    from cuflash.gpu import host_pages

    streams: list[int] = []
    gather = host_pages.gather

    def noted(*args: Any) -> None:
        streams.append(args[-1])
        gather(*args)

    own = cpu_device.CpuDevice((9, 0), 3)
    monkeypatch.setattr(cuda_device, "device_of", lambda x: own)
    monkeypatch.setattr(host_pages, "gather", noted)
    monkeypatch.setattr("cuflash.offload.in_place.is_in_place", lambda *_: False)
    return streams


def pools_of(cuda: Cuda, is_pinned: bool, page_size: int, table: Any) -> tuple[Array, Array, Array, dict[str, Any]]:
    """Return q, pools and options of sequences that end within a page."""
    q, *host = make(len(table))
    rng = np.random.default_rng(1)
    shape = 30, page_size, *host[0].shape[2:]
    k, v = rng.standard_normal((2, *shape)).astype(q.dtype)
    if is_pinned:
        own = [np.frombuffer(cuda.alloc(x.nbytes), x.dtype).reshape(x.shape) for x in (k, v)]
        for target, x in zip(own, (k, v), strict=True):
            target[...] = x
        k, v = own
    lengths = np.array([len(row) * page_size - 3 for row in table], np.int32)
    return q, k, v, {"block_table": np.array(table, np.int32).view(OnDevice), "kv_lengths": lengths, "causal": True}


def compare_pools(q: Array, k: Array, v: Array, options: dict[str, Any], share: float = 0) -> None:
    expected, expected_backward = cuflash.attention_vjp(q, k, v, **options)
    found, backward = offload.attention_vjp(q.view(OnDevice), k, v, share=share, **options)
    grads, expected_grads = backward(np.ones_like(found)), expected_backward(np.ones_like(expected))
    for x, y in zip((found, *grads), (expected, *expected_grads), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=1e-5)


SCATTERED = (5, 3, 3, 9, 29, 2, 0, 17, 11, 4), (8, 12, 7, 6, 19, 21, 0, 1, 26, 25)


@pytest.mark.parametrize("page_size", [16, 60])
def test_a_gpu_gathers_rows_of_a_pinned_pool(cuda: Cuda, gathered: list[int], page_size: int) -> None:
    compare_pools(*pools_of(cuda, True, page_size, SCATTERED))
    assert len(gathered) > 8  # k and v of several chunks, in two passes
    assert not [size for kind, size, _ in cuda.copies if kind == 1]
    assert len(cuda.pinned) == 2 + 4  # the pools, and staging for gradients, which are summed on the host


def test_pages_that_follow_each_other_are_copied(
    cuda: Cuda, gathered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long runs of rows need no kernel, and only the rows in use travel."""
    from cuflash.offload import gpu_device

    monkeypatch.setattr(gpu_device, "_LEAST_RUN", 1000)
    q, k, v, options = pools_of(cuda, True, 16, [(*range(4, 12), *range(20, 28))])
    compare_pools(q, k, v, options)
    assert not gathered
    row = k[0, 0].nbytes
    ins = [size for kind, size, _ in cuda.copies if kind == 1]
    assert sum(ins) == 2 * 2 * int(options["kv_lengths"][0]) * row
    monkeypatch.setattr(gpu_device, "_LEAST_RUN", 1 << 20)
    compare_pools(q, k, v, options)
    assert gathered


def test_layers_and_views_of_pinned_pools(cuda: Cuda, gathered: list[int]) -> None:
    """A layer of a cache, and keys and values of one pool, are gathered where they lie; heads apart are staged."""
    q, k, v, options = pools_of(cuda, False, 16, SCATTERED)
    for axis in (0, 1):  # (num_layers, pages, ...) and (pages, keys and values, ...)
        memory = np.stack([k, v, v], axis)
        both = np.frombuffer(cuda.alloc(memory.nbytes), k.dtype).reshape(memory.shape)
        both[...] = memory
        before = len(gathered)
        first, second, _ = np.moveaxis(both, axis, 0)
        compare_pools(q, first, second, options)
        assert len(gathered) > before
    before = len(gathered)
    by_head = np.frombuffer(cuda.alloc(k.nbytes), k.dtype).reshape(30, 2, 16, 8).swapaxes(1, 2)
    by_head[...] = k
    compare_pools(q, by_head, by_head, options)
    assert len(gathered) == before


@pytest.mark.parametrize("share", [0, 0.4])
@pytest.mark.parametrize("page_size", [16, 60])
def test_pageable_pools_are_gathered_into_staging(
    cuda: Cuda, gathered: list[int], page_size: int, share: float
) -> None:
    q, k, v, options = pools_of(cuda, False, page_size, SCATTERED)
    compare_pools(q, k, v, options, share)
    assert not gathered
    assert cuda.pinned
    for _, size, pointer in cuda.copies:
        assert any(x.ctypes.data <= pointer and pointer + size <= x.ctypes.data + x.nbytes for x in cuda.pinned)


def test_kernels_wait_for_the_computation_before(cuda: Cuda, gathered: list[int]) -> None:
    """The kernel runs on the stream of copies in, behind the event of its buffer, and attention waits for it."""
    q, k, v, options = pools_of(cuda, True, 16, SCATTERED)
    offload.attention(q.view(OnDevice), k, v, share=0, **options)
    of_copies = [event for event in Event.made if event.stream is not cuda.current]
    incoming = of_copies[0].stream
    assert incoming is not None
    assert all(event.stream is incoming for event in of_copies)
    assert len(of_copies) == len(incoming.waited_for) == len(gathered)
    assert set(gathered) == {incoming.ptr}
    assert {id(event) for event in cuda.current.waited_for} == {id(event) for event in of_copies}
    assert not any(event.waits for event in of_copies)  # the host waits for none of them
    assert incoming.is_synchronized


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 300])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_gpu_takes_rows_of_pools(monkeypatch: pytest.MonkeyPatch, is_pinned: bool, page_size: int) -> None:
    """Chunks of several calls hold the right rows, though pools are written as soon as a call has returned."""
    import cupy

    from cuflash.offload.gpu_device import GpuDevice

    monkeypatch.setattr(GpuDevice, "chunk_bytes", 1 << 19)
    rng = np.random.default_rng(0)
    num_pages, keys = 9000 // page_size, 6000
    q = rng.standard_normal((2, 3, 4, 64)).astype(np.float32)
    k, v = (
        offload.pinned_empty((num_pages, page_size, 2, 64), "float32")
        if is_pinned
        else np.empty((num_pages, page_size, 2, 64), np.float32)
        for _ in range(2)
    )
    table = np.stack([rng.permutation(num_pages)[: keys // page_size] for _ in range(2)]).astype(np.int32)
    lengths = np.array([keys - 7, keys // 2], np.int32)
    for _ in range(3):
        k[...], v[...] = rng.standard_normal((2, *k.shape))
        expected = cuflash.attention(q, k, v, block_table=table, kv_lengths=lengths)
        on_gpu = [cupy.asarray(x) for x in (q, table, lengths)]
        out = offload.attention(on_gpu[0], k, v, share=0, block_table=on_gpu[1], kv_lengths=on_gpu[2])
        np.testing.assert_allclose(cupy.asnumpy(out), expected, rtol=0, atol=1e-5)
