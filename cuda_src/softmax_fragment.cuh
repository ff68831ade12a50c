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
  float maximum[2], sum[2];

  // Plain scores stay products of q and k, and their scale comes with the conversion to base 2.
  __device__ __forceinline__ FragmentSoftmax(float scale)
      : to_natural(PLAIN_SCORES ? scale : 1), to_base_2(to_natural * LOG2_E) {
    maximum[0] = maximum[1] = -infinity();
    sum[0] = sum[1] = 0;
  }

  // Turns scores into weights; rescale[r] is what earlier results of row r are to be multiplied with.
  __device__ __forceinline__ void step(float (&x)[BLOCK_N / 2], float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = maximum[r];
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) m = larger(m, larger(x[e], x[e + 1]));
      m = reduce_row<4>(m, [](float a, float b) { return larger(a, b); });
      const float growth = (m - maximum[r]) * to_base_2;
      const bool grown = growth > MAX_GROWTH;
      rescale[r] = grown ? ptx::ex2(-growth) : 1;
      maximum[r] = grown ? m : maximum[r];
      const float reference = maximum[r] == -infinity() ? 0 : maximum[r];  // nothing seen yet: weights are 0, not NaN
      const float offset = reference * to_base_2;
      float row_sum = 0;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          float& w = x[e + side];
          // A bias may be finfo.min, whose product with log2(e) overflows: it is subtracted first.
          w = ptx::ex2(HAS_BIAS ? (w - reference) * LOG2_E : w * to_base_2 - offset);
          row_sum += w;
        }
      }
      sum[r] = sum[r] * rescale[r] + row_sum;
    }
  }

  // Completes the sums. inverse[r] normalises row r (0 where it saw nothing), lse[r] is its natural log-sum-exp.
  __device__ __forceinline__ void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) finish_row(maximum[r] * to_natural, sum[r], sink, inverse[r], lse[r]);
  }
};

template <int N>
__device__ __forceinline__ void rescale_rows(float (&out)[N], const float (&rescale)[2]) {
  if (!__any_sync(ALL_LANES, rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
  for (int e = 0; e < N; e++) out[e] *= rescale[e / 2 % 2];
}
