// Rows that must not count become 0 in shared memory, since they may hold NaN and 0 * NaN would count: padded queries,
// and keys that no query sees. Beyond the end of an array TMA has written zeros.
#pragma once
#include "../mask.cuh"
#include "../score.cuh"
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

// What brings the exponent of infinity and NaN, and no other, to the sign bit.
__device__ __forceinline__ u32 to_sign(__nv_bfloat16) { return 0x0080; }
__device__ __forceinline__ u32 to_sign(__half) { return 0x0400; }

// Whose sign bits say which of two elements are not finite.
__device__ __forceinline__ u32 marked_infinite(u32 pair) {
  return (pair & 0x7fff7fffu) + to_sign(Element()) * 0x00010001u;
}
__device__ __forceinline__ u32 marked_infinite(uint4 x) {
  return marked_infinite(x.x) | marked_infinite(x.y) | marked_infinite(x.z) | marked_infinite(x.w);
}
constexpr u32 SIGNS = 0x80008000u;

// Clears the keys that are not finite and that no query sees, by a warp. Both are rare: most tiles are only read once.
template <int NUM_PANELS>
__device__ __forceinline__ void clear_unseen_keys(const AttentionParams& p, const Sequence& s, int head_kv,
                                                  int first_key, u32 tile) {
  const int group = p.num_heads_q / p.num_heads_kv;
  constexpr int VECTORS = ROW_BYTES / sizeof(uint4);
  u32 infinite = 0;
#pragma unroll 2
  for (int i = lane(); i < BLOCK_N * NUM_PANELS * VECTORS; i += WARP) {
    infinite |= marked_infinite(*static_cast<const uint4*>(__cvta_shared_to_generic(tile + i * sizeof(uint4))));
  }
  if (!__any_sync(ALL_LANES, infinite & SIGNS)) return;
#pragma unroll 1
  for (int row = 0; row < BLOCK_N; row++) {
    const auto vector = [&](int i) {
      const u32 address = tile + (i / VECTORS * BLOCK_N + row) * ROW_BYTES + i % VECTORS * sizeof(uint4);
      return static_cast<uint4*>(__cvta_shared_to_generic(address));
    };
    infinite = 0;
    for (int i = lane(); i < NUM_PANELS * VECTORS; i += WARP) infinite |= marked_infinite(*vector(i));
    if (!__any_sync(ALL_LANES, infinite & SIGNS)) continue;
    const int key = first_key + row;
    bool seen = false;
    for (int head = head_kv * group; head < (head_kv + 1) * group; head++) {
      const Mask mask(p, s, head);
      const Score score(p, s, head);
      for (int i = lane(); i < s.len_q && !seen; i += WARP) {
        seen = mask.visible(i, key) && score.value(0, i, key) != -infinity();
      }
    }
    if (__any_sync(ALL_LANES, seen)) continue;
    for (int i = lane(); i < NUM_PANELS * VECTORS; i += WARP) *vector(i) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
  __syncwarp();
}
