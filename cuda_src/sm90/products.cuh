// The matrix products of a warpgroup, and where the elements of its fragments stand. Tiles lie in shared memory as
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
DEVICE int warp_row() { return threadIdx.x % WARPGROUP / WARP * 16; }

template <class T, int N>
DEVICE void keep(T (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) ptx::keep(x[e]);
}

// Descriptors of tiles at shared addresses; an offset in bytes is added as offset / 16.
DEVICE u64 rows_descriptor(u32 address) { return ptx::wgmma_descriptor(address, 16, ATOM_BYTES); }
DEVICE u64 columns_descriptor(u32 address) { return ptx::wgmma_descriptor(address, BLOCK_N * ROW_BYTES, ATOM_BYTES); }
DEVICE constexpr u32 step_offset(int step, int rows) { return step / 4 * rows * ROW_BYTES + step % 4 * 32; }

// Starts x = q k^T for 64 rows of q, and what `more` starts to be added.
template <class More>
DEVICE void multiply_keys(float (&x)[BLOCK_N / 2], u32 q, u32 k, More more) {
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
DEVICE void multiply_values(float (&out)[HEAD_DIM_V / 2], u32 (&weights)[BLOCK_N / 4], u32 v) {
  const u64 b = columns_descriptor(v);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < BLOCK_N / STEP; step++) {
    ptx::wgmma_rs<Element, 1>(out, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                              weights[4 * step + 3], b + step * (STEP * ROW_BYTES / 16), true);
  }
  ptx::wgmma_commit_group();
}

// ---- Of the gradients: every tile is used as it lies, by its rows, or transposed by its columns.

// Starts x = a b^T over DEPTH; the panels of a and b have ROWS_A and ROWS_B rows.
template <int DEPTH, int ROWS_A, int ROWS_B, int N>
DEVICE void multiply_by_rows(float (&x)[N], u32 a, u32 b) {
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
DEVICE u64 columns_of(u32 address) {
  return ptx::wgmma_descriptor(address, ROWS * ROW_BYTES, ATOM_BYTES);
}

// Starts x = a b over DEPTH: a by its rows, b by its columns.
template <int DEPTH, int ROWS_A, int N>
DEVICE void multiply_by_columns(float (&x)[N], u32 a, u32 b) {
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
DEVICE void add_product(float (&sum)[N], u32 (&factor)[DEPTH / 4], u32 b) {
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
DEVICE u32 transposed_address(u32 panel, u32 thread) {
  const u32 lane = thread % WARP;
  const u32 query = lane / 16 * 8 + lane % 8, chunk = thread % WARPGROUP / WARP * 2 + lane / 8 % 2;
  return panel + query * ROW_BYTES + (chunk ^ query % 8) * 16;
}

// Writes a fragment of 64 keys x N queries as rows of queries into the panel of its keys.
template <int N>
DEVICE void store_transposed(u32 panel, const u32 (&words)[N]) {
  const u32 target = transposed_address(panel, threadIdx.x);
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    ptx::stmatrix_x4_trans(target + i * 16 * ROW_BYTES, words[4 * i], words[4 * i + 1], words[4 * i + 2],
                           words[4 * i + 3]);
  }
}
