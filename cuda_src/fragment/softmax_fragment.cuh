// The online softmax on a warp's fragment of 16 queries: a thread has two rows, each shared by a quad's four lanes.
#include "fragment.cuh"
#include "softmax.cuh"

// A row's weights are powers of two of its scores less its reference, a maximum that the row once had. A new maximum
// may exceed the reference by MAX_GROWTH before earlier results are rescaled (FlashAttention-4, 2026).
constexpr float MAX_GROWTH = 8;
// A weight of 16 bits is exact only where its score is the reference. So whatever may become a large weight of the row
// becomes the reference, or its rounding is the largest error of the row. What is large is foretold from a row's first
// tile: where its sum is at least FLAT of its largest weights, no key has much of it, and the root of all squared
// weights will be about the sum times the root of the number of tiles; a weight is large from LARGE_SHARE of that on.
// Few rows of N(0, 1) inputs ever meet such a weight. Any other row, and one that has met it, follows every maximum.
// Errors on inputs with large weights are 1.01 to 1.02 of those of following always (1.10 to 1.20 without).
constexpr float FLAT = 3, LARGE_SHARE = 0.12f;

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
  static constexpr bool ROUNDS_WEIGHTS = sizeof(Element) == 2;

  Accum to_natural, to_base_2;         // factors of a score
  Accum room[ROUNDS_WEIGHTS ? 2 : 1];  // by which scores of row r may exceed its reference
  Accum reference[2], sum[2];

  FragmentSoftmax() = default;  // for arrays

  // Plain scores stay products of q and k, and their scale comes with the conversion to base 2.
  DEVICE FragmentSoftmax(Accum scale) : FragmentSoftmax(in_units(PLAIN_SCORES ? scale : 1)) {}

  DEVICE void take_factors(const FragmentSoftmax& other) {
    to_natural = other.to_natural;
    to_base_2 = other.to_base_2;
    if constexpr (!ROUNDS_WEIGHTS) room[0] = other.room[0];
  }

  // The softmax of scores that stand in units.
  static DEVICE FragmentSoftmax in_units(Accum unit) { return FragmentSoftmax(unit, unit * LOG2_E); }
  // The softmax of scores that are powers of two.
  static DEVICE FragmentSoftmax of_powers() { return FragmentSoftmax(0.6931471805599453f, 1); }

  template <int N>
  static DEVICE void find_tops(const Accum (&x)[N], Accum (&top)[2]) {
    top[0] = x[0], top[1] = x[2];
#pragma unroll
    for (int e = 0; e < N; e++) top[e / 2 % 2] = larger(top[e / 2 % 2], x[e]);
  }

  // What is subtracted from the scores of row r without `shift`; where nothing was seen, all are -inf.
  DEVICE Accum base(int r, Accum shift = 0) const { return reference[r] == -infinity() ? 0 : reference[r] - shift; }

  // What scores of row r without `shift` may reach before the row's reference follows.
  DEVICE Accum limit(int r, Accum shift = 0) const { return reference[r] - shift + room[ROUNDS_WEIGHTS ? r : 0]; }

  DEVICE bool exceeded(const Accum (&top)[2]) const { return top[0] > limit(0) || top[1] > limit(1); }

  // Makes a row's maximum its reference where it exceeds the limit.
  DEVICE void follow(int r, Accum maximum, Accum& rescale, Accum shift = 0) {
    if (!(maximum > limit(r, shift))) return;
    rescale = power_of_2((reference[r] - shift - maximum) * to_base_2);
    if constexpr (ROUNDS_WEIGHTS) room[r] = reference[r] == -infinity() || is_unsettled(room[r]) ? UNSETTLED : 0;
    reference[r] = maximum + shift;
    sum[r] *= rescale;
  }

  // The room, a power of two, beside the sum of a row's first tile of `tiles`.
  static DEVICE Accum room_beside(Accum total, int tiles) {
    const Accum large = ptx::lg2(total * LARGE_SHARE) + ptx::lg2(static_cast<float>(tiles)) / 2;
    return total < FLAT ? Accum(0) : smaller(larger(large, Accum(0)), Accum(MAX_GROWTH));
  }
  DEVICE void settle(int r, Accum total, int tiles) {
    if constexpr (ROUNDS_WEIGHTS) {
      if (is_unsettled(room[r])) room[r] = in_score_units(room_beside(total, tiles));
    }
  }
  DEVICE void settle(int tiles) {
    if constexpr (ROUNDS_WEIGHTS) {
#pragma unroll
      for (int r = 0; r < 2; r++) settle(r, sum_of_row<4>(sum[r]), tiles);
    }
  }

  // Whether earlier results are to be multiplied, row r with rescale[r].
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
    weigh(x);
    if (grown) settle(tiles);
    return grown;
  }

  template <int N>
  DEVICE void weigh(Accum (&x)[N]) {
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
    rescale[0] = rescale[1] = 1;
    const bool grown = __any_sync(ALL_LANES, top[0] > limit(0, shift[0]) || top[1] > limit(1, shift[1]));
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; r++) follow(r, max_of_row<4>(top[r]), rescale[r], shift[r]);
    }
    return grown;
  }

  // Then the weights of elements BEGIN to END - 1: whole groups of four.
  template <int BEGIN, int END>
  DEVICE bool weigh(Accum (&x)[BLOCK_N / 2], const Accum (&shift)[2], Accum (&)[2], bool) {
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
          w = power_of_2(HAS_BIAS ? (w - base) * LOG2_E : w * to_base_2 - offset);
          row_sum += w;
        }
      }
      sum[r] += row_sum;
    }
    return false;
  }

  // The weights of a row's first tile of `tiles`, by which rooms are found; with 0 later.
  template <bool FINDS_ROOM>
  DEVICE void begin(Accum (&x)[BLOCK_N / 2], const Accum (&shift)[2], int tiles) {
    Accum rescale[2];
    weigh<0, BLOCK_N / 2>(x, shift, rescale, true);
    if (FINDS_ROOM && tiles > 0) settle(tiles);
  }

  DEVICE void finish(Accum sink, Accum (&inverse)[2], Accum (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) finish_row(reference[r] * to_natural, sum[r], sink, inverse[r], lse[r]);
  }

 private:
  DEVICE FragmentSoftmax(Accum to_natural, Accum to_base_2) : to_natural(to_natural), to_base_2(to_base_2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      reference[r] = -infinity();
      sum[r] = 0;
    }
    room[0] = in_score_units(MAX_GROWTH);
    if constexpr (ROUNDS_WEIGHTS) room[0] = room[1] = 0;
  }

  // The room of a row whose room is still to be found is a zero of its own: until then every maximum is followed.
  static constexpr Accum UNSETTLED = -0.0f;
  static DEVICE bool is_unsettled(Accum room) {
    return __float_as_int(static_cast<float>(room)) == __float_as_int(-0.0f);
  }

  DEVICE Accum in_score_units(Accum power) const { return quotient(power, to_base_2); }
};

template <int N>
DEVICE void rescale_rows(Accum (&out)[N], const Accum (&rescale)[2]) {
#pragma unroll
  for (int e = 0; e < N; e++) out[e] *= rescale[e / 2 % 2];
}
