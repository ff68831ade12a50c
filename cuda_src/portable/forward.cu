// This kernel computes forward attention without tensor cores, for every GPU and dtype: FlashAttention-2 (Dao 2023),
// Algorithm 1. A thread block keeps BLOCK_M queries of one head and loops over the tiles of BLOCK_N keys that they see.
// It is the kernel to read first; sm80/forward.cuh and sm90/forward/forward.cu are the same loop with tensor cores. The
// header `keys`, which is own_rows.cuh or paged_rows.cuh, says where keys and values lie.
#include "keys"
#include "tile.cuh"
#include "../fragment/softmax.cuh"

constexpr int ROWS = BLOCK_M / SIDE, COLUMNS = BLOCK_N / SIDE, OUT_COLUMNS = HEAD_DIM_V / SIDE;
using ScoreChunks = ChunkPair<BLOCK_M, BLOCK_N>;
using ValueChunk = Chunk<HEAD_DIM_V, BLOCK_N>;
constexpr int BUFFER = ScoreChunks::SIZE > ValueChunk::SIZE ? ScoreChunks::SIZE : ValueChunk::SIZE;

struct alignas(16) SharedStorage {
  Accum buffers[2 * BUFFER];                 // operands of the products, double-buffered
  Accum weights[BLOCK_N * (BLOCK_M + PAD)];  // P, transposed: (BLOCK_N, BLOCK_M + PAD)
  u8 seen[BLOCK_N];                          // keys of the tile that some query sees
};

// forward computes one tile of queries of one head: the grid has a block for each tile of each batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) forward(const AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);

  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, HAS_WINDOW);
  const Sequence& s = work.sequence;
  const int head = work.head, head_kv = head / group_size(p);
  const int first_row = work.tile * BLOCK_M;
  if (first_row >= s.rows_q) return;

  const i64 batch = batch_of(p, s);
  const Rows q(p.q.at(batch, s.row_q, head), p.q.row_stride, s.len_q, p.head_dim);
  const KeyRows k = rows_of_keys(p, p.k, s, batch, head_kv, p.head_dim);
  const KeyRows v = rows_of_keys(p, p.v, s, batch, head_kv, p.head_dim_v);
  const Score score(p, s, head);
  const Mask mask(p, s, head);
  const Dropout dropout(p, s, head);
  const Accum sink = p.sink == nullptr ? -infinity() : p.sink[head];

  Buffers<BUFFER> buffers(shared.buffers);
  OnlineSoftmax<ROWS, SIDE> softmax(sink, thread_column() == 0);  // the thread's rows of m and l
  Accum out[ROWS][OUT_COLUMNS];                                   // the thread's elements of O (BLOCK_M, HEAD_DIM_V)
  clear(out);

  ScoreChunks score_chunks;
  Blocks blocks = blocks_of_keys(p, s, head, work.tile, BLOCK_M, BLOCK_N);
  if (!blocks.done()) score_chunks.fetch(q, first_row, k, blocks.block * BLOCK_N, 0);
  while (!blocks.done()) {
    const int first_key = blocks.block * BLOCK_N;
    const bool masked = needs_mask(mask, blocks, first_row, BLOCK_M, first_key, BLOCK_N);
    if (masked && threadIdx.x < BLOCK_N) shared.seen[threadIdx.x] = 0;
    blocks.advance();

    ValueChunk value_chunk;
    Accum x[ROWS][COLUMNS];  // the thread's elements of S (BLOCK_M, BLOCK_N): products, then scores, then weights
    clear(x);
    // 1. Queries and keys are multiplied, S = Q K^T, while the first values are fetched.
    multiply_transposed(x, buffers, score_chunks, q, first_row, k, first_key,
                        [&] { value_chunk.fetch(v, first_key, 0); });
    // 2. Products become scores, -inf where hidden.
    score_tile<false>(x, score, mask, first_row, first_key, masked, shared.seen);

    // 3. The online softmax turns scores into weights P and rescales the sums of earlier tiles.
    Accum rescale[ROWS];
    softmax.step(x, rescale);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < OUT_COLUMNS; c++) out[r][c] *= rescale[r];
    }
    // 4. Dropout sets weights to 0; the row sums of step 3 count them all.
    if constexpr (HAS_DROPOUT) {
      for_each_kept<false, ROWS, COLUMNS>(dropout, first_row, first_key, [&](int r, int c, bool kept) {
        if (!kept) x[r][c] = 0;
      });
    }
    // 5. The products P V are added to O, while the next queries and keys are fetched.
    write_transposed(shared.weights, x);
    if (masked) __syncthreads();
    multiply_rows<BLOCK_N>(out, buffers, shared.weights, value_chunk, v, first_key, masked ? shared.seen : nullptr,
                           [&] {
                             if (!blocks.done()) score_chunks.fetch(q, first_row, k, blocks.block * BLOCK_N, 0);
                           });
  }

  // 6. The epilogue normalises O and writes it with lse.
  Accum inverse[ROWS], lse[ROWS];
  softmax.finish(inverse, lse);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if constexpr (HAS_DROPOUT) inverse[r] *= static_cast<Accum>(p.dropout_rescale);
    const int row = first_row + owned_index<ROWS>(thread_row(), r);
    if (thread_column() == 0 && slice_begin() == 0 && row < s.rows_q)
      *p.lse.at(batch, s.row_q + row, head) = row < s.len_q ? lse[r] : -infinity();
  }
  write_rows(p.out.at(batch, s.row_q, head), p.out.row_stride, first_row, s.len_q, s.rows_q, p.head_dim_v, out,
             inverse);
}
