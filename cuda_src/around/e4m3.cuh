// This header converts numbers to the codes of e4m3 (float8_e4m3fn): 1 sign, 4 exponent and 3 mantissa bits, no
// infinity (Micikevicius et al., "FP8 formats for deep learning", 2022). The instruction of newer GPUs is not used, so
// that every GPU, and float64, has the same code.
#include "../params.cuh"

constexpr int E4M3_MANTISSA_BITS = 3, E4M3_LEAST_EXPONENT = -6;
constexpr u32 E4M3_SIGN = 0x80, E4M3_NAN = 0x7f;
constexpr float E4M3_LARGEST = 448;

// exponent_of() is the exponent of a positive normal number, power_of_2() the inverse.
DEVICE int exponent_of(float x) { return (__float_as_int(x) >> 23) - 127; }
DEVICE int exponent_of(double x) { return static_cast<int>(__double_as_longlong(x) >> 52) - 1023; }
DEVICE float power_of_2(int exponent, float) { return __int_as_float((exponent + 127) << 23); }
DEVICE double power_of_2(int exponent, double) {
  return __longlong_as_double(static_cast<i64>(exponent + 1023) << 52);
}
DEVICE float nearest_integer(float x) { return rintf(x); }
DEVICE double nearest_integer(double x) { return rint(x); }

// e4m3_code() gives the nearest code, of two as near the even one; what is beyond the largest number becomes that.
DEVICE u8 e4m3_code(Accum x) {
  const u32 sign = x < 0 || (x == 0 && 1 / x < 0) ? E4M3_SIGN : 0;
  if (x != x) return E4M3_NAN;
  const Accum magnitude = smaller(x < 0 ? -x : x, Accum(E4M3_LARGEST));
  const int exponent = exponent_of(larger(magnitude, power_of_2(E4M3_LEAST_EXPONENT, Accum())));
  const int steps = static_cast<int>(nearest_integer(magnitude * power_of_2(E4M3_MANTISSA_BITS - exponent, Accum())));
  // The steps of a binade follow those of the one before, whose last number of steps they begin with.
  return static_cast<u8>(sign | (((exponent - E4M3_LEAST_EXPONENT) << E4M3_MANTISSA_BITS) + steps));
}
