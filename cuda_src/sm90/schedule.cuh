// Which tiles a persistent thread block computes.
#pragma once
#include "../sequence.cuh"

// Tiles in the order of their index, dealt to the thread blocks in rounds, every other round in the opposite
// direction: where the longest tiles come first, this balances the sums.
//
// Tiles of one head are neighbours, so that blocks that run together share keys in L2. With a window they come in
// groups of heads whose keys fit in L2, and in each group the last queries, whose rows are the longest, come first.
struct Schedule {
  u32 round, num_tiles, total;

  __device__ __forceinline__ explicit Schedule(const AttentionParams& p) : round(0), num_tiles(p.num_tiles) {
    total = num_tiles * num_images(p);
  }

  // Heads of all sequences; packed sequences are one.
  static __device__ __forceinline__ u32 num_images(const AttentionParams& p) {
    return p.cu_seqlens_q == nullptr ? p.num_heads_q * p.batch : p.num_heads_q;
  }

  __device__ __forceinline__ u32 index() const {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  // A round that is not full may end before this block's turn, so rounds are counted, not tiles.
  __device__ __forceinline__ bool done() const { return round * gridDim.x >= total; }
  __device__ __forceinline__ bool has_tile() const { return index() < total; }

  __device__ __forceinline__ Work work(const AttentionParams& p) const {
    u32 tile, image;
    if constexpr (HAS_WINDOW) {
      const u32 group = index() / (num_tiles * p.heads_together) * p.heads_together;
      const u32 in_group = index() - group * num_tiles;
      const u32 heads = umin(p.heads_together, num_images(p) - group);
      tile = num_tiles - 1 - in_group / heads;
      image = group + in_group % heads;
    } else {
      tile = index() % num_tiles;
      image = index() / num_tiles;
    }
    if (p.cu_seqlens_q != nullptr) return packed_work<false>(p, BLOCK_M, tile, image);
    return {sequence_of(p, image / p.num_heads_q), static_cast<int>(image % p.num_heads_q), static_cast<int>(tile)};
  }

  __device__ __forceinline__ void advance() { round++; }

 private:
  static __device__ __forceinline__ u32 umin(u32 a, u32 b) { return a < b ? a : b; }
};
