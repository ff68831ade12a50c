// This header says where Hopper's backward kernels keep lse and delta of each tile of BLOCK_M queries, numbered by
// query_tile(), and its float32 sum of dq, in the order of the fragments that are added to it. It also has the protocol
// by which several tiles of keys add to one sum. rows.cu prepares these arrays and converts the sums in the end.
#include "../wgmma.cuh"

// A tile's dq is computed in DQ_PIECES pieces of 64 queries and DQ_COLUMNS columns: a piece has some of the queries, or
// some of the columns.
constexpr bool DQ_BY_QUERIES = BLOCK_M > ROWS_OF_WARPGROUP;
static_assert(!DQ_BY_QUERIES || (BLOCK_M == DQ_PIECES * ROWS_OF_WARPGROUP && DQ_COLUMNS == HEAD_DIM),
              "pieces of queries");
static_assert(DQ_BY_QUERIES || (DQ_PIECES * DQ_COLUMNS >= HEAD_DIM && DQ_COLUMNS % PANEL == 0), "pieces of columns");
// DQ_PIECE and DQ_TILE are the elements of a piece, and of a tile.
constexpr int DQ_PIECE = DQ_COLUMNS * ROWS_OF_WARPGROUP, DQ_TILE = DQ_PIECES * DQ_PIECE;

// ds_unit() is the unit in which gradients of scores and delta stand, which dk and dq are multiplied by at the end:
// with dropout that saves a product for each element. Where they are written as dbias they stand for themselves.
DEVICE float ds_unit(const AttentionParams& p) { return WRITES_DBIAS ? 1 : static_cast<float>(p.ds_unit); }

// WRITES_DQ: one tile of keys, or a pair's two, has all keys. Then dq of a tile of queries is complete with its only
// step, which writes it in 16 bits: there are no sums, and no kernel behind.
static_assert(!WRITES_DQ || !(HAS_BLOCK_MASK || WIDE_RESULTS), "steps write rows of 16 bits that a range of tiles has");

struct alignas(16) FourFloats {
  float x[4];
};

// Where sums have an order, a tile of queries has DQ_SUMS sums, which take its additions alternately.
static_assert(DETERMINISTIC || DQ_SUMS == 1, "additions without an order need not wait");

// dq_place() is the place of a thread's first four elements of a piece; its next four are WARP places behind. The
// warps' elements lie one after the other.
DEVICE int dq_place() { return threadIdx.x % WARPGROUP / WARP * (DQ_COLUMNS / 8 * WARP) + lane(); }
DEVICE FourFloats* dq_sum_at(const AttentionParams& p, i64 sum, int piece) {
  return reinterpret_cast<FourFloats*>(p.dq_sum + sum * DQ_TILE + piece * DQ_PIECE) + dq_place();
}

// QueryPlace is where a tile of queries, given by its query_tile(), lies in arrays of sequences that are not packed.
struct QueryPlace {
  int row, head, batch;

  DEVICE QueryPlace(const AttentionParams& p, i64 number) {
    const u32 batch_head = number / p.num_query_tiles;
    row = static_cast<int>(number % p.num_query_tiles) * BLOCK_M;
    head = batch_head % p.num_heads_q;
    batch = batch_head / p.num_heads_q;
  }
};

// dq_order_at() counts how many tiles of keys have added to a piece of a sum; without an order it tells how far the
// first of them is (take_sum).
DEVICE int* dq_order_at(const AttentionParams& p, i64 sum, int piece) {
  return p.dq_order + 1 + sum * DQ_PIECES + piece;
}

// wait_for_earlier_additions() waits until all additions that come before have arrived.
DEVICE void wait_for_earlier_additions(const AttentionParams& p, i64 sum, int piece, int place_in_order) {
  while (DETERMINISTIC && ptx::load_acquire(dq_order_at(p, sum, piece)) != place_in_order) {
  }
}
DEVICE void signal_addition(const AttentionParams& p, i64 sum, int piece) {
  ptx::add_release(dq_order_at(p, sum, piece), 1);
}

// TAKES_SUMS: where FIRST_ADDITION_STORES is set nobody clears sums, and the first addition is stored instead. Without
// an order the first is whoever takes the sum; others wait until its piece has arrived.
constexpr bool TAKES_SUMS = FIRST_ADDITION_STORES && !DETERMINISTIC;
constexpr int NOT_STARTED = 0, TAKEN = 1, STORED = 2;  // signal_addition() leads from TAKEN to STORED
DEVICE int take_sum(const AttentionParams& p, i64 sum, int piece) {
  return atomicCAS(dq_order_at(p, sum, piece), NOT_STARTED, TAKEN);
}
DEVICE void wait_until_stored(const AttentionParams& p, i64 sum, int piece) {
  // No acquire is needed: only L2 touches a sum.
  while (ptx::load_volatile(dq_order_at(p, sum, piece)) != STORED) {
  }
}

// DQ_BY_HEADS: dq of one head is written while tiles of keys of other heads are still computed.
constexpr bool DQ_BY_HEADS = PING_PONG;
// warps_done_at() counts, for the KV head whose queries have this tile, how many adding warps have come to the end of a
// tile of keys: DQ_PIECES for each tile.
DEVICE int* warps_done_at(const AttentionParams& p, i64 number) {
  const i64 num_batch_heads = num_batch_heads_q(p);
  const u32 batch_head = static_cast<u32>(number) / p.num_query_tiles / (p.num_heads_q / p.num_heads_kv);
  return dq_order_at(p, num_batch_heads * p.num_query_tiles * DQ_SUMS, 0) + batch_head;
}
// chunks_taken() is the last word: how many chunks of sums the kernel behind has taken.
DEVICE int* chunks_taken(const AttentionParams& p) {
  return warps_done_at(p, p.num_query_tiles * num_batch_heads_q(p));
}
