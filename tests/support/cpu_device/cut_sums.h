// Tensor cores cut products of 16-bit elements and a float32 sum: the terms lose what lies below `bits` bits
// under the largest one's exponent, the sum what float32 does not hold. All is cut off, not rounded.
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "instructions.h"
#include "worker.h"

namespace cpu_device {

inline int exponent_of(float x, int least) {
  uint32_t word;
  memcpy(&word, &x, sizeof word);
  return std::max(int(word >> 23 & 255) - 127, least);
}

inline double power_of_2(int exponent) {
  const uint64_t word = uint64_t(exponent + 1023) << 52;
  double x;
  memcpy(&x, &word, sizeof x);
  return x;
}

// cut_sum() adds `depth` products a[i * step_a] * b[i * step_b].
inline float cut_sum(float sum, const float* a, int step_a, const float* b, int step_b, int depth, int bits,
                     Format format) {
  const int least = format == Format::kFloat16 ? -14 : format == Format::kE4m3 ? -6 : -126;
  int top = sum == 0 ? INT_MIN : exponent_of(sum, -126);
  float plain = sum;
  for (int i = 0; i < depth; i++) {
    const float x = a[i * step_a], y = b[i * step_b];
    plain += x * y;
    if (x != 0 && y != 0) top = std::max(top, exponent_of(x, least) + exponent_of(y, least));
  }
  if (top == INT_MIN || !std::isfinite(plain)) return plain;
  const double unit = power_of_2(bits - top);
  int64_t whole = double(sum) * unit;
  for (int i = 0; i < depth; i++) whole += int64_t(double(a[i * step_a]) * b[i * step_b] * unit);
  const double exact = double(whole) * power_of_2(top - bits);
  const float near = float(exact);
  return std::fabs(near) > std::fabs(exact) ? std::nextafter(near, 0.0f) : near;
}

// By steps as deep as the launch has them.
inline float sum_of_products(float sum, const float* a, int step_a, const float* b, int step_b, int depth,
                             Format format) {
  const int bits = worker->launch->sum_bits, at_once = worker->launch->sum_depth;
  for (int i = 0; i < depth; i += at_once)
    sum = cut_sum(sum, a + i * step_a, step_a, b + i * step_b, step_b, std::min(at_once, depth - i), bits, format);
  return sum;
}

}  // namespace cpu_device
