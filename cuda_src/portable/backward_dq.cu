// This kernel computes the gradient of q without tensor cores, and each row's part of the slopes' gradient:
// FlashAttention-2 (Dao 2023), Algorithm 2, with one owner for every sum. A thread block keeps BLOCK_M queries and
// loops over the tiles of keys that they see, so dq needs no atomic additions and repeats its bits.
// portable/backward_dkv.cu is the pass that keeps keys.
#include "gradient_tile.cuh"

constexpr int ROWS = BLOCK_M / SIDE, COLUMNS = BLOCK_N / SIDE, OUT_COLUMNS = HEAD_DIM / SIDE;
using ScoreChunks = ChunkPair<BLOCK_M, BLOCK_N>;
using KeyChunk = Chunk<HEAD_DIM, BLOCK_N>;
constexpr int BUFFER = ScoreChunks::SIZE > KeyChunk::SIZE ? ScoreChunks::SIZE : KeyChunk::SIZE;

struct alignas(16) SharedStorage {
  Accum buffers[2 * BUFFER];            // operands of the products, double-buffered
  Accum ds[BLOCK_N * (BLOCK_M + PAD)];  // dS, transposed: (BLOCK_N, BLOCK_M + PAD)
  u8 seen[BLOCK_N];                     // keys of the tile that some query sees
};

// backward_dq computes one tile of queries of one head: the grid has a block for each tile of each batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) backward_dq(const AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);

  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, HAS_WINDOW);
  const Sequence& s = work.sequence;
  const int head = work.head, head_kv = head / group_size(p);
  const int first_row = work.tile * BLOCK_M;
  if (first_row >= s.rows_q) return;
  const i64 batch = batch_of(p, s);
  const GradientTile<false> tile(p, s, head, head_kv);

  Buffers<BUFFER> buffers(shared.buffers);
  Accum dq[ROWS][OUT_COLUMNS], dslope[ROWS];  // the thread's elements of dq (BLOCK_M, HEAD_DIM)
  clear(dq);
#pragma unroll
  for (int r = 0; r < ROWS; r++) dslope[r] = 0;

  ScoreChunks score_chunks;
  Blocks blocks = blocks_of_keys(p, s, head, work.tile, BLOCK_M, BLOCK_N);
  if (!blocks.done()) tile.fetch(score_chunks, first_row, blocks.block * BLOCK_N);
  while (!blocks.done()) {
    const int first_key = blocks.block * BLOCK_N;
    const bool masked = needs_mask(tile.mask, blocks, first_row, BLOCK_M, first_key, BLOCK_N);
    // `seen` is not cleared where dq is not wanted: nobody reads it, and no barrier stands between two tiles.
    if (masked && p.dq.data != nullptr && threadIdx.x < BLOCK_N) shared.seen[threadIdx.x] = 0;
    blocks.advance();
    const auto next_tile = [&] {
      if (!blocks.done()) tile.fetch(score_chunks, first_row, blocks.block * BLOCK_N);
    };

    KeyChunk key_chunk;
    Accum dropped[ROWS][COLUMNS], ds[ROWS][COLUMNS];  // P after dropout, and dS: (BLOCK_M, BLOCK_N)
    TileDerivatives<ROWS, COLUMNS> derivatives;
    // 1. compute() multiplies S = Q K^T and dP = dO V^T, and makes P and dS of them.
    tile.compute(dropped, ds, derivatives, buffers, score_chunks, first_row, first_key, masked, shared.seen, [&] {
      if (p.dq.data != nullptr) {
        key_chunk.fetch(tile.k, first_key, 0);
      } else {
        next_tile();
      }
    });
    // 2. Each row sums what it adds to the slope's gradient.
    if constexpr (HAS_ALIBI) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          dslope[r] -= ds[r][c] * tile.score.distance(first_row + owned_index<ROWS>(thread_row(), r),
                                                      first_key + owned_index<COLUMNS>(thread_column(), c));
        }
      }
    }
    if (p.dq.data == nullptr) continue;
    // 3. The products dS K are added to dQ, while the next tile is fetched.
    derivatives.differentiate_cap(ds);
    write_transposed(shared.ds, ds);
    if (masked) __syncthreads();
    multiply_rows<BLOCK_N>(dq, buffers, shared.ds, key_chunk, tile.k, first_key, masked ? shared.seen : nullptr,
                           next_tile);
  }

  // 4. The epilogue writes the rows' shares of the slopes' gradient, and dq times the scale.
  if (HAS_ALIBI && p.dslope_rows.data != nullptr && slice_begin() == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Accum sum = sum_of_row<SIDE>(dslope[r]);
      const int row = first_row + owned_index<ROWS>(thread_row(), r);
      if (thread_column() == 0 && row < s.rows_q) *p.dslope_rows.at(batch, s.row_q + row, head) = sum;
    }
  }
  if (p.dq.data == nullptr) return;
  Accum factor[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) factor[r] = tile.score.scale;
  write_rows(p.dq.at(batch, s.row_q, head), p.dq.row_stride, first_row, s.len_q, s.rows_q, p.head_dim, dq, factor);
}
