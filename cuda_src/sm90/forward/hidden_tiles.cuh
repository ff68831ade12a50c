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
// ZEROES_WHOLE_ROWS tells whether these threads have registers to zero all heads of a row at once.
constexpr bool ZEROES_WHOLE_ROWS = PRODUCER_REGISTERS >= 40;

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

// has_whole_rows() tells whether all heads are zeroed at once: heads of a row, and rows, lie side by side in memory.
DEVICE bool has_whole_rows(const AttentionParams& p) {
  return ZEROES_WHOLE_ROWS && p.out.row_stride == p.num_heads_q * p.head_dim_v && p.out.head_stride == p.head_dim_v;
}

// zero_run() makes neighbouring words zeros.
template <class Word>
DEVICE void zero_run(Element* first, int elements, int thread) {
  Word* at = reinterpret_cast<Word*>(first) + thread;
#pragma unroll(sizeof(Word) == sizeof(uint4) ? 4 : 1)
  for (int left = elements / static_cast<int>(sizeof(Word) / sizeof(Element)) - thread; left > 0;
       left -= ZEROING_THREADS, at += ZEROING_THREADS) {
    *at = Word();
  }
}

// zero_head() makes rows of one head zeros, which lie `stride` elements apart. Each thread has every
// ZEROING_THREADS-th word of all rows, so that none is idle where a row has few words.
template <class Word>
DEVICE void zero_head(Element* first, i64 stride, int rows, int columns, int thread) {
  constexpr int ELEMENTS = sizeof(Word) / sizeof(Element), WORDS = (HEAD_DIM_V + ELEMENTS - 1) / ELEMENTS;
  constexpr int ROWS = ZEROING_THREADS / WORDS, STEP = ZEROING_THREADS % WORDS;
  int left = rows - thread / WORDS, column = thread % WORDS * ELEMENTS;
  Element* at = first + thread / WORDS * stride;
#pragma unroll 1
  while (left > 0) {
    if (column < columns) *reinterpret_cast<Word*>(at + column) = Word();
    at += ROWS * stride;
    left -= ROWS;
    column += STEP * ELEMENTS;
    if (STEP > 0 && column >= WORDS * ELEMENTS) {
      column -= WORDS * ELEMENTS;
      at += stride;
      left--;
    }
  }
}

// zero_rows() writes the results of rows [row, row + number) of a head, or of all heads from head 0 on where these have
// whole rows. The first `used` rows are queries in use. Results are zeros, and the lse of a sum that has at most a
// sink.
DEVICE void zero_rows(const AttentionParams& p, i64 batch, i64 row, int head, int heads, int number, int used,
                      int thread) {
  constexpr int ELEMENTS = sizeof(uint4) / sizeof(Element);
  const int columns = static_cast<int>(p.head_dim_v);
  Element* first = p.out.at(batch, row, head);
  const bool aligned = (reinterpret_cast<u64>(first) | p.out.row_stride * sizeof(Element)) % sizeof(uint4) == 0;
  if (ZEROES_WHOLE_ROWS && heads > 1) {
    const int elements = number * heads * columns;
    aligned ? zero_run<uint4>(first, elements, thread) : zero_run<unsigned short>(first, elements, thread);
  } else {
    (aligned && columns % ELEMENTS == 0) ? zero_head<uint4>(first, p.out.row_stride, number, columns, thread)
                                         : zero_head<unsigned short>(first, p.out.row_stride, number, columns, thread);
  }
#pragma unroll 1
  for (int i = thread; i < number * heads; i += ZEROING_THREADS) {
    // Neighbours write one head's rows, which lie side by side.
    const int own_row = i % number, own_head = head + i / number;
    *p.lse.at(batch, row + own_row, own_head) = own_row < used && p.sink != nullptr ? p.sink[own_head] : -infinity();
  }
}

// zero_hidden_tiles() writes this thread block's share of the tiles that see no key. Heads follow each other, as their
// rows are neighbours in memory; where they are so without gaps, all heads of some rows are zeroed at once.
DEVICE void zero_hidden_tiles(const AttentionParams& p, int thread) {
  const int heads = p.num_heads_q;
  if (are_alike(p)) {
    const int at_once = has_whole_rows(p) ? heads : 1, rows = LeftOut(p).rows;
    const int rows_at_once = larger(ROWS_OF_TILE / at_once, 1), pieces = ceil_div(rows, rows_at_once);
    const int groups = heads / at_once, total = pieces * groups * p.batch;
#pragma unroll 1
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
      const int place = index / groups, row = place % pieces * rows_at_once;
      const int number = smaller(rows - row, rows_at_once);
      zero_rows(p, place / pieces, row, index % groups, at_once, number, number, thread);
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
      zero_rows(p, batch_of(p, s), s.row_q + begin, head, 1, smaller(first + ROWS_OF_TILE, s.rows_q) - begin,
                s.len_q - begin, thread);
    }
  }
}
