// This header has the sums in which sm80/backward.cu adds up dq: a float32 sum for each tile of BLOCK_M queries, in the
// order of the fragments that are added to it, and the order of additions where results must repeat their bits.
// backward_rows.cu clears the sums and converts them in the end.
#include "../ptx/sm90.cuh"
#include "tile.cuh"

// A warp has DQ_FRAGMENTS * 16 queries of dq and some of its columns.
constexpr int DQ_WARPS_M = BLOCK_M / (DQ_FRAGMENTS * 16), DQ_WARPS_N = NUM_WARPS / DQ_WARPS_M;
constexpr int DQ_COLUMNS = HEAD_DIM / DQ_WARPS_N;
static_assert(DQ_WARPS_M * DQ_WARPS_N == NUM_WARPS && DQ_COLUMNS % 32 == 0, "how dq is divided");

// OWN_SUM is a warp's part of a tile's sum, fragment by fragment: its lanes' numbers lie side by side, in the width of
// the additions.
constexpr int OWN_SUM = DQ_FRAGMENTS * 16 * DQ_COLUMNS;
constexpr int ADDED = VECTOR_ADDS ? 4 : 1;
DEVICE constexpr int sum_offset(int e) { return e / ADDED * ADDED * WARP + e % ADDED; }
DEVICE float* own_sum_at(const AttentionParams& p, i64 tile) {
  return p.dq_sum + (tile * NUM_WARPS + threadIdx.x / WARP) * OWN_SUM;
}

// write_dq() writes a warp's part of a tile of dq, nothing where dq is not wanted.
DEVICE void write_dq(const AttentionParams& p, const Sequence& s, int head, int block,
                     const float (&dq)[DQ_FRAGMENTS][DQ_COLUMNS / 2]) {
  if (p.dq.data == nullptr) return;
  const int warp = threadIdx.x / WARP, column = warp % DQ_WARPS_N * DQ_COLUMNS;
  const float scale = static_cast<float>(p.softmax_scale), factor[2] = {scale, scale};
#pragma unroll
  for (int f = 0; f < DQ_FRAGMENTS; f++) {
    const int row = block * BLOCK_M + (warp / DQ_WARPS_N * DQ_FRAGMENTS + f) * 16 + fragment_row();
    write_fragment(p.dq.at(batch_of(p, s), s.row_q, head) + column, p.dq.row_stride, row, s.len_q, s.rows_q,
                   p.head_dim - column, dq[f], factor);
  }
}

// zero_dq() makes a tile of dq zeros, nothing where dq is not wanted. All threads call it.
DEVICE void zero_dq(const AttentionParams& p, const Sequence& s, int head, int block) {
  if (p.dq.data == nullptr) return;
  constexpr int VECTORS = HEAD_DIM / VECTOR;
  const i64 stride = p.dq.row_stride;
  const int rows = smaller(s.rows_q - block * BLOCK_M, BLOCK_M), columns = static_cast<int>(p.head_dim);
  Element* first = p.dq.at(batch_of(p, s), s.row_q + block * BLOCK_M, head);
  const bool vectors = (reinterpret_cast<u64>(first) | static_cast<u64>(stride) * sizeof(Element)) % ALIGNMENT == 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < rows * VECTORS; i += NUM_THREADS) {
    const int column = i % VECTORS * VECTOR;
    Element* at = first + i / VECTORS * stride + column;
    if (vectors && column + VECTOR <= columns) {
      *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll 1
      for (int e = 0; e < smaller(columns - column, VECTOR); e++) at[e] = from_accum<Element>(0);
    }
  }
}

// read_fragment() reads a thread's share of a fragment of the sum; add_fragment() adds to it.
DEVICE void read_fragment(float (&x)[DQ_COLUMNS / 2], const float* sum) {
  sum += lane() * ADDED;
#pragma unroll
  for (int e = 0; e < DQ_COLUMNS / 2; e += ADDED) {
    if constexpr (VECTOR_ADDS) {
      const float4 four = *reinterpret_cast<const float4*>(sum + sum_offset(e));
      x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
    } else {
      x[e] = sum[sum_offset(e)];
    }
  }
}

DEVICE void add_fragment(float* sum, const float (&x)[DQ_COLUMNS / 2]) {
  sum += lane() * ADDED;
#pragma unroll
  for (int e = 0; e < DQ_COLUMNS / 2; e += ADDED) {
    if constexpr (VECTOR_ADDS) {
      ptx::add_f32_x4(sum + sum_offset(e), x[e], x[e + 1], x[e + 2], x[e + 3]);
    } else {
      atomicAdd(sum + sum_offset(e), x[e]);
    }
  }
}

// add_in_bulk() adds all fragments of a warp by TMA while the warp goes on. Half of them wait in shared memory at
// `first`, half at `second`.
DEVICE void add_in_bulk(float* sum, float* first, float* second, const float (&x)[DQ_FRAGMENTS][DQ_COLUMNS / 2]) {
  constexpr int GROUPS = DQ_COLUMNS / 8, HALF = OWN_SUM / 2;
  first += threadIdx.x / WARP * HALF;
  second += threadIdx.x / WARP * HALF;
  if (lane() == 0) ptx::bulk_wait_group_read<0>();  // TMA has read what waited there before
  __syncwarp();
#pragma unroll
  for (int i = 0; i < DQ_FRAGMENTS * GROUPS; i++) {
    const int at = i * 4 * WARP, e = i % GROUPS * 4;
    const float (&own)[DQ_COLUMNS / 2] = x[i / GROUPS];
    *reinterpret_cast<float4*>((at < HALF ? first : second) + at % HALF + lane() * 4) =
        make_float4(own[e], own[e + 1], own[e + 2], own[e + 3]);
  }
  ptx::fence_async_shared();
  __syncwarp();
  if (lane() == 0) {
    ptx::bulk_reduce_add_f32(sum, ptx::shared_address(first), HALF * sizeof(float));
    ptx::bulk_reduce_add_f32(sum + HALF, ptx::shared_address(second), HALF * sizeof(float));
    ptx::bulk_commit_group();
  }
}

// dq_order_at() counts additions where they have an order, which is that of the keys: a warp adds its part of a tile
// when all before it are there. The first word counts how many blocks have begun.
static_assert(NUM_WARPS <= ORDER_COUNTERS, "each warp has a counter");
DEVICE int* dq_order_at(const AttentionParams& p, i64 tile) {
  return p.dq_order + 1 + tile * ORDER_COUNTERS + threadIdx.x / WARP;
}
// additions_done() asks how many additions are there. It is called early, because an answer takes long.
DEVICE int additions_done(const int* counter) { return ptx::load_volatile(counter); }
// wait_for_earlier_additions() waits until it is this addition's place in the order. No fence is needed: L2 adds, one
// behind the other, whatever was read or written otherwise.
DEVICE void wait_for_earlier_additions(int*& own, int* counter, int known, int before) {
  if (lane() == 0) {
    own = counter;
    while (known != before) known = additions_done(counter);
  }
  __syncwarp();
}
// signal_addition() passes the order on. It is called a step later, when the addition has arrived.
DEVICE void signal_addition(int* own) {
  __syncwarp();
  if (lane() != 0 || own == nullptr) return;
  if constexpr (BULK_ADDS) {
    ptx::bulk_wait_group<0>();
  } else {
    __threadfence();
  }
  atomicAdd(own, 1);
}
