// Results of a warp in float32 or float64 to global memory, straight from registers.
#pragma once
#include "fragment.cuh"
#include "sequence.cuh"
#include "sm80/ptx.cuh"

// Where only the last factor may lead to subnormals, or out of range.
__device__ __forceinline__ float times_last(float x, float factor) { return ptx::multiply(x, factor); }
__device__ __forceinline__ double times_last(double x, double factor) { return x * factor; }

// Writes out * factor[row] * unit[row] for the thread's rows `row` and row + 8 of `data`; rows in [len, rows) are
// padding and 0.
template <int N>
__device__ __forceinline__ void write_wide_fragment(Element* data, i64 row_stride, int row, int len, int rows,
                                                    int head_dim, const Accum (&out)[N], const Accum (&factor)[2],
                                                    const Accum (&unit)[2]) {
  struct alignas(2 * sizeof(Element)) Pair {
    Element x, y;
  };
  const bool vectors =
      (reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(Element)) % sizeof(Pair) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    if (i >= rows) continue;
    Element* target = data + i * row_stride;
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
      const int column = fragment_column() + column_offset(e);
      // Padding is chosen, not multiplied: it may be NaN.
      const Pair pair = {i < len ? times_last(out[e] * factor[r], unit[r]) : 0,
                         i < len ? times_last(out[e + 1] * factor[r], unit[r]) : 0};
      if (vectors && column + 1 < head_dim) {
        *reinterpret_cast<Pair*>(target + column) = pair;
      } else {
        if (column < head_dim) target[column] = pair.x;
        if (column + 1 < head_dim) target[column + 1] = pair.y;
      }
    }
  }
}

// The same for a sum whose rows have units.
template <class Units, class... Arguments>
__device__ __forceinline__ void write_in_units(const Units& units, Arguments&&... arguments) {
  const Accum unit[2] = {units.at(0), units.at(1)};
  write_wide_fragment(arguments..., unit);
}

// All fragments of a warp; nothing is staged.
template <class Units, class T, int FRAGMENTS, int N>
__device__ __forceinline__ void write_results(const Units (&units)[FRAGMENTS], const T&, int, Element* data,
                                              i64 row_stride, int row, int len, int rows, int head_dim,
                                              const Accum (&out)[FRAGMENTS][N]) {
  const Accum one[2] = {1, 1};
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    write_in_units(units[f], data, row_stride, row + 16 * f + fragment_row(), len, rows, head_dim, out[f], one);
  }
}
