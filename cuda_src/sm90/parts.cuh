// Tiles whose keys are split among thread blocks, where tiles alone would leave some of the GPU idle: each part is an
// attention of its own, and merge_parts.cu makes one of them.
#pragma once
#include "../blocks.cuh"
#include "pipeline.cuh"
#include "products.cuh"

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
