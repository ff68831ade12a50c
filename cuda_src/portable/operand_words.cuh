// This header is the second pass of sums that repeat their bits: terms become integers of two words in a unit of their
// element's largest one, and integers have the same sum in any order. It is `terms` of backward_operands.cuh.
#include "gradient_tile.cuh"
#include "../rules/fixed_point.cuh"

struct TermSums {
  const u64* maxima;
  u64 *high, *low;
  int bits;

  DEVICE explicit TermSums(const AttentionParams& p)
      : maxima(p.operand_words),
        high(p.operand_words + p.operand_total),
        low(p.operand_words + 2 * p.operand_total),
        bits(p.operand_bits) {}

  DEVICE void add(int n, i64 at, Accum term) {
    const double x = static_cast<double>(term);
    const double largest = __longlong_as_double(static_cast<i64>(maxima[at]));
    if (is_finite(largest)) {
      const double scaled = ldexp(x, bits - exponent_of(largest)), whole = rint(scaled);
      atomicAdd(high + at, static_cast<u64>(static_cast<i64>(whole)));
      atomicAdd(low + at, static_cast<u64>(static_cast<i64>(rint(ldexp(scaled - whole, bits)))));
    } else if (!is_finite(x)) {
      atomicOr(high + at, x != x ? HAS_NAN : x > 0 ? HAS_INFINITY : HAS_MINUS_INFINITY);
    }
  }
  DEVICE void finish() {}
};
