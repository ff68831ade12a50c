// Which tiles a persistent thread block computes: one of its threads takes them one after the other and hands them on.
#pragma once
#include "../sequence.cuh"
#include "pipeline.cuh"

// Heads of all sequences; packed sequences are one.
__device__ __forceinline__ u32 num_images(const AttentionParams& p) {
  return p.cu_seqlens_q == nullptr ? p.num_heads_q * p.batch : p.num_heads_q;
}

// Tiles of one head are neighbours, so that blocks that run together share keys in L2. With a window the last queries,
// whose rows are the longest, come first, in the last heads in all of these heads before the next: blocks end together.
__device__ __forceinline__ Work work_at(const AttentionParams& p, u32 index) {
  const u32 num_tiles = p.num_tiles;
  u32 tile = index % num_tiles, image = index / num_tiles;
  if constexpr (HAS_WINDOW) {
    const u32 images = num_images(p), last_heads = images - min(p.heads_together, images);
    if (image >= last_heads) {
      const u32 place = index - last_heads * num_tiles, heads = images - last_heads;
      tile = place / heads;
      image = last_heads + place % heads;
    }
    tile = num_tiles - 1 - tile;
  }
  if (p.cu_seqlens_q != nullptr) return packed_work<false>(p, BLOCK_M, tile, image);
  return {sequence_of(p, image / p.num_heads_q), static_cast<int>(image % p.num_heads_q), static_cast<int>(tile)};
}

// Thread blocks take tiles in order as they become free. Every tile is followed by one ticket, so the last of `total`
// tickets leaves the counter at 0 for the next launch. Without a counter tiles are dealt.
__device__ __forceinline__ u32 take_ticket(const AttentionParams& p) {
  return p.tile_counter == nullptr ? 0 : atomicAdd(p.tile_counter, 1u);
}

__device__ __forceinline__ u32 index_of_ticket(const AttentionParams& p, u32 ticket, u32 index, u32 total) {
  if (p.tile_counter == nullptr) return index + gridDim.x;
  if (ticket + 1 == total) *p.tile_counter = 0;
  return gridDim.x + ticket;
}

__device__ __forceinline__ u32 next_index(const AttentionParams& p, u32 index, u32 total) {
  return index_of_ticket(p, take_ticket(p), index, total);
}

constexpr int WORK_STAGES = 2;
using WorkRing = Ring<WORK_STAGES, sizeof(Work)>;
constexpr int NO_TILE = -1;
