// This header applies score, mask and dropout to a warp's fragment of 16 queries and N * 2 keys: all BLOCK_N keys of a
// tile, or a part of them. The forward kernels of sm80/ use it as it is, and sm90/forward/scores.cuh extends it for
// Hopper. `row` is always the thread's first query. fragment/score_gradient.cuh and fragment/gradient_fragment.cuh are
// its counterparts for gradients.
#include "dropout_fragment.cuh"
#include "place.cuh"

constexpr bool HAS_BIAS_PAIRS = HAS_BIAS && sizeof(Element) == 2;

// FragmentOptions holds what a thread reads of a mask and a bias. It is fetched while products are computed, so that
// the memory's latency is hidden.
struct FragmentOptions {
  struct alignas(2 * sizeof(BiasElement)) Pair {
    BiasElement x[2];
  };
  uint4 mask[2];  // rows `row` and row + 8; each lane of a quad has 16 columns of its own
  Pair biases[HAS_BIAS_PAIRS ? BLOCK_N / 4 : 1];  // the bias of the thread's elements 2 i and 2 i + 1
};

// ScoreFragment turns a warp's products into scores, for one (sequence, query head).
struct ScoreFragment {
  Score score;
  Mask mask;
  Dropout dropout;

  DEVICE ScoreFragment(const AttentionParams& p, const Sequence& s, int head)
      : score(p, s, head), mask(p, s, head), dropout(p, s, head) {}

  // needs_mask() tells whether some element of the current tile may be hidden from queries [first_row, first_row +
  // rows).
  DEVICE bool needs_mask(const Blocks& blocks, int first_row, int rows, int keys = BLOCK_N) const {
    return HIDES_IN_ANY_TILE || blocks.partial || !mask.columns_inside(first_row, rows, blocks.block * keys, keys);
  }

  // fetch() starts to read the options of a tile.
  DEVICE void fetch(FragmentOptions& options, int row, int first_key) const {
    if constexpr (HAS_BIAS_PAIRS) fetch_biases(options, row, first_key + fragment_column());
    if constexpr (HAS_MASK) {
      const int j = first_key + lane() % 4 * 16;
      if (mask.in_vectors(j)) {
#pragma unroll
        for (int r = 0; r < 2; r++) options.mask[r] = *reinterpret_cast<const uint4*>(mask.mask_row(row + 8 * r) + j);
      }
    }
  }

  // apply() turns products into scores, -inf where hidden. `recheck`: the tile is computed a second time. In the first
  // pass hidden keys that are not finite may show as NaN, which makes the caller compute the tile again.
  template <int N>
  DEVICE void apply(Accum (&x)[N], const AttentionParams& p, int row, int first_key, bool masked, bool recheck,
                    const FragmentOptions& options) const {
    static_assert(!HAS_BLOCK_MASK || (N <= 32 && CANONICAL % (2 * N) == 0), "a thread has one word");
    const Place<false> place = {row, first_key + fragment_column()};
    if constexpr (HAS_BIAS_PAIRS) {
#pragma unroll
      for (int e = 0; e < N; e++) {
        const Accum bias = to_accum(options.biases[e / 2 % (BLOCK_N / 4)].x[e % 2]);
        x[e] = score.value<false>(x[e], place.query(e), place.key(e), &bias);
        if (recheck && bias == -infinity()) x[e] = bias;
      }
    } else if constexpr (!PLAIN_SCORES) {
      rules::apply(x, score, place);
    }
    if (!masked) return;
    if constexpr (HAS_BLOCK_MASK) {
      const u32 bits = block_bits(p, mask.slot_at(row, first_key), row, first_key);
      rules::hide(x, [&](int e) { return (bits >> e & 1) == 0; });
    }
    if constexpr (HAS_MASK) hide_by_mask(x, options.mask, row, first_key);
    rules::hide_by_rules(x, mask, place);
    if (!HAS_BLOCK_MASK && !recheck && mask.columns_inside(row - fragment_row(), 16, first_key, 2 * N)) return;
    hide_outside(x, mask, place);
  }

  // drop() sets the weights that dropout drops to 0.
  template <int N>
  DEVICE void drop(Accum (&weights)[N], int row, int first_key) const {
    if constexpr (HAS_DROPOUT) {
      RandomBits<false, N>().drop(weights, dropout, row, first_key + fragment_column());
    }
  }

  // bias_in_vectors() tells whether the rows of the bias are aligned vectors, and reach over this tile of keys.
  DEVICE bool bias_in_vectors(int first_key) const {
    return score.bias_column_stride == 1 && score.bias_last_column >= smaller(first_key + BLOCK_N, mask.len_k) - 1 &&
           (reinterpret_cast<u64>(score.bias + first_key) | bias_stride() * sizeof(BiasElement)) % sizeof(uint4) == 0;
  }
  DEVICE i64 bias_stride() const { return score.bias_last_row == 0 ? 0 : score.bias_row_stride; }
  // bias_rows() is the bias of a tile of keys as rows that are loaded like an operand.
  DEVICE Rows bias_rows(int first_key) const {
    return Rows(reinterpret_cast<const Element*>(score.bias + first_key), bias_stride(), mask.len_q,
                smaller(score.bias_last_column + 1 - first_key, BLOCK_N));
  }

  // fetch_biases() starts to read the biases of a thread's elements, in pairs where they are neighbours in memory.
  DEVICE void fetch_biases(FragmentOptions& options, int row, int column) const {
    using Pair = FragmentOptions::Pair;
    const bool in_pairs =
        score.bias_column_stride == 1 && column + column_offset(BLOCK_N / 2 - 1) <= score.bias_last_column &&
        (reinterpret_cast<u64>(score.bias + column) | score.bias_row_stride * sizeof(BiasElement)) % sizeof(Pair) == 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const BiasElement* line = score.bias + smaller(row + 8 * r, score.bias_last_row) * score.bias_row_stride;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) {
        const int j = column + column_offset(e);
        if (in_pairs) {
          options.biases[e / 2] = *reinterpret_cast<const Pair*>(line + j);
        } else {
#pragma unroll
          for (int side = 0; side < 2; side++) {
            options.biases[e / 2].x[side] = line[smaller(j + side, score.bias_last_column) * score.bias_column_stride];
          }
        }
      }
    }
  }

 private:
  // hide_by_mask() applies a dense mask. Each lane of a quad makes the bits of 16 columns, and the lanes exchange them.
  template <int N>
  DEVICE void hide_by_mask(Accum (&x)[N], const uint4 (&bytes)[2], int row, int first_key) const {
    const int j = first_key + lane() % 4 * 16;
    u32 own = 0;  // 16 bits of each of the thread's two rows
    if (mask.in_vectors(j)) {
      own = bits_of(bytes[0], bytes[1]);
    } else {
#pragma unroll 8
      for (int i = 0; i < 32; i++) own |= (mask.in_mask(row + i / 16 * 8, j + i % 16) ? 1u : 0u) << i;
    }
#pragma unroll
    for (int e = 0; e < N; e += 8) {
      const u32 word = __shfl_sync(ALL_LANES, own, lane() / 4 * 4 + e / 8) >> fragment_column();
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[e + i] = word >> (2 * row_offset(i) + column_offset(i)) & 1 ? x[e + i] : -infinity();
      }
    }
  }
};
