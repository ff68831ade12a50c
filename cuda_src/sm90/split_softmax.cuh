// The online softmax on a fragment whose scores and weights carry the factors of split rows (split_layout.cuh).
#pragma once
#include "../softmax_fragment.cuh"

constexpr u32 EXPONENT_BITS = 0x7f800000;
constexpr float TOP = 16384;              // where the largest element of a row of halves lies: 2^14
constexpr float LOWEST_UNIT = 0x1p-112f;  // its inverse times TOP is a number
constexpr float SMALLEST_NORMAL = 0x1p-126f;

__device__ __forceinline__ float power_of_2_below(float x) {
  return __uint_as_float(__float_as_uint(x) & EXPONENT_BITS);
}

// TOP / unit of a power of two.
__device__ __forceinline__ float top_over(float unit) {
  return __uint_as_float(__float_as_uint(2 * TOP) + (126u << 23) - __float_as_uint(unit));
}

// x *= factors of its columns, which lie in shared memory, times `constant`.
__device__ __forceinline__ void multiply_columns(float (&x)[BLOCK_N / 2], const float* factors, float constant) {
#pragma unroll
  for (int e = 0; e < BLOCK_N / 2; e += 4) {
    float2 factor = *reinterpret_cast<const float2*>(factors + fragment_column() + column_offset(e));
    factor.x *= constant;
    factor.y *= constant;
    x[e] = ptx::multiply(x[e], factor.x);
    x[e + 1] = ptx::multiply(x[e + 1], factor.y);
    x[e + 2] = ptx::multiply(x[e + 2], factor.x);
    x[e + 3] = ptx::multiply(x[e + 3], factor.y);
  }
}

struct SplitSoftmax {
  float to_natural[2], to_base_2[2];  // factors of a score
  float maximum[2], sum[2];
  float unit[2];  // of row r of out, a power of two: weights times the factors of their values are at most 2 units

  // Plain scores stay products with split queries, and the factor of the row comes with the conversion to base 2.
  __device__ __forceinline__ SplitSoftmax(float scale, const float (&row_factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      to_natural[r] = PLAIN_SCORES ? row_factor[r] * scale : 1;
      to_base_2[r] = larger(to_natural[r] * LOG2_E, SMALLEST_NORMAL);  // times -inf it must not be NaN
      maximum[r] = -infinity();
      sum[r] = 0;
      unit[r] = LOWEST_UNIT;
    }
  }

  // Turns scores into weights; rescale[r] is what earlier results of row r are to be multiplied with.
  __device__ __forceinline__ void step(float (&x)[BLOCK_N / 2], float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = maximum[r];
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) m = larger(m, larger(x[e], x[e + 1]));
      m = reduce_row<4>(m, [](float a, float b) { return larger(a, b); });
      const float reference = m == -infinity() ? 0 : m;  // nothing seen yet: weights are 0, not NaN
      rescale[r] = ptx::ex2((maximum[r] - reference) * to_base_2[r]);
      maximum[r] = m;
      float row_sum = 0;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          float& w = x[e + side];
          w = ptx::ex2((w - reference) * to_base_2[r]);
          row_sum += w;
        }
      }
      sum[r] = sum[r] * rescale[r] + row_sum;
    }
  }

  // Turns weights into those of split values: times the factors of the values, in units that put the largest of a row
  // near TOP, so that float16 pairs hold them. Factors depend on visible keys alone. rescale gets the units' ratio.
  __device__ __forceinline__ void fold(float (&x)[BLOCK_N / 2], const float* value_factors, float (&rescale)[2]) {
    multiply_columns(x, value_factors, TOP);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = 0;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) m = larger(m, larger(x[e], x[e + 1]));
      m = reduce_row<4>(m, [](float a, float b) { return larger(a, b); });
      const float earlier = rescale[r] * unit[r];
      unit[r] = larger(larger(power_of_2_below(m), power_of_2_below(earlier)), LOWEST_UNIT);
      const float up = top_over(unit[r]);
      rescale[r] = earlier * up * (1 / TOP);
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) {
        x[e] = ptx::multiply(x[e], up);
        x[e + 1] = ptx::multiply(x[e + 1], up);
      }
    }
  }

  // Completes the sums. out[row r] * inverse[r] * unit[r] is the result (0 where it saw nothing), lse[r] its natural
  // log-sum-exp.
  __device__ __forceinline__ void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      finish_row(maximum[r] * to_natural[r], sum[r], sink, inverse[r], lse[r]);
      inverse[r] *= 1 / (TOP * TOP);  // weights and values both stand TOP too high
    }
  }
};
