// This header decides which scores are visible and which tiles a thread block visits, for every mask that there is:
// lengths, causal and window, a dense mask, and a block mask. Before a loop, lengths and window leave a range of tiles
// and a block mask a list; in the loop, tiles that are wholly visible skip the test of their elements. Block-sparse
// lists follow FlashAttention's block-sparse variant (Dao et al. 2022, section 3.3), with exact bits inside partial
// blocks.
#include "../params.cuh"
#include "options.cuh"
#include "user.cuh"

// WORDS_OF_ROW is the number of 32-bit words in a row of a block of a BlockMask's canonical store.
constexpr int WORDS_OF_ROW = CANONICAL / 32;
constexpr int HIDDEN_SLOT = HIDDEN, VISIBLE_SLOT = VISIBLE;

// add_bits() adds to `sum` one bit for each of 4 bytes that is not 0, shifted left by 7. The weights 0x08040201 put the
// four bits into the low half of a byte, 0x80402010 into its high half. __dp4a does it in one instruction: each byte is
// first reduced to its bit 7.
DEVICE u32 add_bits(u32 bytes, u32 weights, u32 sum) {
  const u32 set = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  return __dp4a(set, weights, sum);
}
// bits_of() gives one bit for each of 16 or 32 bytes: set where the byte is not 0.
DEVICE u32 bits_of(uint4 x) {
  const u32 a = add_bits(x.y, 0x80402010u, add_bits(x.x, 0x08040201u, 0));
  const u32 b = add_bits(x.w, 0x80402010u, add_bits(x.z, 0x08040201u, 0));
  return a >> 7 | b << 1;
}
DEVICE u32 bits_of(uint4 low, uint4 high) { return bits_of(low) | bits_of(high) << 16; }

// Mask answers for one (sequence, query head) whether query i sees key j.
struct Mask {
  int len_q, len_k, diagonal, left, right;
  const u8* mask;  // (seqlen_q, seqlen_k) at this (batch, head), nonzero where visible; a broadcast axis has stride 0
  i64 mask_row_stride, mask_column_stride;
  int mask_last_row, mask_last_column;
  const int* slots;  // (slot_rows, slot_columns) of the block mask at this (batch, head)
  const u32* bits;   // (num_partial, 64, 2): block_bits
  int slot_rows, slot_columns;
  RuleIf<HAS_MASK_MOD> user;

  DEVICE Mask(const AttentionParams& p, const Sequence& s, int head) : user(p, s, head) {
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

  DEVICE bool inside(int i, int j) const { return i < len_q && j < len_k; }

  // visible() is the definition of the mask: whether query i sees key j.
  DEVICE bool visible(int i, int j) const {
    if (!inside(i, j)) return false;
    if constexpr (HAS_WINDOW) {
      const int d = j - i - diagonal;
      if (d < -left || d > right) return false;
    }
    if constexpr (HAS_MASK) {
      if (!in_mask(i, j)) return false;
    }
    if constexpr (ASKS_ELEMENTS) {
      if (!in_rules(i, j)) return false;
    }
    if constexpr (HAS_BLOCK_MASK) return in_block(i, j);
    return true;
  }

  // in_rules() tells whether the rules that are asked element by element let (i, j) be seen.
  DEVICE bool in_rules(int i, int j) const { return user.visible(i, j); }

  // in_mask() and in_block() tell what the dense mask and the block mask say of (i, j).
  DEVICE bool in_mask(int i, int j) const {
    return mask[smaller(i, mask_last_row) * mask_row_stride + smaller(j, mask_last_column) * mask_column_stride] != 0;
  }

  // in_vectors() tells whether columns j to j + 31 of each row are two aligned 16-byte vectors in memory; j is a
  // multiple of 16.
  DEVICE bool in_vectors(int j) const {
    return (reinterpret_cast<u64>(mask) | mask_row_stride) % sizeof(uint4) == 0 && mask_column_stride == 1 &&
           j + 31 <= mask_last_column;
  }
  DEVICE const u8* mask_row(int i) const { return mask + smaller(i, mask_last_row) * mask_row_stride; }
  // mask_word() gives the bits of columns j to j + 31 of row i, whatever the strides.
  DEVICE u32 mask_word(int i, int j) const {
    const u8* line = mask_row(i);
    if (mask_column_stride == 0) return *line != 0 ? 0xffffffffu : 0;
    u32 word = 0;
#pragma unroll 8
    for (int e = 0; e < 32; e++) {
      word |= (line[smaller(j + e, mask_last_column) * mask_column_stride] != 0 ? 1u : 0u) << e;
    }
    return word;
  }

  struct Range {
    int begin, end;
  };

  // columns() gives the range of keys that lengths and window leave to query i.
  DEVICE Range columns(int i) const {
    if constexpr (HAS_WINDOW) return {larger(i + diagonal - left, 0), smaller(i + diagonal + right + 1, len_k)};
    return {0, len_k};
  }

  // rows() gives the range of queries that lengths and window leave to key j.
  DEVICE Range rows(int j) const {
    const int end = j < len_k ? len_q : 0;
    if constexpr (HAS_WINDOW) return {larger(j - diagonal - right, 0), smaller(j - diagonal + left + 1, end)};
    return {0, end};
  }

  DEVICE bool in_block(int i, int j) const {
    const int slot = slot_at(i, j);
    // The word is chosen by a conditional expression, not by an early return: a branch takes registers.
    const u32 word =
        slot < 0 ? (slot == VISIBLE_SLOT ? 0xffffffffu : 0)
                 : (bits + (static_cast<i64>(slot) * CANONICAL + i % CANONICAL) * WORDS_OF_ROW)[j % CANONICAL / 32];
    return word >> j % 32 & 1;
  }

  // slot_at() gives the slot of the 64 x 64 block that holds (i, j); blocks beyond the grid are hidden.
  DEVICE int slot_at(int i, int j) const {
    const int row = i / CANONICAL, column = j / CANONICAL;
    return row < slot_rows && column < slot_columns ? slots[static_cast<i64>(row) * slot_columns + column]
                                                    : HIDDEN_SLOT;
  }

  // wholly_inside() tells whether rows [i, i + m) x columns [j, j + n) need no test of lengths and window.
  DEVICE bool wholly_inside(int i, int m, int j, int n) const {
    const int last_i = i + m - 1, last_j = j + n - 1;
    if (!inside(last_i, last_j)) return false;
    return !HAS_WINDOW || (j - last_i - diagonal >= -left && last_j - i - diagonal <= right);
  }

  // columns_inside() tells whether columns [j, j + n) are wholly in columns(row) of all rows in [i, i + m) that are in
  // use.
  DEVICE bool columns_inside(int i, int m, int j, int n) const {
    return columns(smaller(i + m, len_q) - 1).begin <= j && j + n <= columns(i).end;
  }

  // wholly_outside() tells whether lengths and window hide all of rows [i, i + m) x columns [j, j + n).
  DEVICE bool wholly_outside(int i, int m, int j, int n) const {
    if (!inside(i, j)) return true;
    return HAS_WINDOW && (j + n - 1 - i - diagonal < -left || j - (i + m - 1) - diagonal > right);
  }
};

// block_bits() gives what a block mask shows of a thread's fragment: bit e is set where element e is visible. Fragment
// rows are queries, or keys in the kernels that keep a tile of keys.
DEVICE u32 block_bits(const AttentionParams& p, int slot, int row, int column) {
  if (slot < 0) return slot == VISIBLE_SLOT ? 0xffffffffu : 0;
  const i64 warp = slot * (CANONICAL / 16) + row % CANONICAL / 16;
  return p.fragment_bits[warp * 32 + threadIdx.x % 32] >> column % CANONICAL / 2;
}

// Blocks iterates over the tiles that a thread block visits. Without a block mask they are a range; with one, the
// entries of a list that lie in the range.
struct Blocks {
  int block, end;   // the current tile, and one past the last
  const int* list;  // with a block mask: the remaining entries (tile << 1) | partial, ascending
  int left;         // how many entries are left
  bool partial;     // the block mask hides some elements of the current tile

  DEVICE Blocks(int first, int last_plus_1, const AttentionParams& p, const Sequence& s, int head, int which_list)
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

  // take() reads the current entry of the list.
  DEVICE void take() {
    block = left > 0 ? *list >> 1 : end;
    partial = left > 0 && (*list & 1);
  }

  DEVICE bool done() const { return block >= end; }
  // count() is the number of tiles left, the current one included.
  DEVICE int count() const { return HAS_BLOCK_MASK ? left : end - block; }

  DEVICE void advance() {
    if constexpr (HAS_BLOCK_MASK) {
      list++;
      left--;
      take();
    } else {
      block++;
    }
  }
};

// range_of_keys() gives the range of tiles of keys that lengths and window leave to a tile of queries.
DEVICE Mask::Range range_of_keys(const AttentionParams& p, const Sequence& s, int tile, int block_m, int block_n) {
  const int row = tile * block_m;
  int begin = 0, end = row < s.len_q ? s.len_k : 0;
  if constexpr (HAS_WINDOW) {
    const int last_row = smaller(row + block_m, s.len_q) - 1;
    begin = larger(begin, row + s.diagonal() - p.window_left);
    end = smaller(end, last_row + s.diagonal() + p.window_right + 1);
  }
  return {begin / block_n, end <= begin ? 0 : ceil_div(end, block_n)};
}

// blocks_of_keys() iterates over the tiles of keys that some query of a tile sees.
DEVICE Blocks blocks_of_keys(const AttentionParams& p, const Sequence& s, int head, int tile, int block_m,
                             int block_n) {
  const Mask::Range range = range_of_keys(p, s, tile, block_m, block_n);
  return Blocks(range.begin, range.end, p, s, head, tile);
}

// blocks_of_queries() iterates over the tiles of queries that see some key of a tile of keys.
DEVICE Blocks blocks_of_queries(const AttentionParams& p, const Sequence& s, int head, int tile, int block_m,
                                int block_n) {
  const int column = tile * block_n;
  int begin = 0, end = column < s.len_k ? s.len_q : 0;
  if constexpr (HAS_WINDOW) {
    const int last_column = smaller(column + block_n, s.len_k) - 1;
    begin = larger(begin, column - s.diagonal() - p.window_right);
    end = smaller(end, last_column - s.diagonal() + p.window_left + 1);
  }
  return Blocks(begin / block_m, end <= begin ? 0 : ceil_div(end, block_m), p, s, head, tile);
}
