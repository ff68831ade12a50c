// Behind the gradients: dq from its sum, which has the order of fragments, one warpgroup a part.
#include "../write_fragment.cuh"
#include "gradient_rows.cuh"

extern "C" __global__ void __launch_bounds__(DQ_PARTS* WARPGROUP) backward_sm90_dq(const AttentionParams p) {
  const int part = threadIdx.x / WARPGROUP;
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int first_row = work.tile * BLOCK_M + (DQ_BY_QUERIES ? part * ROWS_OF_WARPGROUP : 0);
  const int column = DQ_BY_QUERIES ? 0 : part * DQ_COLUMNS;
  if (first_row >= s.rows_q) return;
  const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;

  float dq[DQ_COLUMNS / 2];
#pragma unroll
  for (float& x : dq) x = 0;
  if (first_row < s.len_q) {
    const FourFloats* sum = dq_sum_at(p, query_tile(p, s, work.head, work.tile), part);
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 8; i++) {
      const FourFloats four = sum[i * WARP];
#pragma unroll
      for (int e = 0; e < 4; e++) dq[4 * i + e] = four.x[e];
    }
  }
  const float scale = static_cast<float>(p.softmax_scale), factor[2] = {scale, scale};
  write_fragment(p.dq.at(batch, s.row_q, work.head) + column, p.dq.row_stride, first_row + warp_row() + fragment_row(),
                 s.len_q, s.rows_q, p.head_dim - column, dq, factor);
}
