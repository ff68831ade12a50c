// This header computes delta of a tile of queries (FlashAttention-2, Dao 2023, Algorithm 2, line 4). The kernel before
// backward.cu calls it, or backward.cu itself where one tile has all keys.
#include "tile.cuh"

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

// write_delta() computes delta of BLOCK_M queries of one head, from first_row on, less the gradient of lse. It is 0
// where a query has no weights. All threads call it.
DEVICE void write_delta(const AttentionParams& p, const Sequence& s, int head, int first_row) {
  const i64 batch = batch_of(p, s);
  const Rows dout(p.dout.at(batch, s.row_q, head), p.dout.row_stride, s.len_q, p.head_dim_v);
  const Rows out(p.out.at(batch, s.row_q, head), p.out.row_stride, s.len_q, p.head_dim_v);
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
      counts[i] = row < s.len_q && *p.lse.at(batch, s.row_q + row, head) != -infinity();
    }
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const i64 row = s.row_q + own_row + i * ROWS_APART;
      const bool subtracts = p.dlse.data != nullptr && counts[i] && threadIdx.x % LANES == 0;
      sum[i] = subtracts ? -*p.dlse.at(batch, row, head) : 0;
    }
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const int row = own_row + i * ROWS_APART;
#pragma unroll
      for (int e = 0; e < VECTOR; e++) sum[i] += to_accum(a[i].e[e]) * to_accum(b[i].e[e]);
#pragma unroll
      for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], lanes);
      if (!counts[i]) sum[i] = 0;
      if (threadIdx.x % LANES == 0 && row < s.rows_q) *p.delta.at(batch, s.row_q + row, head) = sum[i];
    }
  }
}

// clear_delta() makes delta of BLOCK_M queries of one head 0, which see no key, so that nothing is read. All threads
// call it.
DEVICE void clear_delta(const AttentionParams& p, const Sequence& s, int head, int first_row) {
  const int row = first_row + static_cast<int>(threadIdx.x);
  if (threadIdx.x < BLOCK_M && row < s.rows_q) *p.delta.at(batch_of(p, s), s.row_q + row, head) = 0;
}
