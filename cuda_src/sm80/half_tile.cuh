// Tiles of 16-bit elements as they lie.
#include "tile.cuh"

using namespace direct;
constexpr int WARP_KEYS = BLOCK_N / KEY_WARPS;
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
