// Which tiles of keys a persistent thread block takes, and which queries it walks for each.
#pragma once
#include "../blocks.cuh"
#include "schedule.cuh"

// KV heads of all sequences; packed sequences are one.
__device__ __forceinline__ u32 num_key_images(const AttentionParams& p) {
  return p.cu_seqlens_q == nullptr ? p.num_heads_kv * p.batch : p.num_heads_kv;
}

struct KeyWork : Work {
  bool unseen;               // by all queries
  u32 stage, phase;          // of the ring that brought it: read back, they take no registers meanwhile
  u32 key_stage, key_phase;  // the same of the keys, beside a bias
};

// Tiles of one head are neighbours. With a window they come in groups of heads whose queries fit in L2, and in each
// group the first keys, which most queries see if it is causal, come first. LAST_HEADS: the last heads alone make a
// group, so that thread blocks end together.
template <bool LAST_HEADS>
__device__ __forceinline__ Work key_work_at(const AttentionParams& p, u32 index) {
  const u32 num_tiles = p.num_tiles;
  u32 tile = index % num_tiles, image = index / num_tiles;
  if constexpr (HAS_WINDOW) {
    const u32 together = p.heads_together;
    const u32 images = num_key_images(p);
    const u32 group = LAST_HEADS ? images - min(together, images) : index / (num_tiles * together) * together;
    if (image >= group) {
      const u32 in_group = index - group * num_tiles;
      const u32 heads = min(together, images - group);
      tile = in_group / heads;
      image = group + in_group % heads;
    }
  }
  if (p.cu_seqlens_q != nullptr) return packed_work<true>(p, BLOCK_N, tile, image);
  return {sequence_of(p, image / p.num_heads_kv), static_cast<int>(image % p.num_heads_kv), static_cast<int>(tile)};
}

// Thread blocks that wait for each other take even their first tile when they run: what a tile waits for has been taken
// before, by a block that runs.
__device__ __forceinline__ u32 first_key_index(const AttentionParams& p) {
  return DETERMINISTIC && p.dq_turns != nullptr ? atomicAdd(p.dq_turns, 1) : blockIdx.x;
}
__device__ __forceinline__ u32 next_key_index(const AttentionParams& p, u32 index, u32 total) {
  return DETERMINISTIC && p.dq_turns != nullptr ? atomicAdd(p.dq_turns, 1) : next_index(p, index, total);
}

// The tiles of queries, of all heads of the group, that see some key of a tile. If sums of dq have an order, that is
// the order of the keys, and queries are walked from the last to the first: tiles of keys that are taken one after the
// other then come to each query one after the other, causal or not, and hardly wait.
struct QueryWalk {
  const AttentionParams& p;
  const Sequence& sequence;
  int tile, head, end_head;
  Blocks blocks;
  int first_block;

  __device__ __forceinline__ QueryWalk(const AttentionParams& p, const Work& work)
      : p(p),
        sequence(work.sequence),
        tile(work.tile),
        head(work.head * (p.num_heads_q / p.num_heads_kv)),
        end_head(head + p.num_heads_q / p.num_heads_kv),
        blocks(of_head()),
        first_block(blocks.block) {
    skip();
  }
  __device__ __forceinline__ int block() const {
    return DETERMINISTIC ? first_block + blocks.end - 1 - blocks.block : blocks.block;
  }
  __device__ __forceinline__ int first_row() const { return block() * BLOCK_M; }
  __device__ __forceinline__ bool done() const { return head == end_head; }
  __device__ __forceinline__ void advance() {
    blocks.advance();
    skip();
  }
  // How many tiles of keys add to dq of the current tile before this one.
  __device__ __forceinline__ int turn() const {
    return DETERMINISTIC ? tile - blocks_of_keys(p, sequence, head, block(), BLOCK_M, BLOCK_N).block : 0;
  }

 private:
  __device__ __forceinline__ Blocks of_head() const {
    return blocks_of_queries(p, sequence, head, tile, BLOCK_M, BLOCK_N);
  }
  __device__ __forceinline__ void skip() {
    while (blocks.done() && ++head < end_head) {
      blocks = of_head();
      first_block = blocks.block;
    }
  }
};
static_assert(!DETERMINISTIC || !HAS_BLOCK_MASK, "a list is walked forwards");
