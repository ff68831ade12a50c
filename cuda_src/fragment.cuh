// Where the elements of a warp's accumulators stand: 16 rows of mma.sync, or a warp's 16 of the 64 rows of wgmma.
// Element e of N / 2 is row 8 * (e / 2 % 2) and column 8 * (e / 4) + e % 2, counted from the thread's.
#pragma once
#include "params.cuh"

DEVICE int lane() { return threadIdx.x % WARP; }
DEVICE int fragment_row() { return lane() / 4; }
DEVICE int fragment_column() { return lane() % 4 * 2; }
DEVICE constexpr int row_offset(int e) { return e / 2 % 2 * 8; }
DEVICE constexpr int column_offset(int e) { return e / 4 * 8 + e % 2; }

DEVICE u32 packed(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}
DEVICE u32 packed(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// An accumulator as the left factor of the next product.
template <int N>
DEVICE void pack(u32 (&pairs)[N / 2], const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) pairs[i] = packed(Element(), x[2 * i], x[2 * i + 1]);
}

// Marks the keys of a masked tile that some query sees: x are their scores.
template <int N>
DEVICE void mark_seen(u8* seen, const Accum (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) {
    if (row_offset(e) == 0 && (x[e] != -infinity() || x[e + 2] != -infinity())) {
      seen[fragment_column() + column_offset(e)] = 1;
    }
  }
}
