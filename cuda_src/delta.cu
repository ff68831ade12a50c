// delta = rowsum(dout * out) - dlse: what the gradient kernels subtract in every row (FlashAttention-2, Algorithm 2,
// line 4, with the gradient through the returned lse). One warp computes one row of one head.
#include "sequence.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32) delta(const AttentionParams p) {
  const Work work = work_of<false>(p, WARPS, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int row = work.tile * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, head = work.head;
  if (row >= s.rows_q) return;
  const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
  const i64 at = s.row_q + row;

  // Padded rows and rows that saw nothing may hold anything.
  Accum sum = 0;
  if (row < s.len_q && *p.lse.at(batch, at, head) != -infinity()) {
    const Element* dout = p.dout.at(batch, at, head);
    const Element* out = p.out.at(batch, at, head);
    for (int column = lane; column < p.head_dim_v; column += 32) sum += to_accum(dout[column]) * to_accum(out[column]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (p.dlse.data != nullptr) sum -= *p.dlse.at(batch, at, head);
  }
  if (lane == 0) *p.delta.at(batch, at, head) = sum;
}
