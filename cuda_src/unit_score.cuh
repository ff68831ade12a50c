// Scores in the accumulators of tensor cores (16-bit inputs) stand in units: score = unit * x. The unit comes with the
// conversion to base 2, so plain products, and those of softcap, cost no multiplication of their own.
#pragma once
#include "score.cuh"
#include "sm80/ptx.cuh"

struct UnitScore {
  float unit, slope;  // the slope is in units
  float factor;       // of a product
  float softcap;

  // A bias needs natural units: in others finfo.min would overflow.
  __device__ __forceinline__ explicit UnitScore(const Score& score) : softcap(score.softcap) {
    unit = HAS_BIAS ? 1 : HAS_SOFTCAP ? score.softcap : PLAIN_SCORES ? score.scale : 1;
    if constexpr (HAS_ALIBI) slope = score.slope / unit;
    factor = HAS_SOFTCAP ? score.scale / score.softcap : score.scale;
  }

  // Before bias and alibi. The error of tanh, 2^-11 of the score, is no larger than that of scores rounded to float16.
  __device__ __forceinline__ float of_product(float product) const {
    if constexpr (HAS_SOFTCAP) return ptx::tanh(product * factor) * (HAS_BIAS ? softcap : 1);
    return PLAIN_SCORES ? product : product * factor;
  }
};
