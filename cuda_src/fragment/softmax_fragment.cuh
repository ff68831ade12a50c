// This header has the online softmax on a warp's fragment of 16 queries for the kernels with tensor cores. A thread has
// two rows, each shared by the four lanes of a quad. It follows FlashAttention-2 (Dao 2023, section 3.1) with the lazy
// rescaling of FlashAttention-4 (2026), except in rows where one key may take much of the weight: there every maximum
// is followed, because 16-bit weights are exact only at the maximum. sm90/forward/bounded_softmax.cuh is the variant
// for scores that have a bound.
#include "../rules/score.cuh"
#include "fragment.cuh"
#include "softmax.cuh"

// MAX_GROWTH is how far a new maximum may exceed a row's reference before earlier results are rescaled
// (FlashAttention-4, 2026). The reference is a maximum that the row once had; a weight is a power of two of a score
// less the reference.
constexpr float MAX_GROWTH = 8;
// FLAT and LARGE_SHARE predict from a row's first tile whether it may skip maxima. A weight of 16 bits is exact only
// where its score is the reference. A score that may become a large weight of the row must therefore become the
// reference, or its rounding is the largest error of the row. Where the sum of the first tile is at least FLAT of its
// largest weights, no key has much of it, and the root of all squared weights is predicted to be about the sum times
// the root of the number of tiles. A weight counts as large from LARGE_SHARE of that on. Few rows of N(0, 1) inputs
// ever meet such a weight. Any other row, and one that has met it, follows every maximum. Errors on inputs with large
// weights are 1.01 to 1.02 of those of following always (1.10 to 1.20 without). The mma.sync kernels' tiles have half
// as many keys, whose sum predicts less well: half the share keeps their errors there (1.01 in place of 1.03 on inputs
// with outliers).
constexpr float FLAT = 3, LARGE_SHARE = 0.12f, LARGE_SHARE_OF_SMALL_TILES = LARGE_SHARE / 2;

// quotient() is a / b; for 16-bit inputs it is within two units in the last place, and natural_log() within 2^-22.
DEVICE Accum quotient(Accum a, Accum b) {
  if constexpr (sizeof(Element) == 2) return __fdividef(a, b);
  return a / b;
}

DEVICE Accum natural_log(Accum x) {
  if constexpr (sizeof(Element) == 2) return ptx::lg2(x) * 0.6931471805599453f;
  return log_e(x);
}

// finish_total() ends a row whose largest score is `top`; `total` is the sum of its weights. A sink is one more score.
// `inverse` normalises the row, `lse` is its log-sum-exp.
DEVICE void finish_total(Accum top, Accum total, Accum sink, Accum& inverse, Accum& lse) {
  Accum own = 1;
  if (sink != -infinity()) {
    const Accum seen = top;
    top = larger(seen, sink);
    own = seen == -infinity() ? 0 : weight(seen, top);
    total = (total == 0 ? 0 : total * own) + (sink == top ? 1 : weight(sink, top));
  }
  inverse = total == 0 ? 0 : quotient(own, total);
  lse = total == 0 ? -infinity() : top + natural_log(total);
}

// finish_row() does so where four lanes have a share of the sum each.
DEVICE void finish_row(Accum top, Accum sum, Accum sink, Accum& inverse, Accum& lse) {
  finish_total(top, sum_of_row<4>(sum), sink, inverse, lse);
}

DEVICE float power_of_2(float x) { return ptx::ex2(x); }
DEVICE double power_of_2(double x) { return exp2(x); }

// SUBTRACTS_FIRST: scores are subtracted before they are scaled to base 2, where they may have any size; and wider
// inputs deserve weights as exact as the difference.
constexpr bool SUBTRACTS_FIRST = ANY_SCORES || sizeof(Element) > 2;

// FragmentSoftmax is the state of a thread's two rows, row r of its fragment being `fragment_row() + 8 * r`.
struct FragmentSoftmax {
  static constexpr bool ROUNDS_WEIGHTS = sizeof(Element) == 2;

  Accum to_natural, to_base_2;          // factors that bring a score to natural units, and to base 2
  Accum slack[ROUNDS_WEIGHTS ? 2 : 1];  // how far scores of row r may exceed its reference before it follows
  Accum reference[2], sum[2];  // the score that has weight 1, and this thread's share of the row's sum of weights

  FragmentSoftmax() = default;  // the default constructor is for arrays

  // This constructor serves plain scores, which stay products of q and k: their scale comes with the conversion to base
  // 2.
  DEVICE FragmentSoftmax(Accum scale) : FragmentSoftmax(in_units(PLAIN_SCORES ? scale : 1)) {}

  DEVICE void take_factors(const FragmentSoftmax& other) {
    to_natural = other.to_natural;
    to_base_2 = other.to_base_2;
    if constexpr (!ROUNDS_WEIGHTS) slack[0] = other.slack[0];
  }

  // in_units() makes the softmax of scores that stand in multiples of `unit`.
  static DEVICE FragmentSoftmax in_units(Accum unit) { return FragmentSoftmax(unit, unit * LOG2_E); }
  // of_powers() makes the softmax of scores that are scaled to base 2 already.
  static DEVICE FragmentSoftmax of_powers() { return FragmentSoftmax(0.6931471805599453f, 1); }

  // find_tops() finds the thread's largest score in each of its two rows.
  template <int N>
  static DEVICE void find_tops(const Accum (&x)[N], Accum (&top)[2]) {
    top[0] = x[0], top[1] = x[2];
#pragma unroll
    for (int e = 0; e < N; e++) top[e / 2 % 2] = larger(top[e / 2 % 2], x[e]);
  }

  // base() is what is subtracted from the scores of row r, which stand without `shift`. A row that has seen nothing has
  // only scores of -inf, so 0 serves.
  DEVICE Accum base(int r, Accum shift = 0) const { return reference[r] == -infinity() ? 0 : reference[r] - shift; }

  // limit() is what scores of row r, which stand without `shift`, may reach before the row's reference follows.
  DEVICE Accum limit(int r, Accum shift = 0) const { return reference[r] - shift + slack[ROUNDS_WEIGHTS ? r : 0]; }

  DEVICE bool exceeded(const Accum (&top)[2]) const { return top[0] > limit(0) || top[1] > limit(1); }

  // follow() makes a row's maximum its reference where it exceeds the limit, and finds the factor for earlier results.
  DEVICE void follow(int r, Accum maximum, Accum& rescale, Accum shift = 0) {
    if (!(maximum > limit(r, shift))) return;
    rescale = power_of_2((reference[r] - shift - maximum) * to_base_2);
    if constexpr (ROUNDS_WEIGHTS) slack[r] = reference[r] == -infinity() || is_unsettled(slack[r]) ? UNSETTLED : 0;
    reference[r] = maximum + shift;
    sum[r] *= rescale;
  }

  // predicted_slack() predicts the slack, as an exponent of two, from the sum of a row's first tile of `tiles` in all:
  // a row that is not flat has none.
  static DEVICE Accum predicted_slack(Accum total, int tiles, float large_share = LARGE_SHARE) {
    const Accum large = ptx::lg2(total * large_share) + ptx::lg2(static_cast<float>(tiles)) / 2;
    return total < FLAT ? Accum(0) : smaller(larger(large, Accum(0)), Accum(MAX_GROWTH));
  }
  // settle() sets the slack of a row after its first tile, of `tiles` in all.
  DEVICE void settle(int r, Accum total, int tiles, float large_share) {
    if constexpr (ROUNDS_WEIGHTS) {
      if (is_unsettled(slack[r])) slack[r] = in_score_units(predicted_slack(total, tiles, large_share));
    }
  }
  DEVICE void settle(int tiles, float large_share = LARGE_SHARE) {
    if constexpr (ROUNDS_WEIGHTS) {
#pragma unroll
      for (int r = 0; r < 2; r++) settle(r, sum_of_row<4>(sum[r]), tiles, large_share);
    }
  }

  // step() turns the scores of one tile into weights, and returns whether earlier results must be multiplied, row r
  // with rescale[r].
  template <int N>
  DEVICE bool step(Accum (&x)[N], Accum (&rescale)[2], int tiles) {
    Accum top[2];
    find_tops(x, top);
    rescale[0] = rescale[1] = 1;
    const bool grown = __any_sync(ALL_LANES, exceeded(top));
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; r++) follow(r, max_of_row<4>(top[r]), rescale[r]);
    }
    to_weights(x);
    if (grown) settle(tiles, LARGE_SHARE_OF_SMALL_TILES);
    return grown;
  }

  // to_weights() turns scores into weights and adds them to the sums; the references stand already.
  template <int N>
  DEVICE void to_weights(Accum (&x)[N]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Accum base = this->base(r);
      const Accum offset = base * to_base_2;
      Accum row_sum = 0;
#pragma unroll
      for (int e = 2 * r; e < N; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          Accum& w = x[e + side];
          w = power_of_2(SUBTRACTS_FIRST ? (w - base) * (PLAIN_SCORES ? to_base_2 : LOG2_E) : w * to_base_2 - offset);
          row_sum += w;
        }
      }
      sum[r] += row_sum;
    }
  }

  // bound() and to_weights<BEGIN, END>() are step() in two halves, for scores that stand without shift[r], so that
  // weights can be found a few at a time. bound() follows EVERY growth of the maximum, or only large ones.
  template <bool EVERY>
  DEVICE bool bound(const Accum (&x)[BLOCK_N / 2], const Accum (&shift)[2], Accum (&rescale)[2]) {
    Accum top[2];
    find_tops(x, top);
    if constexpr (EVERY) {
      bool any_grown = false;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Accum maximum = max_of_row<4>(top[r]);
        const Accum grown = larger(reference[r], maximum + shift[r]);
        any_grown |= grown > reference[r];
        rescale[r] = power_of_2((reference[r] - (grown == -infinity() ? 0 : grown)) * to_base_2);
        reference[r] = grown;
        sum[r] *= rescale[r];
      }
      // At head dim 128 the vote costs more than the multiplication
      return HEAD_DIM_V == 128 || __any_sync(ALL_LANES, any_grown);
    }
    rescale[0] = rescale[1] = 1;
    const bool grown = __any_sync(ALL_LANES, top[0] > limit(0, shift[0]) || top[1] > limit(1, shift[1]));
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; r++) follow(r, max_of_row<4>(top[r]), rescale[r], shift[r]);
    }
    return grown;
  }

  // to_weights<BEGIN, END>() finds the weights of elements BEGIN to END - 1, which are whole groups of four.
  template <int BEGIN, int END>
  DEVICE bool to_weights(Accum (&x)[BLOCK_N / 2], const Accum (&shift)[2], Accum (&)[2], bool) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Accum base = this->base(r, shift[r]);
      const Accum offset = base * to_base_2;
      Accum row_sum = 0;
#pragma unroll
      for (int e = BEGIN + 2 * r; e < END; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          Accum& w = x[e + side];
          w = power_of_2(ANY_SCORES ? (w - base) * LOG2_E : w * to_base_2 - offset);
          row_sum += w;
        }
      }
      sum[r] += row_sum;
    }
    return false;
  }

  // begin() finds the weights of a row's first tile, of `tiles` in all, and from them the slack; with `tiles` 0 the
  // slack is found later.
  template <bool FINDS_SLACK>
  DEVICE void begin(Accum (&x)[BLOCK_N / 2], const Accum (&shift)[2], int tiles) {
    Accum rescale[2];
    to_weights<0, BLOCK_N / 2>(x, shift, rescale, true);
    if (FINDS_SLACK && tiles > 0) settle(tiles);
  }

  // finish() ends both rows: inverse[r] normalises row r, lse[r] is its natural log-sum-exp.
  DEVICE void finish(Accum sink, Accum (&inverse)[2], Accum (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) finish_row(reference[r] * to_natural, sum[r], sink, inverse[r], lse[r]);
  }
  // This finish() takes one sink for both rows, or one for each, where they are of different heads.
  template <int N>
  DEVICE void finish(const Accum (&sinks)[N], Accum (&inverse)[2], Accum (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++)
      finish_row(reference[r] * to_natural, sum[r], r == 0 ? sinks[0] : sinks[N - 1], inverse[r], lse[r]);
  }

 private:
  DEVICE FragmentSoftmax(Accum to_natural, Accum to_base_2) : to_natural(to_natural), to_base_2(to_base_2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      reference[r] = -infinity();
      sum[r] = 0;
    }
    slack[0] = in_score_units(MAX_GROWTH);
    if constexpr (ROUNDS_WEIGHTS) slack[0] = slack[1] = 0;
  }

  // UNSETTLED marks a row whose slack is still to be found: it is -0, so until then every maximum is followed.
  static constexpr Accum UNSETTLED = -0.0f;
  static DEVICE bool is_unsettled(Accum slack) {
    return __float_as_int(static_cast<float>(slack)) == __float_as_int(-0.0f);
  }

  DEVICE Accum in_score_units(Accum power) const { return quotient(power, to_base_2); }
};

// rescale_rows() multiplies the results of row r by rescale[r].
template <int N>
DEVICE void rescale_rows(Accum (&out)[N], const Accum (&rescale)[2]) {
#pragma unroll
  for (int e = 0; e < N; e++) out[e] *= rescale[e / 2 % 2];
}
