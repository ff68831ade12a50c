// This header writes the results of tiles of queries to which lengths and window leave no key, on Hopper: two warps
// that neither load nor schedule write them while the other warps compute. The scheduler hands no such tile on, so a
// tile costs no more than its stores.
#include "scores.cuh"
#include "work.cuh"

// ZEROES_HIDDEN tells whether the kernel has warps for such tiles, if the host says that there may be any
// (HIDES_QUERIES). The warpgroups compute such tiles like all others, and find that they have no keys, where tiles have
// several heads, splits of the keys or a block mask, and where these warps load; so they do where scores take tanh,
// because the large tiles of such kernels leave these warps too few registers.
constexpr bool LEAVES_REGISTERS = CONSUMERS <= 2 || !TAKES_TANH;
constexpr bool ZEROES_HIDDEN =
    HIDES_QUERIES && TEAMS == 1 && !PACKS_HEADS && !SPLITS_KEYS && !HAS_BLOCK_MASK && !COPIES_ROWS && LEAVES_REGISTERS;
// ZEROES_BY_LENGTHS tells whether the kernel also has registers to find out which tiles the lengths of each sequence
// hide. A pair does not: its schedulers agree on a tile in step with the tiles that they hand on, so they hand on all.
constexpr bool ZEROES_BY_LENGTHS = ZEROES_HIDDEN && CONSUMERS <= 2 && PAIR == 1;
constexpr int ZEROING_THREADS = 2 * WARP;

// are_alike() tells whether all sequences have the lengths of the arrays, so that the same tiles of each see no key.
DEVICE bool are_alike(const AttentionParams& p) {
  return p.cu_seqlens_q == nullptr && p.q_lengths == nullptr && p.kv_lengths == nullptr;
}

// LeftOut are the first tiles of each head that see no key, where sequences are alike. The scheduler does not count
// them: a ticket for each would take longer than writing them.
struct LeftOut {
  int tiles, rows;

  DEVICE explicit LeftOut(const AttentionParams& p) : tiles(0), rows(0) {
    if (!ZEROES_HIDDEN || !HAS_WINDOW || !are_alike(p)) return;
    u32 all_rows = p.seqlen_q;
    ptx::forget(all_rows);  // computed anew each time, as the scheduler has few registers
    const int seqlen_q = static_cast<int>(all_rows);
    const int skipped = SKIPS_ROWS ? ceil_div(seqlen_q, ROWS_OF_TILE) * ROWS_OF_TILE - seqlen_q : 0;
    tiles = (clamped(seqlen_q - p.seqlen_k - p.window_right, seqlen_q) + skipped) / ROWS_OF_TILE;
    rows = larger(tiles * ROWS_OF_TILE - skipped, 0);
  }
};

// is_hidden() tells whether a tile with these keys is not handed on. Where sequences are alike, the scheduler counts no
// such tile.
DEVICE bool is_hidden(const AttentionParams& p, const KeyRange& keys) {
  return ZEROES_BY_LENGTHS && !are_alike(p) && keys.begin >= keys.end;
}

// zero_rows() writes the results of rows [row, row + number), of which the first `used` are queries in use: zeros, and
// the lse of a sum that has at most a sink. A row has LANES threads, each with 16 bytes of it.
DEVICE void zero_rows(const AttentionParams& p, i64 batch, i64 row, int head, int number, int used, int thread) {
  constexpr int LANES = HEAD_DIM_V <= 64 ? 8 : HEAD_DIM_V <= 128 ? 16 : 32;
  constexpr int ROWS_AT_ONCE = ZEROING_THREADS / LANES, ELEMENTS = sizeof(uint4) / sizeof(Element);
  const int column = thread % LANES * ELEMENTS, count = clamped(p.head_dim_v - column, ELEMENTS);
  const i64 step = ROWS_AT_ONCE * p.out.row_stride;
  Element* at = p.out.at(batch, row + thread / LANES, head) + column;
  if (count == ELEMENTS && (reinterpret_cast<u64>(at) | step * sizeof(Element)) % sizeof(uint4) == 0) {
#pragma unroll 4
    for (int i = thread / LANES; i < number; i += ROWS_AT_ONCE, at += step) {
      *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
    }
  } else {
#pragma unroll 1
    for (int i = thread / LANES; i < number; i += ROWS_AT_ONCE, at += step) {
#pragma unroll 1
      for (int e = 0; e < count; e++) at[e] = from_accum<Element>(0);
    }
  }
  const float sink = p.sink == nullptr ? -infinity() : p.sink[head];
#pragma unroll 1
  for (int i = thread; i < number; i += ZEROING_THREADS)
    *p.lse.at(batch, row + i, head) = i < used ? sink : -infinity();
}

// zero_hidden_tiles() writes this thread block's share of the tiles that see no key. Heads follow each other, as their
// rows are neighbours in memory.
DEVICE void zero_hidden_tiles(const AttentionParams& p, int thread) {
  const int heads = p.num_heads_q;
  if (are_alike(p)) {
    const int rows = LeftOut(p).rows, tiles = ceil_div(rows, ROWS_OF_TILE), total = tiles * heads * p.batch;
#pragma unroll 1
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      const int place = index / heads, first = place % tiles * ROWS_OF_TILE;
      const int number = smaller(rows - first, ROWS_OF_TILE);
      zero_rows(p, place / tiles, first, index % heads, number, number, thread);
    }
    return;
  }
  if constexpr (ZEROES_BY_LENGTHS) {
    const int tiles = static_cast<int>(p.num_tiles), total = tiles * static_cast<int>(num_batch_heads_q(p));
#pragma unroll 1
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      const int head = index % heads, place = index / heads;
      Work work;
      if (p.cu_seqlens_q == nullptr) {
        work = {sequence_of(p, place / tiles), head, place % tiles};
      } else {
        work = packed_work<false, HAS_PAGES>(p, BLOCK_M, place, head);
      }
      Sequence& s = work.sequence;
      const int skipped = SKIPS_ROWS ? fill_last_tile(s) : 0, first = work.tile * ROWS_OF_TILE;
      const Mask::Range keys = range_of_keys(p, s, work.tile, ROWS_OF_TILE, BLOCK_N);
      if (!is_hidden(p, {keys.begin, keys.end})) continue;
      const int begin = larger(first, skipped);
      zero_rows(p, batch_of(p, s), s.row_q + begin, head, smaller(first + ROWS_OF_TILE, s.rows_q) - begin,
                s.len_q - begin, thread);
    }
  }
}
