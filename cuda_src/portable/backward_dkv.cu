// This kernel computes the gradients of k and v without tensor cores, or one of them where the other's head dim is 0:
// FlashAttention-2 (Dao 2023), Algorithm 2. A thread block keeps BLOCK_N keys of one KV head and loops over the tiles
// of queries that see them, of all query heads of the group (GQA), so no sum has two owners. portable/backward_dq.cu is
// the pass that keeps queries.
#include "gradient_tile.cuh"

constexpr int ROWS = BLOCK_N / SIDE, COLUMNS = BLOCK_M / SIDE;
using ScoreChunks = ChunkPair<BLOCK_N, BLOCK_M>;
constexpr bool HAS_DK = HEAD_DIM > 0, HAS_DV = HEAD_DIM_V > 0;
// SIDE stands in for the columns of a result that is not computed, because arrays must have a size.
constexpr int DK_COLUMNS = HAS_DK ? HEAD_DIM : SIDE, DV_COLUMNS = HAS_DV ? HEAD_DIM_V : SIDE;
using DoutChunk = Chunk<DV_COLUMNS, BLOCK_M>;
using QueryChunk = Chunk<DK_COLUMNS, BLOCK_M>;
constexpr int WIDER = DoutChunk::SIZE > QueryChunk::SIZE ? DoutChunk::SIZE : QueryChunk::SIZE;
constexpr int BUFFER = ScoreChunks::SIZE > WIDER ? ScoreChunks::SIZE : WIDER;

struct alignas(16) SharedStorage {
  Accum buffers[2 * BUFFER];                // operands of the products, double-buffered
  Accum factor[BLOCK_M * (BLOCK_N + PAD)];  // P, then dS, transposed: (BLOCK_M, BLOCK_N + PAD)
  u8 seen[BLOCK_M];                         // queries of the tile that see some key
};

// backward_dkv computes one tile of keys of one KV head: the grid has a block for each tile of each of them.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) backward_dkv(const AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);

  const Work work = work_of<true>(p, BLOCK_N, p.num_heads_kv, false);
  const Sequence& s = work.sequence;
  const int head_kv = work.head, group = group_size(p);
  const int first_key = work.tile * BLOCK_N;
  if (first_key >= s.rows_k) return;
  const i64 batch = batch_of(p, s);

  Buffers<BUFFER> buffers(shared.buffers);
  Accum dk[ROWS][DK_COLUMNS / SIDE], dv[ROWS][DV_COLUMNS / SIDE];  // the thread's elements of (BLOCK_N, head_dim)
  clear(dk);
  clear(dv);

  for (int head = head_kv * group; head < (head_kv + 1) * group; head++) {
    const GradientTile<true> tile(p, s, head, head_kv);
    ScoreChunks score_chunks;
    Blocks blocks = blocks_of_queries(p, s, head, work.tile, BLOCK_M, BLOCK_N);
    if (!blocks.done()) tile.fetch(score_chunks, first_key, blocks.block * BLOCK_M);
    while (!blocks.done()) {
      const int first_row = blocks.block * BLOCK_M;
      const bool masked = needs_mask(tile.mask, blocks, first_row, BLOCK_M, first_key, BLOCK_N);
      if (masked && threadIdx.x < BLOCK_M) shared.seen[threadIdx.x] = 0;
      blocks.advance();

      DoutChunk dout_chunk;
      QueryChunk query_chunk;
      Accum dropped[ROWS][COLUMNS], ds[ROWS][COLUMNS];  // P^T after dropout, and dS^T: (BLOCK_N, BLOCK_M)
      TileDerivatives<ROWS, COLUMNS> derivatives;
      const auto next_tile = [&] {
        if (!blocks.done()) tile.fetch(score_chunks, first_key, blocks.block * BLOCK_M);
      };
      const auto next_dk = [&] {
        if constexpr (HAS_DK) {
          query_chunk.fetch(tile.q, first_row, 0);
        } else {
          next_tile();
        }
      };
      // 1. compute() multiplies S^T = K Q^T and dP^T = V dO^T, and makes P^T and dS^T of them.
      tile.compute(dropped, ds, derivatives, buffers, score_chunks, first_key, first_row, masked, shared.seen, [&] {
        if constexpr (HAS_DV) {
          dout_chunk.fetch(tile.dout, first_row, 0);
        } else {
          next_dk();
        }
      });
      const u8* seen = masked ? shared.seen : nullptr;
      // 2. The products P^T dO are added to dV.
      if constexpr (HAS_DV) {
        write_transposed(shared.factor, dropped);
        if (masked) __syncthreads();
        multiply_rows<BLOCK_M>(dv, buffers, shared.factor, dout_chunk, tile.dout, first_row, seen, next_dk);
      }
      // 3. The products dS^T Q are added to dK, while the next tile is fetched.
      if constexpr (HAS_DK) {
        derivatives.differentiate_cap(ds);
        __syncthreads();  // every thread has read P for dv, so dS may take its place
        write_transposed(shared.factor, ds);
        multiply_rows<BLOCK_M>(dk, buffers, shared.factor, query_chunk, tile.q, first_row, seen, next_tile);
      }
    }
  }

  // 4. The epilogue writes dk times the scale, and dv.
  Accum factor[ROWS];
  if constexpr (HAS_DK) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) factor[r] = static_cast<Accum>(p.softmax_scale);
    if (p.dk.data != nullptr)
      write_rows(p.dk.at(batch, s.row_k, head_kv), p.dk.row_stride, first_key, s.len_k, s.rows_k, p.head_dim, dk,
                 factor);
  }
  if constexpr (HAS_DV) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) factor[r] = HAS_DROPOUT ? static_cast<Accum>(p.dropout_rescale) : Accum(1);
    if (p.dv.data != nullptr)
      write_rows(p.dv.at(batch, s.row_k, head_kv), p.dv.row_stride, first_key, s.len_k, s.rows_k, p.head_dim_v, dv,
                 factor);
  }
}
