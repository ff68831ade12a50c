// Forward attention by mma.sync on float64, and on float32 as TF32.
#include "../write_wide_fragment.cuh"
#include "wide_tile.cuh"

constexpr int WARP_KEYS = BLOCK_N;
using Weights = LeftFragment<BLOCK_N>;

template <class T, int FRAGMENTS, int N>
__device__ __forceinline__ void write_results(const T&, int, Element* data, i64 row_stride, int row, int len, int rows,
                                              int head_dim, const Accum (&out)[FRAGMENTS][N]) {
  const Accum unit[2] = {1, 1};
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    write_wide_fragment(data, row_stride, row + 16 * f + fragment_row(), len, rows, head_dim, out[f], unit, unit);
  }
}

#include "forward.cuh"
