"""Only a GPU can show streams, graphs, several devices, uninitialised memory, and the host's time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cases import Case, assert_same_bits, gaussian, gaussian_case, same_bits
from devices import Device

import cuflash

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

# The slowest call of these tests is enqueued in less time.
DELAY_S = 0.3


@pytest.fixture(scope="module")
def gpu() -> Device:
    return Device("cupy", cupy)


@pytest.fixture
def stream() -> Iterator[Any]:
    """Make a non-blocking stream current, of which the default stream knows nothing."""
    own = cupy.cuda.Stream(non_blocking=True)
    with own:
        yield own
        own.synchronize()


@pytest.fixture(scope="module")
def delay() -> Callable[[], None]:
    """Return a function that keeps the current stream busy for `DELAY_S`."""
    source = """
        __device__ long long now() { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
        extern "C" __global__ void spin(long long nanoseconds) {
            long long start = now();
            while (now() - start < nanoseconds) {}
        }"""
    spin = cupy.RawKernel(source, "spin")
    spin((1,), (1,), (np.int64(1),))  # compiled and loaded
    return lambda: spin((1,), (1,), (np.int64(DELAY_S * 1e9),))


def poison(x: Any) -> None:
    """Fill an array without gaps with NaN (or -1), on the current stream."""
    x.data.memset_async(0xFF, x.nbytes)


def varied_cases() -> dict[str, Case]:
    """Make a case for each kind of launch: dense, steered by data on the device, packed, block-sparse."""
    rng = np.random.default_rng(0)
    lengths = np.array([70, 41], np.int32)
    cu_seqlens = np.array([0, 30, 33, 90], np.int32)
    packed = gaussian_case(3, "float16", (90, 90), batch=1, causal=True)
    return {
        "causal": gaussian_case(0, "float32", (100, 130), causal=True),
        "half": gaussian_case(1, "float16", (100, 130), dims=(64, 64)),
        "extras": gaussian_case(
            2,
            "bfloat16",
            (80, 90),
            bias=gaussian(rng, (4, 80, 90), "bfloat16"),
            mask=rng.random((80, 90)) < 0.8,
            alibi_slopes=np.full(4, 0.1, np.float32),
            sink=np.zeros(4, np.float32),
        ),
        "lengths": gaussian_case(4, "float32", (70, 70), q_lengths=lengths, kv_lengths=lengths, causal=True),
        "dropout": gaussian_case(5, "float32", (60, 60), dropout_p=0.3, dropout_seed=np.array([5], np.uint64)),
        "blocks": gaussian_case(6, "float32", (200, 200), block_mask=rng.random((200, 200)) < 0.2),
        "packed": Case(
            packed.q[0],
            packed.k[0],
            packed.v[0],
            packed.dout[0],
            options=packed.options,
            cu_seqlens=(cu_seqlens, cu_seqlens),
        ),
    }


every_case = pytest.mark.parametrize("name", list(varied_cases()))


class Calls:
    """Forward, backward and vjp of a case into the same device arrays at every run."""

    def __init__(self, case: Case, gpu: Device) -> None:
        self.case, self.on_device = case, case.on(gpu)
        self.results: tuple[Any, ...] = ()

    def run(self) -> None:
        bound = self.on_device
        self.results = ()  # their memory serves again: a graph that is captured must not allocate
        result, lse = bound.raw_forward(return_lse=True)
        arguments = (bound.dout, *bound.qkv, result, lse, *bound.cu_seqlens)
        options = {"deterministic": True, **bound.options}
        grads = self.case.function("_backward")(*arguments, **{"dlse": bound.dlse, **options})
        vjp_result, backward = self.case.function("_vjp")(*bound.qkv, *bound.cu_seqlens, **options)
        self.results = (result, lse, *grads, vjp_result, *backward(bound.dout))

    def host(self) -> list[Any]:
        return [cupy.asnumpy(x) for x in self.results]


@every_case
def test_graph_capture_and_replay(gpu: Device, stream: Any, name: str) -> None:
    """After one warm-up a captured graph computes from the arrays' contents at replay, lengths and seeds included."""
    case = varied_cases()[name]
    calls = Calls(case, gpu)
    calls.run()
    stream.synchronize()
    stream.begin_capture()
    calls.run()
    graph = stream.end_capture()

    def replay() -> list[Any]:
        for x in calls.results:
            poison(x)
        graph.launch(stream)
        stream.synchronize()
        return calls.host()

    first = replay()
    eager = Calls(case, gpu)
    eager.run()
    assert all(same_bits(a, b) for a, b in zip(first, eager.host(), strict=True))

    bound = calls.on_device
    changed = [*bound.qkv, *(bound.options[x] for x in ("q_lengths", "dropout_seed") if x in bound.options)]
    for x in changed:
        x[...] = x[::-1].copy() if x.size > 1 else x + 1
    if bound.cu_seqlens:
        for x in bound.cu_seqlens:
            x[...] = cupy.asarray(np.array([0, 50, 50, 88], np.int32))
    second = replay()
    calls.run()
    stream.synchronize()
    assert all(same_bits(a, b) for a, b in zip(second, calls.host(), strict=True))
    assert not same_bits(first[0], second[0]), "the replay did not see the new contents"


def test_scratch_memory_of_a_graph_is_its_own(gpu: Device, stream: Any) -> None:
    """After one warm-up many calls are captured; what is allocated later survives the replay.

    The caller keeps all that the calls return, backward functions with their residuals included.
    """
    cupy.get_default_memory_pool().free_all_blocks()
    bound = gaussian_case(1, "float16", (100, 130), dims=(64, 64)).on(gpu)
    q, k, v = bound.qkv

    def run() -> tuple[list[Any], list[Any]]:
        x, results, functions = q, [], []
        for _ in range(5):
            out, backward = cuflash.attention_vjp(x, k, v)
            grads = backward(out)
            x = grads[0]
            results += [out, *grads]
            functions.append(backward)
        return results, functions

    expected = [cupy.asnumpy(x) for x in run()[0]]
    stream.begin_capture()
    captured, _functions = run()
    graph = stream.end_capture()
    sizes = [2**n for n in range(9, 22)] * 8
    others = [cupy.full(size, 7, np.uint8) for size in sizes]
    graph.launch(stream)
    stream.synchronize()
    assert all((x == 7).all() for x in others)
    assert all(np.allclose(cupy.asnumpy(x), y, atol=1e-2) for x, y in zip(captured, expected, strict=True))


@every_case
def test_work_waits_for_its_stream_and_the_host_does_not(
    gpu: Device, stream: Any, delay: Callable[[], None], name: str
) -> None:
    """Inputs that are written on the current stream just before the call are seen, and nothing synchronises."""
    case = varied_cases()[name]
    calls = Calls(case, gpu)
    calls.run()  # compiles, and moves block masks
    stream.synchronize()
    expected = calls.host()
    bound = calls.on_device
    right = [x.copy() for x in bound.qkv]
    for x in bound.qkv:
        poison(x)
    stream.synchronize()
    delay()
    for x, values in zip(bound.qkv, right, strict=True):
        x[...] = values
    calls.run()
    assert not stream.done, "a call waited for the device"
    stream.synchronize()
    assert all(same_bits(a, b) for a, b in zip(calls.host(), expected, strict=True))


def test_merge_waits_for_its_stream_and_the_host_does_not(gpu: Device, stream: Any, delay: Callable[[], None]) -> None:
    case = gaussian_case(0, "float16", (64, 64))
    out, lse = case.on(gpu).raw_forward(return_lse=True)
    dout = cupy.ones_like(out)

    def work() -> list[Any]:
        merged = cuflash.merge([out, out], [lse, lse])
        douts, dlses = cuflash.merge_backward(dout, None, [out, out], [lse, lse], *merged)
        return [*merged, *douts, *dlses]

    expected = [cupy.asnumpy(x) for x in work()]
    right = out.copy()
    poison(out)
    stream.synchronize()
    delay()
    out[...] = right
    results = work()
    assert not stream.done, "a call waited for the device"
    assert all(same_bits(cupy.asnumpy(x), y) for x, y in zip(results, expected, strict=True))


def test_torch_stream_and_capture(gpu: Device, delay: Callable[[], None]) -> None:
    """Torch's tensors are computed on torch's current stream, eagerly and while torch captures a graph."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    case = gaussian_case(0, "bfloat16", (100, 100), dims=(64, 64), causal=True)
    expected, _ = case.on(gpu).forward()
    x = [torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16) for x in (case.q, case.k, case.v)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def bits(result: Any) -> Any:
        assert result.dtype == torch.bfloat16 and result.is_cuda
        return result.view(torch.int16).cpu().numpy().view(case.dtype)

    with torch.cuda.stream(side):
        cuflash.attention(*x, causal=True)
        values = [tensor.clone() for tensor in x]
        for tensor in x:
            tensor.fill_(torch.nan)
        side.synchronize()
        torch.cuda._sleep(int(DELAY_S * 1e9))
        for tensor, right in zip(x, values, strict=True):
            tensor.copy_(right)
        result = cuflash.attention(*x, causal=True)
        assert not side.query(), "a call waited for the device"
        side.synchronize()
    assert same_bits(bits(result), expected)

    with torch.cuda.stream(side):  # the warm-up call, whose memory the captured one takes from CuPy's pool
        warm, backward = cuflash.attention_vjp(*x, causal=True)
        backward(warm)
        del warm, backward
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result, backward = cuflash.attention_vjp(*x, causal=True)
        grads = backward(result)
    for tensor in (result, *grads):
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(bits(result), expected)
    assert not any(grad.isnan().any() for grad in grads)


@every_case
def test_second_device(gpu: Device, name: str) -> None:
    """Arrays of a device that is not the current one are computed there, with the same bits."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    case = varied_cases()[name]
    with cupy.cuda.Device(0):
        here = Calls(case, gpu)
        here.run()
        expected = here.host()
    with cupy.cuda.Device(1):
        there = Calls(case, gpu)
    assert cupy.cuda.runtime.getDevice() == 0
    there.run()
    assert cupy.cuda.runtime.getDevice() == 0
    assert all(x.device.id == 1 for x in there.results)
    with cupy.cuda.Device(1):
        assert all(same_bits(a, b) for a, b in zip(there.host(), expected, strict=True))


def _zeros_on(device: int) -> Any:
    with cupy.cuda.Device(device):
        return cupy.zeros((1, 4, 2, 8), np.float32)


def test_arrays_of_two_devices(gpu: Device) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    q, k = (_zeros_on(device) for device in (0, 1))  # others may have left any device the current one
    with pytest.raises(ValueError, match=r"k: .*GPU 0.*GPU 1"):
        cuflash.attention(q, k, q)
    with pytest.raises(ValueError, match=r"out: .*GPU 0.*GPU 1"):
        cuflash.attention(q, q, q, out=k)


def test_arrays_of_cpu_and_gpu(gpu: Device) -> None:
    on_gpu, on_cpu = cupy.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 4, 2, 8), np.float32)
    for arrays in ((on_gpu, on_cpu, on_gpu), (on_cpu, on_cpu, on_gpu)):
        with pytest.raises((TypeError, ValueError), match="numpy|cupy|CPU|GPU"):
            cuflash.attention(*arrays)
    with pytest.raises((TypeError, ValueError), match="kv_lengths"):
        cuflash.attention(on_gpu, on_gpu, on_gpu, kv_lengths=np.array([4], np.int32))


@every_case
def test_uninitialised_memory_does_not_matter(gpu: Device, name: str) -> None:
    """Results and work space come from a pool full of NaN, which changes nothing."""
    calls = Calls(varied_cases()[name], gpu)
    calls.run()
    expected = calls.host()
    calls.results = ()
    pool = cupy.get_default_memory_pool()
    for byte in (0xFF, 0x00, 0x7F):
        pool.free_all_blocks()
        blocks = [cupy.full(2**size, byte, np.uint8) for size in range(9, 24)]
        del blocks
        calls.run()
        assert all(same_bits(a, b) for a, b in zip(calls.host(), expected, strict=True))


def test_default_streams_of_threads(gpu: Device) -> None:
    """The per-thread default stream is a current stream like any other."""
    case = varied_cases()["causal"]
    out, lse = case.on(gpu).forward()
    with cupy.cuda.Stream.ptds:
        on_device = case.on(gpu)
        again = on_device.forward()
        assert_same_bits(dict(zip("ol", again, strict=True)), {"o": out, "l": lse})


def test_a_thread_that_has_done_nothing_yet(gpu: Device) -> None:
    """A thread's first contact with the GPU may be a call, on memory that the pool has ready."""
    case = varied_cases()["half"]
    expected = case.on(gpu).forward()
    on_device = case.on(gpu)  # other addresses: nothing that was kept for them serves
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(on_device.forward).result()
    assert_same_bits(dict(zip("ol", again, strict=True)), dict(zip("ol", expected, strict=True)))


def test_host_time_of_a_call(gpu: Device) -> None:
    """A call for a shape that was seen before costs the host at most 20 us, launch and allocations included."""
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        pytest.skip("other processes keep the host busy: wall time would be theirs, too")
    q, k, v = (cupy.zeros((1, 64, 8, 64), np.float16) for _ in range(3))
    times = []
    for _ in range(30):
        cupy.cuda.Stream.null.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            cuflash.attention(q, k, v, causal=True)
        times.append((time.perf_counter() - start) / 100)
    assert np.median(times) <= 20e-6, f"{np.median(times) * 1e6:.1f} us"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_backward_repeats(head_dim: int, causal: bool) -> None:
    """Many thread blocks add to each row of dq; 50 runs give the same bits."""
    q, k, v, dout = cupy.random.standard_normal((4, 2, 1500, 8, head_dim), dtype=np.float32).astype(np.float16)
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)

    def gradients() -> tuple[Any, ...]:
        return cuflash.attention_backward(dout, q, k, v, out, lse, causal=causal, deterministic=True)

    first = gradients()
    for _ in range(50):
        for x, y in zip(gradients(), first, strict=True):
            assert bool((x.view(np.uint16) == y.view(np.uint16)).all())
