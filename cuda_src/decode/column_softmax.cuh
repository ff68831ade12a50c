// This header has the online softmax of decode kernels (FlashAttention-2, Dao 2023, section 3.1). Queries are columns
// of the scores: a lane has two of them in each block, and the eight lanes whose number differs by a multiple of 4 have
// the others' keys. Every maximum is followed, because a weight of 16 bits is exact only where its score is the
// maximum.
#include "../fragment/softmax_fragment.cuh"
#include "factors.cuh"

// A weight times its key's scale stands in a unit of its query over TOP. Where scales differ, the unit is the largest
// such product so far, so that a key with most of the weight is exact. LEAST_UNIT is the least unit, of which TOP is a
// finite multiple; products of any scale but subnormal ones keep their bits above it.
constexpr float TOP = QUERY_CODES ? 256 : is_half<Weighted> ? 16384 : 1, LEAST_UNIT = TOP * 0x1p-124f;

// over_keys() combines x over the lanes that have the same queries.
template <class Operation>
DEVICE float over_keys(float x, Operation operation) {
#pragma unroll
  for (int step = 4; step < WARP; step *= 2) x = operation(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}
DEVICE float largest_over_keys(float x) {
  return over_keys(x, [](float a, float b) { return larger(a, b); });
}

// ColumnSoftmax is the state of the thread's two queries of a block. Scores are in units of base 2.
struct ColumnSoftmax {
  float maximum[2], sum[2], unit[2];  // `sum` is that of the thread's keys

  DEVICE void begin() {
#pragma unroll
    for (int i = 0; i < 2; i++) maximum[i] = -infinity(), sum[i] = 0, unit[i] = HAS_FP8 ? LEAST_UNIT : 1;
  }

  // step() turns the scores of a stage into weights in units; rescale[i] is the factor for earlier results.
  DEVICE void step(float (&x)[KEY_BLOCKS][4], const Stage& stage, bool scales_vary, float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = maximum[i];
#pragma unroll
      for (int e = i; e < 4 * KEY_BLOCKS; e += 2) top = larger(top, x[e / 4][e % 4]);
      top = largest_over_keys(top);
      const float reference = top == -infinity() ? 0 : top;  // nothing seen yet: all weights are 0, not NaN
      rescale[i] = ptx::ex2(maximum[i] - reference);
      maximum[i] = top;
      float own = 0;
#pragma unroll
      for (int e = i; e < 4 * KEY_BLOCKS; e += 2) {
        x[e / 4][e % 4] = ptx::ex2(x[e / 4][e % 4] - reference);
        own += x[e / 4][e % 4];
      }
      sum[i] = sum[i] * rescale[i] + own;
    }
    if constexpr (HAS_FP8) {
      if (scales_vary) {
        scale_to_units(x, stage, rescale);
      } else {
        unit[0] = unit[1] = stage.v_scale[0];
        multiply(x, TOP);
      }
      if constexpr (QUERY_CODES) {
#pragma unroll
        for (auto& block : x) {
#pragma unroll
          for (float& weight : block) weight = rounded_to_e4m3(weight);
        }
      }
    } else {
      multiply(x, TOP);
    }
  }

  // finish() ends the queries of a warp, whose sinks are one more score each: inverse[i] normalises a result, in units.
  DEVICE void finish(const float (&sinks)[2], float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float total = over_keys(sum[i], [](float a, float b) { return a + b; });
      finish_total(maximum[i] * (1 / LOG2_E), total, sinks[i], inverse[i], lse[i]);
      inverse[i] *= 1 / TOP;
    }
  }

 private:
  static DEVICE void multiply(float (&x)[KEY_BLOCKS][4], float factor) {
    if (factor == 1) return;
#pragma unroll
    for (auto& block : x) {
#pragma unroll
      for (float& weight : block) weight *= factor;
    }
  }

  // scale_to_units() multiplies weights by their keys' scales, and puts them into the queries' units.
  DEVICE void scale_to_units(float (&x)[KEY_BLOCKS][4], const Stage& stage, float (&rescale)[2]) {
    float top[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 4 * KEY_BLOCKS; e++) {
      float& weight = x[e / 4][e % 4];
      // The scale of a key without weight may be anything.
      weight = weight == 0 ? 0 : weight * stage.v_scale[key_of(e / 4, e % 4)];
      top[e % 2] = larger(top[e % 2], fabsf(weight));
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float earlier = rescale[i] * unit[i];
      unit[i] = larger(larger(largest_over_keys(top[i]), earlier), LEAST_UNIT);
      const float inverse = quotient(TOP / 4, unit[i] / 4);  // a quotient by more than 2^126 would be 0
      rescale[i] = earlier * inverse * (1 / TOP);
#pragma unroll
      for (int e = i; e < 4 * KEY_BLOCKS; e += 2) x[e / 4][e % 4] *= inverse;
    }
  }
};
