// This header has the online softmax of scores under a softcap, for Hopper's forward kernel. A softcap bounds scores,
// so weights stay finite without a maximum. Powers of two come from products by a polynomial where these are small, and
// a tile whose products are all small neither looks for maxima nor calls tanh. BoundedSoftmax takes the place of
// FragmentSoftmax (fragment/softmax_fragment.cuh), with whose rules for large weights it agrees.
#include "../../fragment/softmax_fragment.cuh"
#include "../wgmma.cuh"

// BoundedSoftmax is the state of a thread's two rows, as FragmentSoftmax is for other scores.
struct BoundedSoftmax {
  // SMALL bounds the arguments whose tanh is x (1 + CUBIC x^2), within 2^-11 as the instruction is; the
  // special-function unit that computes the instruction is left to the powers of two. The slope at 0 is exactly 1,
  // because an error that the smallest scores had in common would be an error of lse.
  static constexpr float SMALL = 0.385f, CUBIC = -0.31775113f;
  static constexpr float STEEP = 1e12f;  // factors whose cube may be infinite: then no product counts as small
  // FEWER and MORE are margins for roundings: apart from roundings a score is no larger than its product times the
  // slope at 0.
  static constexpr float FEWER = 0.999f, MORE = 1.001f;
  // EXTRA_SLACK is added to the slack that FragmentSoftmax gives a row. Products far below 0 do not count as small
  // either, because their magnitude is compared; more slack makes the products of enough tiles small.
  static constexpr float EXTRA_SLACK = 2;
  // UNSETTLED is the value of `largest_small` before the row's first tile has a sum: no product counts as small.
  static constexpr float UNSETTLED = -3e38f;
  const AttentionParams& p;
  float largest_small[2];  // the largest product of row r that is small and leaves the row's reference as it is
  float linear, cubic;     // the polynomial's coefficients for small products
  FragmentSoftmax rows;    // the state of the rows, whose scores are scaled to base 2
  bool is_flat;            // every row of the warp has reference 0, so nothing is subtracted

  // Curve holds numbers that are seldom needed; it is computed anew each time, because registers are scarce.
  struct Curve {
    float factor;  // leads from a product to the argument of tanh
    float power;   // leads from tanh to the exponent of two
    float small;   // the largest argument that is small

    DEVICE explicit Curve(const AttentionParams& p) {
      const float softcap = static_cast<float>(p.softcap);
      factor = quotient(static_cast<float>(p.softmax_scale), softcap);
      power = softcap * LOG2_E;
      small = fabsf(factor) < STEEP ? SMALL : -1;
    }
    DEVICE float of_large(float argument, float base) const { return fmaf(ptx::tanh(argument), power, -base); }
  };

  DEVICE explicit BoundedSoftmax(const AttentionParams& p) : p(p), rows(FragmentSoftmax::of_powers()) {
    const Curve curve(p);
    largest_small[0] = largest_small[1] = UNSETTLED;
    linear = curve.factor * curve.power;
    cubic = curve.factor * curve.factor * curve.factor * curve.power * CUBIC;
  }

  // of_small() is the exponent of a small product's weight, less `base`.
  DEVICE float of_small(float product, float base = 0) const {
    return fmaf(product, fmaf(cubic, product * product, linear), -base);
  }
  // of_any() is the exponent of any product's weight. Each element is treated as if it were alone, so no row depends on
  // other rows.
  DEVICE float of_any(const Curve& curve, float product, float base = 0) const {
    const float argument = product * curve.factor;
    return fabsf(argument) <= curve.small ? of_small(product, base) : curve.of_large(argument, base);
  }

  // to_exponents() turns the products of a masked tile into exponents, before the tile is masked.
  DEVICE void to_exponents(float (&x)[BLOCK_N / 2]) const {
    const Curve curve(p);
#pragma unroll
    for (float& product : x) product = curve.of_large(product * curve.factor, 0);
  }

  // bound() does nothing here: a step is one piece, because a tile's products decide together how its weights are
  // computed.
  template <bool EVERY>
  DEVICE bool bound(const float (&)[BLOCK_N / 2], const float (&)[2], float (&)[2]) {
    return false;
  }

  // begin() turns the capped scores of a first tile, of `tiles` in all, into weights. A flat row keeps reference 0.
  template <bool>
  DEVICE void begin(float (&x)[BLOCK_N / 2], const float (&)[2], int tiles) {
    float top[2], factor[2];
    FragmentSoftmax::find_tops(x, top);
    to_weights_by(x, [](float capped, int) { return capped; });
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float maximum = max_of_row<4>(top[r]), share = ptx::ex2(-maximum);
      const float in_largest = sum_of_row<4>(rows.sum[r]) * share;  // the sum of weights in units of the largest
      const bool flat = in_largest >= FLAT;
      rows.reference[r] = flat ? 0 : maximum;
      factor[r] = flat || maximum == -infinity() ? 1 : share;
      rows.sum[r] *= factor[r];
      const float slack = flat ? FragmentSoftmax::predicted_slack(in_largest, tiles) + EXTRA_SLACK : 0;
      largest_small[r] = maximum == -infinity() ? UNSETTLED : largest_small_below(maximum + slack);
    }
    is_flat = __all_sync(ALL_LANES, factor[0] == 1 && factor[1] == 1);
    if (!is_flat) rescale_rows(x, factor);
  }

  // to_weights() turns products, or a masked tile's capped scores, into weights; it returns whether earlier results are
  // to be multiplied, row r with rescale[r]. It has three cases: masked tiles, tiles whose products are all small, and
  // all other tiles.
  template <int BEGIN, int END>
  DEVICE bool to_weights(float (&x)[BLOCK_N / 2], const float (&)[2], float (&rescale)[2], bool masked) {
    static_assert(BEGIN == 0 && END == BLOCK_N / 2, "all at once");
    if (masked) {
      float top[2];
      FragmentSoftmax::find_tops(x, top);
      const bool grown = follow(top, rescale);
      const float base[2] = {rows.base(0), rows.base(1)};
      to_weights_by(x, [&](float capped, int r) { return capped - base[r]; });
      return grown;
    }
    float largest[2] = {};
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) largest[e / 2 % 2] = larger(largest[e / 2 % 2], fabsf(x[e]));
    if (__all_sync(ALL_LANES, largest[0] <= largest_small[0] && largest[1] <= largest_small[1])) {
      if (is_flat) {
        to_weights_by(x, [&](float product, int) { return of_small(product); });
      } else {
        const float base[2] = {rows.base(0), rows.base(1)};
        to_weights_by(x, [&](float product, int r) { return of_small(product, base[r]); });
      }
      return false;
    }
#pragma unroll
    // forget() keeps the compiler from computing terms of both cases ahead of the branch.
    for (float& product : x) ptx::forget(product);
    const Curve curve(p);
    const float sign = curve.factor < 0 ? -1 : 1;
    float top[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) top[e / 2 % 2] = larger(top[e / 2 % 2], sign * x[e]);
#pragma unroll
    for (float& product : top) product = of_any(curve, sign * product);
    const bool grown = follow(top, rescale);
    const float base[2] = {rows.base(0), rows.base(1)};
    to_weights_by(x, [&](float product, int r) { return of_any(curve, product, base[r]); });
    return grown;
  }

  template <int N>
  DEVICE void finish(const float (&sinks)[N], float (&inverse)[2], float (&lse)[2]) const {
    rows.finish(sinks, inverse, lse);
  }

 private:
  // follow() makes a row's maximum its reference where it exceeds what largest_small allows, and finds the factor for
  // earlier results.
  DEVICE bool follow(const float (&top)[2], float (&rescale)[2]) {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float maximum = max_of_row<4>(top[r]), before = rows.reference[r];
      rescale[r] = 1;
      if (!(maximum > larger(before, largest_small[r] * fabsf(linear) * MORE))) continue;
      grown = true;
      rescale[r] = ptx::ex2(before - maximum);
      rows.reference[r] = maximum;
      rows.sum[r] *= rescale[r];
      largest_small[r] = largest_small_below(maximum);
    }
    grown = __any_sync(ALL_LANES, grown);
    is_flat &= !grown;
    return grown;
  }

  // largest_small_below() is the largest product that is small and whose score stays below `limit`.
  DEVICE float largest_small_below(float limit) const {
    const Curve curve(p);
    return smaller(smaller(quotient(curve.small, fabsf(curve.factor)), 1e18f), quotient(limit, fabsf(linear))) * FEWER;
  }

  // to_weights_by() turns x into weights by power(x, row) and adds them to the sums. Each case has its own copy, so
  // that the additions hide behind its powers.
  template <class Power>
  DEVICE void to_weights_by(float (&x)[BLOCK_N / 2], Power power) {
    float row_sum[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) {
      x[e] = ptx::ex2(power(x[e], e / 2 % 2));
      row_sum[e / 2 % 2] += x[e];
    }
    rows.sum[0] += row_sum[0];
    rows.sum[1] += row_sum[1];
  }
};
