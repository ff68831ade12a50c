// This header has the kernel for the gradient of a bias. A thread block owns a tile of dbias (BLOCK_M, BLOCK_N), or one
// split of its work, and visits every tile of scores that this tile was added to: broadcast axes of the bias are summed
// over. The header `gradient` has BiasGradient and SharedStorage: portable/bias_gradient.cuh without tensor cores,
// sm80/bias.cuh with them. Splits leave partial sums, which around/reduce.cu adds in order.
#include "gradient"
#include "../rules/mask.cuh"

constexpr int SUMS_STRIDE = BLOCK_N + 1;  // an odd stride puts rows into different banks
static_assert(BLOCK_M * SUMS_STRIDE * sizeof(Accum) <= sizeof(SharedStorage::tiles), "the sums take their place");
static_assert(BLOCK_M <= NUM_THREADS && NUM_THREADS % BLOCK_N == 0, "a thread has a row or a column");

// Axis is one axis of dbias in tiles of `block`, and the tiles of scores behind its own tile: all of them where the
// axis is broadcast, else one.
struct Axis {
  int num_tiles, tile, step;  // the number of tiles of scores, the own tile of dbias, the current tile of scores

  // The constructor takes the tile from the last digit of a block's number, whose digits are those of the axes.
  DEVICE Axis(int size, int scores, int block, u32& number) : step(0) {
    const bool broadcast = size == 1 && scores != 1;
    const int tiles = broadcast ? 1 : ceil_div(size, block);
    num_tiles = broadcast ? ceil_div(scores, block) : 1;
    tile = number % tiles;
    number /= tiles;
  }
  // begin() takes the first step likewise, from the last digit of a number of steps.
  DEVICE void begin(i64& steps) {
    step = static_cast<int>(steps % num_tiles);
    steps /= num_tiles;
  }
  // advance() returns false where the axis begins anew, so that the next axis advances.
  DEVICE bool advance() {
    step = step + 1 < num_tiles ? step + 1 : 0;
    return step != 0;
  }
  DEVICE int at() const { return tile + step; }  // the tile of scores
};

// ScoreTileIterator iterates over the tiles of scores that belong to the thread block: keys are the fastest axis, then
// queries, heads and sequences.
struct ScoreTileIterator {
  const AttentionParams& p;
  u32 split;  // which share of the tiles of scores is this block's
  Axis columns, rows, heads, batches;
  i64 left;  // tiles of scores that are left, the current one included
  Sequence sequence;

  DEVICE explicit ScoreTileIterator(const AttentionParams& p)
      : p(p),
        split(blockIdx.x),
        columns(p.dbias_columns, p.seqlen_k, BLOCK_N, split),
        rows(p.dbias_rows, p.seqlen_q, BLOCK_M, split),
        heads(p.dbias_heads, p.num_heads_q, 1, split),
        batches(p.dbias_batches, p.batch, 1, split) {
    left = static_cast<i64>(batches.num_tiles) * heads.num_tiles * rows.num_tiles * columns.num_tiles;
    if (p.splits > 1) {  // one split alone begins at 0, and skips these divisions, which take as long as a step
      i64 steps = left * split / p.splits;
      left = left * (split + 1) / p.splits - steps;
      columns.begin(steps);
      rows.begin(steps);
      heads.begin(steps);
      batches.begin(steps);
    }
    if (left > 0) sequence = sequence_of(p, batches.at());
  }

  DEVICE void advance() {
    if (--left == 0 || columns.advance() || rows.advance() || heads.advance()) return;
    batches.advance();
    sequence = sequence_of(p, batches.at());
  }
  DEVICE int head() const { return heads.at(); }
  DEVICE int first_row() const { return rows.at() * BLOCK_M; }
  DEVICE int first_key() const { return columns.at() * BLOCK_N; }

  // is_hidden() tells whether the whole tile is hidden, so that its gradient is 0.
  DEVICE bool is_hidden() const {
    const Mask mask(p, sequence, head());
    bool hidden = HAS_BLOCK_MASK;
    if constexpr (HAS_BLOCK_MASK) {
      for (int i = 0; i < BLOCK_M; i += CANONICAL) {
        for (int j = 0; j < BLOCK_N; j += CANONICAL)
          hidden &= mask.slot_at(first_row() + i, first_key() + j) == HIDDEN_SLOT;
      }
    }
    return hidden || mask.wholly_outside(first_row(), BLOCK_M, first_key(), BLOCK_N);
  }

  // write() stores element (row, column) of the tile. A broadcast axis has one element, at index 0.
  DEVICE void write(int row, int column, Accum value) const {
    row += rows.tile * BLOCK_M;
    column += columns.tile * BLOCK_N;
    if (row >= p.dbias_rows || column >= p.dbias_columns) return;
    if (p.dbias_splits != nullptr) {
      const i64 split_and_batch = static_cast<i64>(split) * p.dbias_batches + batches.tile;
      p.dbias_splits[((split_and_batch * p.dbias_heads + heads.tile) * p.dbias_rows + row) * p.dbias_columns + column] =
          value;
    } else {
      p.dbias.data[batches.tile * p.dbias.batch_stride + heads.tile * p.dbias.head_stride + row * p.dbias.row_stride +
                   column * p.dbias.column_stride] = from_accum<BiasElement>(value);
    }
  }
};

// backward_bias computes one tile of dbias, or one split of its work: the grid has p.splits blocks for each tile.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    backward_bias(const __grid_constant__ AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);
  // 1. The gradients of all tiles of scores are summed in registers.
  BiasGradient tile(shared);
  ScoreTileIterator iterator(p);
  for (; iterator.left > 0; iterator.advance()) {
    if (!iterator.is_hidden())
      tile.add(p, iterator.sequence, iterator.head(), iterator.first_row(), iterator.first_key());
  }

  __syncthreads();
  // 2. The sums go to shared memory, where broadcast axes are summed within the tile.
  auto* sums = reinterpret_cast<Accum*>(shared.tiles);
  tile.store(sums, SUMS_STRIDE);
  __syncthreads();
  if (p.dbias_columns == 1) {
    if (threadIdx.x < BLOCK_M) {
      Accum* row = sums + threadIdx.x * SUMS_STRIDE;
      for (int c = 1; c < BLOCK_N; c++) row[0] += row[c];
    }
    __syncthreads();
  }
  if (p.dbias_rows == 1) {
    if (threadIdx.x < BLOCK_N) {
      for (int r = 1; r < BLOCK_M; r++) sums[threadIdx.x] += sums[r * SUMS_STRIDE + threadIdx.x];
    }
    __syncthreads();
  }
  // 3. All threads write the tile, or this split's part of it.
  const int column = threadIdx.x % BLOCK_N;
#pragma unroll 4
  for (int row = threadIdx.x / BLOCK_N; row < BLOCK_M; row += NUM_THREADS / BLOCK_N) {
    iterator.write(row, column, sums[row * SUMS_STRIDE + column]);
  }
}
