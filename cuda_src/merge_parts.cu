// One attention from its parts over disjoint keys: out = sum of w out_parts with w = exp(lse_part - lse) (Dao et al.
// 2022, section 3.1). One warp computes one row of one head.
#include "sequence.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32) merge_parts(const AttentionParams p) {
  const Work work = work_of<false>(p, WARPS, p.num_heads_q, false);
  const int row = work.tile * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, head = work.head;
  if (row >= p.seqlen_q) return;
  const i64 batch = work.sequence.batch, first_part = batch * p.splits;

  Accum top = -infinity();
  for (int part = 0; part < p.splits; part++) top = larger(top, *p.lse_parts.at(first_part + part, row, head));
  Accum total = 0;
  for (int part = 0; part < p.splits && top != -infinity(); part++) {
    total += exp_2((*p.lse_parts.at(first_part + part, row, head) - top) * LOG2_E);
  }
  for (int column = lane; column < p.head_dim_v; column += 32) {
    Accum sum = 0;
    for (int part = 0; part < p.splits && top != -infinity(); part++) {
      const Accum weight = exp_2((*p.lse_parts.at(first_part + part, row, head) - top) * LOG2_E);
      sum += weight * p.out_parts.at(first_part + part, row, head)[column];
    }
    p.out.at(batch, row, head)[column] = from_accum<Element>(total == 0 ? Accum(0) : sum / total);
  }
  if (lane == 0) *p.lse.at(batch, row, head) = top == -infinity() ? top : top + log_e(total);
}
