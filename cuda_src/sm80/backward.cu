// Gradients by mma.sync for 16-bit inputs (sm_75 and newer): FlashAttention-2 (Dao 2023), Algorithm 2, in one pass. A
// block keeps BLOCK_N keys and loops over the tiles of queries that see them. Scores are transposed, so weights and
// their gradients stay in registers as left factors of dV and dK; dQ goes by way of shared memory, and is added up in
// global memory (gradient_rows.cuh), or written where a tile, or those of a cluster (cluster.cuh), has all keys
// (ALL_KEYS). QUERY_WARPS warps have the same FRAGMENTS * 16 keys, each other queries and other columns of dv and dk.
// key_warp.cuh has the steps of the loop, backward_rows.cu the kernels before and behind; gradients.cuh is the version
// without atomics, sm90/backward/backward.cu Hopper's.
#include "key_warp.cuh"

// take_work() finds the tile of keys of this thread block.
DEVICE void take_work(const AttentionParams& p, SharedStorage& shared) {
  if constexpr (DETERMINISTIC) {
    for (auto& pending : shared.pending_signals) pending = nullptr;
    // Blocks take tiles when they run, so whatever a block waits for was taken before, by a block that runs.
    const u32 id = p.dq_order == nullptr ? blockIdx.x : atomicAdd(p.dq_order, 1);
    shared.work = work_of<true>(p, BLOCK_N, p.num_heads_kv, true, id, INTERLEAVED_TILES);
  } else {
    shared.work = work_of<true>(p, BLOCK_N, p.num_heads_kv, HAS_WINDOW, blockIdx.x / CLUSTER);
    if constexpr (CLUSTER > 1) shared.work.tile = key_rank();
  }
}

// backward_sm80 computes dk and dv (or one of them) of a tile of keys of one KV head, and adds this tile's share to dq.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        backward_sm80(const __grid_constant__ AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);
  if constexpr (CLUSTER > 1) arrive_at_cluster();  // nobody sends to a thread block that has not begun
  if (threadIdx.x == 0) take_work(p, shared);
  __syncthreads();
  if (CLUSTER == 1 && shared.work.tile * BLOCK_N >= shared.work.sequence.rows_k) return;

  const KeyWarp own(p, shared);
  KeyGradients sums;
  StepIterator iterator(p, shared.work);  // in the loop it is a step ahead
  Step step(iterator);
  bool exists = !iterator.done();
  if (exists) own.load_first_tiles(step);
  if constexpr (ALL_KEYS) own.prepare_queries();  // while these arrive
  if (exists) own.load_first(iterator, step);
  for (u32 stage = 0; exists; stage ^= STAGES - 1) {
    const StepTiles tiles(shared, stage);
    const bool sees = CLUSTER_KEYS == 1 || own.sees(step);
    const int passes = CLUSTER_KEYS == 1 || sees ? QUERY_PASSES : 0;
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
      const int query = (pass * QUERY_WARPS + own.query_warp) * FRAGMENT_QUERIES, first_row = step.first_row() + query;
      const bool masked = own.is_masked(step, first_row);
      const u32 visible = own.visible_bits(step, stage, first_row);
      // These fragments are of the warp's keys x its queries: S^T and then P^T, dP^T and then dS^T; 16 bits of both.
      float x[FRAGMENTS][FRAGMENT], dp[FRAGMENTS][FRAGMENT], dslope = 0;
      u32 weights[FRAGMENTS][FRAGMENT / 2], ds[FRAGMENTS][FRAGMENT / 2];

      // 1. S^T = K Q^T.
      clear_all(x);
      multiply_rows<!LOADS_SLOT>(x, own.own_keys, tiles.queries.from_row(query));
      if (DQ_IN_QUERIES && pass == 0) own.load_queries_late(stage, iterator);
      // 2. dP^T = V dO^T.
      if constexpr (COMPUTES_DK) {
        clear_all(dp);
        multiply_rows<false>(dp, own.own_values, tiles.douts.from_row(query));
      }
      // 3. P^T = exp(S^T - lse) and dS^T = P^T (dP^T - delta).
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        const int key = own.warp_key + 16 * f;
        const GradientFragment scores(p, own.s, step.head, first_row, own.tile_key + key);
        Derivatives derivatives;
        if constexpr (COMPUTES_DK) derivatives.take(scores.score(), x[f], scores.place());
        scores.to_weights(x[f], QueryValuesInPlace{shared.lse[stage] + query}, masked, 1,
                          BitsOfBlock{visible >> f * FRAGMENT});
        scores.mark_dropped(x[f]);
        if constexpr (COMPUTES_DK) {
          const float* delta = shared.delta[stage] + query + fragment_column();
          own.to_gradients(dp[f], x[f], scores, derivatives, delta, masked, dslope);
        }
        own.put_weights(weights[f], x[f], key, query);
        if constexpr (COMPUTES_DK) tiles.put_gradients(ds[f], dp[f], key, query);
      }
      // 4. dV += P^T dO and dK += dS^T Q, with the warp's own queries.
      if constexpr (COMPUTES_DV) multiply_weights(sums.dv, weights, tiles.douts.from_row(query), own.dv_column);
      if constexpr (COMPUTES_DK) multiply_weights(sums.dk, ds, tiles.queries.from_row(query), own.dk_column);
      if constexpr (COMPUTES_DK && WRITES_DSLOPES) own.add_slope(step.head, dslope);
    }
    // 5. dV and dK take the queries of the other warps that have the same keys.
    if (sees) own.add_other_queries(tiles, sums);
    if (ONE_BARRIER && !iterator.done()) finish_queries(shared, stage ^ 1, Step(iterator));
    __syncthreads();  // all gradients are there, and the queries are read
    // 6. The next step's operands are loaded.
    const int head = step.head, block = step.block;
    exists = load_next(p, shared, stage, iterator, step);
    // 7. dQ = dS K of this step is added to its sum.
    own.add_dq(tiles, stage, head, block, sees);
    if constexpr (!ONE_BARRIER) {
      if (exists) finish_queries(shared, 0, step);
      __syncthreads();
    }
  }
  own.finish_steps(iterator);
  own.finish_additions();
  __syncthreads();  // all threads have read the keys, so their buffer is free for the epilogue
  own.write(sums);
}
