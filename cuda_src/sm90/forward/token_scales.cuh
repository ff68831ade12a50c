// This header has scales of single keys and values in Hopper's forward kernel on 16 bits over e4m3 codes. Products are
// multiplied by the scale of their key. The scale of a value is a power of two, by which its elements are multiplied
// when they are made, and a factor of the weight: of any scale at all float16 then holds elements and weights.
#include "../../around/scales.cuh"
#include "../../fragment/fragment.cuh"

// TokenScales are the scales of a tile of keys in shared memory, and the factors of the weights.
struct TokenScales {
  static constexpr int KEYS = TOKEN_SCALES ? BLOCK_N : 4;
  alignas(16) float of_keys[KEYS];
  float of_weights[KEYS];
};

// The exponents of powers that elements are multiplied by: 448 times the largest and a code times the smallest are
// numbers of the type, and the latter keep all bits.
DEVICE int most_exponent(__half) { return 7; }
DEVICE int least_exponent(__half) { return -15; }
DEVICE int most_exponent(__nv_bfloat16) { return 100; }
DEVICE int least_exponent(__nv_bfloat16) { return -100; }

DEVICE float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// exponent_of() is that of the power of two in the scale of a value.
DEVICE int exponent_of(float scale) {
  const int own = (__float_as_int(scale) >> 23 & 0xff) - 127;
  return larger(smaller(own, most_exponent(Element())), least_exponent(Element()));
}

// scale_columns() multiplies columns of a fragment by `factors` in shared memory; with `keeps_zeros` a 0 stays 0,
// whatever the factor is.
template <int N>
DEVICE void scale_columns(float (&x)[N], const float* factors, bool keeps_zeros) {
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    const float2 pair = *reinterpret_cast<const float2*>(factors + fragment_column() + column_offset(e));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scaled = x[e + i] * (i % 2 == 0 ? pair.x : pair.y);
      x[e + i] = keeps_zeros && x[e + i] == 0 ? 0 : scaled;
    }
  }
}
