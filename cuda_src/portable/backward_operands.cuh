// This kernel computes the gradients of a rule's operands without tensor cores, for every GPU and dtype. A thread block
// keeps BLOCK_M queries of one head and computes the gradients of their scores tile by tile. It hands the term that
// each of them adds to an element of an operand to TermSums of the header `terms`: operand_terms.cuh,
// operand_maxima.cuh or operand_words.cuh.
#include "gradient_tile.cuh"
#include "terms"

constexpr int ROWS = BLOCK_M / SIDE, COLUMNS = BLOCK_N / SIDE;
using ScoreChunks = ChunkPair<BLOCK_M, BLOCK_N>;
constexpr int BUFFER = ScoreChunks::SIZE;

struct alignas(16) SharedStorage {
  Accum buffers[2 * BUFFER];  // operands of the products, double-buffered
  u8 seen[BLOCK_N];           // written by compute(), not read here
};

// Terms gives TermSums the terms of each score's gradient.
struct Terms {
  TermSums& sums;

  DEVICE void operator()(const Score& score, Accum before, Accum ds, int i, int j) {
    if constexpr (HAS_SCORE_MOD)
      score.user.differentiate(before, ds, i, j, [&](int n, i64 at, Accum term) { sums.add(n, at, term); });
  }
};

// backward_operands visits the scores of one tile of queries of one head: the grid has a block for each tile of each
// batch_head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) backward_operands(const AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);

  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, HAS_WINDOW);
  const Sequence& s = work.sequence;
  const int first_row = work.tile * BLOCK_M;
  if (first_row >= s.rows_q) return;
  const GradientTile<false> tile(p, s, work.head, work.head / group_size(p));
  Buffers<BUFFER> buffers(shared.buffers);
  TermSums sums(p);
  for (Blocks blocks = blocks_of_keys(p, s, work.head, work.tile, BLOCK_M, BLOCK_N); !blocks.done(); blocks.advance()) {
    const int first_key = blocks.block * BLOCK_N;
    Accum dropped[ROWS][COLUMNS], ds[ROWS][COLUMNS];
    TileDerivatives<ROWS, COLUMNS> derivatives;
    ScoreChunks score_chunks;
    tile.fetch(score_chunks, first_row, first_key);
    tile.compute(
        dropped, ds, derivatives, buffers, score_chunks, first_row, first_key, true, shared.seen, [] {}, Terms{sums});
  }
  sums.finish();
}
