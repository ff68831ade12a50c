// This header is a warp of the kernel of backward.cu, with a function for each step of its loop over the tiles of
// queries, and the tiles that a step reads.
#include "../fragment/gradient_fragment.cuh"
#include "../fragment/slope_sum.cuh"
#include "delta.cuh"
#include "gradient_rows.cuh"
#include "query_steps.cuh"

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

// StepTiles are a step's tiles in shared memory.
struct StepTiles {
  QueryTile queries;
  DoutTile douts;
  ScoreTile gradients;

  DEVICE StepTiles(const SharedStorage& shared, u32 stage)
      : queries{ptx::shared_address(shared.q) + stage * QueryTile::BYTES},
        douts{ptx::shared_address(shared.dout) + stage * DoutTile::BYTES},
        gradients{ptx::shared_address(shared.ds) + stage * ScoreTile::BYTES} {}

  // put_gradients() packs dS^T of a fragment, and shares it with all warps.
  DEVICE void put_gradients(u32 (&words)[FRAGMENT / 2], const float (&ds)[FRAGMENT], int key, int query) const {
    pack(words, ds);
    gradients.from_row(key).store_fragment(words, query);
  }
};

// clear_all() makes fragments 0.
template <int FRAGMENTS_OF_WARP, int N>
DEVICE void clear_all(float (&fragments)[FRAGMENTS_OF_WARP][N]) {
#pragma unroll
  for (auto& fragment : fragments) clear(fragment);
}

// KeyGradients are sums of the warp's keys x its columns.
struct KeyGradients {
  float dk[COMPUTES_DK ? FRAGMENTS : 1][DK_COLUMNS / 2], dv[COMPUTES_DV ? FRAGMENTS : 1][DV_COLUMNS / 2];

  DEVICE KeyGradients() {
    clear_all(dk);
    clear_all(dv);
  }
};

// KeyWarp is a warp of a tile of keys: FRAGMENTS * 16 keys with its columns of dk and dv, and in each step some of the
// queries. Its functions are the steps of the algorithm.
struct KeyWarp {
  const AttentionParams& p;
  SharedStorage& shared;
  const Sequence& s;
  const int tile_key;                  // the first key of the tile
  const int warp, warp_key;            // the warp, and its first key in the tile
  const int query_warp;                // its number among the warps that have the same keys
  const int dk_column, dv_column;      // its first columns of dk and dv
  const KeyTile keys, own_keys;        // K of the tile and of the warp
  const ValueTile values, own_values;  // V likewise
  const ScoreTile shared_weights;

  DEVICE KeyWarp(const AttentionParams& p, SharedStorage& shared)
      : p(p),
        shared(shared),
        s(shared.work.sequence),
        tile_key(shared.work.tile * BLOCK_N),
        warp(threadIdx.x / WARP),
        warp_key(warp / QUERY_WARPS * FRAGMENTS * 16),
        query_warp(warp % QUERY_WARPS),
        dk_column(query_warp * DK_COLUMNS),
        dv_column(query_warp * DV_COLUMNS),
        keys{ptx::shared_address(shared.k)},
        own_keys(keys.from_row(warp_key)),
        values{ptx::shared_address(shared.v)},
        own_values(values.from_row(warp_key)),
        shared_weights{ptx::shared_address(shared.weights)} {}

  // load_first_tiles() loads the keys and values, and the queries of the first step.
  DEVICE void load_first_tiles(const Step& step) const {
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
  }

  // prepare_queries() computes delta of all queries, and makes dq 0 of tiles of queries that see no key. Tiles that do
  // are visited by this thread block, or its cluster, which then writes their dq. A block of a cluster computes delta
  // of the tiles that it visits, as others with the same queries do, and shares those that see no key: the last block
  // comes first, as the first one visits the first tile. Where these have no part in a sink's gradient, either, nothing
  // is read for them.
  DEVICE void prepare_queries() const {
    const int group = group_size(p);
    int num_seeing = 0, num_others = 0;
    for (int head = shared.work.head * group; head < (shared.work.head + 1) * group; head++) {
      const Blocks seeing = seen_queries(p, s, head);
      for (int block = 0; block * BLOCK_M < s.rows_q; block++) {
        const bool sees = block >= seeing.block && block < seeing.end;
        if constexpr (CLUSTER > 1) {
          const bool is_own =
              sees ? num_seeing++ % CLUSTER_QUERIES == query_rank() : num_others++ % CLUSTER == CLUSTER - 1 - rank();
          if (!is_own) continue;
        }
        if (!sees) zero_dq(p, s, head, block);
        if (sees || p.sink != nullptr) {
          write_delta(p, s, head, block * BLOCK_M);
        } else {
          clear_delta(p, s, head, block * BLOCK_M);
        }
      }
    }
    __syncthreads();
  }

  // load_first() loads the rest of the first step's operands, and waits for them.
  DEVICE void load_first(StepIterator& iterator, const Step& step) const {
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

  // load_queries_late() loads the next step's queries where dq of the step before waited for its addition.
  DEVICE void load_queries_late(u32 stage, const StepIterator& iterator) const {
    if (lane() == 0) ptx::bulk_wait_group_read<0>();
    __syncwarp();  // the rows that a warp loads are those of its own dq
    if (!iterator.done()) load_queries(p, shared, stage ^ 1, Step(iterator));
    commit_copies();
  }

  // sees() tells whether some query of a step sees a key of this thread block; others of the cluster may have keys that
  // the step sees.
  DEVICE bool sees(const Step& step) const {
    const Blocks seeing = blocks_of_queries(p, s, step.head, shared.work.tile, BLOCK_M, BLOCK_N);
    return step.block >= seeing.block && step.block < seeing.end;
  }

  // is_masked() tells whether something of the warp's part of a step, from query first_row on, may be hidden.
  DEVICE bool is_masked(const Step& step, int first_row) const {
    return HAS_MASK || HAS_BIAS || step.partial ||
           !Mask(p, s, step.head).columns_inside(first_row, FRAGMENT_QUERIES, tile_key + warp_key, FRAGMENTS * 16);
  }

  // visible_bits() has FRAGMENT bits for each fragment: what a block mask shows of it.
  DEVICE u32 visible_bits(const Step& step, u32 stage, int first_row) const {
    u32 visible = 0xffffffffu;
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
    return visible;
  }

  // to_gradients() turns dP^T (`dp`) of a fragment into dS^T, by its weights P^T; dslope takes what the scores add to
  // the slope's gradient, with its sign turned.
  DEVICE void to_gradients(float (&dp)[FRAGMENT], const float (&weights)[FRAGMENT], const GradientFragment& scores,
                           const Derivatives& derivatives, const float* delta, bool masked, float& dslope) const {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      dp[e] = score_gradient(p, dp[e], weights[e], delta[column_offset(e)]);
      if (!DERIVES_ADDRESSES && (masked || HIDES_BY_RULE)) clear_hidden(dp[e], weights[e]);
    }
    if (DERIVES_ADDRESSES && (masked || HIDES_BY_RULE)) clear_hidden(dp, weights);  // a branch saves 64 selections
    derivatives.differentiate_rule(dp);
    if constexpr (WRITES_DSLOPES) dslope += SlopeSum(p, s, scores.row, scores.key).of(dp);
    derivatives.differentiate_cap(dp);
  }

  // put_weights() packs P^T of a fragment, and shares it with the warps that have the same keys.
  DEVICE void put_weights(u32 (&words)[FRAGMENT / 2], const float (&weights)[FRAGMENT], int key, int query) const {
    if constexpr (COMPUTES_DV) pack_kept(words, weights);
    if constexpr (SHARES_WEIGHTS) shared_weights.from_row(key).store_fragment(words, query);
  }

  // add_slope() adds what a step's scores say of the slope's gradient.
  DEVICE void add_slope(int head, float dslope) const {
    const int place = key_tile(p, s, shared.work.tile, BLOCK_N) * NUM_WARPS + warp;
    add_to_slope(p.dslope_rows.at(batch_of(p, s), place, head), dslope, -1);
  }

  // add_other_queries() adds P^T dO and dS^T Q of the queries of the other warps that have the same keys.
  DEVICE void add_other_queries(const StepTiles& tiles, KeyGradients& sums) const {
    if constexpr (QUERY_WARPS > 1) ptx::barrier_sync(1 + warp / QUERY_WARPS, QUERY_WARPS * WARP);
#pragma unroll 1
    for (int other = 1; other < QUERY_WARPS; other++) {
      const int query = (query_warp + other) % QUERY_WARPS * FRAGMENT_QUERIES;
      if constexpr (COMPUTES_DV) {
        multiply_depth_range<FRAGMENT_QUERIES>(sums.dv, shared_weights.from_row(warp_key), query, tiles.douts,
                                               dv_column);
      }
      if constexpr (COMPUTES_DK) {
        multiply_depth_range<FRAGMENT_QUERIES>(sums.dk, tiles.gradients.from_row(warp_key), query, tiles.queries,
                                               dk_column);
      }
    }
  }

  // add_dq() computes dQ = dS K of a tile of queries, of which the warp has some rows and columns, and adds it to its
  // sum. Where no query sees a key of this thread block it adds nothing.
  DEVICE void add_dq(const StepTiles& tiles, u32 stage, int head, int block, bool sees) const {
    if (!COMPUTES_DK || (!ALL_KEYS && p.dq_sum == nullptr)) return;
    const int dq_warp = warp / DQ_WARPS_N, column = warp % DQ_WARPS_N * DQ_COLUMNS;
    int known = 0;
    if constexpr (DETERMINISTIC) {
      signal_addition(shared.pending_signals[warp]);
      known = additions_done(dq_order_at(p, query_tile(p, s, head, block, BLOCK_M)));
    }
    float dq[DQ_FRAGMENTS][DQ_COLUMNS / 2];
    clear_all(dq);
    if (sees) multiply_columns(dq, tiles.gradients, dq_warp * DQ_FRAGMENTS * 16, keys, column);
    if constexpr (CLUSTER_KEYS > 1) return add_in_cluster(head, block, dq, dq_warp * DQ_FRAGMENTS * 16, column);
    if constexpr (ALL_KEYS) return write_dq(p, s, head, block, dq);
    const i64 number = query_tile(p, s, head, block, BLOCK_M);
    float* sum = own_sum_at(p, number);
    if constexpr (DETERMINISTIC) {
      wait_for_earlier_additions(shared.pending_signals[warp], dq_order_at(p, number), known,
                                 shared.work.tile - blocks_of_keys(p, s, head, block, BLOCK_M, BLOCK_N).block);
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

  // add_in_cluster() adds up dq of a step over the thread blocks that have the keys, and writes it. The cluster's
  // barrier is half done before and behind it: all have read the sums of the step before when it begins to send.
  DEVICE void add_in_cluster(int head, int block, const float (&dq)[DQ_FRAGMENTS][DQ_COLUMNS / 2], int row,
                             int column) const {
    if (p.dq.data == nullptr) return;
    const Pieces pieces(s.rows_q - block * BLOCK_M, BLOCK_M, p.head_dim);
    const DqSum sum{shared.sums(), key_rank(), query_rank() * CLUSTER_KEYS, 1};
    wait_for_cluster();
    sum.send(dq, 0, pieces, row, column);
    sync_cluster();
    sum.add(pieces.count(), [&](int piece, const float (&x)[PIECE]) {
      write_piece(piece, pieces, p.dq.at(batch_of(p, s), s.row_q, head), p.dq.row_stride, block * BLOCK_M, s.len_q,
                  s.rows_q, p.head_dim, x, static_cast<float>(p.softmax_scale));
    });
    arrive_at_cluster();
  }

  // finish_steps() takes part in the last step of others of the cluster.
  template <class Iterator>
  DEVICE void finish_steps(const Iterator& iterator) const {
    if constexpr (CLUSTER_KEYS > 1) {
      if (p.dq.data == nullptr || !iterator.ends_early()) return;
      wait_for_cluster();
      sync_cluster();
      arrive_at_cluster();
    }
  }

  // finish_additions() waits until the last additions to dq are there.
  DEVICE void finish_additions() const {
    if constexpr (DETERMINISTIC) {
      signal_addition(shared.pending_signals[warp]);
    } else if constexpr (BULK_ADDS) {
      if (lane() == 0) ptx::bulk_wait_group_read<0>();
    }
  }

  // add_in_cluster() adds up dk and dv over the thread blocks that have the same keys, and writes them.
  DEVICE void add_in_cluster(const KeyGradients& sums) const {
    const KeySum sum{shared.sums(), query_rank(), key_rank(), CLUSTER_KEYS};
    const Pieces of_dk(s.rows_k - tile_key, BLOCK_N, p.head_dim), of_dv(s.rows_k - tile_key, BLOCK_N, p.head_dim_v);
    wait_for_cluster();
    sum.send(sums.dk, 0, of_dk, warp_key, dk_column);
    if constexpr (!ADDS_APART) sum.send(sums.dv, of_dk.count(), of_dv, warp_key, dv_column);
    sync_cluster();
    sum.add(of_dk.count() + (ADDS_APART ? 0 : of_dv.count()), [&](int piece, const float (&x)[PIECE]) {
      piece < of_dk.count() ? write_dk(piece, of_dk, x) : write_dv(piece - of_dk.count(), of_dv, x);
    });
    if constexpr (ADDS_APART) {
      sync_cluster();  // all have read what was sent
      sum.send(sums.dv, 0, of_dv, warp_key, dv_column);
      sync_cluster();
      sum.add(of_dv.count(), [&](int piece, const float (&x)[PIECE]) { write_dv(piece, of_dv, x); });
    }
  }
  DEVICE void write_dk(int piece, const Pieces& pieces, const float (&x)[PIECE]) const {
    if (p.dk.data == nullptr) return;
    write_piece(piece, pieces, p.dk.at(batch_of(p, s), s.row_k, shared.work.head), p.dk.row_stride, tile_key, s.len_k,
                s.rows_k, p.head_dim, x, static_cast<float>(p.softmax_scale));
  }
  DEVICE void write_dv(int piece, const Pieces& pieces, const float (&x)[PIECE]) const {
    if (p.dv.data == nullptr) return;
    write_piece(piece, pieces, p.dv.at(batch_of(p, s), s.row_k, shared.work.head), p.dv.row_stride, tile_key, s.len_k,
                s.rows_k, p.head_dim_v, x, HAS_DROPOUT ? static_cast<float>(p.dropout_rescale) : 1.0f);
  }

  // write() is the epilogue: it writes dk and dv by way of the keys' buffer, which all threads have read.
  DEVICE void write(KeyGradients& sums) const {
    if constexpr (CLUSTER_QUERIES > 1) return add_in_cluster(sums);
    if constexpr (CLUSTER_KEYS > 1) wait_for_cluster();  // a barrier that is half done is none for those that end
    const int head = shared.work.head, first_key = tile_key + warp_key;
    if constexpr (COMPUTES_DK) {
      if (p.dk.data != nullptr) {
        scale_all(sums.dk, static_cast<float>(p.softmax_scale));
        write_through(own_keys, dk_column, p.dk.at(batch_of(p, s), s.row_k, head), p.dk.row_stride, first_key, s.len_k,
                      s.rows_k, p.head_dim, sums.dk);
      }
    }
    if constexpr (COMPUTES_DV) {
      if (p.dv.data != nullptr) {
        if constexpr (HAS_DROPOUT) scale_all(sums.dv, static_cast<float>(p.dropout_rescale));
        write_through(own_keys, dv_column, p.dv.at(batch_of(p, s), s.row_k, head), p.dv.row_stride, first_key, s.len_k,
                      s.rows_k, p.head_dim_v, sums.dv);
      }
    }
  }
};
