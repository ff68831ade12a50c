// The matrix products of the gradients. Every tile is used as it lies in shared memory (products.cuh): by its rows, or
// transposed by its columns.
#pragma once
#include "products.cuh"

// Starts x = a b^T over DEPTH; the panels of a and b have ROWS_A and ROWS_B rows.
template <int DEPTH, int ROWS_A, int ROWS_B, int N>
__device__ __forceinline__ void multiply_by_rows(float (&x)[N], u32 a, u32 b) {
  const u64 left = rows_descriptor(a), right = rows_descriptor(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < DEPTH / STEP; step++) {
    ptx::wgmma_ss<Element, 0, 0>(x, left + step_offset(step, ROWS_A) / 16, right + step_offset(step, ROWS_B) / 16,
                                 step > 0);
  }
  ptx::wgmma_commit_group();
}

// Columns of a tile whose panels have ROWS rows.
template <int ROWS>
__device__ __forceinline__ u64 columns_of(u32 address) {
  return ptx::wgmma_descriptor(address, ROWS * ROW_BYTES, ATOM_BYTES);
}

// Starts x = a b over DEPTH: a by its rows, b by its columns.
template <int DEPTH, int ROWS_A, int N>
__device__ __forceinline__ void multiply_by_columns(float (&x)[N], u32 a, u32 b) {
  const u64 left = rows_descriptor(a), right = columns_of<DEPTH>(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < DEPTH / STEP; step++) {
    ptx::wgmma_ss<Element, 0, 1>(x, left + step_offset(step, ROWS_A) / 16, right + step * (STEP * ROW_BYTES / 16),
                                 step > 0);
  }
  ptx::wgmma_commit_group();
}

// Starts sum += factor b over DEPTH: factor is a fragment, b used by its columns.
template <int DEPTH, int N>
__device__ __forceinline__ void add_product(float (&sum)[N], u32 (&factor)[DEPTH / 4], u32 b) {
  const u64 right = columns_of<DEPTH>(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < DEPTH / STEP; step++) {
    ptx::wgmma_rs<Element, 1>(sum, factor[4 * step], factor[4 * step + 1], factor[4 * step + 2], factor[4 * step + 3],
                              right + step * (STEP * ROW_BYTES / 16), true);
  }
  ptx::wgmma_commit_group();
}

// Where the thread's row of four 8 x 8 matrices stands in the panel of its keys.
__device__ __forceinline__ u32 transposed_address(u32 panel, u32 thread) {
  const u32 lane = thread % WARP;
  const u32 query = lane / 16 * 8 + lane % 8, chunk = thread % WARPGROUP / WARP * 2 + lane / 8 % 2;
  return panel + query * ROW_BYTES + (chunk ^ query % 8) * 16;
}

// Writes a fragment of 64 keys x N queries as rows of queries into the panel of its keys.
template <int N>
__device__ __forceinline__ void store_transposed(u32 panel, const u32 (&words)[N]) {
  const u32 target = transposed_address(panel, threadIdx.x);
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    ptx::stmatrix_x4_trans(target + i * 16 * ROW_BYTES, words[4 * i], words[4 * i + 1], words[4 * i + 2],
                           words[4 * i + 3]);
  }
}
