// This header applies options in Hopper's backward kernels with few registers, for fragments of 64 keys x BLOCK_M
// queries. Each fast path has a file of its own: block_bits.cuh, bias_tiles.cuh and derivatives.cuh; the bits of a mask
// follow here.
#include "bias_tiles.cuh"
#include "block_bits.cuh"

// LseValues reads lse from shared memory each time where options take many registers, and holds it in registers
// elsewhere.
template <bool IN_PLACE = TAKES_REGISTERS || (HAS_BLOCK_MASK && BLOCKS_M > 1)>
struct LseValues : QueryValues {
  using QueryValues::QueryValues;
};
template <>
struct LseValues<true> : QueryValuesInPlace {
  using QueryValuesInPlace::QueryValuesInPlace;
};

// MASK_IN_BITS: the mask of a tile is read as bits while a product is computed. For wide heads, and together with other
// options, this holds even for a mask that is read element by element, because registers are scarce behind the product.
constexpr bool MASK_IN_BITS = HAS_MASK_VECTORS || (HAS_MASK && (HEAD_DIM > 128 || NUM_OPTIONS > 1));

// to_weights() turns products, or the scores that FewDerivatives and add_bias() have made of them, into weights.
template <class Values>
DEVICE void to_weights(float (&x)[FRAGMENT], const GradientFragment& scores, const Values& lse, bool masked,
                       const BlockBits& bits) {
  scores.to_weights<GIVES_SCORES, HAS_BLOCK_MASK || MASK_IN_BITS>(x, lse, masked, unit_of(scores), bits);
}

// MaskBits has the bits of a mask whose rows are vectors. Each lane reads the warp's 16 keys for two of 64 queries, and
// takes its own elements from the other lanes.
struct MaskBits {
  static_assert(!HAS_MASK_VECTORS || BLOCK_M == 2 * WARP, "two queries a lane");
  static constexpr int KEYS = sizeof(uint4);
  u32 word = 0;  // bit 16 h + 8 k + i belongs to the element in half h of the queries, query i of 8 and key k of 2

  DEVICE MaskBits(const AttentionParams& p, const Sequence& s, int head, int first_row, int key) {
    if constexpr (HAS_MASK_VECTORS) {
      const Mask mask(p, s, head);
      const int column = smaller(key, mask.mask_last_column - (KEYS - 1));  // keys beyond the end are hidden anyway
      u32 own = 0;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u8* from = mask.mask_row(first_row + lane() + r * WARP) + column;
        own |= bits_of(*reinterpret_cast<const uint4*>(from)) << KEYS * r;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32 keys = __shfl_sync(ALL_LANES, own, fragment_column() + i / 2 * 8 + i % 2) >> fragment_row();
        word |= (keys & 0x01010101u) << i;
      }
    } else if constexpr (MASK_IN_BITS) {
      const Mask mask(p, s, head);
#pragma unroll 4
      for (int e = 0; e < FRAGMENT; e++) {
        const int i = first_row + fragment_column() + column_offset(e), j = key + fragment_row() + row_offset(e);
        word |= static_cast<u32>(mask.in_mask(i, j)) << bit_of(e);
      }
    }
  }
  static DEVICE int bit_of(int e) { return e / 16 * 16 + e / 2 % 2 * 8 + e / 4 % 4 * 2 + e % 2; }

  DEVICE void clear_hidden(float (&weights)[FRAGMENT]) const {
    if constexpr (MASK_IN_BITS) {
#pragma unroll
      for (int e = 0; e < FRAGMENT; e++) weights[e] = word >> bit_of(e) & 1 ? weights[e] : 0;
    }
  }
};
