// This header lets the thread blocks of a cluster (sm_90 and newer) have one KV head together, where its kernel runs
// alone (backward.cu, ALL_KEYS). CLUSTER_KEYS blocks have a tile of keys each and visit the same tiles of queries,
// whose dq they add up step by step; CLUSTER_QUERIES such groups visit other tiles of queries, and add up dk and dv in
// the end. Sums are exchanged in float32 by way of shared memory, and added in the order of the blocks, so bits repeat.
#include "gradient_rows.cuh"

constexpr int CLUSTER = CLUSTER_KEYS * CLUSTER_QUERIES;
static_assert(CLUSTER == 1 || (ALL_KEYS && COMPUTES_DK && COMPUTES_DV), "a cluster has all of a head");

// key_rank() is the number of this block's tile of keys, query_rank() that of its group.
DEVICE int rank() { return CLUSTER == 1 ? 0 : static_cast<int>(ptx::cluster_rank()); }
DEVICE int key_rank() { return rank() % CLUSTER_KEYS; }
DEVICE int query_rank() { return rank() / CLUSTER_KEYS; }

// arrive_at_cluster() and wait_for_cluster() are the halves of a barrier of all threads of the cluster.
DEVICE void arrive_at_cluster() {
  __syncwarp();
  ptx::cluster_arrive();
}
DEVICE void wait_for_cluster() {
  __syncwarp();
  ptx::cluster_wait();
}
DEVICE void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

// A piece is what blocks exchange of a sum: 16 rows and PIECE_COLUMNS columns of it, a warp's fragment.
constexpr int PIECE_COLUMNS = 32, PIECE = PIECE_COLUMNS / 2, PIECE_BYTES = PIECE * WARP * sizeof(float);

// Pieces are those of a matrix that the result has: `rows` of them below each other, `columns` side by side.
struct Pieces {
  int rows, columns;

  DEVICE Pieces(int num_rows, int most_rows, int num_columns)
      : rows(ceil_div(clamped(num_rows, most_rows), 16)), columns(ceil_div(num_columns, PIECE_COLUMNS)) {}
  DEVICE int count() const { return rows * columns; }
};

// ClusterSum adds up sums of BLOCKS thread blocks: each block adds every BLOCKS-th piece, of which it gets each
// block's.
template <int BLOCKS>
struct ClusterSum {
  unsigned char* memory;       // in shared memory: (pieces that a block adds, BLOCKS, PIECE_BYTES)
  int own, first_rank, apart;  // this block's number, the rank of block 0, and that of block 1 less it

  // send() sends fragments of this block's sum, which begin at a row and a column of its matrix. `first` is the number
  // of the matrix's first piece.
  template <int FRAGMENTS, int N>
  DEVICE void send(const float (&x)[FRAGMENTS][N], int first, const Pieces& pieces, int row, int column) const {
    static_assert(N % PIECE == 0, "whole pieces");
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
      for (int part = 0; part < N / PIECE; part++) {
        const int at_row = row / 16 + f, at_column = column / PIECE_COLUMNS + part;
        if (at_row >= pieces.rows || at_column >= pieces.columns) continue;
        const int piece = first + at_row * pieces.columns + at_column;
        const u32 to = ptx::cluster_address(ptx::shared_address(place(piece / BLOCKS, own)) + lane() * sizeof(float4),
                                            first_rank + piece % BLOCKS * apart);
#pragma unroll
        for (int e = 0; e < PIECE; e += 4) {
          const float* four = &x[f][part * PIECE + e];
          ptx::store_cluster_x4(to + e * WARP * sizeof(float), four[0], four[1], four[2], four[3]);
        }
      }
    }
  }

  // add() calls write(piece, sum) for the pieces of this warp, when all blocks have sent theirs.
  template <class Write>
  DEVICE void add(int num_pieces, const Write& write) const {
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i * BLOCKS + own < num_pieces; i += NUM_WARPS) {
      float sum[PIECE];
      clear(sum);
#pragma unroll 2
      for (int block = 0; block < BLOCKS; block++) {
        const float4* from = reinterpret_cast<const float4*>(place(i, block)) + lane();
#pragma unroll
        for (int e = 0; e < PIECE; e += 4) {
          const float4 four = from[e / 4 * WARP];
          sum[e] += four.x, sum[e + 1] += four.y, sum[e + 2] += four.z, sum[e + 3] += four.w;
        }
      }
      write(i * BLOCKS + own, sum);
    }
  }

 private:
  DEVICE unsigned char* place(int i, int block) const { return memory + (i * BLOCKS + block) * PIECE_BYTES; }
};
using DqSum = ClusterSum<CLUSTER_KEYS>;
using KeySum = ClusterSum<CLUSTER_QUERIES>;

// SUM_BYTES is the shared memory for the sums of a step's dq and, in the end, of dk with dv behind it, or (ADDS_APART)
// of dk before dv.
DEVICE constexpr int sum_bytes(int blocks, int rows, int columns) {
  const int pieces = rows / 16 * (columns / PIECE_COLUMNS);
  return blocks == 1 ? 0 : (pieces + blocks - 1) / blocks * blocks * PIECE_BYTES;
}
constexpr int KEY_COLUMNS = !ADDS_APART ? HEAD_DIM + HEAD_DIM_V : HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
constexpr int DQ_SUM_BYTES = sum_bytes(CLUSTER_KEYS, BLOCK_M, HEAD_DIM),
              KEY_SUM_BYTES = sum_bytes(CLUSTER_QUERIES, BLOCK_N, KEY_COLUMNS),
              SUM_BYTES = DQ_SUM_BYTES > KEY_SUM_BYTES ? DQ_SUM_BYTES : KEY_SUM_BYTES;

// SumStorage is the room of a cluster's sums; without a cluster it takes none.
template <int BYTES>
struct SumStorage {
  alignas(16) unsigned char bytes[BYTES];
  DEVICE unsigned char* sums() { return bytes; }
};
template <>
struct SumStorage<0> {
  DEVICE unsigned char* sums() { return nullptr; }
};

// write_piece() writes piece `number` of a matrix whose first row is `row` of `data` (rows, head_dim), times a factor.
DEVICE void write_piece(int number, const Pieces& pieces, Element* data, i64 row_stride, int row, int len, int rows,
                        int head_dim, const float (&x)[PIECE], float scale) {
  const int column = number % pieces.columns * PIECE_COLUMNS;
  const float factor[2] = {scale, scale};
  write_fragment(data + column, row_stride, row + number / pieces.columns * 16 + fragment_row(), len, rows,
                 head_dim - column, x, factor);
}

// seen_queries() are the tiles of queries of a head that see some key of any block.
DEVICE Blocks seen_queries(const AttentionParams& p, const Sequence& s, int head) {
  return blocks_of_queries(p, s, head, 0, BLOCK_M, BLOCK_N * CLUSTER_KEYS);
}

// ClusterQueryTileIterator iterates over every CLUSTER_QUERIES-th tile of queries, of all query heads of the group,
// that sees some key of any block. Each head has as many, as there are no lists.
struct ClusterQueryTileIterator {
  int first_head, begin, count;  // a head's tiles are [begin, begin + count)
  int number, end;               // the current tile among those of all heads, and one past the last

  DEVICE ClusterQueryTileIterator(const AttentionParams& p, const Work& work)
      : first_head(work.head * group_size(p)), number(query_rank()) {
    const Blocks seen = seen_queries(p, work.sequence, first_head);
    begin = seen.block;
    count = larger(seen.end - seen.block, 0);
    end = count * group_size(p);
  }
  DEVICE int head() const { return first_head + number / count; }
  DEVICE int block() const { return begin + number % count; }
  DEVICE bool done() const { return number >= end; }
  DEVICE void advance() { number += CLUSTER_QUERIES; }
  // ends_early() tells whether other blocks have one step more than this one has.
  DEVICE bool ends_early() const { return end % CLUSTER_QUERIES != 0 && query_rank() >= end % CLUSTER_QUERIES; }
};
