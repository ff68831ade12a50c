// The list of work of a packed batch, which find_work.cu writes on the device and forward.cu takes its tiles from:
// tiles of queries, the query heads of a KV head being their rows, each with all of its keys or with a chunk of them.
// An entry stands for all KV heads, as each of them has the same tiles. Chunks of one tile write float32 parts, which
// around/merge_tiles.cu merges.
#include "../../params.cuh"

// A list has a place in front of its entries, which holds how many these are and how many tiles are cut.
struct alignas(ALIGNMENT) WorkCounts {
  int entries, cut_tiles;
  int unused[6];
};

struct alignas(ALIGNMENT) WorkEntry {
  int group, tile;  // a packed group, and a tile of its queries
  int begin, end;   // the tiles of keys
  int chunk;        // which chunk of the tile this is
  int part;         // the place of its result among the parts of a head, or WHOLE
  int unused[2];
};
constexpr int WHOLE = -1;  // in place of a part: no other entry has keys of the tile
static_assert(sizeof(WorkCounts) == sizeof(WorkEntry), "the counts take the place of an entry");

// CutTile is a tile whose keys are cut into chunks: their parts follow each other.
struct alignas(ALIGNMENT) CutTile {
  int group, tile;
  int first_part, parts;
  int begin, end;  // the tiles of keys of the whole tile
  int first_rank;  // the place of the first chunk in the order of its class
  int in_front;    // its class
};

// TileKeys are a tile's keys; there is no tile where `group` is NOBODY.
struct alignas(ALIGNMENT) TileKeys {
  int group, tile, begin, end;
};
constexpr int NOBODY = -1;

DEVICE WorkCounts& work_counts(const AttentionParams& p) { return *reinterpret_cast<WorkCounts*>(p.work_entries); }
DEVICE WorkEntry* work_entries(const AttentionParams& p) { return reinterpret_cast<WorkEntry*>(p.work_entries) + 1; }
DEVICE CutTile* cut_tiles(const AttentionParams& p) { return reinterpret_cast<CutTile*>(p.cut_tiles); }
DEVICE TileKeys* tile_keys(const AttentionParams& p) { return reinterpret_cast<TileKeys*>(p.tile_keys); }

// part_row() counts a row of a part among the rows of all parts. Parts are (most_parts, num_heads_kv, BLOCK_M,
// HEAD_DIM_V), and their log-sum-exps have no last axis.
DEVICE i64 part_row(const AttentionParams& p, int part, int head, int row) {
  return (static_cast<i64>(part) * p.num_heads_kv + head) * BLOCK_M + row;
}
