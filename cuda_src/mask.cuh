// Which elements are visible: one predicate for an element, one for a whole tile. Shared by all families.
#pragma once
#include "sequence.cuh"

// Keys may be hidden one by one, so that only the scores tell which keys of a tile are seen.
constexpr bool HIDES_ANYWHERE = HAS_MASK || HAS_BIAS || HAS_BLOCK_MASK;
constexpr int CANONICAL = 64;  // blocks of a BlockMask's own store

// One (sequence, query head).
struct Mask {
  int len_q, len_k, diagonal, left, right;
  const u8* mask;  // at (batch, head)
  i64 mask_row_stride, mask_column_stride;
  int mask_last_row, mask_last_column;
  const int* slots;  // at (batch, head)
  const u32* bits;
  int slot_rows, slot_columns;

  __device__ __forceinline__ Mask(const AttentionParams& p, const Sequence& s, int head) {
    len_q = s.len_q;
    len_k = s.len_k;
    diagonal = s.diagonal();
    left = p.window_left;
    right = p.window_right;
    if constexpr (HAS_MASK) {
      mask = p.mask.data + s.batch_or_0() * p.mask.batch_stride + head * p.mask.head_stride;
      mask_row_stride = p.mask.row_stride;
      mask_column_stride = p.mask.column_stride;
      mask_last_row = static_cast<int>(p.mask.num_rows - 1);
      mask_last_column = static_cast<int>(p.mask.num_columns - 1);
    }
    if constexpr (HAS_BLOCK_MASK) {
      const i64 grid = s.batch_or_0() * p.block_batch_stride + head * p.block_head_stride;
      slots = p.block_slots + grid * p.slot_rows * p.slot_columns;
      bits = p.block_bits;
      slot_rows = p.slot_rows;
      slot_columns = p.slot_columns;
    }
  }

  __device__ __forceinline__ bool inside(int i, int j) const { return i < len_q && j < len_k; }

  __device__ __forceinline__ bool visible(int i, int j) const {
    if (!inside(i, j)) return false;
    if constexpr (HAS_WINDOW) {
      const int d = j - i - diagonal;
      if (d < -left || d > right) return false;
    }
    if constexpr (HAS_MASK) {
      if (!in_mask(i, j)) return false;
    }
    if constexpr (HAS_BLOCK_MASK) return in_block(i, j);
    return true;
  }

  __device__ __forceinline__ bool in_mask(int i, int j) const {
    return mask[smaller(i, mask_last_row) * mask_row_stride + smaller(j, mask_last_column) * mask_column_stride] != 0;
  }

  struct Range {
    int begin, end;
  };

  // Columns that lengths and window leave to row i.
  __device__ __forceinline__ Range columns(int i) const {
    if constexpr (HAS_WINDOW) return {larger(i + diagonal - left, 0), smaller(i + diagonal + right + 1, len_k)};
    return {0, len_k};
  }

  // Rows that lengths and window leave to column j.
  __device__ __forceinline__ Range rows(int j) const {
    const int end = j < len_k ? len_q : 0;
    if constexpr (HAS_WINDOW) return {larger(j - diagonal - right, 0), smaller(j - diagonal + left + 1, end)};
    return {0, end};
  }

  __device__ __forceinline__ bool in_block(int i, int j) const { return (block_word(i, j) >> (j % 32)) & 1; }

  // The block mask's bits of row i in the 32 columns around j that begin at a multiple of 32.
  __device__ __forceinline__ u32 block_word(int i, int j) const {
    const int row = i / CANONICAL, column = j / CANONICAL;
    if (row >= slot_rows || column >= slot_columns) return 0;
    const int slot = slots[static_cast<i64>(row) * slot_columns + column];
    if (slot < 0) return slot == -2 ? 0xffffffffu : 0;
    return bits[(static_cast<i64>(slot) * CANONICAL + i % CANONICAL) * (CANONICAL / 32) + j % CANONICAL / 32];
  }

  // Whether rows [i, i + m) x columns [j, j + n) need no test of lengths and window.
  __device__ __forceinline__ bool wholly_inside(int i, int m, int j, int n) const {
    const int last_i = i + m - 1, last_j = j + n - 1;
    if (!inside(last_i, last_j)) return false;
    return !HAS_WINDOW || (j - last_i - diagonal >= -left && last_j - i - diagonal <= right);
  }

  // Whether columns [j, j + n) are wholly in columns(row) of all rows in [i, i + m) that are in use.
  __device__ __forceinline__ bool columns_inside(int i, int m, int j, int n) const {
    return columns(smaller(i + m, len_q) - 1).begin <= j && j + n <= columns(i).end;
  }

  // Whether lengths and window hide all of rows [i, i + m) x columns [j, j + n).
  __device__ __forceinline__ bool wholly_outside(int i, int m, int j, int n) const {
    if (!inside(i, j)) return true;
    return HAS_WINDOW && (j + n - 1 - i - diagonal < -left || j - (i + m - 1) - diagonal > right);
  }
};
