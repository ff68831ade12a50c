// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and dropout's keep decision.
#pragma once
#include "sequence.cuh"

__device__ __forceinline__ uint4 philox(uint4 counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u32 high_x = __umulhi(0xD2511F53u, counter.x), low_x = 0xD2511F53u * counter.x;
    const u32 high_z = __umulhi(0xCD9E8D57u, counter.z), low_z = 0xCD9E8D57u * counter.z;
    counter = make_uint4(high_z ^ counter.y ^ key_low, low_z, high_x ^ counter.w ^ key_high, low_x);
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// Keep decisions of the four elements {i, i ^ 8} x {j, j ^ 8}, which share one call.
struct Dropout {
  u32 key_low, key_high, threshold, head, batch;

  __device__ __forceinline__ Dropout(const AttentionParams& p, const Sequence& s, int head)
      : head(head), batch(s.batch) {
    const u64 key = p.dropout_seed == nullptr ? p.dropout_key : *p.dropout_seed;
    key_low = static_cast<u32>(key);
    key_high = static_cast<u32>(key >> 32);
    threshold = p.dropout_threshold;
  }

  // i and j have bit 3 clear. Word 2 * bit3(i) + bit3(j) keeps that element if it reaches the threshold.
  __device__ __forceinline__ uint4 words(int i, int j) const {
    return philox(make_uint4(i, j, head, batch), key_low, key_high);
  }

  // The same as bits.
  __device__ __forceinline__ u32 keep(int i, int j) const {
    const uint4 w = words(i, j);
    return (w.x >= threshold ? 1u : 0u) | (w.y >= threshold ? 2u : 0u) | (w.z >= threshold ? 4u : 0u) |
           (w.w >= threshold ? 8u : 0u);
  }
};
