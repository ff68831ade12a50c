// This header is the scheduler of Hopper's backward kernels. It decides which tiles of keys a persistent thread block
// takes, which tiles of queries it visits for each, and in which order tiles add to dq where sums have an order
// (deterministic). backward.cu
// and backward/wide.cu use it through backward/loader.cuh; split/sm90_backward.cu uses the iterators.
#include "../../rules/mask.cuh"
#include "../pipeline.cuh"

// num_batch_heads_kv() is the number of KV heads of all sequences; packed sequences count as one.
DEVICE u32 num_batch_heads_kv(const AttentionParams& p) {
  return p.cu_seqlens_q == nullptr ? p.num_heads_kv * p.batch : p.num_heads_kv;
}

// KeyWork is a tile of keys, as the loading warp hands it on.
struct KeyWork : Work {
  bool is_hidden;        // no query sees any of its keys
  unsigned short split;  // the part of the queries that this thread block visits; behind is_hidden it takes no room
  u32 skips;             // bit w: warpgroup w sees nothing of the last step (w = 0) or the first (w = 1), and skips it
  u32 stage, phase;  // the position of the ring that brought it: read back from here, it takes no registers meanwhile
  u32 key_stage, key_phase;  // likewise the position of the ring of keys, where there is a bias
};

// Two thread blocks may be a pair (a cluster): they have neighbouring tiles of keys, and both visit all queries that
// see one of them.
DEVICE int rank() { return PAIR == 1 ? 0 : static_cast<int>(ptx::cluster_rank()); }
static_assert(PAIR == 1 || (PAIR == 2 && !DETERMINISTIC && !HAS_BLOCK_MASK), "orders and lists are those of one tile");

// Tiles of keys come head by head, a pair's two tiles as one. In the last heads alone (num_grouped_heads) the longest
// tiles of all these heads come first, so that thread blocks end together. If sums of dq have an order, see
// visits_in_reverse(). GROUPS: all heads are scheduled in such groups.

// last_group() is the first head of the last group.
DEVICE u32 last_group(const AttentionParams& p) {
  const u32 num_batch_heads = num_batch_heads_kv(p);
  return HAS_WINDOW && !(DETERMINISTIC && HAS_BLOCK_MASK) ? num_batch_heads - min(p.num_grouped_heads, num_batch_heads)
                                                          : num_batch_heads;
}

// num_interleaved_heads() and visits_in_reverse() set the order of tiles where sums of dq have an order, which is that
// of tiles of keys. The last tiles of keys come first, and visit queries from the first; so with a diagonal a tile
// comes to a query one step after the tile before it. Without a diagonal, the tiles of so many heads alternate that
// tiles of one head begin two steps apart. The last group (with a block mask there is none) visits queries from the
// last.
DEVICE u32 num_interleaved_heads(const AttentionParams& p) {
  return max(2 * gridDim.x / max(p.num_query_tiles * group_size(p), 1), 1u);
}
DEVICE bool visits_in_reverse(const AttentionParams& p, const Work& work) {
  const u32 batch = batch_of(p, work.sequence);
  return DETERMINISTIC && batch * p.num_heads_kv + work.head >= last_group(p);
}

// key_work_at() is the scheduler's map from an index to a tile of keys.
template <bool GROUPS = false>
DEVICE Work key_work_at(const AttentionParams& p, u32 index) {
  const u32 num_tiles = p.num_tiles;
  u32 tile = index % num_tiles, batch_head = index / num_tiles;
  constexpr bool INTERLEAVES_HEADS = DETERMINISTIC && !GROUPS;
  if constexpr (HAS_WINDOW || INTERLEAVES_HEADS) {
    const u32 last = last_group(p);
    u32 first = 0, num_grouped = p.num_grouped_heads, end = num_batch_heads_kv(p);
    if (!GROUPS) {
      first = batch_head < last ? 0 : last;
      num_grouped = end - first;
      if (batch_head < last) {
        num_grouped = INTERLEAVES_HEADS ? num_interleaved_heads(p) : 1;
        end = last;
      }
    }
    const u32 group = first + (batch_head - first) / num_grouped * num_grouped, in_group = index - group * num_tiles;
    const u32 heads = min(num_grouped, end - group);
    tile = in_group / heads;
    batch_head = group + in_group % heads;
    if (INTERLEAVES_HEADS && batch_head < last) tile = num_tiles - 1 - tile;
  }
  Work work{};
  if (p.cu_seqlens_q != nullptr) {
    work = packed_work<true>(p, PAIR * BLOCK_N, tile, batch_head);
  } else {
    work = {sequence_of(p, batch_head / p.num_heads_kv), static_cast<int>(batch_head % p.num_heads_kv),
            static_cast<int>(tile)};
  }
  work.tile = work.tile * PAIR + rank();
  return work;
}

// first_key_index() and next_key_index() take tiles. Thread blocks that wait for each other take even their first tile
// when they run; the tile taken first then waits for none, so there is no deadlock.
DEVICE u32 first_key_index(const AttentionParams& p) {
  return p.dq_order != nullptr ? atomicAdd(p.dq_order, 1) : blockIdx.x / PAIR;
}
DEVICE u32 next_key_index(const AttentionParams& p, u32 index, u32 total) {
  if (p.dq_order == nullptr) return next_index(p, index, total, gridDim.x / PAIR);
  return atomicAdd(p.dq_order, 1);
}

// QueryPart is the part of a tile's queries that one thread block visits, where few tiles of keys meet many queries:
// splits are parts of the query heads of the group (head_splits), times parts of each head's tiles of queries.
struct QueryPart {
  int first_head = 0, heads;  // query heads of the group
  int number = 0, parts = 1;  // the part of each head's tiles, and how many there are

  DEVICE explicit QueryPart(const AttentionParams& p) : heads(group_size(p)) {}
  DEVICE QueryPart(const AttentionParams& p, int split) {
    const int group = group_size(p), by_heads = p.head_splits;
    parts = p.splits / by_heads;
    number = split % parts;
    first_head = split / parts * group / by_heads;
    heads = (split / parts + 1) * group / by_heads - first_head;
  }

  DEVICE void narrow(Blocks& blocks) const {
    if (parts == 1) return;
    const int tiles = larger(blocks.end - blocks.block, 0), begin = blocks.block;
    blocks.block = begin + tiles * number / parts;
    blocks.end = begin + tiles * (number + 1) / parts;
  }
};

// QueryTileIterator iterates over the tiles of queries, of all query heads of the group, that see some key of a tile.
struct QueryTileIterator {
  const AttentionParams& p;
  const Sequence& sequence;
  QueryPart part;
  int tile, head, end_head;
  Blocks blocks;
  int first_block;
  bool backwards;

  DEVICE QueryTileIterator(const AttentionParams& p, const Work& work) : QueryTileIterator(p, work, 0, QueryPart(p)) {}
  DEVICE QueryTileIterator(const AttentionParams& p, const Work& work, u32, const QueryPart& part)
      : p(p),
        sequence(work.sequence),
        part(part),
        tile(work.tile),
        head(work.head * group_size(p) + part.first_head),
        end_head(head + part.heads),
        blocks(of_head()),
        first_block(blocks.block),
        backwards(visits_in_reverse(p, work)) {
    skip();
  }
  DEVICE int block() const { return backwards ? first_block + blocks.end - 1 - blocks.block : blocks.block; }
  DEVICE int first_row() const { return block() * BLOCK_M; }
  DEVICE int last_block() const { return blocks.end - 1; }  // the last tile of the range; not for block masks
  DEVICE bool done() const { return head == end_head; }
  DEVICE void advance() {
    blocks.advance();
    skip();
  }
  // place_in_order() is how many tiles of keys add to dq of the current tile before this one.
  DEVICE int place_in_order() const {
    if (!DETERMINISTIC) return 0;
    const Mask::Range keys = range_of_keys(p, sequence, block(), BLOCK_M, BLOCK_N);
    if constexpr (HAS_BLOCK_MASK) return tiles_seen(tile + 1, keys.end);
    return backwards ? tile - keys.begin : keys.end - 1 - tile;
  }

 private:
  DEVICE Blocks of_head() const {
    Blocks all = blocks_of_queries(p, sequence, head, tile / PAIR, BLOCK_M, PAIR * BLOCK_N);
    part.narrow(all);
    return all;
  }
  // tiles_seen() counts the tiles of keys in [begin, end) that the current tile of queries sees. A warp calls it.
  DEVICE int tiles_seen(int begin, int end) const {
    const Mask mask(p, sequence, head);
    int count = 0;
    for (int first = begin; first < end; first += WARP) {
      const int j = first + static_cast<int>(lane());
      bool seen = false;
      for (int i = 0; i < BLOCK_M; i += CANONICAL) {
        for (int k = 0; k < BLOCK_N; k += CANONICAL) {
          seen |= j < end && mask.slot_at(first_row() + i, j * BLOCK_N + k) != HIDDEN_SLOT;
        }
      }
      count += __popc(__ballot_sync(ALL_LANES, seen));
    }
    return count;
  }
  DEVICE void skip() {
    while (blocks.done() && ++head < end_head) {
      blocks = of_head();
      first_block = blocks.block;
    }
  }
};

// GroupedQueryTileIterator iterates over the same tiles in another order: ROWS tiles of all heads before the next ROWS,
// because L2 does not hold the queries of all heads. Thread blocks that begin together visit them from the last
// queries, those that follow from the first; each begins with another head and row, so that few add to the same sum at
// once.
struct GroupedQueryTileIterator {
  static constexpr int ROWS = 16;
  const Sequence& sequence;
  Blocks blocks;
  int head, end_head, heads;
  int begin;        // the first of all ROWS tiles, without a window
  int base, step;   // the first of the ROWS tiles that are visited for all heads, and how many steps of them are done
  int left;         // how many such groups of tiles are left, without a window
  int tile_offset;  // the offset by which this block begins with another tile
  bool backwards;

  DEVICE GroupedQueryTileIterator(const AttentionParams& p, const Work& work, u32 round, const QueryPart& part)
      : sequence(work.sequence),
        blocks(blocks_of_queries(p, work.sequence, 0, work.tile / PAIR, BLOCK_M, PAIR * BLOCK_N)),
        heads(part.heads),
        step(0) {
    part.narrow(blocks);
    begin = part.parts == 1 ? 0 : blocks.block / ROWS * ROWS;
    const bool shared = heads > 1;
    backwards = shared && round % 2 == 0;
    const int tile = work.tile / PAIR;
    tile_offset = shared ? tile / heads : HAS_WINDOW ? 0 : tile * (PAIR * BLOCK_N / BLOCK_M);
    const int first_head = work.head * group_size(p) + part.first_head;
    head = first_head + tile % heads;
    end_head = first_head + heads;
    base = (backwards ? blocks.end - 1 : blocks.block) / ROWS * ROWS;
    if (!HAS_WINDOW && !shared) base = begin + tile_offset % larger(blocks.end - begin, 1) / ROWS * ROWS;
    if (blocks.done()) base = blocks.end;
    left = ceil_div(blocks.end - begin, ROWS);
    skip();
  }
  DEVICE int block() const { return base + (step + tile_offset) % ROWS; }
  DEVICE int first_row() const { return block() * BLOCK_M; }
  DEVICE int last_block() const { return blocks.end - 1; }
  DEVICE bool done() const { return HAS_WINDOW ? base >= blocks.end || base + ROWS <= blocks.block : left == 0; }
  DEVICE void advance() {
    next();
    skip();
  }
  DEVICE int place_in_order() const { return 0; }

 private:
  DEVICE void next() {
    if (++step % ROWS != 0) return;
    if (++head == end_head) head -= heads;
    if (step == ROWS * heads) {
      step = 0;
      base += backwards ? -ROWS : ROWS;
      left--;
      if (!HAS_WINDOW && heads == 1 && base >= blocks.end) base = begin;
    }
  }
  // skip() moves on to the next tile that is to be visited.
  DEVICE void skip() {
    while (!done() && (block() < blocks.block || block() >= blocks.end)) next();
  }
};
