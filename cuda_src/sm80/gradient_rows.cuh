// Tiles of queries by their numbers, and the sum of dq: numbered tiles of BLOCK_M queries whose elements have the order
// of the fragments that are added to them.
#pragma once
#include "../sequence.cuh"
#include "../sm90/ptx.cuh"
#include "tile.cuh"

// A warp's part of a tile's dq: DQ_FRAGMENTS * 16 queries and some of the columns.
constexpr int DQ_WARPS_M = BLOCK_M / (DQ_FRAGMENTS * 16), DQ_WARPS_N = NUM_WARPS / DQ_WARPS_M;
constexpr int DQ_COLUMNS = HEAD_DIM / DQ_WARPS_N;
static_assert(DQ_WARPS_M * DQ_WARPS_N == NUM_WARPS && DQ_COLUMNS % 32 == 0, "how dq is divided");

// The number of a tile of queries; packed: its slot (packed_work of sequence.cuh).
__device__ __forceinline__ i64 query_tile(const AttentionParams& p, const Sequence& s, int head, int tile) {
  if (p.cu_seqlens_q == nullptr) {
    return (static_cast<i64>(s.batch) * p.num_heads_q + head) * p.num_query_tiles + tile;
  }
  return static_cast<i64>(head) * p.num_query_tiles + s.row_q / BLOCK_M + (s.batch + 1) + tile;
}

// Element e of a fragment's DQ_COLUMNS / 2 is at fragment_sum_at + sum_offset(e): side by side for a warp's lanes, in
// the width of the additions.
constexpr int ADDED = VECTOR_ADDS ? 4 : 1;
__device__ __forceinline__ constexpr int sum_offset(int e) { return e / ADDED * ADDED * WARP + e % ADDED; }
__device__ __forceinline__ float* fragment_sum_at(const AttentionParams& p, i64 tile, int f) {
  const i64 fragment = (tile * NUM_WARPS + threadIdx.x / WARP) * DQ_FRAGMENTS + f;
  return p.dq_sum + fragment * (16 * DQ_COLUMNS) + lane() * ADDED;
}

__device__ __forceinline__ void add_fragment(float* sum, const float (&x)[DQ_COLUMNS / 2]) {
#pragma unroll
  for (int e = 0; e < DQ_COLUMNS / 2; e += ADDED) {
    if constexpr (VECTOR_ADDS) {
      ptx::add_f32_x4(sum + sum_offset(e), x[e], x[e + 1], x[e + 2], x[e + 3]);
    } else {
      atomicAdd(sum + sum_offset(e), x[e]);
    }
  }
}
