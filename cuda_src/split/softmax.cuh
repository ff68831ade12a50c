// This header has the online softmax of Hopper's forward kernel on float32 operands in float16 parts
// (split/sm90_forward.cu).
#include "../fragment/softmax_fragment.cuh"
#include "factors.cuh"

// SplitSoftmax is the online softmax of scores and weights that stand with the factors of split rows.
struct SplitSoftmax {
  float to_base_2[2];  // factors that bring a score to base 2
  float maximum[2], sum[2];
  float unit[2];  // a power of two for row r of out: weights times the factors of their values are at most 2 units

  DEVICE SplitSoftmax(float scale, const ScoreFactors& factors) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      // The factor is not 0, because its product with -inf must not be NaN.
      to_base_2[r] = larger(factors.to_natural(scale, r) * LOG2_E, SMALLEST_NORMAL);
      maximum[r] = -infinity();
      sum[r] = 0;
      unit[r] = LOWEST_UNIT;
    }
  }

  // step() does what OnlineSoftmax::step does.
  DEVICE void step(float (&x)[BLOCK_N / 2], float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = maximum[r];
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) m = larger(m, larger(x[e], x[e + 1]));
      m = max_of_row<4>(m);
      const float reference = m == -infinity() ? 0 : m;
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

  // scale_to_units() multiplies weights by the factors of their values, and puts them into units (normalize_rows()),
  // whose ratio goes into rescale.
  DEVICE void scale_to_units(float (&x)[BLOCK_N / 2], const float* value_factors, float (&rescale)[2]) {
    multiply_columns(x, value_factors, TOP);
    normalize_rows(x, unit, rescale);
  }

  // finish() ends the rows: out[row r] * inverse[r] * unit[r] is the result.
  DEVICE void finish(float scale, const ScoreFactors& factors, float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      finish_row(maximum[r] * factors.to_natural(scale, r), sum[r], sink, inverse[r], lse[r]);
      inverse[r] *= 1 / (TOP * TOP);  // both weights and values stand TOP too high
    }
  }
};
