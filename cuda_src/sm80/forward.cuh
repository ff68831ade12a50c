// Forward attention by mma.sync: FlashAttention-2 (Dao 2023), Algorithm 1. A warp has FRAGMENTS * 16 queries; keys and
// values pass through shared memory, copied while the tile before them is computed.
//
// The file that includes this one has said how: Weights, pack, multiply_scores, multiply_values and write_results.
#pragma once
#include "../score_fragment.cuh"
#include "../softmax_fragment.cuh"
#include "tile.cuh"

constexpr int FRAGMENTS = BLOCK_M / (NUM_WARPS * 16);
using QueryTile = Tile<BLOCK_M, HEAD_DIM>;
using KeyTile = Tile<BLOCK_N, HEAD_DIM>;
using ValueTile = Tile<BLOCK_N, HEAD_DIM_V>;

struct SharedStorage {
  alignas(128) unsigned char q[QueryTile::BYTES];
  alignas(128) unsigned char k[STAGES * KeyTile::BYTES];
  alignas(128) unsigned char v[STAGES * ValueTile::BYTES];
  Work work;  // this and the next are read again where needed: registers are scarce
  Rows k_rows, v_rows;
  FragmentSoftmax softmax;  // its factors
  u8 seen[HIDES_ANYWHERE ? BLOCK_N : 1];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the plan's shared memory holds the tiles");
static_assert(BLOCK_M == FRAGMENTS * NUM_WARPS * 16, "whole fragments");
// What scores need is held all along in registers, or made anew for every tile.
constexpr bool HOLDS_SCORES = sizeof(Element) == 2;

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    forward_sm80(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  if (threadIdx.x == 0) {
    shared.work = work_of<false>(p, BLOCK_M, p.num_heads_q, HAS_WINDOW);
    const Sequence& s = shared.work.sequence;
    const int head_kv = shared.work.head / (p.num_heads_q / p.num_heads_kv);
    const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
    shared.softmax = FragmentSoftmax(static_cast<Accum>(p.softmax_scale));
    shared.k_rows = Rows(p.k.at(batch, s.row_k, head_kv), p.k.row_stride, s.len_k, p.head_dim);
    shared.v_rows = Rows(p.v.at(batch, s.row_k, head_kv), p.v.row_stride, s.len_k, p.head_dim_v);
  }
  __syncthreads();
  const Sequence& s = shared.work.sequence;
  const Rows &k = shared.k_rows, &v = shared.v_rows;
  const int head = shared.work.head, tile_row = shared.work.tile * BLOCK_M;
  if (tile_row >= s.rows_q) return;
  const ScoreFragment held(p, s, head);
  const int first_seen = held.mask.columns(0).begin;  // keys before it are hidden: they may hold anything

  const int warp_row = threadIdx.x / WARP * FRAGMENTS * 16, first_row = tile_row + warp_row;
  const QueryTile queries{ptx::shared_address(shared.q)}, own_queries = queries.from_row(warp_row);
  KeyTile keys{ptx::shared_address(shared.k)};
  ValueTile values{ptx::shared_address(shared.v)};

  Accum out[FRAGMENTS][HEAD_DIM_V / 2];
  FragmentSoftmax softmax[FRAGMENTS];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    clear(out[f]);
    softmax[f] = shared.softmax;
  }

  Blocks blocks = blocks_of_keys(p, s, head, shared.work.tile, BLOCK_M, BLOCK_N);
  if (!blocks.done()) {
    const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
    queries.load(Rows(p.q.at(batch, s.row_q, head), p.q.row_stride, s.len_q, p.head_dim), tile_row);
    keys.load(k, blocks.block * BLOCK_N);
    if constexpr (STAGES == 2) values.load(v, blocks.block * BLOCK_N, first_seen);
    commit_copies();
    if (HIDES_ANYWHERE && threadIdx.x < BLOCK_N) shared.seen[threadIdx.x] = 0;
  }
  for (u32 stage = 0; !blocks.done(); stage ^= 1) {
    const int first_key = blocks.block * BLOCK_N;
    const ScoreFragment scores = HOLDS_SCORES ? held : ScoreFragment(p, s, head);
    const bool masked = HIDES_ANYWHERE ? scores.needs_mask(blocks, tile_row, BLOCK_M)
                                       : scores.needs_mask(blocks, first_row, FRAGMENTS * 16);
    blocks.advance();
    const int next_key = blocks.block * BLOCK_N;
    if constexpr (STAGES == 2) {
      keys.address = ptx::shared_address(shared.k) + stage * KeyTile::BYTES;
      values.address = ptx::shared_address(shared.v) + stage * ValueTile::BYTES;
    }

    finish_copies();
    if constexpr (STAGES == 2) {
      if (!blocks.done()) {
        KeyTile{ptx::shared_address(shared.k) + (stage ^ 1) * KeyTile::BYTES}.load(k, next_key);
        ValueTile{ptx::shared_address(shared.v) + (stage ^ 1) * ValueTile::BYTES}.load(v, next_key, first_seen);
      }
    } else {
      values.load(v, first_key, first_seen);
    }
    commit_copies();
    Accum x[FRAGMENTS][BLOCK_N / 2];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) clear(x[f]);
    multiply_scores(x, own_queries, keys);
    if constexpr (STAGES == 1) {
      finish_copies();
      if (!blocks.done()) keys.load(k, next_key);
      commit_copies();
    }

    Weights weights[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      Accum rescale[2];
      const int row = first_row + 16 * f + fragment_row();
      scores.apply(x[f], row, first_key, masked);
      if (HIDES_ANYWHERE && masked) mark_seen(shared.seen, x[f]);
      softmax[f].take_factors(shared.softmax);
      const bool grown = softmax[f].step(x[f], rescale);
      scores.drop(x[f], row, first_key);
      pack(weights[f], x[f]);
      if (grown) rescale_rows(out[f], rescale);
    }
    if (HIDES_ANYWHERE && masked) {
      __syncthreads();
      if (threadIdx.x < BLOCK_N && shared.seen[threadIdx.x] == 0) values.clear_row(threadIdx.x);
      __syncthreads();
      if (threadIdx.x < BLOCK_N) shared.seen[threadIdx.x] = 0;
    }
    multiply_values(out, weights, values);
  }

  const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
  const Accum sink = p.sink == nullptr ? -infinity() : p.sink[shared.work.head];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    Accum inverse[2], lse[2];
    const int row = first_row + 16 * f + fragment_row();
    softmax[f].take_factors(shared.softmax);
    softmax[f].finish(sink, inverse, lse);
    if constexpr (HAS_DROPOUT) {
      inverse[0] *= static_cast<Accum>(p.dropout_rescale);
      inverse[1] *= static_cast<Accum>(p.dropout_rescale);
    }
    if (lane() % 4 < 2) {
      const int i = row + 8 * (lane() % 4);
      const Accum own = lane() % 4 == 0 ? lse[0] : lse[1];
      if (i < s.rows_q) *p.lse.at(batch, s.row_q + i, shared.work.head) = i < s.len_q ? own : -infinity();
    }
    write_results(p.out.at(batch, s.row_q, shared.work.head), p.out.row_stride, row, s.len_q, s.rows_q, p.head_dim_v,
                  out[f], inverse);
  }
}
