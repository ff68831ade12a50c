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

// What turns products of split operands into products of q and k. Plain scores keep the part of the rows, which comes
// with their conversion to base 2.
struct ScoreFactors {
  // Beside queries this small keys may be so large that the product of both factors' parts overflows, or one
  // underflows.
  static constexpr float SMALL = 0x1p-34f, RELIEF = 0x1p-60f;
  float of_row[2];
  bool small[2];

  __device__ __forceinline__ ScoreFactors(float row_0, float row_1)
      : of_row{row_0 < SMALL ? row_0 / RELIEF : row_0, row_1 < SMALL ? row_1 / RELIEF : row_1},
        small{row_0 < SMALL, row_1 < SMALL} {}

  __device__ __forceinline__ void apply(float (&x)[BLOCK_N / 2], const float* key_factors) const {
    if (__any_sync(ALL_LANES, small[0] || small[1])) {
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e++) x[e] *= small[e / 2 % 2] ? RELIEF : 1;
    }
    multiply_columns(x, key_factors, 1);
    if constexpr (!PLAIN_SCORES) {
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e++) x[e] *= of_row[e / 2 % 2];
    }
  }
  __device__ __forceinline__ float to_natural(float scale, int r) const { return PLAIN_SCORES ? of_row[r] * scale : 1; }
};

struct SplitSoftmax {
  float to_base_2[2];  // factors of a score
  float maximum[2], sum[2];
  float unit[2];  // of row r of out, a power of two: weights times the factors of their values are at most 2 units

  __device__ __forceinline__ SplitSoftmax(float scale, const ScoreFactors& factors) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      to_base_2[r] = larger(factors.to_natural(scale, r) * LOG2_E, SMALLEST_NORMAL);  // times -inf it must not be NaN
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
  __device__ __forceinline__ void finish(float scale, const ScoreFactors& factors, float sink, float (&inverse)[2],
                                         float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      finish_row(maximum[r] * factors.to_natural(scale, r), sum[r], sink, inverse[r], lse[r]);
      inverse[r] *= 1 / (TOP * TOP);  // weights and values both stand TOP too high
    }
  }
};
