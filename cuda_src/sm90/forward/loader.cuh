// The producer side of Hopper's forward kernel (forward.cu): its shared memory, what its warpgroups are handed with a
// tile and with each tile of keys, and the two threads that do so. One thread is the scheduler, which finds out which
// tiles there are; one loads them by TMA. Both run in a warpgroup of their own with few registers (FlashAttention-3,
// Shah et al. 2024, section 3.1: warp specialisation).
#include "../hidden_values.cuh"
#include "scores.cuh"

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

constexpr u32 BIAS_BYTES = HAS_BIAS_TILES ? BIAS_TILE_BYTES : 0;
constexpr u32 MASK_BYTES = HAS_MASK_TILES ? BLOCK_M * MASK_ROW_BYTES : 0;

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

// SplitWork is a tile and a share of its keys. Where tiles alone would leave some of the GPU idle, their keys are split
// (split-KV, as in Flash-Decoding): each split is an attention of its own, and around/reduce.cu merges them.
struct SplitWork : Work {
  int split_or_row_group;  // which split of the tile's keys; with teams, which 64 rows of its queries come first

  DEVICE int split() const { return TEAMS == 1 ? split_or_row_group : 0; }
  DEVICE int first_row_group() const { return TEAMS == 1 ? 0 : split_or_row_group; }
  // first_of_rows() is the first query of this thread block, counted in its sequence.
  DEVICE int first_of_rows() const {
    return tile * ROWS_OF_TILE + rank() * BLOCK_M + first_row_group() * ROWS_OF_WARPGROUP;
  }
};

DEVICE u32 num_splits_of(const AttentionParams& p) { return SPLITS_KEYS ? p.splits : 1; }

// blocks_of_split() iterates over the tiles of keys that some query of the tile sees, or over this split of them.
DEVICE Blocks blocks_of_split(const AttentionParams& p, const SplitWork& work) {
  Blocks blocks = blocks_of_keys(p, work.sequence, work.head, work.tile, ROWS_OF_TILE, BLOCK_N);
  if constexpr (SPLITS_KEYS) {
    const int first = blocks.block, number = larger(blocks.end - first, 0), split = work.split();
    blocks.block = first + number * split / p.splits;
    blocks.end = first + number * (split + 1) / p.splits;
  }
  return blocks;
}

// write_split() writes the thread's rows `row` and row + 8 of a split's result, in float32. Packed sequences have one
// split, and the batch stride is 0.
DEVICE void write_split(const AttentionParams& p, const SplitWork& work, int row, const float (&out)[HEAD_DIM_V / 2],
                        const float (&factor)[2], const float (&lse)[2]) {
  const i64 split = static_cast<i64>(work.sequence.batch) * p.splits + work.split();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    if (i >= work.sequence.rows_q) continue;
    const bool used = i < work.sequence.len_q;
    const i64 at = work.sequence.row_q + i;
    if (lane() % 4 == 0) *p.lse_splits.at(split, at, work.head) = used ? lse[r] : -infinity();
    float* target = p.out_splits.at(split, at, work.head);
#pragma unroll
    for (int e = 2 * r; e < HEAD_DIM_V / 2; e += 4) {
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int column = fragment_column() + column_offset(e + side);
        if (column < p.head_dim_v) target[column] = used ? out[e + side] * factor[r] : 0;
      }
    }
  }
}

// TileMessage is what the scheduler hands to the warpgroups: a tile; whether no key is visible to it (known with a
// block mask); whether it is a recheck of a tile whose result was not finite (hidden_values.cuh); and the tiles of keys
// that the whole tile and each warpgroup see. SKIPS_ROWS: the first tile may begin before the sequence does.
constexpr bool SKIPS_ROWS = HAS_WINDOW && !HAS_OPTIONS && STAGING_PANELS > 0;
static_assert(!KEYS_IN_REVERSE || (HAS_WINDOW && !HAS_OPTIONS), "keys from the last on need a window and no options");
struct KeyRange {
  int begin, end;
};
struct TileMessage : SplitWork {
  bool empty = true, recheck = false;
  int skipped = 0;  // rows of the first tile that lie before the sequence's first
  KeyRange keys, own_keys[CONSUMERS];

  DEVICE int first_row() const { return SKIPS_ROWS ? skipped : 0; }

  // fill_last_tile() moves the rows that a tile lacks to the front: the tile that is not full is then the first, which
  // under a diagonal sees the fewest keys. The sequence begins earlier by rows that nobody writes; the diagonal is
  // counted from the end, so it stays.
  DEVICE void fill_last_tile() {
    Sequence& s = sequence;
    skipped = ceil_div(s.rows_q, ROWS_OF_TILE) * ROWS_OF_TILE - s.rows_q;
    s.row_q -= skipped;
    s.rows_q += skipped;
    s.len_q += skipped;
  }

  // find_keys() finds the tiles of keys that the tile and each of its warpgroups see.
  DEVICE void find_keys(const AttentionParams& p) {
    if constexpr (SKIPS_ROWS) fill_last_tile();
    const Blocks blocks = blocks_of_split(p, *this);
    keys = {blocks.block, blocks.end};
    if constexpr (!HIDES_ANYWHERE) {
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
constexpr int NO_WORK = -2;  // in place of a tile's number: no tile, but the stages are looked at for rechecks

// ConsumerKeyIterator iterates over the tiles of keys as the warpgroups meet them. With a block mask the loading thread
// says with each tile which one it is, whether it is the last, and what is hidden or to be masked for each 64 rows of
// queries.
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

  // take() moves on to the next tile of keys; with a block mask it waits for the keys, and reads what the loading
  // thread says.
  template <class KeyRing>
  DEVICE void take(const KeyRing& keys, const int (*entries)[ENTRIES_PER_STAGE], int row_group) {
    if constexpr (HAS_BLOCK_MASK) {
      keys.wait();
      const int entry = entries[keys.stage][row_group];
      block = entry >> 3;
      next = entry >> 2 & 1;
      hidden = entry & 2;
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
  // it stands in the place of the list, which is read ahead.
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

// Staging is shared memory for the epilogue: as many panels of each warp's rows as there is room for, in the swizzle of
// TMA.
template <int NUM_PANELS>
struct Staging {
  alignas(ATOM_BYTES) unsigned char panels[NUM_PANELS][BLOCK_M][ROW_BYTES];
};
template <>
struct Staging<0> {};

// SharedStorage is a thread block's shared memory, or a team's.
struct SharedStorage : Staging<STAGING_PANELS> {          // Staging is a base because an empty base takes no room
  alignas(1024) unsigned char q[QUERY_STAGES * Q_BYTES];  // (QUERY_STAGES, PANELS, BLOCK_M, 64)
  alignas(1024) unsigned char k[STAGES * K_BYTES];        // (STAGES, PANELS, BLOCK_N, 64)
  alignas(1024) unsigned char v[STAGES * V_BYTES];        // (STAGES, PANELS_V, BLOCK_N, 64)
  alignas(1024) unsigned char bias_and_mask[HAS_BIAS_TILES || HAS_MASK_TILES
                                                ? BIAS_STAGES * BIAS_BYTES + MASK_STAGES * MASK_BYTES
                                                : 16];
  TileMessage work[WORK_STAGES];
  Blocks lists[WORK_STAGES];  // with a block mask, the tiles of keys of each tile handed on
  // ConsumerKeyIterator: which tile of keys a stage holds, and what is hidden or to be masked
  int entries[HAS_BLOCK_MASK ? STAGES : 1][ENTRIES_PER_STAGE];
  StageSlots slots[HAS_BLOCK_MASK ? STAGES : 1];
  int non_finite[WORK_STAGES];  // 1 where a tile's result is not finite, so that hidden values may have come into it
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<STAGES> k_barriers, v_barriers;
  RingBarriers<BIAS_STAGES> bias_barriers;
  SeenKeys seen;
  ColumnNumbers<SLOPE_BY_PRODUCT> numbers;
  uint4 index;  // a pair's next tile, in x: a copy has 16 bytes
  RingBarriers<1> index_barriers;
  u64 nearly_loaded_barrier;  // its phases are tiles handed on
  RingBarriers<MASK_STAGES> mask_barriers;
};

// Rings are one thread's positions in all circular buffers of the kernel.
struct Rings {
  Ring<WORK_STAGES, sizeof(TileMessage), true> work;
  Ring<QUERY_STAGES, Q_BYTES, true> q;
  Ring<STAGES, K_BYTES, true, PAIR> k;
  Ring<STAGES, V_BYTES, true, PAIR> v;
  Ring<BIAS_STAGES, BIAS_BYTES, true> bias;
  Ring<MASK_STAGES, MASK_BYTES, true> mask;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        q(shared.q, shared.q_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        bias(shared.bias_and_mask, shared.bias_barriers),
        mask(shared.bias_and_mask + BIAS_STAGES * BIAS_BYTES, shared.mask_barriers) {}

  // forget() makes the compiler compute addresses anew: next to four warpgroups a loading thread has few registers.
  DEVICE void forget(SharedStorage& shared) {
    const Rings same(shared);
    const u32 from = same.q.buffers;
    u32 to = from;
    ptx::forget(to);
    work.move(same.work, from, to);
    q.move(same.q, from, to);
    k.move(same.k, from, to);
    v.move(same.v, from, to);
  }
};

// load_panels() starts to load rows [row, row + ROWS) of a tensor map (head_dim, seqlen, heads, batch) into the current
// stage. In a pair each block loads every other panel of keys and values, for both.
template <int ROWS, int NUM_PANELS, class AnyRing>
DEVICE void load_panels(const AnyRing& ring, const ptx::TensorMap* map, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < NUM_PANELS; panel++) {
    const u32 target = ring.buffer() + panel * ROWS * ROW_BYTES;
    if constexpr (PAIR == 1 || ROWS == BLOCK_M) {
      ptx::tma_load(target, map, ring.full(), panel * PANEL, row, head, batch);
    } else if (panel % PAIR == rank()) {
      ptx::tma_load_multicast(target, map, ring.full(), 3, panel * PANEL, row, head, batch);
    }
  }
}
// load() is the producer's whole step: it waits for the stage, announces its bytes, starts the copies and moves on.
template <int ROWS, int NUM_PANELS, class AnyRing>
DEVICE void load(AnyRing& ring, const ptx::TensorMap* map, int row, int head, int batch) {
  ring.acquire();
  ring.expect();
  load_panels<ROWS, NUM_PANELS>(ring, map, row, head, batch);
  ring.advance();
}

// The scheduler takes the next tile when KEYS_LEFT tiles of keys of the one before are left to load, so that it goes to
// whoever is ready first. With two teams of a warpgroup each no register is left to count them.
constexpr int KEYS_LEFT = 4;
constexpr bool COUNTS_LEFT = SECOND_TEAM_WARPGROUPS <= 1;

// schedule_tiles() is the scheduler, a thread of its own so that nobody else waits for its divisions.
DEVICE void schedule_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings, Team team) {
  u32 phase = 0;
  // hand_on() hands on a tile. If the tile that was in this stage before needs a recheck, that goes first, and the loop
  // looks for a stage again.
  const auto hand_on = [&](const SplitWork& work) {
    bool recheck;
    do {
      rings.work.acquire();
      recheck = HIDES_ANYWHERE && shared.non_finite[rings.work.stage];
      shared.non_finite[rings.work.stage] = 0;
      TileMessage& message = shared.work[rings.work.stage];
      if (!recheck) message = {work};
      message.recheck = recheck;
      if (message.tile >= 0) {
        if constexpr (HAS_BLOCK_MASK) {
          shared.lists[rings.work.stage] = blocks_of_split(p, message);
          message.empty = shared.lists[rings.work.stage].done();
        } else {
          message.find_keys(p);
        }
      }
      rings.work.publish();
      if constexpr (COUNTS_LEFT) wait_for(ptx::shared_address(&shared.nearly_loaded_barrier), phase);
      phase ^= 1;
    } while (recheck);
  };
  const u32 num_splits = num_splits_of(p), total = team.units(p.num_tiles * num_batch_heads_q(p) * num_splits);
  u32 index = blockIdx.x / PAIR;
  // Behind the last tile every stage is looked at once more, as its tile may need a recheck.
  int rechecks_left = HIDES_ANYWHERE ? WORK_STAGES : 0;
  while (index < total || rechecks_left-- > 0) {
    if (index >= total) {
      hand_on({{{}, 0, NO_WORK}, 0});
      continue;
    }
    const u32 tile = team.tile(index);
    const SplitWork work = {
        work_at(p, tile / num_splits),
        static_cast<int>(SECOND_TEAM_WARPGROUPS == 1 && team.number > 0 ? index % WARPGROUPS_PER_TILE
                                                                        : tile % num_splits)};
    if (PAIR > 1 || work.first_of_rows() < work.sequence.rows_q) hand_on(work);
    rings.work.acquire();
    if (rank() == 0) index = next_index(p, index, total, gridDim.x / PAIR, team.number);
    if constexpr (PAIR > 1) {
      Ring<1, sizeof(uint4)> ring(&shared.index, shared.index_barriers);
      ring.phase = rings.work.stage ^ 1;
      if (rank() == 0) {
        ring.acquire();
        shared.index.x = index;
        ptx::fence_async_shared();
        ptx::bulk_copy_cluster(ptx::cluster_address(ring.buffer(), 1), ring.buffer(), sizeof(uint4),
                               ptx::cluster_address(ring.full(), 1));
      } else {
        ring.expect();
        ring.wait();
        index = shared.index.x;
        ptx::mbarrier_arrive_cluster(ptx::cluster_address(ring.empty_barriers, 0));
      }
    }
  }
  rings.work.acquire();
  shared.work[rings.work.stage].tile = NO_TILE;
  rings.work.publish();
}

// ListPrefetch reads a block mask's list ahead of the tiles, so that no load waits for it.
struct ListPrefetch {
  const int* next;        // the entry to be read next
  int left, end;          // the number of entries left, and the end of the range of tiles
  int entry, next_entry;  // the current entry, and the one behind it
  StageSlots slots;
};

// Loader is the loading thread: it brings all operands of all tiles by TMA.
struct Loader {
  const AttentionParams& p;
  SharedStorage& shared;
  Rings rings;
  const ptx::TensorMap *q_map, *k_map, *v_map, *bias_map, *mask_map;
  ListPrefetch prefetched = {};
  bool signalled;  // the scheduler knows that the current tile is nearly loaded

  // load_all() loads tile after tile until the scheduler says that there are no more.
  DEVICE void load_all() {
    while (true) {
      rings.work.wait();
      const TileMessage& work = shared.work[rings.work.stage];
      if (work.tile == NO_TILE) break;
      signalled = false;
      if (!HIDES_ANYWHERE || work.tile != NO_WORK) load_tile(work);
      signal_nearly_loaded(0);
      rings.work.release();
    }
  }

 private:
  // signal_nearly_loaded() tells the scheduler once for each tile that few of its keys are left to load.
  DEVICE void signal_nearly_loaded(int keys_left) {
    if (!COUNTS_LEFT || signalled || keys_left > KEYS_LEFT) return;
    ptx::mbarrier_arrive(ptx::shared_address(&shared.nearly_loaded_barrier));
    signalled = true;
  }

  // load_tile() loads the operands of one tile of queries in the order of their use: the next keys come before the
  // values of the current ones.
  DEVICE void load_tile(const TileMessage& work) {
    if constexpr (SECOND_TEAM_WARPGROUPS > 1) rings.forget(shared);
    const Sequence& s = work.sequence;
    Blocks blocks = HAS_BLOCK_MASK ? shared.lists[rings.work.stage]
                                   : Blocks(work.keys.begin, work.keys.end, p, s, work.head, work.tile);
    const int head_kv = work.head / group_size(p);
    const int batch = batch_of(p, s);
    const int row_k = static_cast<int>(s.row_k);
    bool last = blocks.done();
    if (HAS_BLOCK_MASK && !last) {
      const Mask mask(p, s, work.head);
      shared.lists[rings.work.stage].list =
          mask.slots + static_cast<i64>(work.tile) * WARPGROUPS_PER_TILE * p.slot_columns;
      prefetched = {blocks.list + 1, blocks.left, blocks.end, 0, blocks.block << 1 | blocks.partial};
      look_ahead(work);
    }
    int block = last ? 0 : load_keys(blocks, work, row_k, head_kv, batch);
    load<BLOCK_M, PANELS>(rings.q, q_map, static_cast<int>(s.row_q) + work.first_of_rows(), work.head, batch);
    if (HAS_BLOCK_MASK && !last) look_ahead(work);
    while (!last) {
      if constexpr (SECOND_TEAM_WARPGROUPS > 1) rings.forget(shared);
      signal_nearly_loaded(HAS_BLOCK_MASK ? prefetched.left : blocks.end - blocks.block);
      if constexpr (HAS_BIAS_TILES) load_bias(work, block);
      if constexpr (HAS_MASK_TILES) load_mask(work, block);
      const int values = row_k + block * BLOCK_N;
      last = HAS_BLOCK_MASK ? prefetched.left == 0 : blocks.done();
      if (!last) block = load_keys(blocks, work, row_k, head_kv, batch);
      load<BLOCK_N, PANELS_V>(rings.v, v_map, values, head_kv, batch);
      if (HAS_BLOCK_MASK && !last) look_ahead(work);
    }
  }

  // look_ahead() begins to read what the next tile of keys needs of the block mask.
  DEVICE void look_ahead(const Work& work) {
    prefetched.entry = prefetched.next_entry;
    if (prefetched.left > 1) prefetched.next_entry = *prefetched.next++;
    prefetched.slots.find(p, shared.lists[rings.work.stage].list, work.tile, prefetched.entry);
  }

  // load_keys() loads the current tile of keys, and returns its number. With a block mask it also writes what the
  // warpgroups have to know of it.
  DEVICE int load_keys(Blocks& blocks, const TileMessage& work, int row_k, int head_kv, int batch) {
    if constexpr (HAS_BLOCK_MASK) {
      const int block = prefetched.entry >> 1;
      const bool last = prefetched.left == 1 || prefetched.next_entry >> 1 >= prefetched.end;
      rings.k.acquire();
      load_panels<BLOCK_N, PANELS>(rings.k, k_map, row_k + block * BLOCK_N, head_kv, batch);
      const bool masks_all = needs_mask(block, work);
#pragma unroll
      for (int row_group = 0; row_group < WARPGROUPS_PER_TILE; row_group++) {
        bool masked = masks_all, hidden = TEAMS > 1;
#pragma unroll
        for (int slot : prefetched.slots.of[row_group]) {
          masked |= slot != VISIBLE_SLOT;
          hidden &= slot == HIDDEN_SLOT;
        }
        shared.entries[rings.k.stage][row_group] = block << 3 | last << 2 | hidden << 1 | masked;
      }
      shared.slots[rings.k.stage] = prefetched.slots;
      rings.k.expect();
      rings.k.advance();
      prefetched.left = last ? 0 : prefetched.left - 1;
      return block;
    } else {
      const int block = KEYS_IN_REVERSE ? work.keys.begin + work.keys.end - 1 - blocks.block : blocks.block;
      blocks.advance();
      load<BLOCK_N, PANELS>(rings.k, k_map, row_k + block * BLOCK_N, head_kv, batch);
      return block;
    }
  }

  // needs_mask() tells whether a tile of keys whose blocks are all visible still needs a mask.
  DEVICE bool needs_mask(int block, const Work& work) const {
    if (HAS_MASK || HAS_ALIBI) return true;
    const Mask mask(p, work.sequence, work.head);
    return !mask.columns_inside(work.tile * BLOCK_M, BLOCK_M, block * BLOCK_N, BLOCK_N);
  }

  // load_mask() loads a tile of the mask; an axis that is broadcast has one place.
  DEVICE void load_mask(const Work& work, int block) {
    rings.mask.acquire();
    rings.mask.expect();
    ptx::tma_load(rings.mask.buffer(), mask_map, rings.mask.full(), block * BLOCK_N, work.tile * BLOCK_M,
                  p.mask.head_stride == 0 ? 0 : work.head, p.mask.batch_stride == 0 ? 0 : work.sequence.batch);
    rings.mask.advance();
  }

  // load_bias() loads a tile of the bias; one that is the same for all queries has one row.
  DEVICE void load_bias(const Work& work, int block) {
    const bool one_row = p.bias.row_stride == 0;
    rings.bias.acquire();
    ptx::mbarrier_arrive_expect(rings.bias.full(), PANELS_BIAS * (one_row ? ROW_BYTES : BIAS_PANEL_BYTES));
    const int row = one_row ? 0 : work.tile * BLOCK_M, head = p.bias.head_stride == 0 ? 0 : work.head;
    const int batch = p.bias.batch_stride == 0 ? 0 : work.sequence.batch;
#pragma unroll
    for (int panel = 0; panel < PANELS_BIAS; panel++) {
      ptx::tma_load(rings.bias.buffer() + panel * BIAS_PANEL_BYTES, bias_map, rings.bias.full(),
                    block * BLOCK_N + panel * BIAS_PANEL, row, head, batch);
    }
    rings.bias.advance();
  }
};
