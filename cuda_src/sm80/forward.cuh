// Forward attention by mma.sync, for sm_75 and newer and for every dtype that tensor cores multiply there:
// FlashAttention-2 (Dao 2023), Algorithm 1. A warp has FRAGMENTS * 16 queries. KEY_WARPS warps may share queries (wide
// heads with a block mask); each then has some of a tile's keys and of the result's columns, and they exchange weights
// and maxima. Where queries are few, every warp may have all of them, with some of a tile's keys and a softmax of its
// own (SPLITS_WARPS, warp_splits.cuh). `products` (half_tile.cuh, codes_tile.cuh, wide_tile.cuh or split/sm80_tile.cuh)
// says how to multiply: it defines Weights, pack, multiply_*, write_results, and what namespace `direct` of
// sm80/tile.cuh has. `keys` (own_keys.cuh or paged_keys.cuh, own_codes.cuh or paged_codes.cuh) says where keys and
// values lie. sm90/forward/forward.cu is the counterpart for Hopper.
#include "products"
#include "keys"
#include "../fragment/score_fragment.cuh"
#include "../fragment/softmax_fragment.cuh"
#include "warp_splits.cuh"

constexpr int QUERY_WARPS = SPLITS_WARPS ? 1 : NUM_WARPS / KEY_WARPS, FRAGMENTS = BLOCK_M / (QUERY_WARPS * 16);
constexpr int WARP_COLUMNS = HEAD_DIM_V / KEY_WARPS;
constexpr bool SHARES_QUERIES = KEY_WARPS > 1;
using QueryTile = QueriedTile<BLOCK_M, HEAD_DIM>;
using KeyTile = KeyedTile<BLOCK_N, HEAD_DIM, true>;
using ValueTile = ValuedTile<BLOCK_N, HEAD_DIM_V, true>;
using WeightTile = SharedTile<BLOCK_M, BLOCK_N>;
constexpr bool HAS_WEIGHT_TILE = SHARES_QUERIES || HAS_BIAS_TILES;
constexpr int LISTED_N = BLOCK_N / LISTED;
// Tiles that are decoded between loading and products are loaded a step ahead into one buffer, as the products read
// another.
constexpr bool DECODES = KeyTile::DECODES;
constexpr int BUFFERS = DECODES ? 1 : STAGES;
DEVICE u32 next_buffer(u32 stage) { return BUFFERS == 2 ? stage ^ 1 : 0; }

// Where tiles of queries alone would leave some of the GPU idle, their keys are split (split-KV, as in Flash-Decoding):
// neighbouring thread blocks have the splits of one tile. Each split is an attention of its own, and around/reduce.cu
// merges them.
DEVICE u32 num_splits_of(const AttentionParams& p) { return SPLITS_KEYS ? p.splits : 1; }
DEVICE int own_split(const AttentionParams& p) { return SPLITS_KEYS ? blockIdx.x % p.splits : 0; }

// OwnBlocks iterates over the tiles of keys of a split: an even share of those that the tile of queries sees.
struct OwnBlocks : Blocks {
  DEVICE OwnBlocks(const AttentionParams& p, const Work& work)
      : Blocks(blocks_of_keys(p, work.sequence, work.head, work.tile, BLOCK_M, LISTED_N)) {
    if constexpr (SPLITS_KEYS) take_share(p);
  }

 private:
  // take_share() leaves an even share of the tiles; where a step takes two of them, a share begins with a step.
  DEVICE void take_share(const AttentionParams& p) {
    const int number = larger(Blocks::count(), 0), split = own_split(p);
    const int begin = static_cast<int>(static_cast<i64>(number) * split / p.splits) / LISTED * LISTED;
    const int last = static_cast<int>(static_cast<i64>(number) * (split + 1) / p.splits);
    const int share_end = split + 1 == p.splits ? number : last / LISTED * LISTED;
    if constexpr (HAS_BLOCK_MASK) {
      list += begin;
      left = share_end - begin;
      take();
    } else {
      end = block + share_end;
      block += begin;
    }
  }
};

struct SharedStorage {
  alignas(128) unsigned char q[QueryTile::BYTES];            // (BLOCK_M, HEAD_DIM)
  alignas(128) unsigned char k[BUFFERS * KeyTile::BYTES];    // (BUFFERS, BLOCK_N, HEAD_DIM)
  alignas(128) unsigned char v[BUFFERS * ValueTile::BYTES];  // (BUFFERS, BLOCK_N, HEAD_DIM_V)
  // (BLOCK_M, BLOCK_N): weights that warps exchange, or biases.
  alignas(HAS_WEIGHT_TILE ? 128 : 4) unsigned char weights[HAS_WEIGHT_TILE ? WeightTile::BYTES : 4];
  Accum of_rows[KEY_WARPS][SHARES_QUERIES ? BLOCK_M : 1];  // (KEY_WARPS, BLOCK_M): maxima or sums that warps exchange
  Work work;  // from here on members are read again and again, because registers are scarce
  KeyRows k_rows, v_rows;
  FragmentSoftmax softmax;  // only its factors are used
  Factors<BLOCK_M, 1> query_factors;
  Factors<BLOCK_N, 2> factors;
  u8 seen[HIDES_ANYWHERE ? BLOCK_N : 1];
};
static_assert(BLOCK_M == FRAGMENTS * QUERY_WARPS * 16 && WARP_KEYS % 16 == 0, "whole fragments");
static_assert(LISTED == 1 || (LISTED == 2 && STAGES == 2 && HAS_BLOCK_MASK && NUM_OPTIONS == 1 && !HAS_WINDOW));
static_assert(!SPLITS_WARPS || (!SHARES_QUERIES && FRAGMENTS == 1 && !HAS_BIAS_TILES && LISTED == 1));
static_assert(!SPLITS_WARPS || sizeof(WarpResults) <= BUFFERS * (KeyTile::BYTES + ValueTile::BYTES), "there is room");
static_assert(!SHARES_QUERIES || (STAGES == 1 && !(HAS_MASK || HAS_BIAS || HAS_DROPOUT)),
              "one buffer of keys; plain, with a window or a block mask");
// WAITS_FOR_KEYS_FIRST: the first scores do not wait for values. With a block mask that takes registers, so it is left
// out.
constexpr bool WAITS_FOR_KEYS_FIRST = BUFFERS == 2 && sizeof(Element) == 2 && !HAS_BLOCK_MASK;
// RECHECKS: keys that are hidden one by one are looked for only where the result is not finite, in a recheck of the
// tile.
constexpr bool RECHECKS = (HAS_MASK || HAS_BIAS) && sizeof(Element) == 2 && !(FRAGMENTS > 1 && HEAD_DIM_V > 64);
// FETCHES_AHEAD: a mask and a bias are read while scores are computed, where registers hold them.
constexpr bool FETCHES_AHEAD = sizeof(Element) == 2 && FRAGMENTS == 1 && !HAS_BIAS_TILES;
// HOLDS_SCORES: what scores need is held in registers, or made anew for every tile.
constexpr bool HOLDS_SCORES = sizeof(Element) == 2 && !(HIDES_ANYWHERE && (FRAGMENTS > 1 || NUM_OPTIONS == 1)) &&
                              !(HAS_WINDOW && (HEAD_DIM_V > 192 || BLOCK_N > 64));

// across_warps() combines a number of each of a thread's rows over all keys of the tile, by way of shared memory.
template <class Combine>
DEVICE void across_warps(SharedStorage& shared, Accum (&x)[FRAGMENTS][2], int warp_row, int key_warp, Combine combine) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Accum own = reduce_row<4>(x[f][r], combine);
      if (lane() % 4 == 0) shared.of_rows[key_warp][warp_row + 16 * f + fragment_row() + 8 * r] = own;
    }
  }
  __syncthreads();
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp_row + 16 * f + fragment_row() + 8 * r;
      x[f][r] = shared.of_rows[0][row];
#pragma unroll
      for (int w = 1; w < KEY_WARPS; w++) x[f][r] = combine(x[f][r], shared.of_rows[w][row]);
    }
  }
}

// find_totals() finds the sums of a thread's rows over all keys so far.
DEVICE void find_totals(SharedStorage& shared, Accum (&total)[FRAGMENTS][2],
                        const FragmentSoftmax (&softmax)[FRAGMENTS], int warp_row, int key_warp) {
  __syncthreads();  // every thread has read what was combined before
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) total[f][0] = softmax[f].sum[0], total[f][1] = softmax[f].sum[1];
  across_warps(shared, total, warp_row, key_warp, [](Accum a, Accum b) { return a + b; });
}

// share() puts a warp's packed weights into shared memory for the warps with the same queries.
template <class W, class T>
DEVICE void share(const W& weights, const T& shared) {
  shared.store_fragment(weights, threadIdx.x / WARP % KEY_WARPS * WARP_KEYS);
}

// multiply_shared() computes out += weights values: weights of own keys are in registers, those of other warps in
// `shared`.
template <class W, class T, int N>
DEVICE void multiply_shared(Accum (&out)[FRAGMENTS][N], const W (&weights)[FRAGMENTS], const T& shared,
                            const ValueTile& values) {
  const int warp = threadIdx.x / WARP, key_warp = warp % KEY_WARPS;
  multiply_weights(out, weights, values.from_row(key_warp * WARP_KEYS), key_warp * WARP_COLUMNS);
  ptx::barrier_sync(1 + warp / KEY_WARPS, KEY_WARPS * WARP);
#pragma unroll 1
  for (int other = 1; other < KEY_WARPS; other++) {
    multiply_depth_range<WARP_KEYS>(out, shared, (key_warp + other) % KEY_WARPS * WARP_KEYS, values,
                                    key_warp * WARP_COLUMNS);
  }
}

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

// compute_tile() computes a tile of queries; it returns false where the tile has none. Unless it is a recheck, hidden
// keys that are not finite show in the result, and the sums are not finite either.
DEVICE bool compute_tile(const AttentionParams& p, SharedStorage& shared, bool recheck,
                         Accum (&out)[FRAGMENTS][WARP_COLUMNS / 2], FragmentSoftmax (&softmax)[FRAGMENTS],
                         Units (&units)[FRAGMENTS]) {
  // Every thread finds the work itself, so that the first copies start at once.
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, HAS_WINDOW, blockIdx.x / num_splits_of(p));
  const int head = work.head, tile_row = work.tile * BLOCK_M;
  if (tile_row >= work.sequence.rows_q) return false;
  const int warp = threadIdx.x / WARP, key_warp = warp % KEY_WARPS;
  const int own_key = (SPLITS_WARPS ? warp : key_warp) * WARP_KEYS;
  const int warp_row = SPLITS_WARPS ? 0 : warp / KEY_WARPS * FRAGMENTS * 16, first_row = tile_row + warp_row;
  const QueryTile queries{ptx::shared_address(shared.q)};
  const auto own_queries = queries.from_row(warp_row);
  KeyTile keys{ptx::shared_address(shared.k)};
  ValueTile values{ptx::shared_address(shared.v)};
  [[maybe_unused]] const WeightTile biases{ptx::shared_address(shared.weights)};
  // Keys before first_seen are hidden from all queries, and may hold anything.
  const int first_seen = Mask(p, work.sequence, head).columns(0).begin;

  OwnBlocks blocks(p, work);
  {
    const Sequence& s = work.sequence;
    const int head_kv = head / group_size(p);
    const KeyRows k = rows_of_keys(p, s, Operand::K, head_kv), v = rows_of_keys(p, s, Operand::V, head_kv);
    if (!blocks.done()) {
      const OperandRows q = rows_of(p, s, Operand::Q, head);
      queries.load(q, tile_row);
      shared.query_factors.load(0, q, q, tile_row);
      if constexpr (LISTED == 2) {
        load_two(keys, k, blocks);
      } else {
        keys.load(k, blocks.block * BLOCK_N);
      }
      shared.factors.load(0, k, v, blocks.block * BLOCK_N);
      if constexpr (WAITS_FOR_KEYS_FIRST) commit_copies();
      if constexpr (LISTED == 2) {
        load_two(values, v, blocks, first_seen);
      } else if constexpr (STAGES == 2) {
        values.load(v, blocks.block * BLOCK_N, first_seen);
      }
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
  __syncthreads();
  const Sequence& s = shared.work.sequence;
  const KeyRows &k = shared.k_rows, &v = shared.v_rows;
  const ScoreFragment held_scores(p, s, shared.work.head);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    clear(out[f]);
    softmax[f] = shared.softmax;
    units[f] = {};
  }

  bool first = true;
  for (u32 stage = 0; !blocks.done(); stage ^= 1) {
    const ScoreFragment scores = HOLDS_SCORES ? held_scores : ScoreFragment(p, s, shared.work.head);
    const int first_key = blocks.block * LISTED_N;
    bool masked = HIDES_ANYWHERE ? scores.needs_mask(blocks, tile_row, BLOCK_M, LISTED_N)
                                 : scores.needs_mask(blocks, first_row, FRAGMENTS * 16);
    blocks.advance();
    const int next_key = blocks.block * LISTED_N;  // the keys of the next step, or the second tile of this one
    if constexpr (LISTED == 2) {
      masked |= scores.needs_mask(blocks, tile_row, BLOCK_M, LISTED_N);
      blocks.advance();
    }
    if constexpr (BUFFERS == 2) {
      keys.address = ptx::shared_address(shared.k) + stage * KeyTile::BYTES;
      values.address = ptx::shared_address(shared.v) + stage * ValueTile::BYTES;
    }

    // 1. Wait for this tile's keys (and values), and start to load what comes next.
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
    if constexpr (STAGES == 2) {
      if (!blocks.done()) {
        shared.factors.load(stage ^ 1, k, v, next_key);
        if constexpr (LISTED == 2) {
          load_two(KeyTile{ptx::shared_address(shared.k) + next_buffer(stage) * KeyTile::BYTES}, k, blocks);
          load_two(ValueTile{ptx::shared_address(shared.v) + next_buffer(stage) * ValueTile::BYTES}, v, blocks,
                   first_seen);
        } else {
          KeyTile{ptx::shared_address(shared.k) + next_buffer(stage) * KeyTile::BYTES}.load(k, next_key);
          ValueTile{ptx::shared_address(shared.v) + next_buffer(stage) * ValueTile::BYTES}.load(v, next_key,
                                                                                                first_seen);
        }
      }
    } else {
      values.load(v, first_key, first_seen);
      if constexpr (HAS_BIAS_TILES) {
        if (scores.bias_in_vectors(first_key)) biases.load(scores.bias_rows(first_key), tile_row);
      }
    }
    commit_copies();
    FragmentOptions options[FRAGMENTS];
    Accum x[FRAGMENTS][WARP_KEYS / 2];  // S, then P: the warp's queries x its keys
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      if constexpr (FETCHES_AHEAD) scores.fetch(options[f], first_row + 16 * f + fragment_row(), first_key + own_key);
      clear(x[f]);
    }
    // 2. S = Q K^T.
    multiply_scores(x, own_queries, keys.from_row(own_key));
    if constexpr (STAGES == 1 && !SHARES_QUERIES) {
      finish_copies();
      if (!blocks.done()) {
        keys.load(k, next_key);
        shared.factors.load(stage ^ 1, k, v, next_key);
      }
      commit_copies();
    }

    // 3. Products become scores, and scores weights P; O is rescaled where a row's reference has grown.
    Weights weights[FRAGMENTS];
    if constexpr (SHARES_QUERIES) {
      const WeightTile shared_weights = WeightTile{ptx::shared_address(shared.weights)}.from_row(warp_row);
      Accum top[FRAGMENTS][2];
      bool exceeded = false;
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        scores.apply(x[f], p, first_row + 16 * f + fragment_row(), first_key + own_key, masked, recheck, options[f]);
        if (HIDES_ANYWHERE && masked) mark_seen(shared.seen + own_key, x[f]);
        softmax[f].take_factors(shared.softmax);
        FragmentSoftmax::find_tops(x[f], top[f]);
        exceeded |= softmax[f].exceeded(top[f]);
      }
      wait_for_copies();
      const bool grown = __syncthreads_or(exceeded);
      if (!blocks.done()) keys.load(k, next_key);
      commit_copies();
      if (HIDES_ANYWHERE && masked) clear_unseen(shared, values);
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
        share(weights[f], shared_weights.from_row(16 * f));
      }
      if (grown && FragmentSoftmax::ROUNDS_WEIGHTS) {
        Accum totals[FRAGMENTS][2];
        find_totals(shared, totals, softmax, warp_row, key_warp);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
          for (int r = 0; r < 2; r++)
            softmax[f].settle(r, totals[f][r], blocks.count() + 1, LARGE_SHARE_OF_SMALL_TILES);
        }
      }
      // 4. O += P V.
      multiply_shared(out, weights, shared_weights, values);
    } else {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        Accum rescale[2];
        const int row = first_row + 16 * f + fragment_row();
        take_scores(x[f], shared.query_factors, warp_row + 16 * f + fragment_row(), shared.factors, stage, own_key);
        if constexpr (HAS_BIAS_TILES) {
          if (scores.bias_in_vectors(first_key)) {
#pragma unroll
            for (int step = 0; step < BLOCK_N / STEP; step++) {
              biases.left(*reinterpret_cast<u32(*)[4]>(&options[f].biases[4 * step]), warp_row + 16 * f, step);
            }
          } else {
            scores.fetch_biases(options[f], row, first_key + fragment_column());
          }
        } else if constexpr (!FETCHES_AHEAD) {
          scores.fetch(options[f], row, first_key + own_key);
        }
#pragma unroll
        for (int i = 0; i < LISTED; i++) {
          auto& tile_scores = reinterpret_cast<Accum(&)[WARP_KEYS / 2 / LISTED]>(x[f][i * WARP_KEYS / 2 / LISTED]);
          scores.apply(tile_scores, p, row, (i == 0 ? first_key : next_key) + own_key, masked, recheck, options[f]);
          if (HIDES_ANYWHERE && masked && recheck) mark_seen(shared.seen + own_key + i * LISTED_N, tile_scores);
        }
        softmax[f].take_factors(shared.softmax);
        // Where no tiles are left, the softmax predicts that a row has to follow every maximum.
        bool grown = softmax[f].step(x[f], rescale, FOLLOWS_MAXIMA ? 0 : blocks.count() + LISTED);
        scores.drop(x[f], row, first_key + own_key);
        grown |= units[f].scale_to_units(x[f], shared.factors.of_valued(stage, own_key), rescale);
        pack(weights[f], x[f]);
        if (grown) rescale_rows(out[f], rescale);
      }
      if (WAITS_FOR_KEYS_FIRST && first) {
        first = false;
        wait_for_copies<1>();
        __syncthreads();
      }
      if (HIDES_ANYWHERE && masked && recheck) {
        __syncthreads();
        clear_unseen(shared, values);
      }
      // 4. O += P V.
      if constexpr (SPLITS_WARPS) {
        multiply_values(out, weights, values.from_row(own_key));
      } else {
        multiply_values(out, weights, values);
      }
    }
  }

  // Warps that share queries add up their rows' sums.
  if constexpr (SHARES_QUERIES) {
    Accum sums[FRAGMENTS][2];
    find_totals(shared, sums, softmax, warp_row, key_warp);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
      // finish() adds a row's lanes, so one of them has the sum.
      for (int r = 0; r < 2; r++) softmax[f].sum[r] = lane() % 4 == 0 ? sums[f][r] : 0;
    }
  }
  return true;
}

// write_split() writes a warp's results of a split of the keys from a row and a column on.
DEVICE void write_split(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_column,
                        const Units (&units)[FRAGMENTS], const Accum (&out)[FRAGMENTS][WARP_COLUMNS / 2]) {
  const i64 at = batch_of(p, s) * p.splits + own_split(p);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = first_row + 16 * f + fragment_row() + 8 * r;
      if (i >= s.rows_q) continue;
      const Accum unit = units[f].at(r);
      Accum* target = p.out_splits.at(at, s.row_q + i, head);
#pragma unroll
      for (int e = 2 * r; e < WARP_COLUMNS / 2; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int column = first_column + column_of(e + side);
          const Accum x = out[f][e + side];
          // A result of 0 stays 0, because the unit of a row that saw nothing may be anything.
          if (column < p.head_dim_v) target[column] = i >= s.len_q || x == 0 ? 0 : times_last(x, unit);
        }
      }
    }
  }
}

// sink_of() is the sink of the tile's head, which counts once: with the first split, and with the first of the warps.
DEVICE Accum sink_of(const AttentionParams& p, int head) {
  const bool is_taken = own_split(p) > 0 || (SPLITS_WARPS && threadIdx.x >= WARP);
  return p.sink == nullptr || is_taken ? -infinity() : p.sink[head];
}

// lse_at() is the place of lse of a row of the tile's head, or of its split.
DEVICE Accum* lse_at(const AttentionParams& p, const Sequence& s, int head, int row) {
  const Tensor<Accum>& lses = SPLITS_KEYS ? p.lse_splits : p.lse;
  return lses.at(batch_of(p, s) * num_splits_of(p) + own_split(p), s.row_q + row, head);
}

// write_warps() is the epilogue where warps have splits of the keys: it merges their results and writes O with lse.
DEVICE void write_warps(const AttentionParams& p, SharedStorage& shared, FragmentSoftmax& softmax, const Units& units,
                        const Accum (&out)[WARP_COLUMNS / 2]) {
  const Sequence& s = shared.work.sequence;
  const int head = shared.work.head;
  auto& results = *reinterpret_cast<WarpResults*>(shared.k);
  softmax.take_factors(shared.softmax);
  __syncthreads();  // all warps have read the keys and the values
  results.put(p, softmax, sink_of(p, head), units, out);
  const MergedRow row(results);
  const int i = shared.work.tile * BLOCK_M + row.number;
  if (i >= s.rows_q) return;
  const bool used = i < s.len_q;
  if (row.is_first()) *lse_at(p, s, head, i) = used ? row.lse : -infinity();
  if constexpr (SPLITS_KEYS) {
    row.write(p.out_splits.at(batch_of(p, s) * p.splits + own_split(p), s.row_q + i, head), p.head_dim_v, used);
  } else {
    const auto& rows = reinterpret_cast<const Tensor<Result>&>(p.out);
    row.write(rows.at(batch_of(p, s), s.row_q + i, head), p.head_dim_v, used);
  }
}

// write_rows() is the epilogue of all other tiles: it normalises O and writes it with lse.
DEVICE void write_rows(const AttentionParams& p, SharedStorage& shared, FragmentSoftmax (&softmax)[FRAGMENTS],
                       const Units (&units)[FRAGMENTS], Accum (&out)[FRAGMENTS][WARP_COLUMNS / 2]) {
  const Sequence& s = shared.work.sequence;
  const int warp = threadIdx.x / WARP, key_warp = warp % KEY_WARPS, warp_row = warp / KEY_WARPS * FRAGMENTS * 16;
  const int first_row = shared.work.tile * BLOCK_M + warp_row;
  const auto own_queries = QueryTile{ptx::shared_address(shared.q)}.from_row(warp_row);
  const Accum sink = sink_of(p, shared.work.head);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    Accum inverse[2], lse[2];
    const int row = first_row + 16 * f + fragment_row();
    softmax[f].take_factors(shared.softmax);
    softmax[f].finish(sink, inverse, lse);
    rescale_kept(p, inverse);
    if (lane() % 4 < 2 && key_warp == 0) {
      const int i = row + 8 * (lane() % 4);
      const Accum own = lane() % 4 == 0 ? lse[0] : lse[1];
      if (i < s.rows_q) *lse_at(p, s, shared.work.head, i) = i < s.len_q ? own : -infinity();
    }
    rescale_rows(out[f], inverse);
  }
  if constexpr (SPLITS_KEYS) {
    write_split(p, s, shared.work.head, first_row, key_warp * WARP_COLUMNS, units, out);
  } else {
    const auto& results = reinterpret_cast<const Tensor<Result>&>(p.out);
    write_results(units, own_queries, key_warp * WARP_COLUMNS, results.at(batch_of(p, s), s.row_q, shared.work.head),
                  results.row_stride, first_row, s.len_q, s.rows_q, p.head_dim_v, out);
  }
}

// forward_sm80 computes a tile of queries of one head, or a split of its keys: the grid has a block for each split of
// each tile of each batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    forward_sm80(const __grid_constant__ AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);
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

  if constexpr (SPLITS_WARPS) {
    write_warps(p, shared, softmax[0], units[0], out[0]);
  } else {
    write_rows(p, shared, softmax, units, out);
  }
}
