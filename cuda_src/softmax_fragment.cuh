// The online softmax on a warp's fragment of 16 queries: a thread has two rows, each shared by a quad's four lanes.
#include "fragment.cuh"
#include "softmax.cuh"

// Earlier results are rescaled only where the maximum grows by more than this power of two (FlashAttention-4, 2026):
// weights up to 256 are as exact. Decided per row, so rows stay independent.
constexpr float MAX_GROWTH = 8;

// a / b, of 16-bit inputs within two units in the last place; a logarithm of theirs is within 2^-22.
DEVICE Accum quotient(Accum a, Accum b) {
  if constexpr (sizeof(Element) == 2) return __fdividef(a, b);
  return a / b;
}

DEVICE Accum natural_log(Accum x) {
  if constexpr (sizeof(Element) == 2) return ptx::lg2(x) * 0.6931471805599453f;
  return log_e(x);
}

// The end of a row whose largest score is `top`; `sum` is the thread's part of the sum. A sink is one more score.
DEVICE void finish_row(Accum top, Accum sum, Accum sink, Accum& inverse, Accum& lse) {
  Accum total = sum_of_row<4>(sum);
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

DEVICE float power_of_2(float x) { return ptx::ex2(x); }
DEVICE double power_of_2(double x) { return exp2(x); }

// A bias may be finfo.min, whose product with log2(e) overflows; wider inputs deserve weights as exact as the
// difference.
constexpr bool SUBTRACTS_FIRST = HAS_BIAS || sizeof(Element) > 2;

struct FragmentSoftmax {
  Accum to_natural, to_base_2;  // factors of a score
  // The reference of a row is a maximum that it once had; its scores may exceed it by `room`.
  Accum room, reference[2], sum[2];

  FragmentSoftmax() = default;  // for arrays

  // Plain scores stay products of q and k, and their scale comes with the conversion to base 2.
  DEVICE FragmentSoftmax(Accum scale)
      : to_natural(PLAIN_SCORES ? scale : 1), to_base_2(to_natural * LOG2_E), room(quotient(MAX_GROWTH, to_base_2)) {
    reference[0] = reference[1] = -infinity();
    sum[0] = sum[1] = 0;
  }

  DEVICE void take_factors(const FragmentSoftmax& other) {
    to_natural = other.to_natural;
    to_base_2 = other.to_base_2;
    room = other.room;
  }

  // Of scores in units.
  static DEVICE FragmentSoftmax in_units(Accum unit) {
    FragmentSoftmax softmax(unit);
    softmax.to_natural = unit;
    softmax.to_base_2 = unit * LOG2_E;
    softmax.room = quotient(MAX_GROWTH, softmax.to_base_2);
    return softmax;
  }

  template <int N>
  static DEVICE void find_tops(const Accum (&x)[N], Accum (&top)[2]) {
    top[0] = x[0], top[1] = x[2];
#pragma unroll
    for (int e = 0; e < N; e++) top[e / 2 % 2] = larger(top[e / 2 % 2], x[e]);
  }

  DEVICE bool exceeded(const Accum (&top)[2]) const {
    return top[0] > reference[0] + room || top[1] > reference[1] + room;
  }

  // Takes a row's new maximum for its reference if it is far above.
  DEVICE void raise(int r, Accum maximum, Accum& rescale) {
    if (!(maximum > reference[r] + room)) return;
    rescale = power_of_2((reference[r] - maximum) * to_base_2);
    reference[r] = maximum;
    sum[r] *= rescale;
  }

  // Whether earlier results are to be multiplied, row r with rescale[r]. Scores in bounds need no maximum of a row.
  template <int N>
  DEVICE bool step(Accum (&x)[N], Accum (&rescale)[2]) {
    Accum top[2];
    find_tops(x, top);
    rescale[0] = rescale[1] = 1;
    const bool grown = __any_sync(ALL_LANES, exceeded(top));
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        raise(r, max_of_row<4>(top[r]), rescale[r]);
      }
    }
    weigh(x);
    return grown;
  }

  template <int N>
  DEVICE void weigh(Accum (&x)[N]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Accum base = reference[r] == -infinity() ? 0 : reference[r];
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

  // The same in two halves, for scores without shift[r], so that weights can be found a few at a time: EVERY growth of
  // the maximum is followed, or only large ones.
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
      return HEAD_DIM_V == 128 || __any_sync(ALL_LANES, any_grown);  // at 128 to ask costs more than to multiply
    }
    const Accum limit[2] = {reference[0] - shift[0] + room, reference[1] - shift[1] + room};
    rescale[0] = rescale[1] = 1;
    const bool grown = __any_sync(ALL_LANES, top[0] > limit[0] || top[1] > limit[1]);
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Accum maximum = max_of_row<4>(top[r]);
        if (!(maximum > limit[r])) continue;
        rescale[r] = power_of_2((reference[r] - shift[r] - maximum) * to_base_2);
        reference[r] = maximum + shift[r];
        sum[r] *= rescale[r];
      }
    }
    return grown;
  }

  // Then the weights of elements BEGIN to END - 1: whole groups of four.
  template <int BEGIN, int END>
  DEVICE void weigh(Accum (&x)[BLOCK_N / 2], const Accum (&shift)[2], bool) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Accum base = reference[r] == -infinity() ? 0 : reference[r] - shift[r];
      const Accum offset = base * to_base_2;
      Accum row_sum = 0;
#pragma unroll
      for (int e = BEGIN + 2 * r; e < END; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          Accum& w = x[e + side];
          w = power_of_2(HAS_BIAS ? (w - base) * LOG2_E : w * to_base_2 - offset);
          row_sum += w;
        }
      }
      sum[r] += row_sum;
    }
  }

  DEVICE void finish(Accum sink, Accum (&inverse)[2], Accum (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) finish_row(reference[r] * to_natural, sum[r], sink, inverse[r], lse[r]);
  }
};

template <int N>
DEVICE void rescale_rows(Accum (&out)[N], const Accum (&rescale)[2]) {
#pragma unroll
  for (int e = 0; e < N; e++) out[e] *= rescale[e / 2 % 2];
}

// The softmax of scores that softcap bounds: their powers stay finite without a maximum.
struct BoundedSoftmax {
  // Below SMALL tanh is x (1 + CUBIC x^2), within 2^-11 as the instruction is, whose unit is left to powers. An error
  // that the smallest had in common would be one of lse.
  static constexpr float SMALL = 0.385f, CUBIC = -0.31775113f;
  static constexpr float STEEP = 1e12f;  // of factors whose cube may be infinite: then no product is small
  float factor;                          // from a product to tanh's argument
  float power;                           // and from tanh to the power of 2
  float small;                           // the largest product that is small
  float linear, cubic;                   // of small products
  float sum[2] = {0, 0};

  template <class Units>
  DEVICE explicit BoundedSoftmax(const Units& units)
      : factor(units.factor),
        power(units.unit * LOG2_E),
        small(fabsf(factor) < STEEP ? fminf(SMALL / fabsf(factor), 1e18f) : -1) {
    linear = factor * power;
    cubic = factor * factor * factor * power * CUBIC;
  }

  DEVICE float of_small(float product) const { return product * fmaf(cubic, product * product, linear); }
  DEVICE float of_any(float product) const { return ptx::tanh(product * factor) * power; }

  // Powers of 2 from the products of a masked tile.
  DEVICE void cap(float (&x)[BLOCK_N / 2]) const {
#pragma unroll
    for (float& product : x) product = of_any(product);
  }

  template <bool EVERY>
  DEVICE bool bound(const float (&)[BLOCK_N / 2], const float (&)[2], float (&)[2]) const {
    return false;
  }

  template <int BEGIN, int END>
  DEVICE void weigh(float (&x)[BLOCK_N / 2], const float (&)[2], bool masked) {
    if (masked) return weigh_by<BEGIN, END>(x, [](float capped) { return capped; });
    float tops[2] = {};  // of one, each would wait for the last
#pragma unroll
    for (int e = BEGIN; e < END; e++) tops[e % 2] = larger(tops[e % 2], fabsf(x[e]));
    if (__all_sync(ALL_LANES, larger(tops[0], tops[1]) <= small)) {
      weigh_by<BEGIN, END>(x, [&](float product) { return of_small(product); });
    } else {  // each as if alone: no row depends on others
      weigh_by<BEGIN, END>(
          x, [&](float product) { return fabsf(product) <= small ? of_small(product) : of_any(product); });
    }
  }

  // Each way has its own sums, which hide behind its powers.
  template <int BEGIN, int END, class Power>
  DEVICE void weigh_by(float (&x)[BLOCK_N / 2], Power power) {
    float row_sum[2] = {0, 0};
#pragma unroll
    for (int e = BEGIN; e < END; e++) {
      x[e] = ptx::ex2(power(x[e]));
      row_sum[e / 2 % 2] += x[e];
    }
    sum[0] += row_sum[0];
    sum[1] += row_sum[1];
  }

  // A sink may be far from all scores: it meets their logarithm.
  DEVICE void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float total = sum_of_row<4>(sum[r]);
      const float seen = total == 0 ? -infinity() : natural_log(total), top = larger(seen, sink);
      const float own = seen == -infinity() ? 0 : exp_2((seen - top) * LOG2_E);
      const float both = own + (sink == -infinity() ? 0 : exp_2((sink - top) * LOG2_E));
      inverse[r] = own == 0 ? 0 : quotient(own, both * total);
      lse[r] = both == 0 ? -infinity() : top + natural_log(both);
    }
  }
};

DEVICE void cap(const FragmentSoftmax&, float (&)[BLOCK_N / 2]) {}
DEVICE void cap(const BoundedSoftmax& softmax, float (&x)[BLOCK_N / 2]) { softmax.cap(x); }

template <bool BOUNDED, class Units>
DEVICE auto softmax_of(const Units& units) {
  if constexpr (BOUNDED) {
    return BoundedSoftmax(units);
  } else {
    return FragmentSoftmax::in_units(units.unit);
  }
}
