// The rows of a tile of queries are on Hopper queries of one head or, where PACKS_HEADS, the query heads of a KV head
// for each of a few queries, one query behind the other (FlashAttention-3's PackGQA). With few queries the heads of a
// group are then one tile, so that their keys are read once. Row r of such a tile is (query r / heads, head r % heads),
// the order in which TMA stores a box of some queries of `heads` neighbouring heads. The rows that are left over where
// `heads` does not divide BLOCK_M belong to nobody.
#include "../pipeline.cuh"
#include "../../rules/mask.cuh"

static_assert(!PACKS_HEADS || (PAIR == 1 && TEAMS == 1 && !HAS_BLOCK_MASK), "rows of several heads need a plain tile");

struct TileRows {
  int heads, queries;  // query heads of a KV head, and queries of a tile; 1 and all rows where heads are apart

  DEVICE explicit TileRows(const AttentionParams& p) : heads(1), queries(BLOCK_M) {
    if constexpr (PACKS_HEADS) {
      heads = group_size(p);
      queries = BLOCK_M / heads;
    }
  }

  // query() is the query of a row, rows counted tile by tile from the sequence's first; a row that belongs to nobody
  // is given `rows_q`, which is behind all queries.
  DEVICE int query(int row, int rows_q) const {
    if constexpr (!PACKS_HEADS) return row;
    const int place = row % BLOCK_M / heads;
    return place < queries ? row / BLOCK_M * queries + place : rows_q;
  }
  // head() is the query head of a row; `head` is the tile's: a KV head where these have several heads as rows.
  DEVICE int head(int row, int head) const {
    if constexpr (!PACKS_HEADS) return head;
    return head * heads + row % BLOCK_M % heads;
  }
  DEVICE int first_head(int head) const { return head * heads; }
  DEVICE u32 rows() const { return heads * queries; }
};

// num_tile_heads() is the number of heads of which each has tiles of its own.
DEVICE int num_tile_heads(const AttentionParams& p) { return PACKS_HEADS ? p.num_heads_kv : p.num_heads_q; }

// OwnRows are a thread's two rows, row r of its fragment being its first one + 8 * r. Where heads are apart they are
// computed from `row` each time, as registers are scarce.
struct OwnRows {
  int queries[2], heads[2];

  DEVICE OwnRows(const TileRows& rows, const Sequence& s, int head, int row) {
    if constexpr (PACKS_HEADS) {
      queries[0] = rows.query(row, s.rows_q), heads[0] = rows.head(row, head);
      queries[1] = rows.query(row + 8, s.rows_q), heads[1] = rows.head(row + 8, head);
    }
  }
  DEVICE int query(int row, int r) const { return !PACKS_HEADS ? row + 8 * r : r == 0 ? queries[0] : queries[1]; }
  DEVICE int head(int head, int r) const { return !PACKS_HEADS ? head : r == 0 ? heads[0] : heads[1]; }
};
