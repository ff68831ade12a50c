// sum_splits adds up the float32 shares of dk and dv that splits of the queries wrote, in order, so that results repeat
// their bits, and rounds the sums once. One launch serves both gradients. The host writes `Target` in front of this
// text. The kernel begins while the one before it ends (programmatic dependent launch).
#include "../offset_of.cuh"
#include "../ptx/sm90.cuh"
#include "four.cuh"

// SplitSum is one gradient.
struct SplitSum {
  const float4* shares;  // (splits, rows, columns), contiguous; the extents' first three axes are the rows
  Target* target;        // (batch, seqlen_k, num_heads_kv, columns), any strides, or null
  Four extents, strides;
};

struct SplitSumParams {
#include "SplitSumParams.members"
};

#include "SplitSumParams.layout"

// sum() computes four neighbouring columns of a row, if the gradient has them.
DEVICE void sum(const SplitSum& of, i64 index, int splits) {
  const i64 columns = of.extents.n[3], vectors = columns / 4;
  const RowPlace place(index / vectors, of.extents, of.strides, of.strides);
  if (!place.exists) return;
  const i64 all = of.extents.n[0] * of.extents.n[1] * of.extents.n[2] * vectors;
  float4 x = of.shares[index];
#pragma unroll 4
  for (int split = 1; split < splits; split++) {
    const float4 share = of.shares[split * all + index];
    x.x += share.x;
    x.y += share.y;
    x.z += share.z;
    x.w += share.w;
  }
  Target* target = of.target + place.first + index % vectors * 4 * of.strides.n[3];
  target[0] = static_cast<Target>(x.x);
  target[of.strides.n[3]] = static_cast<Target>(x.y);
  target[2 * of.strides.n[3]] = static_cast<Target>(x.z);
  target[3 * of.strides.n[3]] = static_cast<Target>(x.w);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_splits(const SplitSumParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  ptx::wait_for_kernel_before();
  if (p.dk.target != nullptr) sum(p.dk, index, p.splits);
  if (p.dv.target != nullptr) sum(p.dv, index, p.splits);
}
