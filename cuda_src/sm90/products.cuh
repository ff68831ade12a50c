// The two matrix products of a warpgroup, and where the elements of its fragments stand. Tiles lie in shared memory as
// TMA writes them: panels of 64 columns, each with its rows one after the other in the 128-byte swizzle.
#pragma once
#include "schedule.cuh"

constexpr int ROWS_OF_WARPGROUP = 64;  // M of wgmma
constexpr int STEP = 16;               // K of wgmma
constexpr int PANEL = 64;              // columns of a panel, 128 bytes
constexpr u32 ROW_BYTES = 128, ATOM_BYTES = 1024;
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL, PANELS_V = (HEAD_DIM_V + PANEL - 1) / PANEL;
constexpr u32 Q_BYTES = BLOCK_M * ROW_BYTES * PANELS;
constexpr u32 K_BYTES = BLOCK_N * ROW_BYTES * PANELS, V_BYTES = BLOCK_N * ROW_BYTES * PANELS_V;

// First row of the thread's warp within its warpgroup.
__device__ __forceinline__ int warp_row() { return threadIdx.x % WARPGROUP / WARP * 16; }

template <class T, int N>
__device__ __forceinline__ void keep(T (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) ptx::keep(x[e]);
}

// Descriptors of tiles at shared addresses; an offset in bytes is added as offset / 16.
__device__ __forceinline__ u64 rows_descriptor(u32 address) { return ptx::wgmma_descriptor(address, 16, ATOM_BYTES); }
__device__ __forceinline__ u64 columns_descriptor(u32 address) {
  return ptx::wgmma_descriptor(address, BLOCK_N * ROW_BYTES, ATOM_BYTES);
}
__device__ __forceinline__ constexpr u32 step_offset(int step, int rows) {
  return step / 4 * rows * ROW_BYTES + step % 4 * 32;
}

// Starts x = q k^T for 64 rows of q, and what `more` starts to be added.
template <class More>
__device__ __forceinline__ void multiply_keys(float (&x)[BLOCK_N / 2], u32 q, u32 k, More more) {
  const u64 a = rows_descriptor(q), b = rows_descriptor(k);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / STEP; step++) {
    ptx::wgmma_ss<Element, 0, 0>(x, a + step_offset(step, BLOCK_M) / 16, b + step_offset(step, BLOCK_N) / 16, step > 0);
  }
  more();
  ptx::wgmma_commit_group();
}

// Starts out += weights v; the fragment of the scores is the one of the left factor.
__device__ __forceinline__ void multiply_values(float (&out)[HEAD_DIM_V / 2], u32 (&weights)[BLOCK_N / 4], u32 v) {
  const u64 b = columns_descriptor(v);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < BLOCK_N / STEP; step++) {
    ptx::wgmma_rs<Element, 1>(out, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                              weights[4 * step + 3], b + step * (STEP * ROW_BYTES / 16), true);
  }
  ptx::wgmma_commit_group();
}
