// Behind the gradients: dq from its sum.
#include "../write_fragment.cuh"
#include "gradient_rows.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) backward_sm80_dq(const AttentionParams p) {
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  if (work.tile * BLOCK_M >= s.rows_q) return;
  const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
  const int warp = threadIdx.x / WARP, column = warp % DQ_WARPS_N * DQ_COLUMNS;
  const float scale = static_cast<float>(p.softmax_scale), factor[2] = {scale, scale};
  float dq[DQ_FRAGMENTS][DQ_COLUMNS / 2] = {};
  if (s.len_q > 0) {
    const float* sum = own_sum_at(p, query_tile(p, s, work.head, work.tile, BLOCK_M));
#pragma unroll
    for (int f = 0; f < DQ_FRAGMENTS; f++) read_fragment(dq[f], sum + f * (16 * DQ_COLUMNS));
  }
#pragma unroll
  for (int f = 0; f < DQ_FRAGMENTS; f++) {
    const int row = work.tile * BLOCK_M + (warp / DQ_WARPS_N * DQ_FRAGMENTS + f) * 16 + fragment_row();
    write_fragment(p.dq.at(batch, s.row_q, work.head) + column, p.dq.row_stride, row, s.len_q, s.rows_q,
                   p.head_dim - column, dq[f], factor);
  }
}
