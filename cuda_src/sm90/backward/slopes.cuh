// This header sums the gradient of ALiBi's slopes in Hopper's backward kernels. Each computing warp has sums of its own
// in params.dslope_rows, one for each query head and tile of keys: (batch, num_heads_q, tiles of a pair, splits of the
// queries, thread blocks of the pair, warps). rows.cu makes them 0, around/reduce.cu adds them up in the end.
#include "../../fragment/gradient_fragment.cuh"
#include "../../fragment/slope_sum.cuh"
#include "rows.cuh"
#include "schedule.cuh"

constexpr int WARPS_OF_WARPGROUP = WARPGROUP / WARP;
// WARPS_WITH_SLOPES are the warps of a thread block that have gradients of scores.
constexpr int WARPS_WITH_SLOPES = (PING_PONG ? CONSUMERS : 1) * WARPS_OF_WARPGROUP;

// SlopePlace tells the warps of a tile of queries where their sums are.
template <bool WRITES>
struct SlopePlaceIf {
  DEVICE void put(const AttentionParams&, const KeyWork&, int, int) {}
  DEVICE void add(const AttentionParams&, int, float) const {}
};
template <>
struct SlopePlaceIf<true> {
  float* slope_sums;  // that of the thread block's first warp

  DEVICE void put(const AttentionParams& p, const KeyWork& work, int splits, int head) {
    const int place = (key_tile(p, work.sequence, work.tile / PAIR, PAIR * BLOCK_N) * splits + work.split) * PAIR;
    slope_sums = p.dslope_rows.at(batch_of(p, work.sequence), (place + rank()) * WARPS_WITH_SLOPES, head);
  }
  // add() adds the terms of a warp's threads.
  DEVICE void add(const AttentionParams& p, int warpgroup, float terms) const {
    const int warp = warpgroup * WARPS_OF_WARPGROUP + threadIdx.x % WARPGROUP / WARP;
    add_to_slope(slope_sums + warp, terms, -ds_unit(p));
  }
};
using SlopePlace = SlopePlaceIf<WRITES_DSLOPES>;

// slope_terms() is what a thread's gradients of scores add, before softcap's derivative; add() turns its sign.
DEVICE float slope_terms(const GradientFragment& scores, const float (&ds)[FRAGMENT]) {
  if constexpr (WRITES_DSLOPES) return SlopeSum(scores.p, scores.s, scores.row, scores.key).of(ds);
  return 0;
}
