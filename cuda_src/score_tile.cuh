// Score, mask and dropout on a register tile of the portable kernels. TRANSPOSED: rows are keys, columns queries.
#pragma once
#include "blocks.cuh"
#include "philox.cuh"
#include "score.cuh"
#include "tile.cuh"

// Turns products into scores, -inf where hidden. In a masked tile seen[column] becomes 1 for every column that some row
// sees; the caller has cleared it and synchronises before it is read.
template <bool TRANSPOSED, int ROWS, int COLUMNS>
__device__ __forceinline__ void score_tile(Accum (&x)[ROWS][COLUMNS], const Score& score, const Mask& mask,
                                           int first_row, int first_column, bool masked, u8* seen) {
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int column = owned_index<COLUMNS>(thread_column(), c);
    bool any = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = first_row + owned_index<ROWS>(thread_row(), r);
      const int i = TRANSPOSED ? first_column + column : row, j = TRANSPOSED ? row : first_column + column;
      if (masked) {
        x[r][c] = mask.visible(i, j) ? score.value(x[r][c], i, j) : -infinity();
        any |= x[r][c] != -infinity();
      } else {
        x[r][c] = score.value(x[r][c], i, j);
      }
    }
    if (masked && any) seen[column] = 1;
  }
}

// Whether a tile takes the masked path. A bias may hide by -inf, so its tiles always do.
__device__ __forceinline__ bool needs_mask(const Mask& mask, const Blocks& blocks, int i, int m, int j, int n) {
  return HAS_MASK || HAS_BIAS || blocks.partial || !mask.wholly_inside(i, m, j, n);
}

// Calls drop(r, c, kept) for every element of the tile.
template <bool TRANSPOSED, int ROWS, int COLUMNS, class Drop>
__device__ __forceinline__ void for_each_kept(const Dropout& dropout, int first_row, int first_column, Drop drop) {
#pragma unroll
  for (int r = 0; r < ROWS / 2; r++) {
#pragma unroll
    for (int c = 0; c < COLUMNS / 2; c++) {
      const int row = first_row + owned_index<ROWS>(thread_row(), r);
      const int column = first_column + owned_index<COLUMNS>(thread_column(), c);
      const u32 kept = TRANSPOSED ? dropout.keep(column, row) : dropout.keep(row, column);
#pragma unroll
      for (int side = 0; side < 4; side++) {
        const int down = side / 2, right = side % 2;
        const int bit = TRANSPOSED ? 2 * right + down : side;
        drop(r + down * (ROWS / 2), c + right * (COLUMNS / 2), (kept >> bit & 1) != 0);
      }
    }
  }
}
