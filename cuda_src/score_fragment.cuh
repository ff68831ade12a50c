// Score, mask and dropout on a warp's fragment of 16 queries and N * 2 keys, BLOCK_N or a part of them. `row` is the
// thread's first query.
#pragma once
#include "mask.cuh"
#include "fragment.cuh"
#include "score.cuh"

constexpr int MASK_WORD = 32;  // columns of a word of a block mask
static_assert(!HAS_BLOCK_MASK || BLOCK_N % MASK_WORD == 0, "tiles begin with a word");

struct ScoreFragment {
  Score score;
  Mask mask;
  Dropout dropout;

  DEVICE ScoreFragment(const AttentionParams& p, const Sequence& s, int head)
      : score(p, s, head), mask(p, s, head), dropout(p, s, head) {}

  // Whether the current tile of keys has to be masked for queries [first_row, first_row + rows).
  DEVICE bool needs_mask(const Blocks& blocks, int first_row, int rows) const {
    return HAS_MASK || HAS_BIAS || blocks.partial ||
           !mask.columns_inside(first_row, rows, blocks.block * BLOCK_N, BLOCK_N);
  }

  // Turns products into scores, -inf where hidden.
  template <int N>
  DEVICE void apply(Accum (&x)[N], int row, int first_key, bool masked) const {
    const int column = first_key + fragment_column();
    if constexpr (!PLAIN_SCORES) {
#pragma unroll
      for (int e = 0; e < N; e++) x[e] = score.value(x[e], row + row_offset(e), column + column_offset(e));
    }
    if (!masked) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row + 8 * r;
      const Mask::Range range = mask.columns(i);
      const int begin = range.begin - column, end = i < mask.len_q ? range.end - column : 0;
      u32 word = 0;
#pragma unroll
      for (int e = 2 * r; e < N; e += 4) {
        if (HAS_BLOCK_MASK && column_offset(e) % MASK_WORD == 0) {
          word = mask.block_word(i, first_key + column_offset(e)) >> fragment_column();
        }
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int j = column_offset(e + side);
          bool hidden = (HAS_WINDOW && j < begin) || j >= end;
          if constexpr (HAS_BLOCK_MASK) hidden |= (word >> (j % MASK_WORD) & 1) == 0;
          if constexpr (HAS_MASK) hidden |= !mask.in_mask(i, column + j);
          x[e + side] = hidden ? -infinity() : x[e + side];
        }
      }
    }
  }

  template <int N>
  DEVICE void drop(Accum (&weights)[N], int row, int first_key) const {
    if constexpr (HAS_DROPOUT) {
#pragma unroll
      for (int e = 0; e < N; e += 8) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const u32 kept = dropout.keep(row, first_key + fragment_column() + column_offset(e + side));
          // Words are numbered by row, then column, fragments the other way round.
          if (!(kept & 1)) weights[e + side] = 0;
          if (!(kept & 4)) weights[e + 2 + side] = 0;
          if (!(kept & 2)) weights[e + 4 + side] = 0;
          if (!(kept & 8)) weights[e + 6 + side] = 0;
        }
      }
    }
  }
};
