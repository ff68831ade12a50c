// What the warpgroups are handed with a tile, and with each tile of its keys.
#pragma once
#include "parts.cuh"
#include "schedule.cuh"

// What the scheduling thread hands on: a tile, whether no key is visible to it (told with a block mask), and whether
// it is done again carefully (hidden_values.cuh).
struct GivenWork : PartialWork {
  bool empty = true, careful = false;
};
constexpr int NO_WORK = -2;  // in place of a tile

// Tiles of keys as the warpgroups meet them. With a block mask the loading thread, who walks its list, says with every
// tile of keys which one it is: (tile << 2) | last << 1 | partial.
struct GivenBlocks {
  int block, next, end;
  bool partial = false;

  __device__ __forceinline__ GivenBlocks(const AttentionParams& p, const GivenWork& work)
      : next(0), end(work.empty ? 0 : 1) {
    if constexpr (!HAS_BLOCK_MASK) {
      const Blocks blocks = blocks_of_part(p, work);
      next = blocks.block;
      end = blocks.end;
    }
  }

  // Leaves those that `rows` queries see, of which tile `tile` is one.
  __device__ __forceinline__ void limit(const AttentionParams& p, const GivenWork& work, int tile, int rows) {
    const Blocks own = blocks_of_keys(p, work.sequence, work.head, tile, rows, BLOCK_N);
    next = larger(own.block, next);
    end = smaller(own.end, end);
  }

  __device__ __forceinline__ bool done() const { return next >= end; }

  template <class KeyRing>
  __device__ __forceinline__ void take(const KeyRing& keys, const int* entries) {
    if constexpr (HAS_BLOCK_MASK) {
      keys.wait();
      const int entry = entries[keys.stage];
      block = entry >> 2;
      next = entry >> 1 & 1;
      partial = entry & 1;
    } else {
      block = next++;
    }
  }
};
