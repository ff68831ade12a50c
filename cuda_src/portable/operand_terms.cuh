// This header sums the gradients of operands by float additions in any order. TermSums first adds up the consecutive
// terms of one element in a register, because all threads would wait for one address where an operand has one element
// for each head. The header is `terms` of backward_operands.cuh.
#include "gradient_tile.cuh"

struct TermSums {
  static constexpr int NUM = UserRule::NUM_TERMS > 0 ? UserRule::NUM_TERMS : 1;
  Accum* sums;
  i64 place[NUM];
  Accum sum[NUM];

  DEVICE explicit TermSums(const AttentionParams& p) : sums(p.operand_sums) {
#pragma unroll
    for (int n = 0; n < NUM; n++) {
      place[n] = -1;
      sum[n] = 0;
    }
  }

  DEVICE void add(int n, i64 at, Accum term) {
    if (at != place[n]) {
      if (sum[n] != 0) atomicAdd(sums + place[n], sum[n]);
      place[n] = at;
      sum[n] = 0;
    }
    sum[n] += term;
  }

  // finish() adds the sums that are left in registers; a warp whose threads all have one element adds once.
  DEVICE void finish() {
#pragma unroll
    for (int n = 0; n < NUM; n++) {
      if (__all_sync(ALL_LANES, place[n] == __shfl_sync(ALL_LANES, place[n], 0))) {
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) sum[n] += __shfl_xor_sync(ALL_LANES, sum[n], step);
        if (threadIdx.x % WARP != 0) sum[n] = 0;
      }
      if (place[n] >= 0 && sum[n] != 0) atomicAdd(sums + place[n], sum[n]);
    }
  }
};
