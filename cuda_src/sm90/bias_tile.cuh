// A bias in tiles that TMA brings (products.cuh). One that is the same for all queries has one row.
#include "products.cuh"

constexpr int BIAS_PANEL = ROW_BYTES / sizeof(BiasElement);  // columns
constexpr int PANELS_BIAS = (BLOCK_N + BIAS_PANEL - 1) / BIAS_PANEL;
constexpr u32 BIAS_PANEL_BYTES = BLOCK_M * ROW_BYTES;
constexpr u32 BIAS_BYTES = HAS_BIAS_TILES ? PANELS_BIAS * BIAS_PANEL_BYTES : 16;

DEVICE float2 unpacked(__nv_bfloat16, u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
DEVICE float2 unpacked(__half, u32 pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

// One row of a tile, of which `column` is a multiple of the elements of 16 bytes.
DEVICE u32 bias_address(u32 tile, int row, int column) {
  const u32 chunk = column % BIAS_PANEL * sizeof(BiasElement) / 16;
  return tile + column / BIAS_PANEL * BIAS_PANEL_BYTES + row * ROW_BYTES + (chunk ^ row % 8) * 16;
}

DEVICE void add_pair(float& x, float& y, float2 bias, bool masked) {
  x = masked && bias.x == -infinity() ? bias.x : x + bias.x;
  y = masked && bias.y == -infinity() ? bias.y : y + bias.y;
}

// Adds a tile to the fragment of a warp whose first row it is, or of all warps if `one_row`.
template <class Bias = BiasElement>
DEVICE void add_bias_tile(float (&x)[BLOCK_N / 2], u32 tile, int warp_row, bool one_row, bool masked) {
  if constexpr (sizeof(Bias) == 2) {
    const int row = one_row ? 0 : warp_row + lane() % 16;
#pragma unroll
    for (int column = 0; column < BLOCK_N; column += 16) {
      u32 pairs[4];  // rows 0 and 8, columns 0 and 8
      ptx::ldmatrix_x4(pairs, bias_address(tile, row, column) ^ (lane() / 16 * 16));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = column / 2 + 2 * i;
        add_pair(x[e], x[e + 1], unpacked(Bias(), pairs[i]), masked);
      }
    }
  } else {
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e += 2) {
      const int row = one_row ? 0 : warp_row + fragment_row() + row_offset(e);
      const int column = column_offset(e) + fragment_column() / 4 * 4;
      const u32 address = bias_address(tile, row, column) + fragment_column() % 4 * sizeof(BiasElement);
      add_pair(x[e], x[e + 1], *static_cast<const float2*>(__cvta_shared_to_generic(address)), masked);
    }
  }
}
