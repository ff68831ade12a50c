"""One warp hands rows of numbers to another through shared memory, in the way whose name is the argument."""

from __future__ import annotations

import sys

import cupy as cp
import numpy as np

ROUNDS, LANES = 4, 32
SOURCE = """
namespace {
struct Barrier {
  unsigned long long state;
  __device__ unsigned address() { return (unsigned)__cvta_generic_to_shared(&state); }
  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ void wait(unsigned parity) {
    unsigned done = 0;
    while (!done) {
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(address()), "r"(parity) : "memory");
    }
  }
};

// arrives(lane): which lanes arrive at an mbarrier, for all of the warp.
template <class Arrives>
__device__ void by_mbarriers(int* out, int arrivals, Arrives arrives) {
  __shared__ int data[LANES];
  __shared__ Barrier full, empty;
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  if (threadIdx.x == 0) {
    full.init(arrivals);
    empty.init(arrivals);
  }
  __syncthreads();
  for (int i = 0; i < ROUNDS; i++) {
    if (warp == 0) {
      if (i > 0) empty.wait((i - 1) % 2);
      data[lane] = i * LANES + lane;
      __syncwarp();
      if (arrives(lane)) full.arrive();
    } else {
      full.wait(i % 2);
      out[i * LANES + lane] = data[LANES - 1 - lane];
      __syncwarp();
      if (arrives(lane)) empty.arrive();
    }
  }
}
}  // namespace

extern "C" __global__ void by_all(int* out) {
  by_mbarriers(out, LANES, [](int) { return true; });
}

extern "C" __global__ void by_one_of_a_warp(int* out) {
  by_mbarriers(out, 1, [](int lane) { return lane == 0; });
}

extern "C" __global__ void by_bar_arrive(int* out) {
  __shared__ int data[LANES];
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  for (int i = 0; i < ROUNDS; i++) {
    if (warp == 0) {
      if (i > 0) asm volatile("bar.sync 2, 64;" ::: "memory");
      data[lane] = i * LANES + lane;
      asm volatile("bar.arrive 1, 64;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 64;" ::: "memory");
      out[i * LANES + lane] = data[LANES - 1 - lane];
      if (i + 1 < ROUNDS) asm volatile("bar.arrive 2, 64;" ::: "memory");
    }
  }
}
"""

if __name__ == "__main__":
    out = cp.zeros((ROUNDS, LANES), np.int32)
    source = f"constexpr int ROUNDS = {ROUNDS}, LANES = {LANES};\n{SOURCE}"
    cp.RawModule(code=source, options=("--std=c++17",)).get_function(sys.argv[1])((1,), (2 * LANES,), (out,))
    assert (out.get()[:, ::-1] == np.arange(ROUNDS * LANES).reshape(ROUNDS, LANES)).all()
