// Attention of one query a head over a cache of keys and values (sm_80 and newer): Flash-Decoding (Dao et al. 2023).
// The time is that of reading the cache, so that little may be done for each of its numbers. A thread block has
// KV_HEADS, some warps each, with their query heads or BLOCK_M of them, and all keys or a split of them. Its warps have
// tiles of WARP_KEYS keys in turn, copies of their own and a softmax of their own (cache.cuh, column_softmax.cuh); they
// meet where their results are merged. Queries are the columns of the products (factors.cuh), so that a group of eight
// heads fills them, and each number of the cache is a factor once.
#include "../ptx/sm90.cuh"
#include "../rules/mask.cuh"
#include "../rules/score.cuh"
#include "../sm80/warp_results.cuh"
#include "column_softmax.cuh"

constexpr int HEAD_WARPS = NUM_WARPS / KV_HEADS;  // warps that share a KV head
static_assert(HEAD_WARPS * WARP_KEYS == BLOCK_N, "a step of the thread block is a tile for each warp of a head");
static_assert(!HIDES_ANYWHERE && !HAS_DROPOUT && !HAS_PLACE, "all queries see the same keys");
constexpr bool HAS_PLAIN_SCORES = NUM_OPTIONS == 0;

struct SharedStorage {
  Stage stages[NUM_WARPS][STAGES];
};
using Results = WarpResults<HEAD_WARPS>;
static_assert(KV_HEADS * sizeof(Results) <= sizeof(SharedStorage), "results lie where keys were");

// DecodeWork is what the warps of a KV head compute.
struct DecodeWork {
  Sequence sequence;
  int head_kv, first_head, num_rows;  // rows are query heads
  int split, begin, end;              // keys [begin, end), of which the first tile may lack some
  int first_key;                      // that of the first tile

  DEVICE explicit DecodeWork(const AttentionParams& p) {
    const u32 num_splits = SPLITS_KEYS ? p.splits : 1, tile = blockIdx.x / num_splits;
    const u32 first_of_block = tile / p.num_tiles * KV_HEADS,
              batch_head = first_of_block + threadIdx.x / WARP / HEAD_WARPS;
    const int first = tile % p.num_tiles * BLOCK_M;
    sequence = sequence_of(p, batch_head / p.num_heads_kv);
    head_kv = batch_head % p.num_heads_kv;
    first_head = head_kv * group_size(p) + first;
    num_rows = smaller(group_size(p) - first, BLOCK_M);
    split = blockIdx.x % num_splits;
    const Mask::Range tiles = range_of_keys(p, sequence, 0, 1, BLOCK_N);
    const Mask::Range seen = Mask(p, sequence, first_head).columns(0);
    const i64 number = larger(tiles.end - tiles.begin, 0);
    first_key = (tiles.begin + static_cast<int>(number * split / num_splits)) * BLOCK_N;
    const int last = (tiles.begin + static_cast<int>(number * (split + 1) / num_splits)) * BLOCK_N;
    begin = larger(seen.begin, first_key);
    end = smaller(seen.end, last);
  }
  static DEVICE int warp() { return threadIdx.x / WARP % HEAD_WARPS; }  // of those of the head
  DEVICE int warp_key() const { return first_key + warp() * WARP_KEYS; }
};

// Warp is a thread of a warp, and has a function for each step of the loop over the keys.
struct Warp {
  const AttentionParams& p;
  const DecodeWork& work;
  const QueryFactors queries;
  float out[QUERY_BLOCKS][VALUE_BLOCKS][4];
  ColumnSoftmax softmax[QUERY_BLOCKS];
  float scale;                    // of a product
  float slopes[QUERY_BLOCKS][2];  // of the thread's queries
  bool scales_vary;               // the values' do

  DEVICE Warp(const AttentionParams& p, const DecodeWork& work, const Cache& cache)
      : p(p), work(work), queries(p, work.sequence, work.first_head, work.num_rows) {
    scale = HAS_PLAIN_SCORES ? static_cast<float>(p.softmax_scale) * LOG2_E : 1;
    scales_vary = cache.v.scales_vary();
#pragma unroll
    for (int q = 0; q < QUERY_BLOCKS; q++) {
      softmax[q].begin();
#pragma unroll
      for (int e = 0; HAS_ALIBI && e < 2; e++) {
        slopes[q][e] = Score(p, work.sequence, work.first_head + own_row(q, e)).slope;
      }
#pragma unroll
      for (auto& block : out[q]) clear(block);
    }
  }

  // step() computes the scores of a stage, turns them into weights, and multiplies these with the values.
  DEVICE void step(const Stage& stage, int first_key) {
    float x[QUERY_BLOCKS][KEY_BLOCKS][4];  // S^T, then P^T: the warp's keys x queries
    WeightFactors weights;
#pragma unroll
    for (auto& of_queries : x) {
#pragma unroll
      for (auto& block : of_queries) clear(block);
    }
    // 1. S^T = K Q^T.
    multiply_keys(x, KeyTile{ptx::shared_address(stage.k)}, queries);
    // 2. Products become scores, and scores weights; O^T is rescaled where a maximum has grown.
    const bool is_whole = work.begin <= first_key && first_key + WARP_KEYS <= work.end;
#pragma unroll
    for (int q = 0; q < QUERY_BLOCKS; q++) {
      find_scores(x[q], q, stage, first_key);
      if (!is_whole) hide_others(x[q], first_key);
      float rescale[2];
      softmax[q].step(x[q], stage, scales_vary, rescale);
      if (__any_sync(ALL_LANES, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
        for (auto& block : out[q]) {
#pragma unroll
          for (int e = 0; e < 4; e++) block[e] *= rescale[e % 2];
        }
      }
    }
    // 3. O^T += V^T P^T.
    pack_weights(weights, x);
    multiply_values(out, ValueTile{ptx::shared_address(stage.v)}, weights);
  }

  // put() writes the warp's normalised results; behind it all threads see those of all warps.
  DEVICE void put(Results& to) const {
    const int warp = DecodeWork::warp();
#pragma unroll
    for (int q = 0; q < QUERY_BLOCKS; q++) {
      float inverse[2], lse[2];
      const float sinks[2] = {sink_of(q, 0), sink_of(q, 1)};
      softmax[q].finish(sinks, inverse, lse);
#pragma unroll
      for (int block = 0; block < VALUE_BLOCKS; block++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float one = out[q][block][e];
          // A result of 0 stays 0, because the unit of a query that saw nothing may be anything.
          to.out[warp][query_of(q, e)][column_of(block, e)] =
              one == 0 ? 0 : one * inverse[e % 2] * softmax[q].unit[e % 2];
        }
      }
      if (lane() < 4) to.lse[warp][query_of(q, 0)] = lse[0], to.lse[warp][query_of(q, 1)] = lse[1];
    }
    __syncthreads();
  }

 private:
  // own_row() is the row of the thread's query; one behind the last is the last, whose scores are as good as any.
  DEVICE int own_row(int q, int e) const { return smaller(query_of(q, e), work.num_rows - 1); }

  // find_scores() turns products into scores in units of base 2.
  DEVICE void find_scores(float (&x)[KEY_BLOCKS][4], int q, const Stage& stage, int first_key) const {
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; block++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float of_key = HAS_FP8 ? stage.k_scale[key_of(block, 2 * half)] * scale : scale;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& one = x[block][2 * half + e];
          one *= of_key;
          if constexpr (QUERY_CODES) one *= queries.scale[q][e];
          if constexpr (!HAS_PLAIN_SCORES) {
            Score score(p, work.sequence, work.first_head);
            if constexpr (HAS_ALIBI) score.slope = slopes[q][e];
            one = score.value(one, 0, first_key + key_of(block, 2 * half)) * LOG2_E;
          }
        }
      }
    }
  }

  // hide_others() hides the keys that the queries do not see.
  DEVICE void hide_others(float (&x)[KEY_BLOCKS][4], int first_key) const {
#pragma unroll
    for (int e = 0; e < 4 * KEY_BLOCKS; e++) {
      const int key = first_key + key_of(e / 4, e % 4);
      if (key < work.begin || key >= work.end) x[e / 4][e % 4] = -infinity();
    }
  }

  // sink_of() is the sink of a query, which counts once: with the first split, and with the first of the warps.
  DEVICE float sink_of(int q, int e) const {
    const bool is_taken = work.split > 0 || DecodeWork::warp() > 0;
    return p.sink == nullptr || is_taken ? -infinity() : p.sink[work.first_head + own_row(q, e)];
  }
};

// write() merges the results of the warps, and writes them with lse: one row for each head.
DEVICE void write(const AttentionParams& p, const DecodeWork& work, const Results& results) {
  const MergedRow row(results, threadIdx.x % (HEAD_WARPS * WARP));
  if (row.number >= work.num_rows) return;
  const int head = work.first_head + row.number, batch = work.sequence.batch;
  const bool used = work.sequence.len_q > 0;
  const i64 part = SPLITS_KEYS ? static_cast<i64>(batch) * p.splits + work.split : batch;
  if (row.is_first()) *(SPLITS_KEYS ? p.lse_splits : p.lse).at(part, 0, head) = used ? row.lse : -infinity();
  if constexpr (SPLITS_KEYS) {
    row.write(p.out_splits.at(part, 0, head), p.head_dim_v, used);
  } else {
    row.write(reinterpret_cast<const Tensor<Result>&>(p.out).at(part, 0, head), p.head_dim_v, used);
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    decode(const __grid_constant__ AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);
  if constexpr (SPLITS_KEYS) ptx::let_next_kernel_begin();  // which merges
  const DecodeWork work(p);
  Stage(&stages)[STAGES] = shared.stages[threadIdx.x / WARP];
  Cache cache(p, work.sequence, work.head_kv, work.begin, work.end);
  int next = work.warp_key();
  // load_next() starts to copy the warp's next tile; a commit stands for each, also where no tile is left.
  const auto load_next = [&](int stage) {
    if (next < work.end) cache.load(stages[stage], next, next + BLOCK_N);
    commit_copies();
    next += BLOCK_N;
  };
  if (next < work.end) cache.find_page(next);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) load_next(stage);
  Warp warp(p, work, cache);
  int stage = 0;
  for (int key = work.warp_key(); key < work.end; key += BLOCK_N) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();  // all lanes' copies have come, and all have read the stage before
    load_next(stage == 0 ? STAGES - 1 : stage - 1);
    warp.step(stages[stage], key);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  wait_for_copies();
  __syncthreads();  // all warps have read their keys and values
  Results& results = reinterpret_cast<Results*>(shared.stages)[threadIdx.x / (HEAD_WARPS * WARP)];
  warp.put(results);
  write(p, work, results);
}
