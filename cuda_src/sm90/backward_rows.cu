// Before and behind the gradients. Before: lse and delta = rowsum(dout * out) - dlse of every query (FlashAttention-2,
// Algorithm 2, line 4, with the gradient through the returned lse) as backward.cu loads them, and zeros for sums of dq
// whose first part is added, too, and for what is not visited of dbias.
constexpr int FRAGMENT_QUERIES = BLOCK_M;
#include "../gradient_fragment.cuh"
#include "../fragment.cuh"
#include "gradient_rows.cuh"

constexpr int THREADS = 256;
// Lanes of a row, each with vectors of 16 bytes.
constexpr int LANES = HEAD_DIM_V > 128 ? 32 : HEAD_DIM_V > 64 ? 16 : 8;

// Rows [row, row + rows) of dbias beside columns [begin, end), by a thread block; rows are vectors of 16 bytes.
DEVICE void clear_bias(const AttentionParams& p, const Work& work, int row, int rows, int begin, int end) {
  const int skipped = larger(end - begin, 0);
  BiasElement* target = p.dbias.data + work.sequence.batch * p.dbias.batch_stride + work.head * p.dbias.head_stride;
  for (int i = row; i < row + rows; i++) {
    for (int j = threadIdx.x * VECTOR; j < p.seqlen_k - skipped; j += THREADS * VECTOR) {
      auto* vector = target + i * p.dbias.row_stride + (j < begin ? j : j + skipped);
      *reinterpret_cast<uint4*>(vector) = make_uint4(0, 0, 0, 0);
    }
  }
}

DEVICE void clear_sums(const AttentionParams& p, i64 tile) {
  if (!STORES_FIRST && p.dq_sum != nullptr) {
    auto* sum = reinterpret_cast<float4*>(p.dq_sum + tile * DQ_TILE);
#pragma unroll
    for (int i = 0; i < DQ_TILE / 4; i += THREADS) {
      if (i + threadIdx.x < DQ_TILE / 4) sum[i + threadIdx.x] = make_float4(0, 0, 0, 0);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_sm90_rows(const AttentionParams p) {
  ptx::let_next_kernel_begin();
  if (DETERMINISTIC && p.dq_turns != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.dq_turns = 0;
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  if (s.batch < 0 || work.tile * BLOCK_M >= s.rows_q) return;
  const i64 batch = batch_of(p, s), tile = query_tile(p, s, work.head, work.tile, BLOCK_M);

  if (WRITES_DBIAS && p.dbias.data != nullptr) {
    const Blocks seen = blocks_of_keys(p, s, work.head, work.tile, BLOCK_M, BLOCK_N);
    const int row = work.tile * BLOCK_M, end = smaller(seen.end * BLOCK_N, p.seqlen_k);
    clear_bias(p, work, row, smaller(BLOCK_M, s.rows_q - row), smaller(seen.block * BLOCK_N, end), end);
  }

  // All vectors of some rows are read before the first is used, whole: the compiler would branch around structs.
  constexpr int ROWS_AT_ONCE = THREADS / LANES, STEPS = BLOCK_M / ROWS_AT_ONCE,
                HELD = STEPS < 4 || HEAD_DIM > 128 ? 2 : 4;
  const int first = threadIdx.x % LANES * VECTOR, own_row = threadIdx.x / LANES;
  const int left = s.len_q - (work.tile * BLOCK_M + own_row);  // rows from the thread's first on
  const i64 at = s.row_q + work.tile * BLOCK_M + own_row, number = tile * BLOCK_M + own_row;
  const Element *dout = p.dout.at(batch, at, work.head) + first, *out = p.out.at(batch, at, work.head) + first;
  const float* own_lse = p.lse.at(batch, at, work.head);
#pragma unroll
  for (int step = 0; step < STEPS; step += HELD) {
    uint4 douts[HELD], outs[HELD];
    float lse[HELD];
#pragma unroll
    for (int held = 0; held < HELD; held++) {
      const int ahead = (step + held) * ROWS_AT_ONCE;
      lse[held] = ahead < left ? __ldg(own_lse + ahead * p.lse.row_stride) : -infinity();
    }
#pragma unroll
    for (int held = 0; held < HELD; held++) {
      const int ahead = (step + held) * ROWS_AT_ONCE;
      // Head dims and strides are multiples of 16 bytes, as TMA wants them.
      douts[held] = outs[held] = make_uint4(0, 0, 0, 0);
      if (ahead < left && first < p.head_dim_v) {
        douts[held] = __ldg(reinterpret_cast<const uint4*>(dout + ahead * p.dout.row_stride));
        outs[held] = __ldcs(reinterpret_cast<const uint4*>(out + ahead * p.out.row_stride));  // not read again
      }
    }
    if (step == 0) {
      clear_sums(p, tile);
      if (p.dq_turns != nullptr) {
        if (threadIdx.x < DQ_SUMS * DQ_PARTS) *dq_turn_at(p, tile * DQ_SUMS, threadIdx.x) = NO_PART;
        if (DQ_BY_HEADS && work.tile == 0 && threadIdx.x == 0) *warps_done_at(p, tile) = 0;
      }
    }
#pragma unroll
    for (int held = 0; held < HELD; held++) {
      const int ahead = (step + held) * ROWS_AT_ONCE;
      const auto& a = reinterpret_cast<const Vector&>(douts[held]);
      const auto& b = reinterpret_cast<const Vector&>(outs[held]);
      float sum = 0;
#pragma unroll
      for (int e = 0; e < VECTOR; e++) sum += to_accum(a.e[e]) * to_accum(b.e[e]);
#pragma unroll
      for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
      if (threadIdx.x % LANES != 0) continue;
      if (p.dlse.data != nullptr && ahead < left) sum -= *p.dlse.at(batch, at + ahead, work.head);
      if (lse[held] == -infinity()) sum = 0;  // padded rows and rows that saw nothing may hold anything
      p.row_lse[number + ahead] = lse[held] == -infinity() ? infinity() : lse[held] * LSE_BASE;
      p.row_delta[number + ahead] = sum;
      if (p.delta.data != nullptr && ahead < left + s.rows_q - s.len_q) *p.delta.at(batch, at + ahead, work.head) = sum;
    }
  }
}

// Behind: dq from its sum, which has the order of fragments, one warpgroup a part.
extern "C" __global__ void __launch_bounds__(DQ_PARTS* WARPGROUP) backward_sm90_dq(const AttentionParams p) {
  const int part = threadIdx.x / WARPGROUP;
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int first_row = work.tile * BLOCK_M + (DQ_BY_QUERIES ? part * ROWS_OF_WARPGROUP : 0);
  const int column = DQ_BY_QUERIES ? 0 : part * DQ_COLUMNS;
  const i64 number = query_tile(p, s, work.head, work.tile, BLOCK_M);
  // Begins as soon as all has been added to its head; in the last one when the kernel before has ended, so that the
  // next kernel follows both.
  if (DQ_BY_HEADS && p.cu_seqlens_q == nullptr && p.seqlen_k > 0 && blockIdx.x + p.num_tiles < gridDim.x) {
    const int all = ceil_div(p.seqlen_k, DQ_PARTS * ROWS_OF_WARPGROUP) * DQ_PARTS;
    while (threadIdx.x == 0 && ptx::load_acquire(warps_done_at(p, number)) != all) {
    }
    __syncthreads();
  } else {
    ptx::wait_for_kernel_before();
  }
  if (first_row >= s.rows_q) return;
  const i64 batch = batch_of(p, s);

  float4 dq[DQ_COLUMNS / 8];
#pragma unroll
  for (float4& x : dq) x = make_float4(0, 0, 0, 0);
  const i64 first_sum = number * DQ_SUMS;
  // A sum whose first part was to be stored, and that no part came to, is not even zero.
  const auto was_added = [&](int i) {
    return first_row < s.len_q && (!STORES_FIRST || *dq_turn_at(p, first_sum + i, 0) != NO_PART);
  };
  const bool second = DQ_SUMS == 2 && was_added(1);
  const int used = was_added(0) ? s.len_q : 0;  // rows
  if (first_row < s.len_q) {
    const auto* sum = reinterpret_cast<const float4*>(dq_sum_at(p, first_sum, part));
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 8; i++) dq[i] = sum[i * WARP];
  }
  if (second) {
    const auto* sum = reinterpret_cast<const float4*>(dq_sum_at(p, first_sum + 1, part));
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 8; i++) {
      const float4 x = sum[i * WARP];
      dq[i] = make_float4(dq[i].x + x.x, dq[i].y + x.y, dq[i].z + x.z, dq[i].w + x.w);
    }
  }
  float scale = static_cast<float>(p.softmax_scale);
  ptx::keep(scale);  // converted once, not for every element
  Element* target = p.dq.at(batch, s.row_q, work.head) + column;
  const bool vectors =
      (reinterpret_cast<u64>(target) | static_cast<u64>(p.dq.row_stride) * sizeof(Element)) % sizeof(uint4) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + warp_row() + fragment_row() + 8 * r;
#pragma unroll
    for (int group = 0; group < DQ_COLUMNS / 32; group++) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 x = dq[4 * group + i];
        // Chosen, not multiplied: what is not used may be NaN.
        words[i] = row >= used ? 0 : packed(Element(), (r == 0 ? x.x : x.z) * scale, (r == 0 ? x.y : x.w) * scale);
      }
      transpose_quad(words);
      const int first = group * 32 + lane() % 4 * VECTOR;
      if (row >= s.rows_q || column + first >= p.head_dim) continue;  // head dims are multiples of VECTOR
      Element* to = target + row * p.dq.row_stride + first;
      if (vectors) {
        // In one store: the compiler would make four of an assignment.
        __stcs(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
      } else {
#pragma unroll
        for (int e = 0; e < VECTOR; e++) reinterpret_cast<unsigned short*>(to)[e] = words[e / 2] >> (e % 2 * 16);
      }
    }
  }
}
