// dbias, summed back to the bias's shape: one thread block owns a tile of dbias and walks all scores that it was added
// to. The walk may be split over blocks, whose parts `reduce_bias` adds in order: no atomics.
#include "gradient_tile.cuh"

constexpr int ROWS = BLOCK_M / SIDE, COLUMNS = BLOCK_N / SIDE;
using ScoreChunks = ChunkPair<BLOCK_M, BLOCK_N>;
constexpr int BUFFER = ScoreChunks::SIZE;

struct alignas(16) SharedStorage {
  Accum buffers[2 * BUFFER];
  Accum sums[SIDE * (BLOCK_M > BLOCK_N ? BLOCK_M : BLOCK_N)];
  u8 seen[BLOCK_N];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the plan's shared memory holds the tiles");

// Tiles along an axis of dbias, and along the same axis of the scores behind one of them.
struct Axis {
  int tiles, walk;

  __device__ __forceinline__ Axis(int size, int scores, int block) {
    const bool broadcast = size == 1 && scores != 1;
    tiles = broadcast ? 1 : ceil_div(size, block);
    walk = broadcast ? ceil_div(scores, block) : 1;
  }
};

__device__ __forceinline__ void write_dbias(const AttentionParams& p, int split, int batch, int head, int row,
                                            int column, Accum value) {
  if (p.dbias_parts != nullptr) {
    const i64 part = static_cast<i64>(split) * p.dbias_batches + batch;
    p.dbias_parts[((part * p.dbias_heads + head) * p.dbias_rows + row) * p.dbias_columns + column] = value;
  } else {
    p.dbias.data[batch * p.dbias.batch_stride + head * p.dbias.head_stride + row * p.dbias.row_stride +
                 column * p.dbias.column_stride] = from_accum<BiasElement>(value);
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) backward_bias(const AttentionParams p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const Axis batches(p.dbias_batches, p.batch, 1), heads(p.dbias_heads, p.num_heads_q, 1);
  const Axis rows(p.dbias_rows, p.seqlen_q, BLOCK_M), columns(p.dbias_columns, p.seqlen_k, BLOCK_N);
  u32 id = blockIdx.x;
  const int column_tile = id % columns.tiles;
  id /= columns.tiles;
  const int row_tile = id % rows.tiles;
  id /= rows.tiles;
  const int own_head = id % heads.tiles;
  id /= heads.tiles;
  const int own_batch = id % batches.tiles, split = id / batches.tiles;

  const i64 walk = static_cast<i64>(batches.walk) * heads.walk * rows.walk * columns.walk;
  const i64 begin = walk * split / p.splits, end = walk * (split + 1) / p.splits;

  Buffers<BUFFER> buffers(shared.buffers);
  Accum sum[ROWS][COLUMNS];
  clear(sum);
  for (i64 step = begin; step < end; step++) {
    i64 rest = step;
    const int first_key = (column_tile + static_cast<int>(rest % columns.walk)) * BLOCK_N;
    rest /= columns.walk;
    const int first_row = (row_tile + static_cast<int>(rest % rows.walk)) * BLOCK_M;
    rest /= rows.walk;
    const int head = own_head + static_cast<int>(rest % heads.walk);
    const Sequence s = sequence_of(p, own_batch + static_cast<int>(rest / heads.walk));
    if (first_row >= s.len_q || first_key >= s.len_k) continue;
    const GradientTile<false> tile(p, s, head, head / (p.num_heads_q / p.num_heads_kv));
    if (tile.mask.wholly_outside(first_row, BLOCK_M, first_key, BLOCK_N)) continue;

    Accum dropped[ROWS][COLUMNS], ds[ROWS][COLUMNS];
    SoftcapTile<ROWS, COLUMNS> softcap;
    ScoreChunks score_chunks;
    tile.fetch(score_chunks, first_row, first_key);
    tile.compute(dropped, ds, softcap, buffers, score_chunks, first_row, first_key, true, shared.seen, [] {});
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) sum[r][c] += ds[r][c];
    }
  }

  if (columns.walk > 1 || p.dbias_columns == 1) {  // all columns are one
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 1; c < COLUMNS; c++) sum[r][0] += sum[r][c];
      sum[r][0] = sum_of_row<SIDE>(sum[r][0]);
    }
  }
  if (rows.walk > 1 || p.dbias_rows == 1) {  // all rows are one
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int r = 1; r < ROWS; r++) sum[0][c] += sum[r][c];
      shared.sums[thread_row() * BLOCK_N + c * SIDE + thread_column()] = sum[0][c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      sum[0][c] = 0;
      for (int t = 0; t < SIDE; t++) sum[0][c] += shared.sums[t * BLOCK_N + c * SIDE + thread_column()];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      // A reduced axis has one element, at index 0 of the tile, which thread 0 of that axis owns.
      const int row = row_tile * BLOCK_M + owned_index<ROWS>(thread_row(), r);
      const int column = column_tile * BLOCK_N + owned_index<COLUMNS>(thread_column(), c);
      if (row < p.dbias_rows && column < p.dbias_columns) {
        write_dbias(p, split, own_batch, own_head, row, column, sum[r][c]);
      }
    }
  }
}
