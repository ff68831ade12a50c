// This header is the first pass of sums that repeat their bits: it finds the largest magnitude of the terms of each
// element of an operand's gradient. It is `terms` of backward_operands.cuh.
#include "gradient_tile.cuh"

struct TermSums {
  u64* maxima;

  DEVICE explicit TermSums(const AttentionParams& p) : maxima(p.operand_words) {}

  // add() compares numbers that are not negative by their bits; NaN is the largest.
  DEVICE void add(int n, i64 at, Accum term) {
    const double x = fabs(static_cast<double>(term));
    atomicMax(maxima + at, static_cast<u64>(__double_as_longlong(x)));
  }
  DEVICE void finish() {}
};
