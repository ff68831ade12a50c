// This header says how sums of integers stand for sums of numbers, so that they repeat their bits in any order. A
// number becomes two words: whole multiples of the unit 2^(exponent - bits) of the largest number, and multiples of a
// unit smaller by 2^bits for the rest. Where a number is not finite, the first word says which ones there were.
#include "../params.cuh"

constexpr u64 HAS_INFINITY = 1, HAS_MINUS_INFINITY = 2, HAS_NAN = 4;

DEVICE bool is_finite(double x) { return x - x == 0; }

// exponent_of() is the least e with x < 2^e, for a finite x that is not negative; of 0 it does not matter.
DEVICE int exponent_of(double x) {
  int e = 0;
  frexp(x, &e);
  return e;
}

// sum_of() is the number that both words stand for.
DEVICE double sum_of(u64 largest_bits, u64 high, u64 low, int bits) {
  const double largest = __longlong_as_double(static_cast<i64>(largest_bits));
  if (is_finite(largest)) {
    const double sum =
        static_cast<double>(static_cast<i64>(high)) + ldexp(static_cast<double>(static_cast<i64>(low)), -bits);
    return ldexp(sum, exponent_of(largest) - bits);
  }
  if (high == HAS_INFINITY || high == HAS_MINUS_INFINITY) return high == HAS_INFINITY ? largest : -largest;
  return largest - largest;
}
