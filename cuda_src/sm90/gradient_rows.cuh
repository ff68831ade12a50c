// Numbered tiles of BLOCK_M queries with their lse and delta, and the sum of dq, in the order of the fragments that are
// added to it.
#include "products.cuh"

// Dq of a tile is computed in parts of 64 queries and DQ_COLUMNS columns: parts of queries, or of columns.
constexpr bool DQ_BY_QUERIES = BLOCK_M > ROWS_OF_WARPGROUP;
static_assert(!DQ_BY_QUERIES || (BLOCK_M == DQ_PARTS * ROWS_OF_WARPGROUP && DQ_COLUMNS == HEAD_DIM),
              "parts of queries");
static_assert(DQ_BY_QUERIES || (DQ_PARTS * DQ_COLUMNS >= HEAD_DIM && DQ_COLUMNS % PANEL == 0), "parts of columns");
constexpr int DQ_PART = DQ_COLUMNS * ROWS_OF_WARPGROUP, DQ_TILE = DQ_PARTS * DQ_PART;  // elements

// Gradients of scores and delta stand in this unit, which dk and dq are multiplied by at the end: with dropout that
// saves a product for each element. Where they are written as dbias they stand for themselves.
DEVICE float ds_unit(const AttentionParams& p) { return WRITES_DBIAS ? 1 : static_cast<float>(p.ds_unit); }

struct alignas(16) FourFloats {
  float x[4];
};

// If sums have an order, those of a tile, numbered tile by tile, take its additions by turns.
static_assert(DETERMINISTIC || DQ_SUMS == 1, "additions without an order need not wait");

// A thread's first four elements of a part; the next four are WARP behind. Warps have their elements side by side.
DEVICE int dq_place() { return threadIdx.x % WARPGROUP / WARP * (DQ_COLUMNS / 8 * WARP) + lane(); }
DEVICE FourFloats* dq_sum_at(const AttentionParams& p, i64 sum, int part) {
  return reinterpret_cast<FourFloats*>(p.dq_sum + sum * DQ_TILE + part * DQ_PART) + dq_place();
}

// How many parts of dq were added to a sum; without an order, how far its first part is.
DEVICE int* dq_turn_at(const AttentionParams& p, i64 sum, int part) { return p.dq_turns + 1 + sum * DQ_PARTS + part; }

// Until all parts of dq that come before have been added.
DEVICE void wait_for_turn(const AttentionParams& p, i64 sum, int part, int turn) {
  while (DETERMINISTIC && ptx::load_acquire(dq_turn_at(p, sum, part)) != turn) {
  }
}
DEVICE void end_turn(const AttentionParams& p, i64 sum, int part) { ptx::add_release(dq_turn_at(p, sum, part), 1); }

// Where STORES_FIRST nobody clears sums: the first part is stored. Without an order it is that of whoever takes the
// sum; others wait until it has arrived.
constexpr bool TAKES_SUMS = STORES_FIRST && !DETERMINISTIC;
constexpr int NO_PART = 0, TAKEN = 1, STORED = 2;  // end_turn leads from TAKEN to STORED
DEVICE int take_sum(const AttentionParams& p, i64 sum, int part) {
  return atomicCAS(dq_turn_at(p, sum, part), NO_PART, TAKEN);
}
DEVICE void wait_until_stored(const AttentionParams& p, i64 sum, int part) {
  // No acquire, which would empty L1 in every step: L2 alone touches a sum.
  while (*static_cast<volatile int*>(dq_turn_at(p, sum, part)) != STORED) {
  }
}

// Dq of one head is written while tiles of keys of others are under way.
constexpr bool DQ_BY_HEADS = PING_PONG;
// How many have come to the end of a tile of keys, DQ_PARTS to each, of the KV head whose queries have this tile.
DEVICE int* warps_done_at(const AttentionParams& p, i64 number) {
  const i64 images = num_images(p);
  const u32 image = static_cast<u32>(number) / p.num_query_tiles / (p.num_heads_q / p.num_heads_kv);
  return dq_turn_at(p, images * p.num_query_tiles * DQ_SUMS, 0) + image;
}
// The last word: parts of sums that the kernel behind has taken, in chunks.
DEVICE int* chunks_taken(const AttentionParams& p) { return warps_done_at(p, p.num_query_tiles * num_images(p)); }
