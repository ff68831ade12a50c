// These small kernels stand around the passes over tiles: they compute delta before the backward pass, and the
// gradients of sink, slopes and bias behind it. Every sum has a fixed order, so results repeat their bits. They serve
// all families and every GPU.
#include "../fragment/softmax.cuh"

constexpr int WARPS = THREADS / WARP;  // rows that a thread block computes, where each warp has a row of one head

// sum_of_block() adds x over the thread block; the sum is complete in thread 0. It is in float64, so that the sum of a
// long column loses nothing.
DEVICE double sum_of_block(double x) {
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = x;
  __syncthreads();
  for (int step = THREADS / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
    __syncthreads();
  }
  return sums[0];
}

// SequenceRows are the packed rows that belong to sequences; rows outside every sequence may hold anything.
struct SequenceRows {
  i64 begin, end;

  DEVICE explicit SequenceRows(const AttentionParams& p) : begin(0), end(p.seqlen_q) {
    if (p.cu_seqlens_q == nullptr) return;
    begin = clamped(p.cu_seqlens_q[0], p.seqlen_q);
    end = clamped(p.cu_seqlens_q[p.batch], p.seqlen_q);
  }
};

// reduce_sink computes dsink = -sum of the sink's weight times delta, over all rows. One block computes one head.
extern "C" __global__ void __launch_bounds__(THREADS) reduce_sink(const AttentionParams p) {
  const int head = blockIdx.x;
  const Accum sink = p.sink[head];
  const SequenceRows own(p);
  const i64 batches = p.cu_seqlens_q == nullptr ? p.batch : 1, rows = own.end - own.begin;
  double sum = 0;
  for (i64 index = threadIdx.x; index < batches * rows; index += THREADS) {
    const i64 batch = index / rows, row = own.begin + index % rows;
    const Accum lse = *p.lse.at(batch, row, head);
    // Padded rows may hold anything; their delta is 0.
    const Accum delta = *p.delta.at(batch, row, head);
    if (delta != 0) sum -= static_cast<double>(weight(sink, lse)) * static_cast<double>(delta);
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) p.dsink[head] = static_cast<Accum>(sum);
}

// reduce_slopes sums the gradient of the slopes over its rows or, with SLOPE_KEYS, over tiles of so many keys, which
// have p.splits sums each. One block computes one (slope batch, head).
extern "C" __global__ void __launch_bounds__(THREADS) reduce_slopes(const AttentionParams p) {
  const int head = blockIdx.x % p.num_heads_q, batch = blockIdx.x / p.num_heads_q;
  // The gradient's stride tells, because slopes whose own stride is 0 may have one gradient for each sequence.
  const bool shared_slopes = p.dalibi_batch_stride == 0;
  const SequenceRows all(p);
  i64 begin = SLOPE_KEYS > 0 ? 0 : all.begin, end = SLOPE_KEYS > 0 ? p.dslope_rows.head_stride : all.end,
      first_batch = shared_slopes ? 0 : batch, batches = shared_slopes ? p.batch : 1;
  if (p.cu_seqlens_q != nullptr) {
    first_batch = 0;
    batches = 1;
    if (!shared_slopes) {
      const Sequence s = sequence_of(p, batch);
      if constexpr (SLOPE_KEYS > 0) {
        constexpr int KEYS = SLOPE_KEYS > 0 ? SLOPE_KEYS : 1;  // compilers warn of divisions by 0 that never run
        begin = (s.row_k / KEYS + batch + 1) * p.splits;       // as in packed_work
        end = begin + static_cast<i64>(ceil_div(s.rows_k, KEYS)) * p.splits;
      } else {
        begin = s.row_q;
        end = s.row_q + s.rows_q;
      }
    }
  }
  const i64 rows = end - begin;
  double sum = 0;
  for (i64 index = threadIdx.x; index < batches * rows; index += THREADS) {
    sum += static_cast<double>(*p.dslope_rows.at(first_batch + index / rows, begin + index % rows, head));
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) p.dalibi_slopes[batch * p.dalibi_batch_stride + head] = static_cast<Accum>(sum);
}

// reduce_bias adds up the partial dbias of all splits, in order. One thread computes one element.
extern "C" __global__ void __launch_bounds__(THREADS) reduce_bias(const AttentionParams p) {
  const i64 size = static_cast<i64>(p.dbias_batches) * p.dbias_heads * p.dbias_rows * p.dbias_columns;
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= size) return;
  Accum sum = 0;
  for (int split = 0; split < p.splits; split++) sum += p.dbias_splits[split * size + index];
  i64 rest = index;
  const i64 column = rest % p.dbias_columns;
  rest /= p.dbias_columns;
  const i64 row = rest % p.dbias_rows;
  rest /= p.dbias_rows;
  p.dbias.data[rest / p.dbias_heads * p.dbias.batch_stride + rest % p.dbias_heads * p.dbias.head_stride +
               row * p.dbias.row_stride + column * p.dbias.column_stride] = from_accum<BiasElement>(sum);
}

// delta computes delta = rowsum(dout * out) - dlse: FlashAttention-2 (Dao 2023), Algorithm 2, line 4. One warp computes
// one row.
extern "C" __global__ void __launch_bounds__(THREADS) delta(const AttentionParams p) {
  const Work work = work_of<false>(p, WARPS, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int row = work.tile * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP, head = work.head;
  if (row >= s.rows_q) return;
  const i64 batch = batch_of(p, s);
  const i64 at = s.row_q + row;

  // Padded rows and rows that saw nothing may hold anything; their delta is 0.
  Accum sum = 0;
  if (row < s.len_q && *p.lse.at(batch, at, head) != -infinity()) {
    const Element* dout = p.dout.at(batch, at, head);
    const Element* out = p.out.at(batch, at, head);
    for (int column = lane; column < p.head_dim_v; column += WARP)
      sum += to_accum(dout[column]) * to_accum(out[column]);
    sum = sum_of_row<WARP>(sum);
    if (p.dlse.data != nullptr) sum -= *p.dlse.at(batch, at, head);
  }
  if (lane == 0) *p.delta.at(batch, at, head) = sum;
}
