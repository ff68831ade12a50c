// This header converts numbers to e4m3 and back, as cuflash/e4m3.py does, by bits and integers, because float32
// arithmetic flushes subnormals.

constexpr int E4M3_SHIFT = 23 - 3;                // from float32's mantissa to e4m3's
constexpr unsigned E4M3_REBIAS = (127 - 7) << 3;  // between the exponents' biases, in units of codes
constexpr unsigned E4M3_NAN = 0x7f, E4M3_LARGEST = 0x7e, E4M3_SUBNORMALS = 8;
constexpr float E4M3_MAX = 448, E4M3_LEAST_NORMAL = 0.015625f, E4M3_LEAST = 0.001953125f;

DEVICE float decoded(unsigned char code) {
  const unsigned sign = (code & 0x80u) << 24, size = code & 0x7fu;
  if (size == E4M3_NAN) return __uint_as_float(sign | 0x7fc00000u);
  const float subnormal = static_cast<float>(size) * E4M3_LEAST;
  const float x = size < E4M3_SUBNORMALS ? subnormal : __uint_as_float((size + E4M3_REBIAS) << E4M3_SHIFT);
  return __uint_as_float(__float_as_uint(x) | sign);
}

// encoded() rounds to nearest even; a number beyond the largest gets the code of that one, and NaN the code of NaN.
DEVICE unsigned char encoded(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
  const float size = __uint_as_float(rest);
  if (rest > 0x7f800000u) return static_cast<unsigned char>(sign | E4M3_NAN);
  if (size >= E4M3_MAX) return static_cast<unsigned char>(sign | E4M3_LARGEST);
  if (size < E4M3_LEAST_NORMAL)
    return static_cast<unsigned char>(sign | static_cast<unsigned>(rintf(size / E4M3_LEAST)));
  const unsigned half = 1u << (E4M3_SHIFT - 1), odd = rest >> E4M3_SHIFT & 1;
  return static_cast<unsigned char>(sign | (((rest + (half - 1) + odd) >> E4M3_SHIFT) - E4M3_REBIAS));
}

// A float64 is first cut to a float32 whose last bit says that something was cut, so that it is rounded once.
DEVICE unsigned char encoded(double x) {
  const unsigned long long bits = static_cast<unsigned long long>(__double_as_longlong(x));
  if (!(fabs(x) < E4M3_MAX) || fabs(x) < E4M3_LEAST / 4) return encoded(static_cast<float>(x));
  const unsigned exponent = static_cast<unsigned>(bits >> 52 & 0x7ff) - (1023 - 127);
  const unsigned mantissa = static_cast<unsigned>(bits >> 29 & 0x7fffff), cut = (bits & 0x1fffffff) != 0;
  return encoded(__uint_as_float(static_cast<unsigned>(bits >> 63) << 31 | exponent << 23 | mantissa | cut));
}
