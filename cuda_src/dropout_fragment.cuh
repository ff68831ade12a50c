// Random bits of a warp's fragment, in the order of its elements: word w decides on elements 2 w and 2 w + 1.
#include "fragment.cuh"
#include "dropout.cuh"

// Of 8 elements in 16 columns. Rows are queries, columns keys: the thread owns all that its call decides on. Row i and
// column j are its first; 16 divides those of the fragment.
DEVICE void draw_by_queries(u32 (&bits)[4], const Dropout& dropout, int i, int j) {
  const uint4 words = dropout.words(i, j);
  bits[0] = words.x, bits[1] = words.z, bits[2] = words.y, bits[3] = words.w;
}

// Rows are keys, columns queries: row j and column i are the thread's first. Its two queries have a call each, which
// decides on its own key and that of lane ^ 4, key j ^ 1, too: the lane of the even key makes the first call, the other
// one the second, and they exchange the halves.
DEVICE void draw_by_keys(u32 (&bits)[4], const Dropout& dropout, int j, int i) {
  constexpr u32 LOW_HALVES = 0x5410, HIGH_HALVES = 0x7632;
  const int odd = j & 1;
  const uint4 own = dropout.words(i + odd, j - odd);
  const u32 other_halves = odd ? LOW_HALVES : HIGH_HALVES;
  const u32 x_y = __shfl_xor_sync(ALL_LANES, __byte_perm(own.x, own.y, other_halves), 4);
  const u32 z_w = __shfl_xor_sync(ALL_LANES, __byte_perm(own.z, own.w, other_halves), 4);
  // The own half of an own word, and the low or the high half of what came, the first query's below.
  const u32 with_low = odd ? 0x3254 : 0x5410, with_high = odd ? 0x3276 : 0x7610;
  bits[0] = __byte_perm(own.x, x_y, with_low), bits[1] = __byte_perm(own.y, x_y, with_high);
  bits[2] = __byte_perm(own.z, z_w, with_low), bits[3] = __byte_perm(own.w, z_w, with_high);
}

// Calls apply(low, high, word) for pairs of elements of a fragment of whole 16 columns.
template <bool OF_KEYS, int N, class Apply>
DEVICE void for_each_pair(Accum (&x)[N], const Dropout& dropout, int row, int column, Apply apply) {
  static_assert(N % 8 == 0, "whole 16 columns");
#pragma unroll
  for (int e = 0; e < N; e += 8) {
    u32 bits[4];
    if constexpr (OF_KEYS) {
      draw_by_keys(bits, dropout, row, column + column_offset(e));
    } else {
      draw_by_queries(bits, dropout, row, column + column_offset(e));
    }
#pragma unroll
    for (int w = 0; w < 4; w++) apply(x[e + 2 * w], x[e + 2 * w + 1], bits[w]);
  }
}
