// This header has the masks of Hopper's forward kernel that memory holds: tiles that TMA loads, and rows that threads
// read where they begin anywhere.
#include "../../fragment/score_fragment.cuh"
#include "../wgmma.cuh"

constexpr int WORD = WORD_BITS;                                 // columns in one word of bits
constexpr int WORDS = (BLOCK_N + WORD - 1) / WORD;              // words in a row of the tile
constexpr int ELEMENT_WORDS = (BLOCK_N / 2 + WORD - 1) / WORD;  // words for a thread's elements
constexpr bool READS_MASK = HAS_MASK && !HAS_MASK_TILES;        // the mask is read by threads, from global memory
static_assert(!READS_MASK || WORDS <= 4, "a lane of a quad has one word");

// BLOCKS_OF_ROW is the number of 64-key blocks of a block mask's store that a tile of keys may touch: the tile begins
// at a multiple of 32 keys in the first one.
constexpr int BLOCKS_OF_ROW = HAS_BLOCK_MASK ? BLOCK_N / CANONICAL + (BLOCK_N % CANONICAL != 0) : 1;

// ---- A mask in tiles (BLOCK_M, MASK_ROW_BYTES) that TMA loads. Rows are as wide as the swizzle, or lie in different
// banks.

// hide_by_mask_tile() hides elements of a warp's fragment, whose first row in the tile is `warp_row`.
DEVICE void hide_by_mask_tile(float (&x)[BLOCK_N / 2], u32 tile, int warp_row) {
  constexpr bool SWIZZLED = MASK_ROW_BYTES == ROW_BYTES;
  const int row = fragment_row();
  const u32 own = tile + (warp_row + row) * MASK_ROW_BYTES + (SWIZZLED ? row * 16 : 0) + fragment_column();
#pragma unroll
  for (int e = 0; e < BLOCK_N / 2; e += 2) {
    const u32 chunk = column_offset(e) / 16 * 16;
    const u32 pairs = (SWIZZLED ? own ^ chunk : own + chunk) + row_offset(e) * MASK_ROW_BYTES + column_offset(e) % 16;
    const u32 pair = *static_cast<const unsigned short*>(__cvta_shared_to_generic(pairs));
    x[e] = pair & 0xff ? x[e] : -infinity();
    x[e + 1] = pair & 0xff00 ? x[e + 1] : -infinity();
  }
}

// unaligned_mask_word() is Mask::mask_word() for rows that begin anywhere: it reads the aligned words that hold the 32
// columns, as long as the last of them ends within the row. With other options registers do not suffice for these
// words.
DEVICE u32 unaligned_mask_word(const Mask& mask, int i, int j) {
  constexpr int BYTES = sizeof(u32), NUM_WORDS = WORD / BYTES;
  const bool in_words = mask.mask_column_stride == 1 && j + WORD + BYTES - 1 <= mask.mask_last_column;
  if (NUM_OPTIONS > 1 || !in_words) return mask.mask_word(i, j);
  const u64 address = reinterpret_cast<u64>(mask.mask_row(i) + j);
  const u32* aligned = reinterpret_cast<const u32*>(address - address % BYTES);
  const u32 shift = address % BYTES * 8;
  u32 read[NUM_WORDS + 1], bytes[NUM_WORDS];
#pragma unroll
  for (int k = 0; k <= NUM_WORDS; k++) read[k] = aligned[k];
#pragma unroll
  for (int k = 0; k < NUM_WORDS; k++) bytes[k] = __funnelshift_r(read[k], read[k + 1], shift);
  return bits_of(make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]),
                 make_uint4(bytes[4], bytes[5], bytes[6], bytes[7]));
}
