// Matrix products of float32 operands in float16 parts (split_layout.cuh). The tensor cores cut off what does not fit
// their sums instead of rounding it, so the small products come first, and sums over many tiles are made elsewhere.
#pragma once
#include "products.cuh"

static_assert(KEY_PARTS == 3 && PARTS == 2 || KEY_PARTS == 1 && PARTS == 1, "float32 or TF32");
constexpr u32 ALL_Q_BYTES = KEY_PARTS * Q_BYTES, ALL_K_BYTES = KEY_PARTS * K_BYTES, ALL_V_BYTES = PARTS * V_BYTES;
constexpr int OUT_CHUNKS = HEAD_DIM_V / OUT_COLUMNS;  // columns of out come in chunks, as registers are scarce
static_assert(OUT_CHUNKS * OUT_COLUMNS == HEAD_DIM_V, "chunks are equal");
static_assert(OUT_CHUNKS == 1 || OUT_COLUMNS % PANEL == 0, "chunks are whole panels");

// Starts x = q k^T for 64 rows of q: but for middle * middle, of 2^-22 of a term at most, all that float32 would keep.
// A score of 100 whose terms lacked the last parts would be 1e-5 away.
__device__ __forceinline__ void multiply_split_keys(float (&x)[BLOCK_N / 2], u32 q, u32 k) {
  const auto multiply = [&](int part_a, int part_b, bool first) {
    u32 part_of_q = q + part_a * Q_BYTES, part_of_k = k + part_b * K_BYTES;
    ptx::forget(part_of_q);
    ptx::forget(part_of_k);
    const u64 a = rows_descriptor(part_of_q), b = rows_descriptor(part_of_k);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / STEP; step++) {
      ptx::wgmma_ss<__half, 0, 0>(x, a + step_offset(step, BLOCK_M) / 16, b + step_offset(step, BLOCK_N) / 16,
                                  !first || step > 0);
    }
  };
  ptx::wgmma_fence();
  if constexpr (KEY_PARTS == 3) {
    multiply(2, 0, true);
    multiply(0, 2, false);
    multiply(1, 0, false);
    multiply(0, 1, false);
  }
  multiply(0, 0, KEY_PARTS == 1);
  ptx::wgmma_commit_group();
}

// A fragment as the left factor of a product.
struct SplitFragment {
  u32 high[BLOCK_N / 4], low[BLOCK_N / 4];

  __device__ __forceinline__ void set(const float (&x)[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      high[i] = *reinterpret_cast<const u32*>(&pair);
      if constexpr (PARTS == 2) {
        const float2 kept = __half22float2(pair);
        low[i] = packed(__half(), x[2 * i] - kept.x, x[2 * i + 1] - kept.y);
      }
    }
  }
};

// Starts tile = weights v for one chunk of v's columns; low * low would add 2^-22 of a term at most.
__device__ __forceinline__ void multiply_split_values(float (&tile)[OUT_COLUMNS / 2], const SplitFragment& weights,
                                                      u32 v, int chunk) {
  const auto multiply = [&](const u32(&a)[BLOCK_N / 4], int part, bool first) {
    u32 part_of_v = v + part * V_BYTES + chunk * (OUT_COLUMNS / PANEL) * BLOCK_N * ROW_BYTES;
    ptx::forget(part_of_v);
    const u64 b = columns_descriptor(part_of_v);
#pragma unroll
    for (int step = 0; step < BLOCK_N / STEP; step++) {
      ptx::wgmma_rs<__half, 1>(tile, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                               b + step * (STEP * ROW_BYTES / 16), !first || step > 0);
    }
  };
  ptx::wgmma_fence();
  if constexpr (PARTS == 2) {
    multiply(weights.low, 0, true);
    multiply(weights.high, 1, false);
  }
  multiply(weights.high, 0, PARTS == 1);
  ptx::wgmma_commit_group();
}

// out = out * factor[row] + tile for one chunk of out's columns.
__device__ __forceinline__ void add_tile(float (&out)[HEAD_DIM_V / 2], const float (&tile)[OUT_COLUMNS / 2],
                                         const float (&factor)[2], int chunk) {
#pragma unroll
  for (int e = 0; e < OUT_COLUMNS / 2; e++) {
    float& sum = out[chunk * (OUT_COLUMNS / 2) + e];
    sum = sum * factor[e / 2 % 2] + tile[e];
  }
}
