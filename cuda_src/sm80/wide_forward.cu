// Forward attention by mma.sync on float64, and on float32 as TF32.
#include "../write_wide_fragment.cuh"
#include "wide_tile.cuh"

using Weights = LeftFragment<BLOCK_N>;

template <int N>
__device__ __forceinline__ void write_results(Element* data, i64 row_stride, int row, int len, int rows, int head_dim,
                                              const Accum (&out)[N], const Accum (&factor)[2]) {
  const Accum unit[2] = {1, 1};
  write_wide_fragment(data, row_stride, row, len, rows, head_dim, out, factor, unit);
}

#include "forward.cuh"
