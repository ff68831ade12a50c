// This header says how the mma.sync kernels multiply 16-bit elements, which lie as they are in their arrays. Turing
// (sm_75) uses it as well, with products of depth 8. It is `products` of forward.cuh, gradients.cuh and bias.cuh;
// wide_tile.cuh and split/sm80_tile.cuh are its counterparts for float64 and float32.
#include "tile.cuh"

using namespace direct;
constexpr int WARP_KEYS = BLOCK_N / (SPLITS_WARPS ? NUM_WARPS : KEY_WARPS);
// LeftFragment is a packed accumulator of COLUMNS columns as a left factor.
template <int COLUMNS>
using LeftFragment = u32[COLUMNS / 4];
using Weights = LeftFragment<WARP_KEYS>;
[[maybe_unused]] constexpr bool OF_KEYS = false, COMPUTES_DK = false, COMPUTES_DV = false;

template <class... Arguments>
DEVICE void multiply_scores(Arguments&&... arguments) {
  multiply_rows<(KEY_WARPS > 1)>(arguments...);
}
template <class... Arguments>
DEVICE void multiply_values(Arguments&&... arguments) {
  multiply_weights(arguments...);
}

// write_results() writes a warp's results; where warps share queries they go by way of shared memory, as each warp has
// few columns.
template <class T, int FRAGMENTS, int N>
DEVICE void write_results(const Units (&)[FRAGMENTS], const T& staging, int column, Element* data, i64 row_stride,
                          int row, int len, int rows, int head_dim, const float (&out)[FRAGMENTS][N]) {
  if constexpr (KEY_WARPS > 1) {
    write_through(staging, column, data, row_stride, row, len, rows, head_dim, out);
  } else {
    const float unit[2] = {1, 1};
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      write_fragment(data, row_stride, row + 16 * f + fragment_row(), len, rows, head_dim, out[f], unit);
    }
  }
}

template <class... Arguments>
DEVICE void write_in_units(const Units&, Arguments&&... arguments) {
  write_fragment(arguments...);
}
