// One attention from its parts over disjoint keys: out = sum of w out_parts with w = exp(lse_part - lse) (Dao et al.
// 2022, section 3.1). One warp computes one row of one head.
#include "sequence.cuh"
#include "softmax.cuh"

constexpr int WARPS = 8, WARP = 32;
constexpr int MOST_COLUMNS = 256 / WARP;  // of a thread

extern "C" __global__ void __launch_bounds__(WARPS* WARP) merge_parts(const AttentionParams p) {
  const Work work = work_of<false>(p, WARPS, p.num_heads_q, false);
  const int row = work.tile * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP, head = work.head;
  if (row >= p.seqlen_q) return;
  const i64 batch = work.sequence.batch, first_part = batch * p.splits;

  const auto lse_of = [&](int part) {
    return part < p.splits ? *p.lse_parts.at(first_part + part, row, head) : -infinity();
  };
  Accum top = -infinity();
  for (int part = lane; part < p.splits; part += WARP) top = larger(top, lse_of(part));
  top = reduce_row<WARP>(top, [](Accum a, Accum b) { return larger(a, b); });
  Accum total = 0, sum[MOST_COLUMNS] = {};
  for (int first = 0; first < p.splits && top != -infinity(); first += WARP) {
    const Accum own = weight(lse_of(first + lane), top);  // each lane's is another part
    total += own;
#pragma unroll 4
    for (int part = 0; part < smaller(p.splits - first, WARP); part++) {
      const Accum of_part = __shfl_sync(0xffffffffu, own, part);
      const Accum* out = p.out_parts.at(first_part + first + part, row, head);
#pragma unroll
      for (int i = 0; i < MOST_COLUMNS; i++) {
        const int column = lane + i * WARP;
        if (column < p.head_dim_v) sum[i] += of_part * out[column];
      }
    }
  }
  total = reduce_row<WARP>(total, [](Accum a, Accum b) { return a + b; });
#pragma unroll
  for (int i = 0; i < MOST_COLUMNS; i++) {
    const int column = lane + i * WARP;
    if (column >= p.head_dim_v) break;
    p.out.at(batch, row, head)[column] = from_accum<Element>(total == 0 ? Accum(0) : sum[i] / total);
  }
  if (lane == 0) *p.lse.at(batch, row, head) = top == -infinity() ? top : top + log_e(total);
}
