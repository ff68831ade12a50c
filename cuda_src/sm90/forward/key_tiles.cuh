// This header has the tiles of keys as the warpgroups of Hopper's forward kernel meet them, and the messages that the
// loading thread sends with each of them where there is a block mask.
#include "scores.cuh"
#include "work.cuh"

// ConsumerKeyIterator iterates over the tiles of keys as the warpgroups meet them. With a block mask the loading thread
// says with each tile which one it is, whether it is the last, and, for each 64 rows of queries, whether it is hidden
// and whether it is to be masked.
constexpr int ENTRIES_PER_STAGE = HAS_BLOCK_MASK ? WARPGROUPS_PER_TILE : 1;
struct ConsumerKeyIterator {
  int block, next, end;  // the current tile, the next one, and the end, which is not a tile
  bool masked = false, hidden = false;

  DEVICE ConsumerKeyIterator(const TileMessage& work, const KeyRange& keys)
      : next(HAS_BLOCK_MASK    ? 0
             : KEYS_IN_REVERSE ? keys.end - 1
                               : keys.begin),
        end(HAS_BLOCK_MASK    ? !work.empty
            : KEYS_IN_REVERSE ? keys.begin - 1
                              : keys.end) {}

  // in_order() tells whether tile `earlier` is visited before tile `later`.
  static DEVICE bool in_order(int earlier, int later) { return KEYS_IN_REVERSE ? earlier > later : earlier < later; }
  DEVICE bool done() const { return KEYS_IN_REVERSE ? next <= end : next >= end; }

  // take() moves on to the next tile of keys; with a block mask it waits for the keys, and reads the entry that the
  // loading thread wrote.
  template <class KeyRing>
  DEVICE void take(const KeyRing& keys, const int (*entries)[ENTRIES_PER_STAGE], int row_group) {
    if constexpr (HAS_BLOCK_MASK) {
      keys.wait();
      const int entry = entries[keys.stage][row_group];
      block = entry >> 3;
      next = entry >> 2 & 1;
      hidden = TEAMS > 1 && (entry & 2) != 0;  // with one team its loading thread says so of no tile
      masked = entry & 1;
    } else {
      block = KEYS_IN_REVERSE ? next-- : next++;
    }
  }
};

// StageSlots has the slots of the 64 x 64 blocks of a block mask in a tile of keys, (WARPGROUPS_PER_TILE,
// BLOCKS_OF_ROW). They travel with the keys, so that no warp waits for one read to begin the next.
struct StageSlots {
  alignas(16) int of[WARPGROUPS_PER_TILE][BLOCKS_OF_ROW];

  // find() reads the slots of an entry of a tile's list. `slots` points to the slots of the tile's first row of blocks;
  // that pointer stands in the place of the list, which is read ahead.
  DEVICE void find(const AttentionParams& p, const int* slots, int tile, int entry) {
#pragma unroll
    for (int i = 0; i < WARPGROUPS_PER_TILE * BLOCKS_OF_ROW; i++)
      of[i / BLOCKS_OF_ROW][i % BLOCKS_OF_ROW] = VISIBLE_SLOT;
    if ((entry & 1) == 0) return;
#pragma unroll
    for (int row_group = 0; row_group < WARPGROUPS_PER_TILE; row_group++) {
#pragma unroll
      for (int i = 0; i < BLOCKS_OF_ROW; i++) {
        const int column = (entry >> 1) * BLOCK_N / CANONICAL + i;
        const bool inside = tile * WARPGROUPS_PER_TILE + row_group < p.slot_rows && column < p.slot_columns;
        of[row_group][i] = inside ? slots[row_group * p.slot_columns + column] : HIDDEN_SLOT;
      }
    }
  }
};
