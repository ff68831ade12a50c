// float32 results of a warpgroup to global memory, straight from registers.
#pragma once
#include "../fragment.cuh"
#include "../sequence.cuh"
#include "../sm80/ptx.cuh"

// Writes out * factor[row] * unit[row] for the thread's rows `row` and row + 8 of `data`; rows in [len, rows) are
// padding and 0. The unit comes last: it alone may lead to subnormals, or out of range.
template <int N>
__device__ __forceinline__ void write_float_fragment(float* data, i64 row_stride, int row, int len, int rows,
                                                     int head_dim, const float (&out)[N], const float (&factor)[2],
                                                     const float (&unit)[2]) {
  const bool vectors =
      (reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(float)) % sizeof(float2) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    if (i >= rows) continue;
    float* target = data + i * row_stride;
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
      const int column = fragment_column() + column_offset(e);
      // Padding is chosen, not multiplied: it may be NaN.
      float2 x;
      x.x = i < len ? ptx::multiply(out[e] * factor[r], unit[r]) : 0;
      x.y = i < len ? ptx::multiply(out[e + 1] * factor[r], unit[r]) : 0;
      if (vectors && column + 1 < head_dim) {
        *reinterpret_cast<float2*>(target + column) = x;
      } else {
        if (column < head_dim) target[column] = x.x;
        if (column + 1 < head_dim) target[column + 1] = x.y;
      }
    }
  }
}
