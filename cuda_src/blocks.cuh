// Which tiles a thread block visits: what lengths and window leave, and within it a block mask's list.
#pragma once
#include "mask.cuh"

struct Blocks {
  int block, end;   // without a block mask: the current and one past the last tile
  const int* list;  // with one: entries (tile << 1) | partial, ascending
  int left;         // of them
  bool partial;

  __device__ __forceinline__ Blocks(int first, int last_plus_1, const AttentionParams& p, const Sequence& s, int head,
                                    int which_list)
      : block(first), end(last_plus_1), partial(false) {
    if constexpr (HAS_BLOCK_MASK) {
      const i64 grid = s.batch_or_0() * p.block_batch_stride + head * p.block_head_stride;
      const bool covered = s.batch >= 0 && which_list < p.num_lists;
      const i64 index = grid * p.num_lists + which_list;
      list = p.block_list + index * p.list_capacity;
      left = covered ? p.block_count[index] : 0;
      for (; left > 0 && (*list >> 1) < first; left--) list++;
      take();
    }
  }

  __device__ __forceinline__ void take() {
    block = left > 0 ? *list >> 1 : end;
    partial = left > 0 && (*list & 1);
  }

  __device__ __forceinline__ bool done() const { return block >= end; }

  __device__ __forceinline__ void advance() {
    if constexpr (HAS_BLOCK_MASK) {
      list++;
      left--;
      take();
    } else {
      block++;
    }
  }
};

// Tiles of keys that some query in [row, row + block_m) sees.
__device__ __forceinline__ Blocks blocks_of_keys(const AttentionParams& p, const Sequence& s, int head, int tile,
                                                 int block_m, int block_n) {
  const int row = tile * block_m;
  int begin = 0, end = row < s.len_q ? s.len_k : 0;
  if constexpr (HAS_WINDOW) {
    const int last_row = smaller(row + block_m, s.len_q) - 1;
    begin = larger(begin, row + s.diagonal() - p.window_left);
    end = smaller(end, last_row + s.diagonal() + p.window_right + 1);
  }
  return Blocks(begin / block_n, end <= begin ? 0 : ceil_div(end, block_n), p, s, head, tile);
}

// Tiles of queries that see some key in [column, column + block_n).
__device__ __forceinline__ Blocks blocks_of_queries(const AttentionParams& p, const Sequence& s, int head, int tile,
                                                    int block_m, int block_n) {
  const int column = tile * block_n;
  int begin = 0, end = column < s.len_k ? s.len_q : 0;
  if constexpr (HAS_WINDOW) {
    const int last_column = smaller(column + block_n, s.len_k) - 1;
    begin = larger(begin, column - s.diagonal() - p.window_right);
    end = smaller(end, last_column - s.diagonal() + p.window_left + 1);
  }
  return Blocks(begin / block_m, end <= begin ? 0 : ceil_div(end, block_m), p, s, head, tile);
}
