// Results of a warp by way of shared memory, so that lanes side by side store whole lines.
#pragma once
#include "../params.cuh"
#include "products.cuh"

constexpr int ROWS_OF_WARP = 16;

// Writes out * factor for the warp's rows [row, row + 16) of `data`; rows in [len, rows) are padding and 0. `staging`
// is the warp's own: rows of eight chunks of 16 bytes, each in the place of its number xor the row's.
template <int N>
DEVICE void write_rows(Element* data, i64 row_stride, int row, int len, int rows, int head_dim, const float (&out)[N],
                       const float (&factor)[2], unsigned char* staging) {
  constexpr int CHUNK = sizeof(Vector), CHUNKS = ROW_BYTES / CHUNK, ROWS_AT_ONCE = WARP / CHUNKS;
  const bool vectors = (reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(Element)) % CHUNK == 0 &&
                       head_dim % VECTOR == 0;
  u32 own_lane = lane();
  ptx::forget(own_lane);  // what follows from it would occupy registers all along
  const int thread = static_cast<int>(own_lane);
  // Padding is chosen, not multiplied: it may be NaN.
  const bool used[2] = {row + thread / 4 < len, row + thread / 4 + 8 < len};
  const int from_row = thread % ROWS_OF_WARP, from_chunk = thread / ROWS_OF_WARP;
  const u32 from = ptx::shared_address(staging) + from_row * ROW_BYTES;
  const int to_row = thread / CHUNKS, to_chunk = thread % CHUNKS;
  Element* target = data + (row + to_row) * row_stride + to_chunk * VECTOR;
#pragma unroll
  for (int panel = 0; panel * (PANEL / 2) < N; panel++) {
#pragma unroll
    for (int block = 0; block < PANEL / 16; block++) {
      const int first = panel * (PANEL / 2) + block * 8;
      if (first >= N) break;
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = first + 2 * i;
        words[i] = used[i % 2] ? packed(Element(), out[e] * factor[i % 2], out[e + 1] * factor[i % 2]) : 0;
      }
      ptx::stmatrix_x4(from + ((2 * block + from_chunk) ^ (from_row % CHUNKS)) * CHUNK, words[0], words[1], words[2],
                       words[3]);
    }
    __syncwarp();
    const int columns_left = head_dim - (panel * PANEL + to_chunk * VECTOR);
    const int rows_left = columns_left > 0 ? rows - row - to_row : 0;
    const auto staged = [&](int i) {
      return reinterpret_cast<const Vector*>(staging + (i + to_row) * ROW_BYTES +
                                             (to_chunk ^ (i + to_row) % CHUNKS) * CHUNK);
    };
    if (vectors) {
      Vector x[ROWS_OF_WARP / ROWS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < ROWS_OF_WARP; i += ROWS_AT_ONCE) x[i / ROWS_AT_ONCE] = *staged(i);
      Element* to = target + panel * PANEL;
#pragma unroll
      for (int i = 0; i < ROWS_OF_WARP; i += ROWS_AT_ONCE, to += ROWS_AT_ONCE * row_stride) {
        if (i < rows_left) *reinterpret_cast<Vector*>(to) = x[i / ROWS_AT_ONCE];
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < smaller(rows_left, ROWS_OF_WARP); i += ROWS_AT_ONCE) {
#pragma unroll 1
        for (int e = 0; e < smaller(columns_left, VECTOR); e++) {
          target[i * row_stride + panel * PANEL + e] = staged(i)->e[e];
        }
      }
    }
    __syncwarp();
  }
}
