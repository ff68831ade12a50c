// This header computes scores and their gradients on a warp's fragment for sm80/gradients.cuh, sm80/bias.cuh and
// split/sm90_backward.cu. The fragment is queries x keys or, if OF_KEYS, keys x queries. fragment/gradient_fragment.cuh
// is the counterpart for the 16-bit kernels whose fragments are always keys x queries. The mathematics is
// FlashAttention-2 (Dao 2023), Algorithm 2, lines 10 to 14.
#include "dropout_fragment.cuh"
#include "place.cuh"

// ScoreGradient recomputes a warp's scores, for one (sequence, query head); a thread has FRAGMENT of them.
template <bool OF_KEYS, int FRAGMENT>
struct ScoreGradient {
  using Derivatives = rules::ScoreDerivatives<FRAGMENT>;
  Score score;
  Mask mask;
  Dropout dropout;

  DEVICE ScoreGradient(const AttentionParams& p, const Sequence& s, int head)
      : score(p, s, head), mask(p, s, head), dropout(p, s, head) {}

  // needs_mask() tells whether some element of a tile may be hidden.
  DEVICE bool needs_mask(bool partial, int first_query, int queries, int first_key, int keys) const {
    // Queries beyond the last one in use may be those of the next packed sequence, where tiles of queries are visited.
    return HIDES_IN_ANY_TILE || partial || (OF_KEYS && first_query + queries > mask.len_q) ||
           !mask.columns_inside(first_query, queries, first_key, keys);
  }

  // place() is that of the thread's elements; `row` is its first row.
  static DEVICE Place<OF_KEYS> place(int row, int first_column) { return {row, first_column + fragment_column()}; }

  // take() finds the derivatives of the scores before the products become scores; take_rule() those of the rule alone.
  DEVICE void take(Derivatives& derivatives, const Accum (&products)[FRAGMENT], int row, int first_column) const {
    derivatives.take(score, products, place(row, first_column));
  }

  DEVICE void take_rule(Derivatives& derivatives, const Accum (&products)[FRAGMENT], int row, int first_column) const {
    derivatives.take_rule(score, products, place(row, first_column));
  }

  // apply() turns products into scores, -inf where hidden; `biases` are the biases of the elements where they were read
  // already, or null.
  DEVICE void apply(Accum (&x)[FRAGMENT], int row, int first_column, bool masked, const Accum* biases = nullptr) const {
    const Place<OF_KEYS> place = this->place(row, first_column);
    if constexpr (!PLAIN_SCORES) rules::apply(x, score, place, biases);
    if (!masked) return;
    // The loop is written out, because with hide_outside() the kernel of a bias's gradient spills on sm_86.
    const int column = place.column;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Mask::Range range = OF_KEYS ? mask.rows(row + 8 * r) : mask.columns(row + 8 * r);
      const int begin = range.begin - column, end = range.end - column;
#pragma unroll
      for (int e = 0; e < FRAGMENT; e++) {
        if (row_offset(e) != 8 * r) continue;
        const int i = place.query(e), j = place.key(e), at = column_offset(e);
        bool hidden = (HAS_WINDOW && at < begin) || at >= end || (!OF_KEYS && i >= mask.len_q);
        if constexpr (HAS_MASK) hidden |= !mask.in_mask(i, j);
        if constexpr (HAS_BLOCK_MASK) hidden |= !mask.in_block(i, j);
        if constexpr (ASKS_ELEMENTS) hidden |= !mask.in_rules(i, j);
        x[e] = hidden ? -infinity() : x[e];
      }
    }
  }

  // mark_dropped() sets the sign of the weights that dropout drops.
  // It is a template, so that the branch which is not taken is not compiled.
  template <int N>
  DEVICE void mark_dropped(Accum (&weights)[N], int row, int first_column) const {
    if constexpr (!HAS_DROPOUT) return;
    if constexpr (N == 4) {  // the fragment is 8 of the 16 columns that one call of the generator decides on
      Accum both[8] = {weights[0], weights[1], weights[2], weights[3], weights[0], weights[1], weights[2], weights[3]};
      RandomBits<OF_KEYS, 8>().mark(both, dropout, row, (first_column & ~8) + fragment_column());
#pragma unroll
      for (int e = 0; e < 4; e++) weights[e] = first_column & 8 ? both[4 + e] : both[e];
    } else {
      RandomBits<OF_KEYS, N>().mark(weights, dropout, row, first_column + fragment_column());
    }
  }

  // add_slopes() adds the fragment's terms to the gradient of ALiBi's slope, for each of the thread's rows.
  DEVICE void add_slopes(Accum (&dslope)[2], const Accum (&ds)[FRAGMENT], int row, int first_column) const {
    const Place<OF_KEYS> place = this->place(row, first_column);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) dslope[e / 2 % 2] -= ds[e] * score.distance(place.query(e), place.key(e));
  }
};

DEVICE bool is_negative(float x) { return __float_as_int(x) < 0; }  // also true for -0
DEVICE bool is_negative(double x) { return __double_as_longlong(x) < 0; }

// score_gradient() is dS of an element, from dP (`dp`) and its weight. A dropped weight has its sign set; a hidden
// element's dP may be NaN, and its weight is 0.
DEVICE Accum score_gradient(Accum dp, Accum weight, Accum delta, Accum dropout_rescale) {
  if constexpr (HAS_DROPOUT) {
    dp = is_negative(weight) ? 0 : dp * dropout_rescale;
    weight = larger(weight, -weight);
  }
  return weight == 0 ? 0 : weight * (dp - delta);
}

// KeyTileIterator iterates over the tiles of keys that a thread block's queries see.
struct KeyTileIterator {
  Blocks blocks;
  int head;

  DEVICE KeyTileIterator(const AttentionParams& p, const Work& work)
      : blocks(blocks_of_keys(p, work.sequence, work.head, work.tile, BLOCK_M, BLOCK_N)), head(work.head) {}
  DEVICE bool done() const { return blocks.done(); }
  DEVICE void advance() { blocks.advance(); }
};

// ColumnIteratorOf is the iterator over the columns of a kernel: those of keys, or of queries where it keeps keys.
template <bool OF_KEYS, class QueryIterator>
struct ColumnIteratorOf {
  using Type = KeyTileIterator;
};
template <class QueryIterator>
struct ColumnIteratorOf<true, QueryIterator> {
  using Type = QueryIterator;
};
