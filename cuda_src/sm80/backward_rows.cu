// Before the gradients: delta = rowsum(dout * out) - dlse of every query (FlashAttention-2, Algorithm 2, line 4, with
// the gradient through the returned lse), and zeros for the sum of dq.
#include "gradient_rows.cuh"

// Lanes of a row, each with a vector of 16 bytes.
constexpr int LANES = HEAD_DIM_V > 128 ? 32 : HEAD_DIM_V > 64 ? 16 : 8;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) backward_sm80_rows(const AttentionParams p) {
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int first_row = work.tile * BLOCK_M;
  if (first_row >= s.rows_q) return;
  const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;

  if (p.dq_sum != nullptr && s.batch >= 0) {
    auto* sum = reinterpret_cast<float4*>(p.dq_sum + query_tile(p, s, work.head, work.tile) * (BLOCK_M * HEAD_DIM));
    for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM / 4; i += NUM_THREADS) sum[i] = make_float4(0, 0, 0, 0);
  }

  const Rows dout(p.dout.at(batch, s.row_q, work.head), p.dout.row_stride, s.len_q, p.head_dim_v);
  const Rows out(p.out.at(batch, s.row_q, work.head), p.out.row_stride, s.len_q, p.head_dim_v);
#pragma unroll 4
  for (int row = first_row + threadIdx.x / LANES; row < first_row + BLOCK_M; row += NUM_THREADS / LANES) {
    // Padded rows and rows that saw nothing may hold anything.
    const i64 at = s.row_q + row;
    const bool counts = row < s.len_q && *p.lse.at(batch, at, work.head) != -infinity();
    const Vector a = dout.read(counts ? row : -1, threadIdx.x % LANES * VECTOR);
    const Vector b = out.read(counts ? row : -1, threadIdx.x % LANES * VECTOR);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < VECTOR; e++) sum += to_accum(a.e[e]) * to_accum(b.e[e]);
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    if (p.dlse.data != nullptr && counts) sum -= *p.dlse.at(batch, at, work.head);
    if (threadIdx.x % LANES == 0 && row < s.rows_q) *p.delta.at(batch, at, work.head) = sum;
  }
}
