// Forward attention by mma.sync, for sm_75 and newer and for every dtype that tensor cores multiply there:
// FlashAttention-2 (Dao 2023), Algorithm 1. A warp has FRAGMENTS * 16 queries. KEY_WARPS warps may share queries (wide
// heads with a block mask); each then has some of a tile's keys and of the result's columns, and they exchange weights
// and maxima. Where queries are few, every warp may have all of them, with some of a tile's keys and a softmax of its
// own (SPLITS_WARPS, warp_splits.cuh). `products` (half_tile.cuh, codes_tile.cuh, wide_tile.cuh or split/sm80_tile.cuh)
// says how to multiply: it defines Weights, pack, multiply_*, write_results, and what namespace `direct` of
// sm80/tile.cuh has. `keys` (own_keys.cuh or paged_keys.cuh, own_codes.cuh or paged_codes.cuh) says where keys and
// values lie. sm90/forward/forward.cu is the counterpart for Hopper.
#include "../ptx/sm90.cuh"
#include "forward_epilogue.cuh"
#include "shared_queries.cuh"

// decode() makes elements of a tile that was loaded as codes.
template <class T>
DEVICE void decode(const T& tile) {
  if constexpr (T::DECODES) tile.decode();
}

// load_two() loads the two listed tiles of a step, and neighbouring ones as one.
template <class T>
DEVICE void load_two(const T& both, const KeyRows& rows, OwnBlocks blocks, int begin = 0) {
  using One = SharedTile<LISTED_N, T::PER_ROW * VECTOR, true>;
  const int first = blocks.block;
  blocks.advance();
  if (blocks.block == first + 1) {
    both.load(rows, first * LISTED_N, begin);
  } else {
    One{both.address}.load(rows, first * LISTED_N, begin);
    One{both.address + One::BYTES}.load(rows, blocks.block * LISTED_N, begin);
  }
}

// clear_unseen() makes the values of keys that no query sees 0.
DEVICE void clear_unseen(SharedStorage& shared, const ValueTile& values) {
  if (threadIdx.x < BLOCK_N && shared.seen[threadIdx.x] == 0) values.clear_row(threadIdx.x);
  __syncthreads();
  if (threadIdx.x < BLOCK_N) shared.seen[threadIdx.x] = 0;
}

// KeyStep says which keys a step has.
struct KeyStep {
  int first_key, next_key;  // its first key, and that of the next step or, of two listed tiles, of the second one
  bool masked;
};

// TileLoop is a thread of a tile of queries, and has a function for each step of the loop over the tiles of keys. Its
// arrays are references: the compiler would keep in memory what shares a struct with them until all loops are unrolled.
struct TileLoop {
  const AttentionParams& p;
  SharedStorage& shared;
  const bool recheck;
  Accum (&out)[FRAGMENTS][WARP_COLUMNS / 2];  // O: the warp's queries x its columns
  FragmentSoftmax (&softmax)[FRAGMENTS];
  Units (&units)[FRAGMENTS];
  OwnBlocks blocks;
  const int tile_row, warp_row, key_warp, own_key;  // the tile's first query, and the warp's first row, number and key
  const int first_seen;                             // keys before it are hidden from all queries, and may hold anything
  KeyTile keys;
  ValueTile values;
  bool first;  // the current step is the first

  // load_first() starts to load the queries, and the keys of the first step; with two buffers its values, too.
  DEVICE void load_first(const Work& work) {
    const Sequence& s = work.sequence;
    const int head_kv = work.head / group_size(p);
    const KeyRows k = rows_of_keys(p, s, Operand::K, head_kv), v = rows_of_keys(p, s, Operand::V, head_kv);
    if (!blocks.done()) {
      const OperandRows q = rows_of(p, s, Operand::Q, work.head);
      QueryTile{ptx::shared_address(shared.q)}.load(q, tile_row);
      shared.query_factors.load(0, q, q, tile_row);
      load_tile(keys, k, blocks.block * LISTED_N);
      shared.factors.load(0, k, v, blocks.block * LISTED_N);
      if constexpr (WAITS_FOR_KEYS_FIRST) commit_copies();
      if constexpr (STAGES == 2) load_tile(values, v, blocks.block * LISTED_N, first_seen);
      commit_copies();
      if (HIDES_ANYWHERE && threadIdx.x < BLOCK_N) shared.seen[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
      shared.work = work;
      shared.softmax = FragmentSoftmax(static_cast<Accum>(p.softmax_scale));
      shared.k_rows = k;
      shared.v_rows = v;
    }
  }

  // step() is the main loop's body: it computes the scores of the keys in buffer `stage`, turns them into weights, and
  // multiplies these with the values.
  DEVICE void step(const ScoreFragment& held_scores, u32 stage) {
    const ScoreFragment scores = HOLDS_SCORES ? held_scores : ScoreFragment(p, shared.work.sequence, shared.work.head);
    const KeyStep at = take_keys(scores, stage);
    FragmentOptions options[FRAGMENTS];
    Accum x[FRAGMENTS][WARP_KEYS / 2];  // S, then P: the warp's queries x its keys
    Weights weights[FRAGMENTS];         // P as a factor
    // 1. Wait for this tile's keys (and values), and start to load what comes next.
    wait_for_keys();
    load_next(scores, at, stage);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      if constexpr (FETCHES_AHEAD) scores.fetch(options[f], row_of(f), at.first_key + own_key);
      clear(x[f]);
    }
    // 2. S = Q K^T.
    multiply_scores(x, QueryTile{ptx::shared_address(shared.q)}.from_row(warp_row), keys.from_row(own_key));
    if constexpr (STAGES == 1 && !SHARES_QUERIES) load_next_keys(at, stage);
    // 3. Products become scores, and scores weights P; O is rescaled where a row's reference has grown.
    if constexpr (SHARES_QUERIES) {
      find_shared_weights(x, weights, scores, at, options);
    } else {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) find_weights(x[f], weights[f], scores, at, options[f], f, stage);
      wait_for_values(at);
    }
    // 4. O += P V.
    if constexpr (SHARES_QUERIES) {
      multiply_shared(out, weights, own_weight_tile(), values);
    } else if constexpr (SPLITS_WARPS) {
      multiply_values(out, weights, values.from_row(own_key));
    } else {
      multiply_values(out, weights, values);
    }
  }

  // finish() adds up the rows' sums of warps that share queries.
  DEVICE void finish() {
    if constexpr (SHARES_QUERIES) {
      Accum sums[FRAGMENTS][2];
      find_totals(shared, sums, softmax, warp_row, key_warp);
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
        // FragmentSoftmax::finish() adds a row's lanes, so one of them has the sum.
        for (int r = 0; r < 2; r++) softmax[f].sum[r] = lane() % 4 == 0 ? sums[f][r] : 0;
      }
    }
  }

 private:
  DEVICE int row_of(int fragment) const { return tile_row + warp_row + 16 * fragment + fragment_row(); }
  DEVICE WeightTile own_weight_tile() const {
    return WeightTile{ptx::shared_address(shared.weights)}.from_row(warp_row);
  }

  // load_tile() starts to load the tiles of a step from key `first_key` on: one, or two listed ones.
  template <class T>
  DEVICE void load_tile(const T& tile, const KeyRows& rows, int first_key, int begin = 0) const {
    if constexpr (LISTED == 2) {
      load_two(tile, rows, blocks, begin);
    } else {
      tile.load(rows, first_key, begin);
    }
  }

  // take_keys() moves on by a step. A mask is that of all warps where they look for hidden keys together.
  DEVICE KeyStep take_keys(const ScoreFragment& scores, u32 stage) {
    KeyStep at;
    at.first_key = blocks.block * LISTED_N;
    at.masked = HIDES_ANYWHERE ? scores.needs_mask(blocks, tile_row, BLOCK_M, LISTED_N)
                               : scores.needs_mask(blocks, tile_row + warp_row, FRAGMENTS * 16);
    blocks.advance();
    at.next_key = blocks.block * LISTED_N;
    if constexpr (LISTED == 2) {
      at.masked |= scores.needs_mask(blocks, tile_row, BLOCK_M, LISTED_N);
      blocks.advance();
    }
    if constexpr (BUFFERS == 2) {
      keys.address = ptx::shared_address(shared.k) + stage * KeyTile::BYTES;
      values.address = ptx::shared_address(shared.v) + stage * ValueTile::BYTES;
    }
    return at;
  }

  DEVICE void wait_for_keys() const {
    if (WAITS_FOR_KEYS_FIRST && first) {
      wait_for_copies<1>();
      __syncthreads();
    } else {
      finish_copies();
    }
    if constexpr (DECODES) {
      decode(keys);
      decode(values);
      __syncthreads();
    }
  }

  // load_next() starts to load the keys and values of the next step or, with one buffer, the values of this one.
  DEVICE void load_next(const ScoreFragment& scores, const KeyStep& at, u32 stage) {
    const KeyRows &k = shared.k_rows, &v = shared.v_rows;
    if constexpr (STAGES == 2) {
      if (!blocks.done()) {
        shared.factors.load(stage ^ 1, k, v, at.next_key);
        load_tile(KeyTile{ptx::shared_address(shared.k) + next_buffer(stage) * KeyTile::BYTES}, k, at.next_key);
        load_tile(ValueTile{ptx::shared_address(shared.v) + next_buffer(stage) * ValueTile::BYTES}, v, at.next_key,
                  first_seen);
      }
    } else {
      values.load(v, at.first_key, first_seen);
      if constexpr (HAS_BIAS_TILES) {
        if (scores.bias_in_vectors(at.first_key)) {
          WeightTile{ptx::shared_address(shared.weights)}.load(scores.bias_rows(at.first_key), tile_row);
        }
      }
    }
    commit_copies();
  }

  // load_next_keys() starts to load the next keys into the only buffer, whose keys have been multiplied.
  DEVICE void load_next_keys(const KeyStep& at, u32 stage) {
    finish_copies();
    if (!blocks.done()) {
      keys.load(shared.k_rows, at.next_key);
      shared.factors.load(stage ^ 1, shared.k_rows, shared.v_rows, at.next_key);
    }
    commit_copies();
  }

  // find_weights() turns the products of fragment f into weights.
  DEVICE void find_weights(Accum (&x)[WARP_KEYS / 2], Weights& weights, const ScoreFragment& scores, const KeyStep& at,
                           FragmentOptions& options, int f, u32 stage) {
    Accum rescale[2];
    const int row = row_of(f);
    take_scores(x, shared.query_factors, warp_row + 16 * f + fragment_row(), shared.factors, stage, own_key);
    fetch_late(scores, at, options, f);
#pragma unroll
    for (int i = 0; i < LISTED; i++) {
      auto& tile_scores = reinterpret_cast<Accum(&)[WARP_KEYS / 2 / LISTED]>(x[i * WARP_KEYS / 2 / LISTED]);
      scores.apply(tile_scores, p, row, (i == 0 ? at.first_key : at.next_key) + own_key, at.masked, recheck, options);
      if (HIDES_ANYWHERE && at.masked && recheck) mark_seen(shared.seen + own_key + i * LISTED_N, tile_scores);
    }
    softmax[f].take_factors(shared.softmax);
    // Where no tiles are left, the softmax predicts that a row has to follow every maximum.
    bool grown = softmax[f].step(x, rescale, FOLLOWS_MAXIMA ? 0 : blocks.count() + LISTED);
    scores.drop(x, row, at.first_key + own_key);
    grown |= units[f].scale_to_units(x, shared.factors.of_valued(stage, own_key), rescale);
    pack(weights, x);
    if (grown) rescale_rows(out[f], rescale);
  }

  // fetch_late() reads the mask and the bias where they were not fetched while the scores were computed.
  DEVICE void fetch_late(const ScoreFragment& scores, const KeyStep& at, FragmentOptions& options, int f) const {
    if constexpr (HAS_BIAS_TILES) {
      if (scores.bias_in_vectors(at.first_key)) {
        const WeightTile biases{ptx::shared_address(shared.weights)};
#pragma unroll
        for (int step = 0; step < BLOCK_N / STEP; step++) {
          biases.left(*reinterpret_cast<u32(*)[4]>(&options.biases[4 * step]), warp_row + 16 * f, step);
        }
      } else {
        scores.fetch_biases(options, row_of(f), at.first_key + fragment_column());
      }
    } else if constexpr (!FETCHES_AHEAD) {
      scores.fetch(options, row_of(f), at.first_key + own_key);
    }
  }

  // wait_for_values() waits for the first values, and clears those of keys that a recheck finds hidden.
  DEVICE void wait_for_values(const KeyStep& at) {
    if (WAITS_FOR_KEYS_FIRST && first) {
      first = false;
      wait_for_copies<1>();
      __syncthreads();
    }
    if (HIDES_ANYWHERE && at.masked && recheck) {
      __syncthreads();
      clear_unseen(shared, values);
    }
  }

  // find_shared_weights() turns products into weights where warps share queries, whose maxima are those of all keys,
  // and puts the weights into shared memory for the other warps.
  template <class W>
  DEVICE void find_shared_weights(Accum (&x)[FRAGMENTS][WARP_KEYS / 2], W (&weights)[FRAGMENTS],
                                  const ScoreFragment& scores, const KeyStep& at,
                                  FragmentOptions (&options)[FRAGMENTS]) {
    Accum top[FRAGMENTS][2];
    bool exceeded = false;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      scores.apply(x[f], p, row_of(f), at.first_key + own_key, at.masked, recheck, options[f]);
      if (HIDES_ANYWHERE && at.masked) mark_seen(shared.seen + own_key, x[f]);
      softmax[f].take_factors(shared.softmax);
      FragmentSoftmax::find_tops(x[f], top[f]);
      exceeded |= softmax[f].exceeded(top[f]);
    }
    wait_for_copies();
    const bool grown = __syncthreads_or(exceeded);
    if (!blocks.done()) keys.load(shared.k_rows, at.next_key);
    commit_copies();
    if (HIDES_ANYWHERE && at.masked) clear_unseen(shared, values);
    if (grown) across_warps(shared, top, warp_row, key_warp, [](Accum a, Accum b) { return larger(a, b); });
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      if (grown) {
        Accum rescale[2] = {1, 1};
#pragma unroll
        for (int r = 0; r < 2; r++) softmax[f].follow(r, top[f][r], rescale[r]);
        rescale_rows(out[f], rescale);
      }
      softmax[f].to_weights(x[f]);
      pack(weights[f], x[f]);
      share(weights[f], own_weight_tile().from_row(16 * f));
    }
    if (grown && FragmentSoftmax::ROUNDS_WEIGHTS) {
      Accum totals[FRAGMENTS][2];
      find_totals(shared, totals, softmax, warp_row, key_warp);
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
        for (int r = 0; r < 2; r++) softmax[f].settle(r, totals[f][r], blocks.count() + 1, LARGE_SHARE_OF_SMALL_TILES);
      }
    }
  }
};

// compute_tile() computes a tile of queries; it returns false where the tile has none. Unless it is a recheck, hidden
// keys that are not finite show in the result, and the sums are not finite either.
DEVICE bool compute_tile(const AttentionParams& p, SharedStorage& shared, bool recheck,
                         Accum (&out)[FRAGMENTS][WARP_COLUMNS / 2], FragmentSoftmax (&softmax)[FRAGMENTS],
                         Units (&units)[FRAGMENTS]) {
  // Every thread finds the work itself, so that the first copies start at once.
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, HAS_WINDOW, blockIdx.x / num_splits_of(p));
  const int tile_row = work.tile * BLOCK_M;
  if (tile_row >= work.sequence.rows_q) return false;
  const int warp = threadIdx.x / WARP, key_warp = warp % KEY_WARPS;
  TileLoop tile = {p,
                   shared,
                   recheck,
                   out,
                   softmax,
                   units,
                   OwnBlocks(p, work),
                   tile_row,
                   SPLITS_WARPS ? 0 : warp / KEY_WARPS * FRAGMENTS * 16,
                   key_warp,
                   (SPLITS_WARPS ? warp : key_warp) * WARP_KEYS,
                   Mask(p, work.sequence, work.head).columns(0).begin,
                   {ptx::shared_address(shared.k)},
                   {ptx::shared_address(shared.v)},
                   true};
  tile.load_first(work);
  __syncthreads();
  const ScoreFragment held_scores(p, shared.work.sequence, shared.work.head);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    clear(out[f]);
    softmax[f] = shared.softmax;
    units[f] = {};
  }
  for (u32 stage = 0; !tile.blocks.done(); stage ^= 1) tile.step(held_scores, stage);
  tile.finish();
  return true;
}

// forward_sm80 computes a tile of queries of one head, or a split of its keys: the grid has a block for each split of
// each tile of each batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    forward_sm80(const __grid_constant__ AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);
  if constexpr (SPLITS_KEYS) ptx::let_next_kernel_begin();  // which merges
  Accum out[FRAGMENTS][WARP_COLUMNS / 2];
  FragmentSoftmax softmax[FRAGMENTS];
  Units units[FRAGMENTS];
  // A tile whose result is not finite is computed once more, as a recheck that looks for hidden keys.
  for (bool recheck = !RECHECKS;; recheck = true) {
    if (!compute_tile(p, shared, recheck, out, softmax, units)) return;
    if (recheck) break;
    Accum zero = 0;
#pragma unroll
    for (auto& fragment : out) {
#pragma unroll
      for (const Accum& x : fragment) zero += 0 * x;
    }
    if (!__syncthreads_or(zero != 0)) break;
  }

  const int first_column = threadIdx.x / WARP % KEY_WARPS * WARP_COLUMNS;
#pragma unroll
  for (auto& fragment : out) restore_channels(fragment, p, shared.work, Operand::DOUT, first_column);
  if constexpr (SPLITS_WARPS) {
    write_warps(p, shared, softmax[0], units[0], out[0]);
  } else {
    write_rows(p, shared, softmax, units, out);
  }
}
