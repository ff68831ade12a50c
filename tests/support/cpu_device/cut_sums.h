// These functions multiply matrices as tensor cores do, and sum in float32 or cut off.
//
// Tensor cores cut products of 16-bit elements and a float32 sum: the terms lose what lies below `bits` bits
// under the largest one's exponent, the sum what float32 does not hold. All is cut off, not rounded.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "instructions.h"

namespace cpu_device {

constexpr int kRows = 16;                         // of a matrix of a warp
constexpr int kMaxDepth = 32, kMaxColumns = 256;  // of the matrices that an instruction multiplies
constexpr int kSums = 8;                          // sums side by side, which loops compute together

// A zero has no exponent. This one stays below all others with any exponent added to it.
constexpr int kNoExponent = -2000, kLeastExponent = -900;

inline int exponent_of(float x, int least) {
  uint32_t word;
  memcpy(&word, &x, sizeof word);
  return x == 0 ? kNoExponent : std::max(int(word >> 23 & 255) - 127, least);
}

inline double power_of_2(int exponent) {
  const uint64_t word = uint64_t(int64_t(exponent + 1023)) << 52;
  double x;
  memcpy(&x, &word, sizeof x);
  return x;
}

// Cut says how tensor cores sum: `depth` products at once, with so many bits. Without bits they sum in float32.
struct Cut {
  int bits, depth;
};

// cut_sums() adds a[k * kRows] * b[k * columns + s] to each sum s. Whole numbers are held by double, in which they are
// exact: they have no more bits than `bits`, two, and those of `depth`.
inline void cut_sums(float* sums, const float* a, const int* exponents_a, const float* b, const int* exponents_b,
                     int columns, int depth, int bits) {
  int top[kSums];
  float plain[kSums];
  for (int s = 0; s < kSums; s++) {
    top[s] = exponent_of(sums[s], -126);
    plain[s] = sums[s];
  }
  for (int k = 0; k < depth; k++) {
    for (int s = 0; s < kSums; s++) {
      top[s] = std::max(top[s], exponents_a[k * kRows] + exponents_b[k * columns + s]);
      plain[s] += a[k * kRows] * b[k * columns + s];
    }
  }
  double whole[kSums], unit[kSums];
  for (int s = 0; s < kSums; s++) {
    top[s] = std::max(top[s], kLeastExponent);
    unit[s] = power_of_2(bits - top[s]);
    whole[s] = std::trunc(double(sums[s]) * unit[s]) + 0.0;  // whole numbers have no negative zero
  }
  for (int k = 0; k < depth; k++)
    for (int s = 0; s < kSums; s++) whole[s] += std::trunc(double(a[k * kRows]) * double(b[k * columns + s]) * unit[s]);
  for (int s = 0; s < kSums; s++) {
    const double exact = whole[s] * power_of_2(top[s] - bits);
    const float near = float(exact);
    // The float before it, towards zero, has the word before.
    uint32_t word;
    memcpy(&word, &near, sizeof word);
    word -= std::fabs(double(near)) > std::fabs(exact);
    float cut;
    memcpy(&cut, &word, sizeof cut);
    const bool is_plain = top[s] == kLeastExponent || !(std::fabs(plain[s]) <= 0x1.fffffep127f);
    sums[s] = is_plain ? plain[s] : cut;
  }
}

// plain_sums() computes so many sums of `depth` products in float32.
template <int sums>
void plain_sums(float* d, bool accumulate, const float* a, const float* b, int columns, int depth) {
  float sum[sums] = {};
  for (int k = 0; k < depth; k++)
    for (int s = 0; s < sums; s++) sum[s] += a[k * kRows] * b[k * columns + s];
  for (int s = 0; s < sums; s++) d[s] = accumulate ? d[s] + sum[s] : sum[s];
}

// multiply() computes d = (accumulate ? d : 0) + a b, where a is (depth x kRows), its rows along the second axis, and b
// (depth x columns), a multiple of kSums.
inline void multiply(float* d, bool accumulate, const float* a, const float* b, int columns, int depth, Cut cut,
                     Format format) {
  if (cut.bits == 0) {
    for (int row = 0; row < kRows; row++) {
      int first = 0;
      for (; first + 4 * kSums <= columns; first += 4 * kSums)
        plain_sums<4 * kSums>(d + row * columns + first, accumulate, a + row, b + first, columns, depth);
      for (; first < columns; first += kSums)
        plain_sums<kSums>(d + row * columns + first, accumulate, a + row, b + first, columns, depth);
    }
    return;
  }
  const int least = format == Format::kFloat16 ? -14 : format == Format::kE4m3 ? -6 : -126;
  int exponents_a[kMaxDepth * kRows], exponents_b[kMaxDepth * kMaxColumns];
  for (int i = 0; i < depth * kRows; i++) exponents_a[i] = exponent_of(a[i], least);
  for (int i = 0; i < depth * columns; i++) exponents_b[i] = exponent_of(b[i], least);
  if (!accumulate) std::fill_n(d, kRows * columns, 0.0f);
  for (int row = 0; row < kRows; row++)
    for (int first = 0; first < columns; first += kSums)
      for (int k = 0; k < depth; k += cut.depth)
        cut_sums(d + row * columns + first, a + k * kRows + row, exponents_a + k * kRows + row, b + k * columns + first,
                 exponents_b + k * columns + first, columns, std::min(cut.depth, depth - k), cut.bits);
}

}  // namespace cpu_device
