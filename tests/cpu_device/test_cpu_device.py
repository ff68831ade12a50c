"""The CPU test device itself has the language, launches, barriers and warp operations of a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_device import device

pytestmark = pytest.mark.skipif(not device.available(), reason=device.NO_COMPILER)

REVERSE = r"""
struct Params { float* out; const float* in; long long n; float scale; };
constexpr int BLOCK = 64;
extern "C" __global__ void __launch_bounds__(BLOCK, 1) reverse(const __grid_constant__ Params p, int shift) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ float tile[BLOCK];
  float* doubled = reinterpret_cast<float*>(dynamic);
  const int t = threadIdx.x;
  const long long i = (long long)(blockIdx.x) * blockDim.x + t;
  tile[t] = i < p.n ? p.in[i] : 0.0f;
  __syncthreads();
  doubled[t] = 2 * tile[BLOCK - 1 - t];
  __syncthreads();
  if (i < p.n) p.out[i] = doubled[(t + shift) % BLOCK] * p.scale;
}
"""


def params(out: np.ndarray, src: np.ndarray, scale: float) -> np.ndarray:
    dtype = np.dtype([("out", "u8"), ("in", "u8"), ("n", "i8"), ("scale", "f4")], align=True)
    return np.array([(out.ctypes.data, src.ctypes.data, src.size, scale)], dtype)


def test_barriers_shared_memory_and_struct_by_value() -> None:
    src = np.arange(64 * 7, dtype=np.float32)
    out = np.full_like(src, np.nan)
    device.compile(REVERSE, (), "reverse").launch("reverse", (7,), (64,), (params(out, src, 0.5), np.int32(0)), 64 * 4)
    np.testing.assert_array_equal(out, src.reshape(7, 64)[:, ::-1].ravel())


WARP = r"""
extern "C" __global__ void warp(unsigned* out, float* sums, unsigned long long* counter) {
  const int t = threadIdx.x + threadIdx.y * blockDim.x, lane = t % 32;
  float x = t;
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  out += blockIdx.x * blockDim.x * blockDim.y;
  out[t] = __ballot_sync(~0u, lane % 3 == 0) ^ __shfl_sync(~0u, t, lane + 1);
  if (lane == 0) { atomicAdd(sums, x); atomicAdd(counter, 1ull); }
  if (lane < 8) out[t] += __shfl_down_sync(0xffu, t, 1, 8);
}
"""


def test_warp_collectives_and_atomics() -> None:
    out, sums, counter = np.zeros((5, 128), np.uint32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    device.compile(WARP).launch("warp", (5,), (64, 2), (out, sums, counter))
    t = np.arange(128, dtype=np.uint32)
    ballot = np.uint32(sum(1 << lane for lane in range(0, 32, 3)))
    want = ballot ^ (t // 32 * 32 + (t + 1) % 32)
    want = want + np.where(t % 32 < 8, np.where(t % 32 < 7, t + 1, t), 0)
    np.testing.assert_array_equal(out, np.broadcast_to(want, out.shape))
    assert sums[0] == 5 * t.sum() and counter[0] == 5 * 4


def test_divergent_collectives_and_deadlocks_are_named() -> None:
    head = 'extern "C" __global__ void k() {\n'
    with pytest.raises(device.DeviceError, match="kernel:2: __shfl_sync: lane [0-9]+ is not in its own mask"):
        device.compile(head + "if (threadIdx.x > 7) __shfl_sync(3u, 1, 0); }").launch("k", (1,), (64,), ())
    with pytest.raises(device.DeviceError, match="deadlock: thread 0 .* waits for __syncwarp at kernel:2"):
        device.compile(head + "if (threadIdx.x % 2) __syncthreads(); else __syncwarp(); }").launch("k", (1,), (64,), ())


def test_arguments_are_checked() -> None:
    module = device.compile('extern "C" __global__ void k(float* p, float x, int n) { if (n) *p = x; }')
    p = np.zeros(1, np.float32)
    with pytest.raises(TypeError, match="argument 1 has 8 bytes"):
        module.launch("k", (1,), (1,), (p, 1.0, 1))
    with pytest.raises(TypeError, match="3 arguments"):
        module.launch("k", (1,), (1,), (p,))
    module.launch("k", (1,), (1,), (p, np.float32(3), 1))
    assert p[0] == 3
