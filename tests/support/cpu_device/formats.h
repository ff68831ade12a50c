// This header says which numbers the elements of tensor cores' operands stand for. Tables hold them, as conversions are
// much of the work of products.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "instructions.h"

namespace cpu_device {

inline float float_of_word(uint32_t word) {
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  const float value = exponent == 0
                          ? float(mantissa) * 0x1p-24f
                          : float_of_word((exponent == 0x1f ? 0xffu : exponent + 127 - 15) << 23 | mantissa << 13);
  return sign ? -value : value;
}

inline float code_to_float(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float size = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(8.0f + mantissa, exponent - 10);
  if ((code & 0x7f) == 0x7f) size = float_of_word(0x7fc00000);
  return std::copysign(size, code & 0x80 ? -1.0f : 1.0f);
}

struct Numbers {
  float of_halves[1 << 16], of_codes[1 << 8];
  Numbers() {
    for (unsigned bits = 0; bits < 1u << 16; bits++) of_halves[bits] = half_to_float(bits);
    for (unsigned code = 0; code < 1u << 8; code++) of_codes[code] = code_to_float(code);
  }
};
inline const Numbers numbers;

template <Format format>
constexpr int kElementBytes = format == Format::kE4m3 ? 1 : 2;

// element<format>() reads the element at an address.
template <Format format>
float element(const uint8_t* bytes) {
  if (format == Format::kE4m3) return numbers.of_codes[*bytes];
  uint16_t bits;
  memcpy(&bits, bytes, sizeof bits);
  return format == Format::kBfloat16 ? float_of_word(uint32_t(bits) << 16) : numbers.of_halves[bits];
}

}  // namespace cpu_device
