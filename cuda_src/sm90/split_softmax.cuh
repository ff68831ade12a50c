// The online softmax on a fragment whose scores and weights carry the factors of split rows (split_layout.cuh).
#pragma once
#include "../softmax_fragment.cuh"
#include "split_factors.cuh"

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
    raise(x, unit, rescale);
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
