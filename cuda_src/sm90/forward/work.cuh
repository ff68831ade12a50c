// This header describes the work of a thread block of Hopper's forward kernel, which is a tile of queries with all of
// its keys, or with a split of them, and what the scheduler hands to the warpgroups with it.
#include "../hidden_values.cuh"
#include "rows.cuh"
#include "work_list.cuh"

// A tile of queries consists of WARPGROUPS_PER_TILE times 64 rows, one warpgroup each. With a block mask there may be
// two teams of warpgroups, with shared memory and loading threads of their own: the first computes whole tiles, the
// other computes other tiles or, if it is a single warpgroup, other tiles 64 rows at a time. Neither team waits for the
// other, so a tile begins and ends while the other team multiplies.
constexpr int WARPGROUPS_PER_TILE = BLOCK_M / ROWS_OF_WARPGROUP;
static_assert(WARPGROUPS_PER_TILE + SECOND_TEAM_WARPGROUPS == CONSUMERS, "a warpgroup has 64 queries");

// A pair of thread blocks (a cluster) has the two halves of a tile of queries; each loads half of the keys and values
// for both.
DEVICE int rank() { return PAIR == 1 ? 0 : static_cast<int>(ptx::cluster_rank()); }
constexpr int ROWS_OF_TILE = PAIR * BLOCK_M;

// Team divides the tiles between two teams, so that both end together.
struct Team {
  // The second team has OTHERS of each TILES tiles; with a third of them it would end last.
  static constexpr u32 TILES = 16, OTHERS = 5;
  int number;

  // units() is how many units of work the team has of `tiles`: whole tiles, or 64 rows of one. tile() is the tile of a
  // unit.
  DEVICE u32 units(u32 tiles) const {
    if (SECOND_TEAM_WARPGROUPS > 1) return (tiles + 1 - number) / 2;
    const u32 others = TEAMS == 1 ? 0 : tiles * OTHERS / TILES;
    return number == 0 ? tiles - others : others * WARPGROUPS_PER_TILE;
  }
  DEVICE u32 tile(u32 unit) const {
    if (TEAMS == 1) return unit;
    if (SECOND_TEAM_WARPGROUPS > 1) return 2 * unit + number;
    return number == 0 ? unit * TILES / (TILES - OTHERS)
                       : unit / WARPGROUPS_PER_TILE * TILES / OTHERS + (TILES - 1) / OTHERS;
  }
};

// ListedKeys are the keys of an entry of a list of work (work_list.cuh); without a list there is nothing to say.
template <bool LISTED>
struct ListedKeys {
  int begin, end;  // tiles of keys
  int place;       // of the part, or WHOLE

  DEVICE void set(const WorkEntry& entry) {
    begin = entry.begin;
    end = entry.end;
    place = entry.part;
  }
  DEVICE int part() const { return place; }
  DEVICE void limit(Blocks& blocks) const {
    blocks.block = begin;
    blocks.end = end;
  }
};
template <>
struct ListedKeys<false> {
  DEVICE void set(const WorkEntry&) {}
  DEVICE int part() const { return WHOLE; }
  DEVICE void limit(Blocks&) const {}
};
static_assert(!HAS_WORK_LIST || (PACKS_HEADS && !SPLITS_KEYS), "a list cuts tiles of several heads by itself");

// SplitWork is a tile and a share of its keys. Where tiles alone would leave some of the GPU idle, their keys are split
// (split-KV, as in Flash-Decoding): each split is an attention of its own, and around/merge_splits.cu merges them.
struct SplitWork : Work, ListedKeys<HAS_WORK_LIST> {
  int split_or_row_group;  // which split of the tile's keys; with teams, which 64 rows of its queries come first

  DEVICE int split() const { return TEAMS == 1 ? split_or_row_group : 0; }
  DEVICE int first_row_group() const { return TEAMS == 1 ? 0 : split_or_row_group; }
  // first_of_rows() is the first query of this thread block, counted in its sequence.
  DEVICE int first_of_rows() const {
    return tile * ROWS_OF_TILE + rank() * BLOCK_M + first_row_group() * ROWS_OF_WARPGROUP;
  }
};

DEVICE u32 num_splits_of(const AttentionParams& p) { return SPLITS_KEYS ? p.splits : 1; }

// listed_work() is the work at an index of the list: all KV heads of an entry follow each other, as their keys are
// neighbours in memory.
DEVICE SplitWork listed_work(const AttentionParams& p, u32 index) {
  const WorkEntry entry = work_entries(p)[index / p.num_heads_kv];
  SplitWork work;
  work.sequence = sequence_of_group<false, HAS_PAGES>(p, entry.group);
  work.head = static_cast<int>(index % p.num_heads_kv);
  work.tile = entry.tile;
  work.split_or_row_group = entry.chunk;
  work.set(entry);
  return work;
}

// blocks_of_split() iterates over the tiles of keys that some query of the tile sees, or over this split of them.
DEVICE Blocks blocks_of_split(const AttentionParams& p, const SplitWork& work, const TileRows& rows) {
  const int queries = PACKS_HEADS ? rows.queries : ROWS_OF_TILE;
  Blocks blocks = blocks_of_keys(p, work.sequence, work.head, work.tile, queries, BLOCK_N);
  if constexpr (SPLITS_KEYS) {
    const int first = blocks.block, number = larger(blocks.end - first, 0), split = work.split();
    blocks.block = first + number * split / p.splits;
    blocks.end = first + number * (split + 1) / p.splits;
  }
  work.limit(blocks);
  return blocks;
}

// SKIPS_ROWS tells whether the first tile may begin before the sequence does.
constexpr bool SKIPS_ROWS = HAS_WINDOW && !HAS_OPTIONS && STAGING_PANELS > 0 && !PACKS_HEADS;
static_assert(!KEYS_IN_REVERSE || (HAS_WINDOW && !HAS_OPTIONS), "keys from the last on need a window and no options");
struct KeyRange {
  int begin, end;
};

// fill_last_tile() moves the rows that a tile lacks to the front, and returns their number: the tile that is not full
// is then the first, which under a diagonal sees the fewest keys. The sequence begins earlier by rows that nobody
// writes; the diagonal is counted from the end, so it stays.
DEVICE int fill_last_tile(Sequence& s) {
  const int skipped = ceil_div(s.rows_q, ROWS_OF_TILE) * ROWS_OF_TILE - s.rows_q;
  s.row_q -= skipped;
  s.rows_q += skipped;
  s.len_q += skipped;
  return skipped;
}

// VISITS_ALL_KEYS: each warpgroup visits all keys of the tile, as with rows of heads the thread that would find those
// of three has too few registers.
constexpr bool VISITS_ALL_KEYS = PACKS_HEADS && CONSUMERS > 2;

// TileMessage is what the scheduler hands to the warpgroups: a tile; whether no key is visible to it (known with a
// block mask); whether it is a recheck of a tile whose result was not finite (hidden_values.cuh); and the tiles of keys
// that the whole tile and each warpgroup see.
struct TileMessage : SplitWork {
  bool empty = true, recheck = false;
  int skipped = 0;  // rows of the first tile that lie before the sequence's first
  KeyRange keys, own_keys[CONSUMERS];

  DEVICE int first_row() const { return SKIPS_ROWS ? skipped : 0; }

  // find_keys() finds the tiles of keys that the tile and each of its warpgroups see.
  DEVICE void find_keys(const AttentionParams& p, const TileRows& rows) {
    if constexpr (SKIPS_ROWS) skipped = fill_last_tile(sequence);
    const Blocks blocks = blocks_of_split(p, *this, rows);
    keys = {blocks.block, blocks.end};
    if constexpr (!HIDES_ANYWHERE && PACKS_HEADS && !VISITS_ALL_KEYS) {
#pragma unroll 1
      for (int warpgroup = 0; warpgroup < CONSUMERS; warpgroup++) {
        const int row = tile * BLOCK_M + warpgroup * ROWS_OF_WARPGROUP, first = rows.query(row, sequence.rows_q);
        int last = smaller(rows.query(row + ROWS_OF_WARPGROUP - 1, sequence.rows_q), (tile + 1) * rows.queries - 1);
        last = smaller(last, sequence.len_q - 1);
        const int begin = range_of_keys(p, sequence, first, 1, BLOCK_N).begin;
        const int end = last < first ? 0 : range_of_keys(p, sequence, last, 1, BLOCK_N).end;
        own_keys[warpgroup] = {larger(begin, keys.begin), smaller(end, keys.end)};
      }
    } else if constexpr (!HIDES_ANYWHERE && !VISITS_ALL_KEYS) {
#pragma unroll 1
      for (int warpgroup = 0; warpgroup < CONSUMERS; warpgroup++) {
        const int row_group = (tile * PAIR + rank()) * CONSUMERS + warpgroup;
        const Blocks own = blocks_of_keys(p, sequence, head, row_group, ROWS_OF_WARPGROUP, BLOCK_N);
        const bool skips_all = (row_group + 1) * ROWS_OF_WARPGROUP <= skipped;
        own_keys[warpgroup] = {larger(own.block, keys.begin), skips_all ? 0 : smaller(own.end, keys.end)};
      }
    }
  }
};
// NO_WORK stands in place of a tile's number where there is no tile, but the stages are looked at for rechecks.
constexpr int NO_WORK = -2;
