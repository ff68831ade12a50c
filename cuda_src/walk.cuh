// The tiles that a thread block of a gradient kernel walks: of keys, or, OF_KEYS, of queries, by the family's
// QueryWalk.
#pragma once
#include "blocks.cuh"

// The tiles of keys that some query of a tile sees.
struct KeyWalk {
  Blocks blocks;
  int head;

  __device__ __forceinline__ KeyWalk(const AttentionParams& p, const Work& work)
      : blocks(blocks_of_keys(p, work.sequence, work.head, work.tile, BLOCK_M, BLOCK_N)), head(work.head) {}
  __device__ __forceinline__ bool done() const { return blocks.done(); }
  __device__ __forceinline__ void advance() { blocks.advance(); }
};

template <bool>
struct Kind {
  using Walk = KeyWalk;
};
template <>
struct Kind<true> {
  using Walk = QueryWalk;
};
using Walk = Kind<OF_KEYS>::Walk;
