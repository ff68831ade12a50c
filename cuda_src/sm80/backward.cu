// Gradients by mma.sync for 16-bit inputs (sm_75 and newer): FlashAttention-2 (Dao 2023), Algorithm 2, in one pass. A
// block keeps BLOCK_N keys and loops over the tiles of queries that see them. Scores are transposed, so weights and
// their gradients stay in registers as left factors of dV and dK; dQ goes by way of shared memory, and is added up in
// global memory (gradient_rows.cuh). QUERY_WARPS warps have the same FRAGMENTS * 16 keys, each other queries and other
// columns of dv and dk. backward_rows.cu has the kernels before and behind; gradients.cuh is the version without
// atomics, sm90/backward/backward.cu Hopper's.
#include "../fragment/gradient_fragment.cuh"
#include "../fragment/slope_sum.cuh"
#include "gradient_rows.cuh"

// DK_COLUMNS and DV_COLUMNS are the columns that a warp has; 32 stands for a result that is not computed, because
// arrays must have a size.
constexpr int KEY_WARPS = NUM_WARPS / QUERY_WARPS, FRAGMENTS = BLOCK_N / (KEY_WARPS * 16);
constexpr int DK_COLUMNS = COMPUTES_DK ? HEAD_DIM / QUERY_WARPS : 32,
              DV_COLUMNS = COMPUTES_DV ? HEAD_DIM_V / QUERY_WARPS : 32;
// INTERLEAVED_TILES is so large that tiles of one head, which add to a tile of queries one after the other, are some
// steps apart.
constexpr u32 INTERLEAVED_TILES = 1024;
// ONE_BARRIER: a step has one barrier, where queries and gradients of scores have two buffers.
constexpr bool ONE_BARRIER = STAGES == 2;
// DQ_IN_QUERIES: dq waits for its addition in the buffer of its step's queries, and the next queries are loaded there
// later.
constexpr bool DQ_IN_QUERIES = BULK_ADDS && !DQ_BUFFER;
// LOADS_SLOT: a tile is one block of a block mask, whose slot is loaded with the queries; that saves registers.
constexpr bool LOADS_SLOT =
    HAS_BLOCK_MASK && BLOCK_M == CANONICAL && BLOCK_N == CANONICAL && STAGES == 1 && MIN_BLOCKS > 1;
// DERIVES_ADDRESSES: tiles derive addresses (SharedTile), except with a block mask, with an order of additions and, for
// tiles of queries, with a window: there addresses that the compiler keeps would leave too few registers.
constexpr bool DERIVES_ADDRESSES = !(HAS_BLOCK_MASK || DETERMINISTIC);
constexpr bool SHARES_WEIGHTS = COMPUTES_DV && QUERY_WARPS > 1;
using KeyTile = SharedTile<BLOCK_N, HEAD_DIM, DERIVES_ADDRESSES>;
using ValueTile = SharedTile<BLOCK_N, HEAD_DIM_V, DERIVES_ADDRESSES>;
using QueryTile = SharedTile<BLOCK_M, HEAD_DIM, DERIVES_ADDRESSES && !HAS_WINDOW>;
using DoutTile = SharedTile<BLOCK_M, HEAD_DIM_V, DERIVES_ADDRESSES && !HAS_WINDOW>;
using ScoreTile = SharedTile<BLOCK_N, BLOCK_M, DERIVES_ADDRESSES>;

struct SharedStorage {
  alignas(128) unsigned char k[KeyTile::BYTES];                       // (BLOCK_N, HEAD_DIM)
  alignas(128) unsigned char v[COMPUTES_DK ? ValueTile::BYTES : 16];  // (BLOCK_N, HEAD_DIM_V)
  alignas(128) unsigned char q[STAGES * QueryTile::BYTES];            // (STAGES, BLOCK_M, HEAD_DIM)
  alignas(128) unsigned char dout[STAGES * DoutTile::BYTES];          // (STAGES, BLOCK_M, HEAD_DIM_V)
  alignas(SHARES_WEIGHTS ? 128 : 16) unsigned char weights[SHARES_WEIGHTS ? ScoreTile::BYTES : 16];
  alignas(COMPUTES_DK ? 128 : 16) unsigned char ds[COMPUTES_DK ? STAGES * ScoreTile::BYTES : 16];
  alignas(DQ_BUFFER ? 128 : 16) unsigned char dq[DQ_BUFFER ? BLOCK_M * HEAD_DIM * sizeof(float) : 16];
  float lse[STAGES][BLOCK_M], delta[STAGES][BLOCK_M + LOADS_SLOT];  // the slot's bits stand last in delta
  Work work;                                            // read again and again, because registers are scarce
  int* pending_signals[DETERMINISTIC ? NUM_WARPS : 1];  // each warp's place in the order that it has not passed on
};
static_assert(BLOCK_N == FRAGMENTS * KEY_WARPS * 16 && FRAGMENT_QUERIES % 16 == 0, "whole fragments");
static_assert(QUERY_WARPS == 1 || QUERY_PASSES == 1, "warps that share their weights have them at once");
static_assert(!DQ_IN_QUERIES || (ONE_BARRIER && HEAD_DIM == HEAD_DIM_V), "as many bytes as both buffers of a step");
static_assert(BLOCK_M <= NUM_THREADS, "a thread has a query's lse and delta");

// BitsOfBlock is what a block mask shows of a fragment.
struct BitsOfBlock {
  static constexpr bool HIDES = HAS_BLOCK_MASK;
  static_assert(!HIDES || (CANONICAL % FRAGMENT_QUERIES == 0 && FRAGMENTS * FRAGMENT <= 32), "a thread has one word");
  u32 visible;

  DEVICE bool ranged() const { return true; }
  DEVICE void hide(float (&x)[FRAGMENT]) const {
    rules::hide(x, [&](int e) { return (visible >> e & 1) == 0; });
  }
};

// Step is a tile of queries.
struct Step {
  int head, block;
  bool partial;

  DEVICE explicit Step(const QueryTileIterator& iterator)
      : head(iterator.head),
        block(DETERMINISTIC ? iterator.keys_in_reverse() : iterator.blocks.block),
        partial(iterator.blocks.partial) {}
  DEVICE int first_row() const { return block * BLOCK_M; }
};

// load_queries() starts to load q and dout of a step, load_rows() its lse and delta.
DEVICE void load_queries(const AttentionParams& p, SharedStorage& shared, u32 stage, const Step& step) {
  const Sequence& s = shared.work.sequence;
  const i64 batch = batch_of(p, s);
  QueryTile{ptx::shared_address(shared.q) + stage * QueryTile::BYTES}.load(
      Rows(p.q.at(batch, s.row_q, step.head), p.q.row_stride, s.len_q, p.head_dim), step.first_row());
  DoutTile{ptx::shared_address(shared.dout) + stage * DoutTile::BYTES}.load(
      Rows(p.dout.at(batch, s.row_q, step.head), p.dout.row_stride, s.len_q, p.head_dim_v), step.first_row());
}

DEVICE void load_rows(const AttentionParams& p, SharedStorage& shared, u32 stage, const Step& step) {
  const Sequence& s = shared.work.sequence;
  const i64 batch = batch_of(p, s);
  if (threadIdx.x < BLOCK_M) {
    const i64 row = s.row_q + smaller(step.first_row() + threadIdx.x, s.len_q - 1);
    copy_float(&shared.lse[stage][threadIdx.x], p.lse.at(batch, row, step.head));
    copy_float(&shared.delta[stage][threadIdx.x], p.delta.at(batch, row, step.head));
  }
  if (LOADS_SLOT && threadIdx.x == 0) {
    const int* slot = Mask(p, s, step.head).slots + static_cast<i64>(step.block) * p.slot_columns + shared.work.tile;
    copy_float(&shared.delta[stage][BLOCK_M], reinterpret_cast<const float*>(slot));
  }
}

DEVICE void load_step(const AttentionParams& p, SharedStorage& shared, u32 stage, const Step& step) {
  if constexpr (!DQ_IN_QUERIES) load_queries(p, shared, stage, step);
  load_rows(p, shared, stage, step);
}

// finish_queries() waits for a step's copies, which are complete for all threads behind a barrier, and makes lse inf
// where a query has no weights.
DEVICE void finish_queries(SharedStorage& shared, u32 stage, const Step& step) {
  wait_for_copies();
  if (threadIdx.x < BLOCK_M) {
    float& lse = shared.lse[stage][threadIdx.x];
    const int row = step.first_row() + static_cast<int>(threadIdx.x);
    lse = row < shared.work.sequence.len_q && lse != -infinity() ? lse * LSE_BASE : infinity();
  }
}

// clear_hidden_keys() makes hidden keys 0 that are not finite, because they would count in dq. Finite keys need no look
// at every query.
DEVICE void clear_hidden_keys(const AttentionParams& p, const SharedStorage& shared, const KeyTile& keys) {
  const Sequence& s = shared.work.sequence;
  const int group = group_size(p), j = shared.work.tile * BLOCK_N + threadIdx.x;
  if (threadIdx.x >= BLOCK_N || keys.is_finite(threadIdx.x)) return;
  for (int head = shared.work.head * group; head < (shared.work.head + 1) * group; head++) {
    const Mask mask(p, s, head);
    const Score score(p, s, head);
    for (int i = 0; i < s.len_q; i++) {
      if (mask.visible(i, j) && score.may_be_seen(i, j)) return;
    }
  }
  keys.clear_row(threadIdx.x);
}

// backward_sm80 computes dk and dv (or one of them) of a tile of keys of one KV head, and adds this tile's share to dq.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    backward_sm80(const __grid_constant__ AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) {
    if constexpr (DETERMINISTIC) {
      for (auto& pending : shared.pending_signals) pending = nullptr;
      // Blocks take tiles when they run, so whatever a block waits for was taken before, by a block that runs.
      const u32 id = p.dq_order == nullptr ? blockIdx.x : atomicAdd(p.dq_order, 1);
      shared.work = work_of<true>(p, BLOCK_N, p.num_heads_kv, true, id, INTERLEAVED_TILES);
    } else {
      shared.work = work_of<true>(p, BLOCK_N, p.num_heads_kv, HAS_WINDOW);
    }
  }
  __syncthreads();
  const Sequence& s = shared.work.sequence;
  const int tile_key = shared.work.tile * BLOCK_N;
  if (tile_key >= s.rows_k) return;

  const int warp = threadIdx.x / WARP, warp_key = warp / QUERY_WARPS * FRAGMENTS * 16, query_warp = warp % QUERY_WARPS;
  const KeyTile keys{ptx::shared_address(shared.k)}, own_keys = keys.from_row(warp_key);
  const ValueTile values{ptx::shared_address(shared.v)}, own_values = values.from_row(warp_key);
  const ScoreTile shared_weights{ptx::shared_address(shared.weights)};
  // These sums are of the warp's keys x its columns.
  float dk[COMPUTES_DK ? FRAGMENTS : 1][DK_COLUMNS / 2], dv[COMPUTES_DV ? FRAGMENTS : 1][DV_COLUMNS / 2];
#pragma unroll
  for (auto& x : dk) clear(x);
#pragma unroll
  for (auto& x : dv) clear(x);

  QueryTileIterator iterator(p, shared.work);
  Step step(iterator);
  bool exists = !iterator.done();
  if (exists) {
    const i64 batch = batch_of(p, s);
    // Keys before first_seen are hidden from all queries.
    const int first_seen = Mask(p, s, step.head).columns(0).begin;
    keys.load(Rows(p.k.at(batch, s.row_k, shared.work.head), p.k.row_stride, s.len_k, p.head_dim), tile_key,
              first_seen);
    if constexpr (COMPUTES_DK) {
      values.load(Rows(p.v.at(batch, s.row_k, shared.work.head), p.v.row_stride, s.len_k, p.head_dim_v), tile_key,
                  first_seen);
    }
    load_queries(p, shared, 0, step);
    load_rows(p, shared, 0, step);
    commit_copies();
    iterator.advance();
    finish_queries(shared, 0, step);
    __syncthreads();
    if constexpr (HIDES_ANYWHERE && COMPUTES_DK) {
      clear_hidden_keys(p, shared, keys);
      __syncthreads();
    }
    if constexpr (ONE_BARRIER) {
      if (!iterator.done()) load_step(p, shared, 1, Step(iterator));
      commit_copies();
    }
  }
  for (u32 stage = 0; exists; stage ^= STAGES - 1) {
    const bool partial = HAS_MASK || HAS_BIAS || step.partial;
    const QueryTile queries{ptx::shared_address(shared.q) + stage * QueryTile::BYTES};
    const DoutTile douts{ptx::shared_address(shared.dout) + stage * DoutTile::BYTES};
    const ScoreTile gradients{ptx::shared_address(shared.ds) + stage * ScoreTile::BYTES};

#pragma unroll 1
    for (int pass = 0; pass < QUERY_PASSES; pass++) {
      const int query = (pass * QUERY_WARPS + query_warp) * FRAGMENT_QUERIES, first_row = step.first_row() + query;
      const bool masked =
          partial ||
          !Mask(p, s, step.head).columns_inside(first_row, FRAGMENT_QUERIES, tile_key + warp_key, FRAGMENTS * 16);
      float x[FRAGMENTS][FRAGMENT];
      u32 weights[FRAGMENTS][FRAGMENT / 2], visible = 0xffffffffu;
      if (HAS_BLOCK_MASK && step.partial) {
        visible = 0;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          const int key = tile_key + warp_key + 16 * f;
          const int slot =
              LOADS_SLOT ? __float_as_int(shared.delta[stage][BLOCK_M]) : Mask(p, s, step.head).slot_at(first_row, key);
          const u32 bits = block_bits(p, slot, key, first_row);
          visible |= (bits & 0xffffffffu >> (32 - FRAGMENT)) << f * FRAGMENT;
        }
      }
#pragma unroll
      for (auto& fragment : x) clear(fragment);
      // 1. S^T = K Q^T.
      multiply_rows<!LOADS_SLOT>(x, own_keys, queries.from_row(query));
      if (DQ_IN_QUERIES && pass == 0) {
        if (lane() == 0) ptx::bulk_wait_group_read<0>();
        __syncwarp();  // the rows that a warp loads are those of its own dq
        if (!iterator.done()) load_queries(p, shared, stage ^ 1, Step(iterator));
        commit_copies();
      }
      if constexpr (COMPUTES_DK) {
        float dp[FRAGMENTS][FRAGMENT];
#pragma unroll
        for (auto& fragment : dp) clear(fragment);
        // 2. dP^T = V dO^T.
        multiply_rows<false>(dp, own_values, douts.from_row(query));
        u32 ds[FRAGMENTS][FRAGMENT / 2];
        float dslope = 0;  // what these scores add to the slope's gradient, with its sign turned
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          // 3. From both come P^T and dS^T.
          const GradientFragment scores(p, s, step.head, first_row, tile_key + warp_key + 16 * f);
          Derivatives derivatives;
          derivatives.take(scores.score(), x[f], scores.place());
          scores.to_weights(x[f], QueryValuesInPlace{shared.lse[stage] + query}, masked, 1,
                            BitsOfBlock{visible >> f * FRAGMENT});
          scores.mark_dropped(x[f]);
          const float* delta = shared.delta[stage] + query + fragment_column();
#pragma unroll
          for (int e = 0; e < FRAGMENT; e++) {
            dp[f][e] = score_gradient(p, dp[f][e], x[f][e], delta[column_offset(e)]);
            if (!DERIVES_ADDRESSES && (masked || HIDES_BY_RULE)) clear_hidden(dp[f][e], x[f][e]);
          }
          if (DERIVES_ADDRESSES && (masked || HIDES_BY_RULE))
            clear_hidden(dp[f], x[f]);  // a branch saves 64 selections
          derivatives.differentiate_rule(dp[f]);
          if constexpr (WRITES_DSLOPES) dslope += SlopeSum(p, s, scores.row, scores.key).of(dp[f]);
          derivatives.differentiate_cap(dp[f]);
          if constexpr (COMPUTES_DV) pack_kept(weights[f], x[f]);
          if constexpr (SHARES_WEIGHTS) shared_weights.from_row(warp_key + 16 * f).store_fragment(weights[f], query);
          pack(ds[f], dp[f]);
          gradients.from_row(warp_key + 16 * f).store_fragment(ds[f], query);
        }
        // 4. dV += P^T dO and dK += dS^T Q, with the warp's own queries.
        if constexpr (COMPUTES_DV) multiply_weights(dv, weights, douts.from_row(query), query_warp * DV_COLUMNS);
        multiply_weights(dk, ds, queries.from_row(query), query_warp * DK_COLUMNS);
        if constexpr (WRITES_DSLOPES) {
          const int place = key_tile(p, s, shared.work.tile, BLOCK_N) * NUM_WARPS + warp;
          add_to_slope(p.dslope_rows.at(batch_of(p, s), place, step.head), dslope, -1);
        }
      } else {
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          const GradientFragment scores(p, s, step.head, first_row, tile_key + warp_key + 16 * f);
          scores.to_weights(x[f], QueryValuesInPlace{shared.lse[stage] + query}, masked, 1,
                            BitsOfBlock{visible >> f * FRAGMENT});
          scores.mark_dropped(x[f]);
          pack_kept(weights[f], x[f]);
          if constexpr (SHARES_WEIGHTS) shared_weights.from_row(warp_key + 16 * f).store_fragment(weights[f], query);
        }
        multiply_weights(dv, weights, douts.from_row(query), query_warp * DV_COLUMNS);
      }
    }
    // 5. The sums take the queries of the other warps that have the same keys.
    if constexpr (QUERY_WARPS > 1) ptx::barrier_sync(1 + warp / QUERY_WARPS, QUERY_WARPS * WARP);
#pragma unroll 1
    for (int other = 1; other < QUERY_WARPS; other++) {
      const int query = (query_warp + other) % QUERY_WARPS * FRAGMENT_QUERIES;
      if constexpr (COMPUTES_DV) {
        multiply_depth_range<FRAGMENT_QUERIES>(dv, shared_weights.from_row(warp_key), query, douts,
                                               query_warp * DV_COLUMNS);
      }
      if constexpr (COMPUTES_DK) {
        multiply_depth_range<FRAGMENT_QUERIES>(dk, gradients.from_row(warp_key), query, queries,
                                               query_warp * DK_COLUMNS);
      }
    }

    if (ONE_BARRIER && !iterator.done()) finish_queries(shared, stage ^ 1, Step(iterator));
    __syncthreads();  // all gradients are there, and the queries are read
    // 6. The next step's operands are loaded.
    const int head = step.head, tile = step.block;
    step = Step(iterator);
    exists = !iterator.done();
    if (exists) iterator.advance();
    if constexpr (ONE_BARRIER) {
      if (!iterator.done()) load_step(p, shared, stage, Step(iterator));
    } else if (exists) {
      load_queries(p, shared, 0, step);
      load_rows(p, shared, 0, step);
    }
    commit_copies();
    if constexpr (COMPUTES_DK) {
      if (p.dq_sum != nullptr) {
        // 7. dQ = dS K of this step is added to its sum.
        const int dq_warp = warp / DQ_WARPS_N, column = warp % DQ_WARPS_N * DQ_COLUMNS;
        int known = 0;
        if constexpr (DETERMINISTIC) {
          signal_addition(shared.pending_signals[warp]);
          known = additions_done(dq_order_at(p, query_tile(p, s, head, tile, BLOCK_M)));
        }
        float dq[DQ_FRAGMENTS][DQ_COLUMNS / 2];
#pragma unroll
        for (auto& fragment : dq) clear(fragment);
        multiply_columns(dq, gradients, dq_warp * DQ_FRAGMENTS * 16, keys, column);
        const i64 number = query_tile(p, s, head, tile, BLOCK_M);
        float* sum = own_sum_at(p, number);
        if constexpr (DETERMINISTIC) {
          wait_for_earlier_additions(shared.pending_signals[warp], dq_order_at(p, number), known,
                                     shared.work.tile - blocks_of_keys(p, s, head, tile, BLOCK_M, BLOCK_N).block);
        }
        if constexpr (BULK_ADDS) {
          unsigned char* first = DQ_BUFFER ? shared.dq : shared.q + stage * QueryTile::BYTES;
          unsigned char* second = DQ_BUFFER ? shared.dq + sizeof(shared.dq) / 2 : shared.dout + stage * DoutTile::BYTES;
          add_in_bulk(sum, reinterpret_cast<float*>(first), reinterpret_cast<float*>(second), dq);
        } else {
#pragma unroll
          for (int f = 0; f < DQ_FRAGMENTS; f++) add_fragment(sum + f * (16 * DQ_COLUMNS), dq[f]);
        }
      }
    }
    if constexpr (!ONE_BARRIER) {
      if (exists) finish_queries(shared, 0, step);
      __syncthreads();
    }
  }

  if constexpr (DETERMINISTIC) {
    signal_addition(shared.pending_signals[warp]);
  } else if constexpr (BULK_ADDS) {
    if (lane() == 0) ptx::bulk_wait_group_read<0>();
  }
  __syncthreads();  // all threads have read the keys, so their buffer is free for the epilogue
  // The epilogue writes dk and dv by way of the keys' buffer.
  const int head = shared.work.head, first_key = tile_key + warp_key;
  if constexpr (COMPUTES_DK) {
    if (p.dk.data != nullptr) {
      scale_all(dk, static_cast<float>(p.softmax_scale));
      write_through(own_keys, query_warp * DK_COLUMNS, p.dk.at(batch_of(p, s), s.row_k, head), p.dk.row_stride,
                    first_key, s.len_k, s.rows_k, p.head_dim, dk);
    }
  }
  if constexpr (COMPUTES_DV) {
    if (p.dv.data != nullptr) {
      if constexpr (HAS_DROPOUT) scale_all(dv, static_cast<float>(p.dropout_rescale));
      write_through(own_keys, query_warp * DV_COLUMNS, p.dv.at(batch_of(p, s), s.row_k, head), p.dv.row_stride,
                    first_key, s.len_k, s.rows_k, p.head_dim_v, dv);
    }
  }
}
