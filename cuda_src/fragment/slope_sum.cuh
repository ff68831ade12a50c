// This header sums the gradient of ALiBi's slope (Press et al. 2022) over a fragment whose rows are keys: the slope's
// gradient is -sum of dS * distance over all scores, and dS is there in registers. A warp adds to a sum in memory that
// no other warp adds to, so that the order of additions is that of its steps and results repeat their bits.
#include "fragment.cuh"

// SlopeSum has the distances of a thread's elements from the diagonal: those of queries are columns.
struct SlopeSum {
  float distance;  // the distance of element 0; it is positive where the key lies before the diagonal
  bool causal;     // no query sees a key behind its diagonal

  DEVICE SlopeSum(const AttentionParams& p, const Sequence& s, int row, int key)
      : distance(static_cast<float>(row + s.diagonal() - key)), causal(HAS_WINDOW && p.window_right <= 0) {}

  // of() is the sum of ds * distance over the elements. Hidden elements have ds = 0, so distances need no absolute
  // values where all of them have one sign, or those that have another are hidden.
  template <int N>
  DEVICE float of(const float (&ds)[N]) const {
    constexpr float FIRST = -8, LAST = N * 2 - 7;  // offsets of the smallest and of the largest distance
    if (causal || distance + FIRST >= 0) return sum<false>(ds);
    if (distance + LAST <= 0) return -sum<false>(ds);
    return sum<true>(ds);
  }

 private:
  // sum() adds elements on one diagonal of the fragment, whose distances are equal, before it multiplies.
  template <bool ABSOLUTE, int N>
  DEVICE float sum(const float (&ds)[N]) const {
    float sums[2] = {};
#pragma unroll
    for (int group = -1; group < N / 4; group++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float own = group < 0 ? ds[2 + i] : ds[4 * group + i];
        if (group >= 0 && group + 1 < N / 4) own += ds[4 * group + 6 + i];
        const float at = distance + static_cast<float>(8 * group + i);
        sums[i] += own * (ABSOLUTE ? fabsf(at) : at);
      }
    }
    return sums[0] + sums[1];
  }
};

// key_tile() numbers the tiles of keys of a head; packed, the number counts slots (packed_work).
DEVICE int key_tile(const AttentionParams& p, const Sequence& s, int tile, int block) {
  return p.cu_seqlens_k == nullptr ? tile : static_cast<int>(s.row_k) / block + s.batch + 1 + tile;
}

// add_to_slope() adds a warp's terms to its sum, times `factor`.
DEVICE void add_to_slope(float* sum, float terms, float factor) {
#pragma unroll
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) terms += __shfl_xor_sync(ALL_LANES, terms, lanes);
  if (lane() == 0) atomicAdd(sum, terms * factor);
}
