// This header is for tiles of keys that a warpgroup of Hopper's forward kernel does not see while others of its tile of
// queries do: it releases them, and takes its places in the order of the warpgroups all the same.
#include "storage.cuh"

// skip_key_tiles() releases tiles of keys that this warpgroup does not see. It still takes its place in the order, and
// helps to clear hidden values.
DEVICE void skip_key_tiles(Rings& rings, const ProductOrder& order, HiddenValues& hidden, int from, int to) {
  for (int block = from; ConsumerKeyIterator::in_order(block, to); block += KEYS_IN_REVERSE ? -1 : 1) {
    rings.k.wait();
    rings.k.release();
    order.pass();
    if constexpr (TOKEN_SCALES) {
      rings.scales.wait();
      rings.scales.release();
    }
    hidden.clear(rings.v, block * BLOCK_N, false);
    rings.v.wait();
    rings.v.release();
  }
}

// takes_extra_place() tells whether a warpgroup that sees no key of a tile uses up a place in the order without a
// product before the tiles of keys of the others, or behind them. A warpgroup with keys takes one place more than it
// has tiles of keys, for the last product with values, so a warpgroup without keys must do the same. Whoever takes this
// extra place sooner must be sooner in the order, too; else it might hold up the order while it waits for others to
// clear values. Rows above all keys take it before the tiles of the others; rows that are not in use, or that see only
// later keys than these, behind them; where keys are visited from the last on (KEYS_IN_REVERSE) it is the other way
// round.
DEVICE bool takes_extra_place(bool is_above, bool before_keys) {
  is_above &= HAS_WINDOW && !HIDES_ANYWHERE;
  return before_keys == (KEYS_IN_REVERSE ? !is_above : is_above);
}

// sees_later_keys() tells whether a warpgroup, whose first query this is, would see only keys behind those of the tile:
// these are a split of them, or its window lies behind all keys, as in a part of an attention.
DEVICE bool sees_later_keys(const Mask& mask, const TileMessage& work, int query) {
  if constexpr (HIDES_ANYWHERE || !HAS_WINDOW) return false;
  return mask.columns(query).begin >= smaller(work.keys.end * BLOCK_N, work.sequence.len_k);
}
