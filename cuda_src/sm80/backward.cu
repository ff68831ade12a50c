// Gradients by mma.sync: FlashAttention-2 (Dao 2023), Algorithm 2. A thread block has BLOCK_N keys and walks the
// queries that see them. A warp computes transposed scores of its FRAGMENTS * 16 keys, so that weights and their
// gradients stay in registers as left factors of dv and dk; dq takes the gradients of all warps through shared memory,
// and is added up in global memory. Without dk (and dq) or dv the other has all registers.
#include "../gradient_fragment.cuh"
#include "../query_walk.cuh"
#include "../write_fragment.cuh"
#include "gradient_rows.cuh"

constexpr int FRAGMENTS = BLOCK_N / (NUM_WARPS * 16);
constexpr int DK_COLUMNS = COMPUTES_DK ? HEAD_DIM : 32,
              DV_COLUMNS = COMPUTES_DV ? HEAD_DIM_V : 32;  // arrays have a size
using KeyTile = Tile<BLOCK_N, HEAD_DIM>;
using ValueTile = Tile<BLOCK_N, HEAD_DIM_V>;
using QueryTile = Tile<BLOCK_M, HEAD_DIM>;
using DoutTile = Tile<BLOCK_M, HEAD_DIM_V>;
using ScoreTile = Tile<BLOCK_N, BLOCK_M>;

struct SharedStorage {
  alignas(128) unsigned char k[KeyTile::BYTES];
  alignas(128) unsigned char v[COMPUTES_DK ? ValueTile::BYTES : 16];
  alignas(128) unsigned char q[STAGES * QueryTile::BYTES];
  alignas(128) unsigned char dout[STAGES * DoutTile::BYTES];
  alignas(128) unsigned char ds[COMPUTES_DK ? ScoreTile::BYTES : 16];
  float lse[STAGES][BLOCK_M], delta[STAGES][BLOCK_M];
  Work work;  // read again where needed: registers are scarce
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the plan's shared memory holds the tiles");
static_assert(BLOCK_N == FRAGMENTS * NUM_WARPS * 16, "whole fragments");
static_assert(BLOCK_M <= NUM_THREADS, "a thread has a query's lse and delta");

__device__ __forceinline__ i64 batch_of(const AttentionParams& p, const Sequence& s) {
  return p.cu_seqlens_q == nullptr ? s.batch : 0;
}

// Starts to load a tile of queries and what belongs to it.
__device__ __forceinline__ void load_queries(const AttentionParams& p, SharedStorage& shared, u32 stage, int head,
                                             int first_row) {
  const Sequence& s = shared.work.sequence;
  const i64 batch = batch_of(p, s);
  QueryTile{ptx::shared_address(shared.q) + stage * QueryTile::BYTES}.load(
      Rows(p.q.at(batch, s.row_q, head), p.q.row_stride, s.len_q, p.head_dim), first_row);
  DoutTile{ptx::shared_address(shared.dout) + stage * DoutTile::BYTES}.load(
      Rows(p.dout.at(batch, s.row_q, head), p.dout.row_stride, s.len_q, p.head_dim_v), first_row);
  if (threadIdx.x < BLOCK_M) {
    const i64 row = s.row_q + smaller(first_row + threadIdx.x, s.len_q - 1);
    copy_float(&shared.lse[stage][threadIdx.x], p.lse.at(batch, row, head));
    copy_float(&shared.delta[stage][threadIdx.x], p.delta.at(batch, row, head));
  }
}

// Waits for such a tile. A thread turns the lse that it has copied into what weights are computed with: inf where a
// query sees nothing, and has none.
__device__ __forceinline__ void finish_queries(SharedStorage& shared, u32 stage, int first_row) {
  wait_for_copies();
  if (threadIdx.x < BLOCK_M) {
    float& lse = shared.lse[stage][threadIdx.x];
    const bool sees = first_row + static_cast<int>(threadIdx.x) < shared.work.sequence.len_q && lse != -infinity();
    lse = sees ? lse * LSE_BASE : infinity();
  }
  __syncthreads();
}

// A key that no query sees may hold NaN, and 0 * NaN would count in dq: its row becomes 0. Where keys are hidden one by
// one that takes a look at every query, so only keys that are not finite are looked after.
__device__ __forceinline__ void clear_hidden_keys(const AttentionParams& p, const SharedStorage& shared,
                                                  const KeyTile& keys) {
  const Sequence& s = shared.work.sequence;
  const int group = p.num_heads_q / p.num_heads_kv, j = shared.work.tile * BLOCK_N + threadIdx.x;
  if (threadIdx.x >= BLOCK_N || keys.is_finite(threadIdx.x)) return;
  for (int head = shared.work.head * group; head < (shared.work.head + 1) * group; head++) {
    const Mask mask(p, s, head);
    const Score score(p, s, head);
    for (int i = 0; i < s.len_q; i++) {
      if (mask.visible(i, j) && score.value(0, i, j) != -infinity()) return;
    }
  }
  keys.clear_row(threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    backward_sm80(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) shared.work = work_of<true>(p, BLOCK_N, p.num_heads_kv, false);
  __syncthreads();
  const Sequence& s = shared.work.sequence;
  const int tile_key = shared.work.tile * BLOCK_N;
  if (tile_key >= s.rows_k) return;

  const int warp = threadIdx.x / WARP, warp_key = warp * FRAGMENTS * 16;
  const KeyTile keys{ptx::shared_address(shared.k)}, own_keys = keys.from_row(warp_key);
  const ValueTile values{ptx::shared_address(shared.v)}, own_values = values.from_row(warp_key);
  const ScoreTile gradients{ptx::shared_address(shared.ds)};
  float dk[COMPUTES_DK ? FRAGMENTS : 1][DK_COLUMNS / 2], dv[COMPUTES_DV ? FRAGMENTS : 1][DV_COLUMNS / 2];
#pragma unroll
  for (auto& x : dk) clear(x);
#pragma unroll
  for (auto& x : dv) clear(x);

  QueryWalk walk(p, shared.work);
  if (!walk.done()) {
    const i64 batch = batch_of(p, s);
    const int first_seen = Mask(p, s, walk.head).columns(0).begin;  // keys before it are hidden from all
    keys.load(Rows(p.k.at(batch, s.row_k, shared.work.head), p.k.row_stride, s.len_k, p.head_dim), tile_key,
              first_seen);
    if constexpr (COMPUTES_DK) {
      values.load(Rows(p.v.at(batch, s.row_k, shared.work.head), p.v.row_stride, s.len_k, p.head_dim_v), tile_key,
                  first_seen);
    }
    load_queries(p, shared, 0, walk.head, walk.first_row());
    commit_copies();
    if constexpr (HIDES_ANYWHERE && COMPUTES_DK) {
      finish_copies();
      clear_hidden_keys(p, shared, keys);
    }
  }
  for (u32 stage = 0; !walk.done(); stage ^= STAGES - 1) {
    const int head = walk.head, first_row = walk.first_row(), tile = walk.blocks.block;
    const bool masked = HAS_MASK || HAS_BIAS || walk.blocks.partial ||
                        !Mask(p, s, head).columns_inside(first_row, BLOCK_M, tile_key + warp_key, FRAGMENTS * 16);
    const QueryTile queries{ptx::shared_address(shared.q) + stage * QueryTile::BYTES};
    const DoutTile douts{ptx::shared_address(shared.dout) + stage * DoutTile::BYTES};
    finish_queries(shared, stage, first_row);
    walk.advance();
    if constexpr (STAGES == 2) {
      if (!walk.done()) load_queries(p, shared, stage ^ 1, walk.head, walk.first_row());
      commit_copies();
    }

    float x[FRAGMENTS][FRAGMENT];
    u32 weights[FRAGMENTS][FRAGMENT / 2];
#pragma unroll
    for (auto& fragment : x) clear(fragment);
    multiply_rows(x, own_keys, queries);
    if constexpr (COMPUTES_DK) {
      float dp[FRAGMENTS][FRAGMENT];
#pragma unroll
      for (auto& fragment : dp) clear(fragment);
      multiply_rows(dp, own_values, douts);
      u32 ds[FRAGMENTS][FRAGMENT / 2];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        const GradientFragment scores(p, s, head, first_row, tile_key + warp_key + 16 * f);
        const KeptWeights kept = scores.kept();
        SoftcapFragment softcap;
        softcap.take(scores.score(), x[f]);
        scores.weigh(x[f], QueryValuesInPlace{shared.lse[stage]}, masked);
        const float* delta = shared.delta[stage] + fragment_column();
#pragma unroll
        for (int e = 0; e < FRAGMENT; e++) {
          dp[f][e] = score_gradient(p, dp[f][e], marked(x[f], kept, e), delta[column_offset(e)]);
          if (masked) clear_hidden(dp[f][e], x[f][e]);
        }
        softcap.apply(dp[f]);
        if constexpr (COMPUTES_DV) pack_kept(weights[f], x[f], kept);
        pack(ds[f], dp[f]);
        gradients.from_row(warp_key + 16 * f).store_fragment(ds[f]);
      }
      if constexpr (COMPUTES_DV) multiply_weights(dv, weights, douts);
      multiply_weights(dk, ds, queries);
      __syncthreads();  // all of ds is there, and the queries are read
      if constexpr (STAGES == 1) {
        if (!walk.done()) load_queries(p, shared, 0, walk.head, walk.first_row());
        commit_copies();
      }
      if (p.dq_sum != nullptr) {
        const int dq_warp = warp / DQ_WARPS_N, column = warp % DQ_WARPS_N * DQ_COLUMNS;
        float dq[DQ_FRAGMENTS][DQ_COLUMNS / 2];
#pragma unroll
        for (auto& fragment : dq) clear(fragment);
        multiply_columns(dq, gradients, dq_warp * DQ_FRAGMENTS * 16, keys, column);
#pragma unroll
        for (int f = 0; f < DQ_FRAGMENTS; f++) {
          add_fragment(fragment_sum_at(p, query_tile(p, s, head, tile), f), dq[f]);
        }
      }
    } else {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        const GradientFragment scores(p, s, head, first_row, tile_key + warp_key + 16 * f);
        scores.weigh(x[f], QueryValuesInPlace{shared.lse[stage]}, masked);
        pack_kept(weights[f], x[f], scores.kept());
      }
      multiply_weights(dv, weights, douts);
      if constexpr (STAGES == 1) {
        __syncthreads();  // the queries are read
        if (!walk.done()) load_queries(p, shared, 0, walk.head, walk.first_row());
        commit_copies();
      }
    }
  }

  const float scale = static_cast<float>(p.softmax_scale);
  const float rescale = HAS_DROPOUT ? static_cast<float>(p.dropout_rescale) : 1;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    const int row = tile_key + warp_key + 16 * f + fragment_row(), head = shared.work.head;
    if constexpr (COMPUTES_DK) {
      const float factor[2] = {scale, scale};
      if (p.dk.data != nullptr) {
        write_fragment(p.dk.at(batch_of(p, s), s.row_k, head), p.dk.row_stride, row, s.len_k, s.rows_k, p.head_dim,
                       dk[f], factor);
      }
    }
    if constexpr (COMPUTES_DV) {
      const float factor[2] = {rescale, rescale};
      if (p.dv.data != nullptr) {
        write_fragment(p.dv.at(batch_of(p, s), s.row_k, head), p.dv.row_stride, row, s.len_k, s.rows_k, p.head_dim_v,
                       dv[f], factor);
      }
    }
  }
}
