// These kernels run before and behind sm80/backward.cu, for 16-bit inputs. backward_sm80_rows computes delta
// (FlashAttention-2, Dao 2023, Algorithm 2, line 4) and makes the sums of dq and of the slopes' gradient 0;
// backward_sm80_dq converts dq from its float32 sums.
#include "delta.cuh"
#include "gradient_rows.cuh"

// backward_sm80_rows prepares a tile of queries of one head: the grid has a block for each tile of each batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) backward_sm80_rows(const AttentionParams p) {
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int first_row = work.tile * BLOCK_M;
  if (DETERMINISTIC && p.dq_order != nullptr) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.dq_order = 0;
    if (s.batch >= 0 && threadIdx.x < ORDER_COUNTERS) {
      p.dq_order[1 + query_tile(p, s, work.head, work.tile, BLOCK_M) * ORDER_COUNTERS + threadIdx.x] = 0;
    }
  }
  if constexpr (WRITES_DSLOPES) {
    const i64 sums = p.dslope_rows.head_stride * p.num_heads_q * (p.cu_seqlens_q == nullptr ? p.batch : 1);
    const i64 first = static_cast<i64>(blockIdx.x) * NUM_THREADS + threadIdx.x;
    for (i64 i = first; i < sums; i += static_cast<i64>(gridDim.x) * NUM_THREADS) p.dslope_rows.data[i] = 0;
  }
  if (first_row >= s.rows_q) return;
  write_delta(p, s, work.head, first_row);

  if (p.dq_sum != nullptr && s.batch >= 0) {
    auto* sum =
        reinterpret_cast<float4*>(p.dq_sum + query_tile(p, s, work.head, work.tile, BLOCK_M) * (BLOCK_M * HEAD_DIM));
    for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM / 4; i += NUM_THREADS) sum[i] = make_float4(0, 0, 0, 0);
  }
}

// backward_sm80_dq converts a tile of dq: the grid has a block for each tile of each batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) backward_sm80_dq(const AttentionParams p) {
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  if (work.tile * BLOCK_M >= s.rows_q) return;
  float dq[DQ_FRAGMENTS][DQ_COLUMNS / 2] = {};
  if (s.len_q > 0) {
    const float* sum = own_sum_at(p, query_tile(p, s, work.head, work.tile, BLOCK_M));
#pragma unroll
    for (int f = 0; f < DQ_FRAGMENTS; f++) read_fragment(dq[f], sum + f * (16 * DQ_COLUMNS));
  }
  write_dq(p, s, work.head, work.tile, dq);
}
