// This header draws dropout's random bits in the order of a warp's fragment: word w decides on elements 2 w and 2 w +
// 1. Where rows are queries a thread owns all eight weights of a call; where they are keys, two lanes make a call each
// and exchange halves, so that no call is made twice.
#include "fragment.cuh"
#include "../rules/dropout.cuh"

// draw_by_queries() draws the bits of 8 elements in 16 columns of a fragment whose rows are queries and whose columns
// are keys: the thread owns all weights that its call decides on. Row i and column j are the thread's first; those of
// the fragment are multiples of 16.
DEVICE void draw_by_queries(u32 (&bits)[4], const Dropout& dropout, int i, int j) {
  const uint4 words = dropout.words(i, j);
  bits[0] = words.x, bits[1] = words.z, bits[2] = words.y, bits[3] = words.w;
}

// draw_by_keys() draws the bits where rows are keys and columns are queries; row j and column i are the thread's first.
// Its two queries have a call each, which decides on its own key and that of lane ^ 4, key j ^ 1, too. The lane of the
// even key makes the first call, the other lane the second, and they exchange the halves.
DEVICE void draw_by_keys(u32 (&bits)[4], const Dropout& dropout, int j, int i) {
  constexpr u32 LOW_HALVES = 0x5410, HIGH_HALVES = 0x7632;
  const int odd = j & 1;
  const uint4 own = dropout.words(i + odd, j - odd);
  const u32 other_halves = odd ? LOW_HALVES : HIGH_HALVES;
  const u32 x_y = __shfl_xor_sync(ALL_LANES, __byte_perm(own.x, own.y, other_halves), 4);
  const u32 z_w = __shfl_xor_sync(ALL_LANES, __byte_perm(own.z, own.w, other_halves), 4);
  // These permutations take the own half of an own word, and the low or the high half of what came; the first query's
  // bits go below.
  const u32 with_low = odd ? 0x3254 : 0x5410, with_high = odd ? 0x3276 : 0x7610;
  bits[0] = __byte_perm(own.x, x_y, with_low), bits[1] = __byte_perm(own.y, x_y, with_high);
  bits[2] = __byte_perm(own.z, z_w, with_low), bits[3] = __byte_perm(own.w, z_w, with_high);
}

// RandomBits draws the random bits of a fragment, one group of 16 columns at a time. Those of the first EARLY groups
// are drawn ahead, while products are computed, and wait in registers.
template <bool OF_KEYS, int N, int EARLY = 0>
struct RandomBits {
  static constexpr int GROUPS = N / 8;
  static_assert(N % 8 == 0 && EARLY <= GROUPS, "whole groups");
  u32 words[EARLY > 0 ? EARLY : 1][4];  // (group, word): the bits drawn ahead

  static DEVICE void draw(u32 (&bits)[4], const Dropout& dropout, int row, int column, int group) {
    if constexpr (OF_KEYS) {
      draw_by_keys(bits, dropout, row, column + 16 * group);
    } else {
      draw_by_queries(bits, dropout, row, column + 16 * group);
    }
  }
  // draw_ahead() draws the bits of the first EARLY groups; `row` and `column` are the thread's first. IN_BRANCH: a
  // branch keeps the draws in their place, where the compiler would mix them with what comes before or behind. The
  // branch is harmless, because with a limit of 0 nobody looks at the bits.
  template <bool IN_BRANCH>
  DEVICE void draw_ahead(const Dropout& dropout, int row, int column) {
    if constexpr (IN_BRANCH) {
#pragma unroll
      for (auto& bits : words) bits[0] = bits[1] = bits[2] = bits[3] = 0;
      if (dropout.limits == 0) return;
    }
#pragma unroll
    for (int i = 0; i < EARLY; i++) draw(words[i], dropout, row, column, i);
  }
  // for_each_pair() calls apply(low, high, word) for each pair of elements.
  template <class Apply>
  DEVICE void for_each_pair(Accum (&x)[N], const Dropout& dropout, int row, int column, Apply apply) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      u32(&bits)[4] = words[i < EARLY ? i : 0];
      if (i >= EARLY) draw(bits, dropout, row, column, i);
#pragma unroll
      for (int w = 0; w < 4; w++) apply(x[8 * i + 2 * w], x[8 * i + 2 * w + 1], bits[w]);
    }
  }
  DEVICE void drop(Accum (&x)[N], const Dropout& dropout, int row, int column) {
    for_each_pair(x, dropout, row, column,
                  [&](Accum& low, Accum& high, u32 word) { drop_pair(low, high, word, dropout); });
  }
  DEVICE void mark(Accum (&x)[N], const Dropout& dropout, int row, int column) {
    for_each_pair(x, dropout, row, column,
                  [&](Accum& low, Accum& high, u32 word) { mark_pair(low, high, word, dropout); });
  }
};
