// Rows that must not count become 0 in shared memory, since they may hold NaN and 0 * NaN would count: padded queries,
// and keys that no query sees. Beyond the end of an array TMA has written zeros.
#pragma once
#include "../mask.cuh"
#include "products.cuh"

// Rows [begin, end) of a tile count.
struct CountedRows {
  int begin, end;

  __device__ __forceinline__ bool all(int rows) const { return begin <= 0 && end >= rows; }
};

__device__ __forceinline__ CountedRows counted_queries(const AttentionParams& p, const Sequence& s, int first_row) {
  const bool to_the_end = p.cu_seqlens_q == nullptr && s.len_q == p.seqlen_q;
  return {0, to_the_end ? BLOCK_M : s.len_q - first_row};
}

__device__ __forceinline__ CountedRows counted_keys(const AttentionParams& p, const Sequence& s, int first_key) {
  int begin = 0, end = s.len_k;
  if constexpr (HAS_WINDOW) {
    begin = larger(begin, s.diagonal() - p.window_left);
    end = smaller(end, s.len_q + s.diagonal() + p.window_right);
  }
  const bool to_the_end = p.cu_seqlens_q == nullptr && end == p.seqlen_k;
  return {begin - first_key, to_the_end ? BLOCK_N : end - first_key};
}

// By a warp.
template <int ROWS, int NUM_PANELS>
__device__ __forceinline__ void clear_others(u32 tile, CountedRows counted) {
  constexpr int VECTORS = ROW_BYTES / sizeof(uint4);
#pragma unroll 1
  for (int i = lane(); i < ROWS * NUM_PANELS * VECTORS; i += WARP) {
    const int row = i / VECTORS % ROWS;
    if (row >= counted.begin && row < counted.end) continue;
    *static_cast<uint4*>(__cvta_shared_to_generic(tile + i * sizeof(uint4))) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
  __syncwarp();
}
