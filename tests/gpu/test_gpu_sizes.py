"""Only a GPU can show that indices beyond 32 bits and grids beyond 65535 work, and that memory grows linearly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import Case, OnDevice, gaussian, gaussian_case
from devices import Device

import cuflash
from cuflash import reference

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

GIGABYTE = 2**30


@pytest.fixture(scope="module")
def gpu() -> Device:
    return Device("cupy", cupy)


def need_memory(gigabytes: float) -> None:
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.Device().mem_info
    if free < gigabytes * GIGABYTE:
        pytest.skip(f"needs {gigabytes:g} GiB of GPU memory, {free / GIGABYTE:.1f} are free")


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (300, 300)])
def test_batch_times_heads_beyond_65535(gpu: Device, batch: int, heads: int) -> None:
    case = gaussian_case(0, "float16", (5, 7), heads=(heads, heads), dims=(8, 8), batch=batch, causal=True)
    on_device = case.on(gpu)
    out, lse = on_device.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(on_device.backward(out, lse))


def test_many_packed_sequences(gpu: Device) -> None:
    """There are 70 000 sequences, most of one row, some empty, a few longer than a tile."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 3, 70_000)
    lengths[[0, 35_000, 69_999]] = 150
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v, dout = (gaussian(rng, (int(cu[-1]), 2, 8), "float32") for _ in range(4))
    case = Case(q, k, v, dout, options={"causal": True}, cu_seqlens=(cu, cu))
    on_device = case.on(gpu)
    out, lse = on_device.forward()
    grads = on_device.backward(out, lse)
    for b in (0, 1, 17, 34_999, 35_000, 35_001, 69_998, 69_999):
        own = slice(int(cu[b]), int(cu[b + 1]))
        alone = Case(q[None, own], k[None, own], v[None, own], dout[None, own], options={"causal": True})
        alone.assert_forward(out[None, own], lse[None, :, own])
        alone.assert_gradients({name: grad[None, own] for name, grad in grads.items()})
    assert np.isfinite(out).all()


def test_strides_beyond_2_31_elements(gpu: Device) -> None:
    """Rows of small arrays lie further apart than a 32-bit offset reaches."""
    need_memory(10)
    case = gaussian_case(0, "float16", (40, 50), dims=(64, 64), causal=True)
    far = 2**31 + 64
    buffer = cupy.empty(2 * far, np.float16)
    on_device = case.on(gpu)
    spread = []
    for index, x in enumerate(on_device.qkv):
        first = buffer[index * 100_000 :]
        strides = (2 * far, *x.strides[1:])
        view = cupy.ndarray(x.shape, x.dtype, first.data, strides)
        view[...] = x
        spread.append(view)
    far_case = OnDevice(case, gpu, tuple(spread), on_device.dout, on_device.dlse, (), on_device.options)
    out, lse = far_case.forward()
    case.assert_forward(out, lse)
    case.assert_gradients(far_case.backward(out, lse))


def test_tensors_beyond_2_31_elements(gpu: Device) -> None:
    """q, k, v and all results have more than 2^31 elements; samples, the last ones too, agree with the reference."""
    batch, seqlen, heads, dim = 36_000, 64, 15, 64
    assert batch * seqlen * heads * dim > 2**31
    need_memory(9 * batch * seqlen * heads * dim * 2 / GIGABYTE + 4)
    block = gaussian(np.random.default_rng(0), (1000, seqlen, heads, dim), "float16")
    q = cupy.empty((batch, seqlen, heads, dim), np.float16)
    for first in range(0, batch, len(block)):
        q[first : first + len(block)] = cupy.asarray(np.roll(block, first, axis=0))
    k, v = q[::-1], q[:, ::-1]
    (out, lse), backward = cuflash.attention_vjp(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = backward(q)
    for b in (0, 1, batch // 2, batch - 1):
        own_q, own_k, own_v = (cupy.asnumpy(x[b : b + 1]) for x in (q, k, v))
        case = Case(own_q, own_k, own_v, own_q, options={"causal": True})
        case.assert_forward(cupy.asnumpy(out[b : b + 1]), cupy.asnumpy(lse[b : b + 1]))
        grads = {name: cupy.asnumpy(grad[b : b + 1]) for name, grad in zip("qkv", (dq, dk, dv), strict=True)}
        case.assert_gradients(grads)


def test_bias_beyond_2_31_elements(gpu: Device) -> None:
    """One head has a bias of more than 2^31 elements and its gradient; sampled rows agree with the reference."""
    seqlen = 46_400
    assert seqlen**2 > 2**31
    need_memory(2.2 * seqlen**2 * 2 / GIGABYTE + 2)
    rng = np.random.default_rng(0)
    q, k, v, dout = (gaussian(rng, (1, seqlen, 1, 16), "float16") for _ in range(4))
    line = cupy.asarray(gaussian(rng, (seqlen,), "float16"))
    bias = cupy.empty((seqlen, seqlen), np.float16)
    bias[...] = line
    bias[-1] = -line
    arrays = gpu.put((q, k, v))
    (out, lse), backward = cuflash.attention_vjp(*arrays, bias=bias, return_lse=True)
    dbias: Any = backward(gpu.put(dout), grads=("bias",))[3]
    rows = np.array([0, 1, 23_000, seqlen - 2, seqlen - 1])
    case = Case(q[:, rows], k, v, dout[:, rows], options={"bias": cupy.asnumpy(bias[rows])})
    case.assert_forward(cupy.asnumpy(out[:, rows]), cupy.asnumpy(lse[..., rows]))
    expected = reference.attention_backward(case.dout, case.q, k, v, **case.options)["bias"]
    largest = np.abs(expected).max()
    assert np.abs(cupy.asnumpy(dbias[rows]).astype(np.float64) - expected).max() <= 0.02 * largest


def test_memory_is_linear_and_nothing_is_copied(gpu: Device) -> None:
    """A call allocates lse at most besides its results, a backward one a float32 dq, even for heads-first inputs."""
    seqlen = 16_384
    stored = cupy.zeros((1, 4, seqlen, 64), np.float16)
    x = stored.swapaxes(1, 2)
    pool = cupy.get_default_memory_pool()

    def growth(work: Callable[[], Any]) -> int:
        work()
        pool.free_all_blocks()
        before = pool.total_bytes()
        result = work()
        del result
        return int(pool.total_bytes() - before)

    lse_bytes = 4 * 4 * seqlen
    assert growth(lambda: cuflash.attention(x, x, x, causal=True)) <= stored.nbytes + 2 * lse_bytes + 2**20
    out, lse = cuflash.attention(x, x, x, causal=True, return_lse=True)
    workspace = growth(lambda: cuflash.attention_backward(out, x, x, x, out, lse, causal=True))
    # The float32 dq that is accumulated into takes twice an input.
    assert workspace <= 3 * stored.nbytes + 2 * stored.nbytes + 4 * lse_bytes + 2**20
