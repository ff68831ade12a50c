// Results of a warp to global memory by way of shared memory, so that lanes side by side store whole lines.
#pragma once
#include "tile.cuh"

// Writes a warp's accumulators, columns from `column` on, to rows from `row` on of `data`, whose rows in [len, rows)
// are padding and 0. The rows of `staging` are the warp's own, or those columns of them.
template <class T, int FRAGMENTS, int N>
__device__ __forceinline__ void write_through(const T& staging, int column, Element* data, i64 row_stride, int row,
                                              int len, int rows, int head_dim, const float (&out)[FRAGMENTS][N]) {
  __syncwarp();  // what was there is read
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    u32 pairs[N / 2];
    pack(pairs, out[f]);
    staging.from_row(16 * f).store_fragment(pairs, column);
  }
  __syncwarp();
  constexpr int PER_ROW = 2 * N / VECTOR, LANES = PER_ROW & -PER_ROW, ROWS_AT_ONCE = WARP / LANES;
  const bool vectors =
      ((reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(Element)) % 16 | head_dim % VECTOR) == 0;
  const int own = lane() / LANES, begin = column + lane() % LANES * VECTOR;
  Element* target = data + (row + own) * row_stride + begin;
  if (vectors) {
#pragma unroll
    for (int i = 0; i < 16 * FRAGMENTS; i += ROWS_AT_ONCE, target += ROWS_AT_ONCE * row_stride) {
#pragma unroll
      for (int v = 0; v < PER_ROW; v += LANES) {
        // Padding is chosen, not multiplied: it may be NaN.
        const Vector x = row + own + i < len ? staging.read(own + i, begin / VECTOR + v) : Vector{};
        if (row + own + i < rows && begin + v * VECTOR < head_dim) *reinterpret_cast<Vector*>(target + v * VECTOR) = x;
      }
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < smaller(16 * FRAGMENTS, rows - row - own); i += ROWS_AT_ONCE) {
#pragma unroll 1
      for (int v = 0; v < PER_ROW; v += LANES) {
        const Vector x = row + own + i < len ? staging.read(own + i, begin / VECTOR + v) : Vector{};
#pragma unroll
        for (int e = 0; e < VECTOR; e++) {
          if (begin + v * VECTOR + e < head_dim) target[i * row_stride + v * VECTOR + e] = x.e[e];
        }
      }
    }
  }
}

template <int FRAGMENTS, int N>
__device__ __forceinline__ void scale_all(float (&x)[FRAGMENTS][N], float factor) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int e = 0; e < N; e++) x[f][e] *= factor;
  }
}
