// These kernels run before and behind sm80/backward.cu, for 16-bit inputs. backward_sm80_rows computes delta
// (FlashAttention-2, Dao 2023, Algorithm 2, line 4) and makes the sums of dq and of the slopes' gradient 0;
// backward_sm80_dq converts dq from its float32 sums.
#include "gradient_rows.cuh"

// LANES lanes share a row; a thread reads OWN_ROWS rows at once, so that their reads overlap.
constexpr int LANES = HEAD_DIM_V > 128 ? 32 : HEAD_DIM_V > 64 ? 16 : 8, ROWS_APART = NUM_THREADS / LANES;
constexpr int OWN_ROWS = BLOCK_M / ROWS_APART < 4 ? BLOCK_M / ROWS_APART : 4;
static_assert(BLOCK_M % (OWN_ROWS * ROWS_APART) == 0, "all threads have as many rows");

// read_own() reads a thread's vectors of OWN_ROWS rows, without a test for each where all are inside.
DEVICE void read_own(Vector (&x)[OWN_ROWS], const Rows& rows, int own_row) {
  const int column = threadIdx.x % LANES * VECTOR;
  const Element* from = rows.data + own_row * rows.stride + column;
  const bool whole = own_row + (OWN_ROWS - 1) * ROWS_APART < rows.num_rows && column + VECTOR <= rows.num_columns;
  if (rows.vectors && whole) {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) x[i] = *reinterpret_cast<const Vector*>(from + i * ROWS_APART * rows.stride);
  } else {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) x[i] = rows.read(own_row + i * ROWS_APART, column);
  }
}

// backward_sm80_rows prepares a tile of queries of one head: the grid has a block for each tile of each batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) backward_sm80_rows(const AttentionParams p) {
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int first_row = work.tile * BLOCK_M;
  if (DETERMINISTIC && p.dq_order != nullptr) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.dq_order = 0;
    if (s.batch >= 0 && threadIdx.x < TURNS) {
      p.dq_order[1 + query_tile(p, s, work.head, work.tile, BLOCK_M) * TURNS + threadIdx.x] = 0;
    }
  }
  if constexpr (WRITES_DSLOPES) {
    const i64 sums = p.dslope_rows.head_stride * p.num_heads_q * (p.cu_seqlens_q == nullptr ? p.batch : 1);
    const i64 first = static_cast<i64>(blockIdx.x) * NUM_THREADS + threadIdx.x;
    for (i64 i = first; i < sums; i += static_cast<i64>(gridDim.x) * NUM_THREADS) p.dslope_rows.data[i] = 0;
  }
  if (first_row >= s.rows_q) return;
  const i64 batch = batch_of(p, s);

  const Rows dout(p.dout.at(batch, s.row_q, work.head), p.dout.row_stride, s.len_q, p.head_dim_v);
  const Rows out(p.out.at(batch, s.row_q, work.head), p.out.row_stride, s.len_q, p.head_dim_v);
#pragma unroll 1
  for (int begin = 0; begin < BLOCK_M; begin += OWN_ROWS * ROWS_APART) {
    const int own_row = first_row + begin + threadIdx.x / LANES;
    Vector a[OWN_ROWS], b[OWN_ROWS];
    read_own(a, dout, own_row);
    read_own(b, out, own_row);
    // All is read before anything is written, because for the compiler a write could change what is read.
    bool counts[OWN_ROWS];
    float sum[OWN_ROWS];
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const int row = own_row + i * ROWS_APART;
      counts[i] = row < s.len_q && *p.lse.at(batch, s.row_q + row, work.head) != -infinity();
    }
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const i64 row = s.row_q + own_row + i * ROWS_APART;
      const bool subtracts = p.dlse.data != nullptr && counts[i] && threadIdx.x % LANES == 0;
      sum[i] = subtracts ? -*p.dlse.at(batch, row, work.head) : 0;
    }
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const int row = own_row + i * ROWS_APART;
#pragma unroll
      for (int e = 0; e < VECTOR; e++) sum[i] += to_accum(a[i].e[e]) * to_accum(b[i].e[e]);
#pragma unroll
      for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], lanes);
      if (!counts[i]) sum[i] = 0;
      if (threadIdx.x % LANES == 0 && row < s.rows_q) *p.delta.at(batch, s.row_q + row, work.head) = sum[i];
    }
  }

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
  const i64 batch = batch_of(p, s);
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
