// This header computes the gradient of a bias without tensor cores, for every GPU and dtype. BiasGradient computes dS
// of one tile of scores and sums it; around/bias_range.cuh has the kernel, which includes this header as `gradient` and
// visits the tiles that one tile of the bias was added to. sm80/bias.cuh is the counterpart with tensor cores.
#include "gradient_tile.cuh"

constexpr int ROWS = BLOCK_M / SIDE, COLUMNS = BLOCK_N / SIDE, MIN_BLOCKS = 1;
using ScoreChunks = ChunkPair<BLOCK_M, BLOCK_N>;
constexpr int BUFFER = ScoreChunks::SIZE;

struct alignas(16) SharedStorage {
  Accum tiles[2 * BUFFER + SIDE * BLOCK_M];  // operands of the products, then the sums of the tile
  u8 seen[BLOCK_N];                          // written by compute(), not read here
};

// BiasGradient sums the gradient of one tile of the bias.
struct BiasGradient {
  SharedStorage& shared;
  Buffers<BUFFER> buffers;
  Accum sum[ROWS][COLUMNS];  // the thread's elements of the tile (BLOCK_M, BLOCK_N)

  DEVICE explicit BiasGradient(SharedStorage& shared) : shared(shared), buffers(shared.tiles) { clear(sum); }

  // add() adds dS of the tile of scores at (first_row, first_key).
  DEVICE void add(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key) {
    const GradientTile<false> tile(p, s, head, head / group_size(p));
    Accum dropped[ROWS][COLUMNS], ds[ROWS][COLUMNS];
    TileDerivatives<ROWS, COLUMNS> derivatives;
    ScoreChunks score_chunks;
    tile.fetch(score_chunks, first_row, first_key);
    tile.compute(dropped, ds, derivatives, buffers, score_chunks, first_row, first_key, true, shared.seen, [] {});
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) sum[r][c] += ds[r][c];
    }
  }

  // store() writes the sums to shared memory, (BLOCK_M, stride).
  DEVICE void store(Accum* sums, int stride) const {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const int row = owned_index<ROWS>(thread_row(), r), column = owned_index<COLUMNS>(thread_column(), c);
        sums[row * stride + column] = sum[r][c];
      }
    }
  }
};
