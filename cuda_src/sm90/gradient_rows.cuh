// What the passes over queries and the one over keys share: numbered tiles of BLOCK_M queries with their lse and delta,
// and the sum of dq, in the order of the fragments that are added to it.
#pragma once
#include "products.cuh"

// The number of a tile of queries; packed: its slot (packed_work of sequence.cuh).
__device__ __forceinline__ i64 query_tile(const AttentionParams& p, const Sequence& s, int head, int tile) {
  if (p.cu_seqlens_q == nullptr) {
    return (static_cast<i64>(s.batch) * p.num_heads_q + head) * p.num_query_tiles + tile;
  }
  return static_cast<i64>(head) * p.num_query_tiles + s.row_q / BLOCK_M + (s.batch + 1) + tile;
}

// dq of a tile: each warpgroup has 64 queries, or the tile has no more and each has some of the panels of columns.
constexpr bool DQ_BY_QUERIES = BLOCK_M == CONSUMERS * ROWS_OF_WARPGROUP;
static_assert(DQ_BY_QUERIES || (BLOCK_M == ROWS_OF_WARPGROUP && CONSUMERS == 2), "how dq is divided");
constexpr int DQ_PANELS = DQ_BY_QUERIES ? PANELS : (PANELS + 1) / 2;  // of the first warpgroup
constexpr int DQ_COLUMNS = HEAD_DIM < DQ_PANELS * PANEL ? HEAD_DIM : DQ_PANELS * PANEL;
constexpr int DQ_PART = DQ_COLUMNS * ROWS_OF_WARPGROUP;  // elements of a warpgroup's part; the last may use less
constexpr int DQ_TILE = CONSUMERS * DQ_PART;

struct alignas(16) FourFloats {
  float x[4];
};

// A thread's first four elements; the next four are WARPGROUP behind.
__device__ __forceinline__ FourFloats* dq_sum_at(const AttentionParams& p, i64 tile, int warpgroup) {
  return reinterpret_cast<FourFloats*>(p.dq_sum + tile * DQ_TILE + warpgroup * DQ_PART) + threadIdx.x % WARPGROUP;
}
