// The online softmax on a warp's fragment of 16 queries: a thread has two rows, each shared by the four lanes of a
// quad.
#pragma once
#include "fragment.cuh"
#include "sm80/ptx.cuh"
#include "softmax.cuh"

// Earlier results are rescaled only where the maximum grows by more than this power of two (FlashAttention-4, 2026):
// weights up to 256 are as exact, and most steps need no rescaling. Decided per row, so rows stay independent.
constexpr float MAX_GROWTH = 8;

// The end of a row whose largest score is `top`; `sum` is the thread's part of the sum. A sink is one more score, of no
// value row.
__device__ __forceinline__ void finish_row(float top, float sum, float sink, float& inverse, float& lse) {
  float total = reduce_row<4>(sum, [](float a, float b) { return a + b; });
  float own = 1;
  if (sink != -infinity()) {
    const float seen = top;
    top = larger(seen, sink);
    own = seen == -infinity() ? 0 : weight(seen, top);
    total = (total == 0 ? 0 : total * own) + (sink == top ? 1 : weight(sink, top));
  }
  inverse = total == 0 ? 0 : own / total;
  lse = total == 0 ? -infinity() : top + log_e(total);
}

struct FragmentSoftmax {
  float to_natural, to_base_2;  // factors of a score
  // The reference of a row is a maximum that it once had; its scores may exceed it by `room`.
  float room, reference[2], sum[2];

  FragmentSoftmax() = default;  // for arrays

  // Plain scores stay products of q and k, and their scale comes with the conversion to base 2.
  __device__ __forceinline__ FragmentSoftmax(float scale)
      : to_natural(PLAIN_SCORES ? scale : 1), to_base_2(to_natural * LOG2_E), room(MAX_GROWTH / to_base_2) {
    reference[0] = reference[1] = -infinity();
    sum[0] = sum[1] = 0;
  }

  // From another with the same scale.
  __device__ __forceinline__ void take_factors(const FragmentSoftmax& other) {
    to_natural = other.to_natural;
    to_base_2 = other.to_base_2;
    room = other.room;
  }

  // Of scores in units.
  static __device__ __forceinline__ FragmentSoftmax in_units(float unit) {
    FragmentSoftmax softmax(unit);
    softmax.to_natural = unit;
    softmax.to_base_2 = unit * LOG2_E;
    softmax.room = MAX_GROWTH / softmax.to_base_2;
    return softmax;
  }

  // Turns scores into weights. Whether earlier results are to be multiplied, row r with rescale[r]. A warp whose scores
  // stay in bounds, as most do, needs no maximum of a whole row.
  __device__ __forceinline__ bool step(float (&x)[BLOCK_N / 2], float (&rescale)[2]) {
    float top[2] = {x[0], x[2]};
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) top[e / 2 % 2] = larger(top[e / 2 % 2], x[e]);
    rescale[0] = rescale[1] = 1;
    const bool grown = __any_sync(ALL_LANES, top[0] > reference[0] + room || top[1] > reference[1] + room);
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float maximum = reduce_row<4>(top[r], [](float a, float b) { return larger(a, b); });
        if (!(maximum > reference[r] + room)) continue;
        rescale[r] = ptx::ex2((reference[r] - maximum) * to_base_2);
        reference[r] = maximum;
        sum[r] *= rescale[r];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float base = reference[r] == -infinity() ? 0 : reference[r];  // nothing seen yet: weights are 0, not NaN
      const float offset = base * to_base_2;
      float row_sum = 0;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          float& w = x[e + side];
          // A bias may be finfo.min, whose product with log2(e) overflows: it is subtracted first.
          w = ptx::ex2(HAS_BIAS ? (w - base) * LOG2_E : w * to_base_2 - offset);
          row_sum += w;
        }
      }
      sum[r] += row_sum;
    }
    return grown;
  }

  // The same in two halves, for scores of which shift[r] has been left out in row r, so that weights can be found a few
  // at a time. First, whether earlier results are to be multiplied.
  __device__ __forceinline__ bool bound(const float (&x)[BLOCK_N / 2], const float (&shift)[2], float (&rescale)[2]) {
    float top[2] = {x[0], x[2]};
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) top[e / 2 % 2] = larger(top[e / 2 % 2], x[e]);
    const float limit[2] = {reference[0] - shift[0] + room, reference[1] - shift[1] + room};
    rescale[0] = rescale[1] = 1;
    const bool grown = __any_sync(ALL_LANES, top[0] > limit[0] || top[1] > limit[1]);
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float maximum = reduce_row<4>(top[r], [](float a, float b) { return larger(a, b); });
        if (!(maximum > limit[r])) continue;
        rescale[r] = ptx::ex2((reference[r] - shift[r] - maximum) * to_base_2);
        reference[r] = maximum + shift[r];
        sum[r] *= rescale[r];
      }
    }
    return grown;
  }

  // Then the weights of the thread's elements BEGIN to END - 1: whole groups of four.
  template <int BEGIN, int END>
  __device__ __forceinline__ void weigh(float (&x)[BLOCK_N / 2], const float (&shift)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      // Nothing seen yet: weights are 0, not NaN.
      const float base = reference[r] == -infinity() ? 0 : reference[r] - shift[r];
      const float offset = base * to_base_2;
      float row_sum = 0;
#pragma unroll
      for (int e = BEGIN + 2 * r; e < END; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          float& w = x[e + side];
          // A bias may be finfo.min, whose product with log2(e) overflows: it is subtracted first.
          w = ptx::ex2(HAS_BIAS ? (w - base) * LOG2_E : w * to_base_2 - offset);
          row_sum += w;
        }
      }
      sum[r] += row_sum;
    }
  }

  // Completes the sums. inverse[r] normalises row r (0 where it saw nothing), lse[r] is its natural log-sum-exp.
  __device__ __forceinline__ void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) finish_row(reference[r] * to_natural, sum[r], sink, inverse[r], lse[r]);
  }
};

template <int N>
__device__ __forceinline__ void rescale_rows(float (&out)[N], const float (&rescale)[2]) {
#pragma unroll
  for (int e = 0; e < N; e++) out[e] *= rescale[e / 2 % 2];
}
