// Matrix products of float32 operands in float16 parts (split_layout.cuh). The tensor cores cut off what does not fit
// their sums instead of rounding it, so the small products come first, and sums over many tiles are made elsewhere.
#pragma once
#include "products.cuh"
#include "split_factors.cuh"

static_assert(KEY_PARTS == 3 && PARTS == 2 || KEY_PARTS == 1 && PARTS == 1, "float32 or TF32");

// Bytes of one part of a tile.
__device__ __forceinline__ constexpr u32 part_bytes(int rows, int columns) {
  return rows * ROW_BYTES * ((columns + PANEL - 1) / PANEL);
}

// Starts x = a b^T for 64 of the ROWS rows of a tile a and the N rows of a tile b, both DEPTH columns wide. Two parts
// leave out middle * middle, of 2^-22 of a term at most. Three parts add all else that float32 would keep: without it a
// score of 100 is off by 1e-5.
template <int COUNT, int DEPTH, int ROWS, int N>
__device__ __forceinline__ void multiply_transposed(float (&x)[N / 2], u32 a, u32 b) {
  const auto multiply = [&](int part_a, int part_b, bool first) {
    u32 from_a = a + part_a * part_bytes(ROWS, DEPTH), from_b = b + part_b * part_bytes(N, DEPTH);
    ptx::forget(from_a);
    ptx::forget(from_b);
    const u64 left = rows_descriptor(from_a), right = rows_descriptor(from_b);
#pragma unroll
    for (int step = 0; step < DEPTH / STEP; step++) {
      ptx::wgmma_ss<__half, 0, 0>(x, left + step_offset(step, ROWS) / 16, right + step_offset(step, N) / 16,
                                  !first || step > 0);
    }
  };
  ptx::wgmma_fence();
  if constexpr (COUNT == 3) {
    multiply(2, 0, true);
    multiply(0, 2, false);
  }
  if constexpr (COUNT >= 2) {
    multiply(1, 0, COUNT == 2);
    multiply(0, 1, false);
  }
  multiply(0, 0, COUNT == 1);
  ptx::wgmma_commit_group();
}

// Starts sum = weights b for one chunk of WIDTH of the columns of a tile b, N rows of `columns` columns.
template <int WIDTH, int N>
__device__ __forceinline__ void multiply(float (&sum)[WIDTH / 2], const SplitFragment<N>& weights, u32 b, int columns,
                                         int chunk) {
  static_assert(WIDTH % PANEL == 0, "chunks are whole panels");
  const auto multiply_part = [&](const u32(&a)[N / 4], int part, bool first) {
    u32 from = b + part * part_bytes(N, columns) + chunk * part_bytes(N, WIDTH);
    ptx::forget(from);
    const u64 right = ptx::wgmma_descriptor(from, N * ROW_BYTES, ATOM_BYTES);
#pragma unroll
    for (int step = 0; step < N / STEP; step++) {
      ptx::wgmma_rs<__half, 1>(sum, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                               right + step * (STEP * ROW_BYTES / 16), !first || step > 0);
    }
  };
  ptx::wgmma_fence();
  if constexpr (PARTS == 2) {
    multiply_part(weights.low, 0, true);
    multiply_part(weights.high, 1, false);
  }
  multiply_part(weights.high, 0, PARTS == 1);
  ptx::wgmma_commit_group();
}

// out = out * factor[row] + sum for one chunk of out's columns.
template <int COLUMNS, int WIDTH>
__device__ __forceinline__ void add_chunk(float (&out)[COLUMNS], const float (&sum)[WIDTH], const float (&factor)[2],
                                          int chunk) {
#pragma unroll
  for (int e = 0; e < WIDTH; e++) {
    out[chunk * WIDTH + e] = out[chunk * WIDTH + e] * factor[e / 2 % 2] + sum[e];
  }
}
