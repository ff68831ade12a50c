// What the warpgroups are handed with a tile, and with each tile of its keys.
#pragma once
#include "../blocks.cuh"
#include "pipeline.cuh"
#include "products.cuh"
#include "schedule.cuh"

// Tiles whose keys are split among thread blocks, where tiles alone would leave some of the GPU idle: each part is an
// attention of its own, and merge_parts.cu makes one of them.
struct PartialWork : Work {
  int part;  // of its keys
};

__device__ __forceinline__ u32 number_of_parts(const AttentionParams& p) { return SPLIT ? p.splits : 1; }

// Tiles of keys that some query of the tile sees, or the part of them.
__device__ __forceinline__ Blocks blocks_of_part(const AttentionParams& p, const PartialWork& work) {
  Blocks blocks = blocks_of_keys(p, work.sequence, work.head, work.tile, BLOCK_M, BLOCK_N);
  if constexpr (SPLIT) {
    const int first = blocks.block, number = larger(blocks.end - first, 0);
    blocks.block = first + number * work.part / p.splits;
    blocks.end = first + number * (work.part + 1) / p.splits;
  }
  return blocks;
}

// Writes the thread's rows `row` and row + 8 of a part's result; rows in [len, rows) are padding.
__device__ __forceinline__ void write_part(const AttentionParams& p, const PartialWork& work, int row,
                                           const float (&out)[HEAD_DIM_V / 2], const float (&factor)[2],
                                           const float (&lse)[2]) {
  const i64 part = static_cast<i64>(work.sequence.batch) * p.splits + work.part;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    if (i >= work.sequence.rows_q) continue;
    const bool used = i < work.sequence.len_q;
    if (lane() % 4 == 0) *p.lse_parts.at(part, i, work.head) = used ? lse[r] : -infinity();
    float* target = p.out_parts.at(part, i, work.head);
#pragma unroll
    for (int e = 2 * r; e < HEAD_DIM_V / 2; e += 4) {
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int column = fragment_column() + column_offset(e + side);
        if (column < p.head_dim_v) target[column] = used ? out[e + side] * factor[r] : 0;
      }
    }
  }
}

// What the scheduling thread hands on: a tile, whether no key is visible to it (told with a block mask), and whether
// it is done again carefully (hidden_values.cuh).
struct GivenWork : PartialWork {
  bool empty = true, careful = false;
};
constexpr int NO_WORK = -2;  // in place of a tile

// Tiles of keys as the warpgroups meet them. With a block mask the loading thread, who walks its list, says with every
// tile of keys which one it is, whether to mask it, and what comes next.
struct GivenBlocks {
  int block, next, end;
  bool masked = false, next_masked = false;

  static __device__ __forceinline__ int entry(int block, bool masked, bool last, bool next_masked) {
    return block << 3 | next_masked << 2 | last << 1 | masked;
  }

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
      block = entry >> 3;
      next_masked = entry >> 2 & 1;
      next = entry >> 1 & 1;
      masked = entry & 1;
    } else {
      block = next++;
    }
  }
};
