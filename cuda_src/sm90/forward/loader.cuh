// This header is the producer side of Hopper's forward kernel (forward.cu). It has the kernel's shared memory, the
// messages that its warpgroups receive with a tile and with each tile of keys, and the two threads that write them. One
// thread is the scheduler, which finds out which tiles there are; one loads them by TMA. Both run in a warpgroup of
// their own with few registers (FlashAttention-3, Shah et al. 2024, section 3.1: warp specialisation).
#include "hidden_tiles.cuh"
#include "page_rows.cuh"
#include "scores.cuh"

constexpr u32 BIAS_BYTES = HAS_BIAS_TILES ? BIAS_TILE_BYTES : 0;
constexpr u32 MASK_BYTES = HAS_MASK_TILES ? BLOCK_M * MASK_ROW_BYTES : 0;

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

// Staging is shared memory for the epilogue. It holds as many panels of each warp's rows as there is room for, in the
// swizzle of TMA.
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
  // `entries` tell ConsumerKeyIterator which tile of keys a stage holds, and for which rows it is hidden or to be
  // masked.
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

// RingOfKeys is a ring of keys or values. Rows that cp.async has written (page_rows.cuh) are made visible to wgmma by
// the threads that wait for them.
template <u32 BYTES>
struct RingOfKeys : Ring<STAGES, BYTES, true, PAIR> {
  using Base = Ring<STAGES, BYTES, true, PAIR>;
  DEVICE RingOfKeys(const void* data, const RingBarriers<STAGES>& barriers) : Base(data, barriers) {}
  DEVICE void wait() const {
    Base::wait();
    if constexpr (COPIES_ROWS) ptx::fence_async_shared();
  }
};

// Rings are one thread's positions in all circular buffers of the kernel.
struct Rings {
  Ring<WORK_STAGES, sizeof(TileMessage), true> work;
  Ring<QUERY_STAGES, Q_BYTES, true> q;
  RingOfKeys<K_BYTES> k;
  RingOfKeys<V_BYTES> v;
  Ring<BIAS_STAGES, BIAS_BYTES, true> bias;
  Ring<MASK_STAGES, MASK_BYTES, true> mask;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        q(shared.q, shared.q_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        bias(shared.bias_and_mask, shared.bias_barriers),
        mask(shared.bias_and_mask + BIAS_STAGES * BIAS_BYTES, shared.mask_barriers) {}

  // forget() makes the compiler compute addresses anew, because a loading thread next to four warpgroups has few
  // registers.
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
  acquire_together(ring);
  if (leads()) {
    ring.expect();
    load_panels<ROWS, NUM_PANELS>(ring, map, row, head, batch);
  }
  ring.advance();
}

// bias_has_one_row() tells whether TMA loads one row of the bias for all rows of a tile.
DEVICE bool bias_has_one_row(const AttentionParams& p) { return !PACKS_HEADS && p.bias.row_stride == 0; }

// The scheduler takes the next tile when KEYS_LEFT tiles of keys of the one before are left to load, so that it goes to
// the thread block that is ready first. Two teams of a warpgroup each have no register left to count them.
constexpr int KEYS_LEFT = 4;
constexpr bool COUNTS_LEFT = SECOND_TEAM_WARPGROUPS <= 1;

// schedule_tiles() is the scheduler, a thread of its own so that no other thread waits for its divisions.
DEVICE void schedule_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings, Team team) {
  const TileRows rows(p);
  u32 phase = 0;
  // hand_on() hands on a tile. If the tile that was in this stage before needs a recheck, the recheck goes first, and
  // the loop looks for a stage again.
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
          shared.lists[rings.work.stage] = blocks_of_split(p, message, rows);
          message.empty = shared.lists[rings.work.stage].done();
        } else {
          message.find_keys(p, rows);
          if (is_hidden(p, message.keys)) return;
        }
      }
      rings.work.publish();
      if constexpr (COUNTS_LEFT) wait_for(ptx::shared_address(&shared.nearly_loaded_barrier), phase);
      phase ^= 1;
    } while (recheck);
  };
  const u32 num_splits = num_splits_of(p);
  const u32 total =
      HAS_WORK_LIST
          ? work_counts(p).entries * p.num_heads_kv
          : team.units((p.num_tiles - LeftOut(p).tiles) * num_batch_heads_of(p, num_tile_heads(p)) * num_splits);
  const auto work_at_index = [&](u32 index) -> SplitWork {
    if constexpr (HAS_WORK_LIST) return listed_work(p, index);
    const u32 tile = team.tile(index);
    return {work_at<HAS_PAGES>(p, tile / num_splits, num_tile_heads(p), rows.queries, LeftOut(p).tiles),
            {},
            static_cast<int>(SECOND_TEAM_WARPGROUPS == 1 && team.number > 0 ? index % WARPGROUPS_PER_TILE
                                                                            : tile % num_splits)};
  };
  u32 index = blockIdx.x / PAIR;
  // Every stage is looked at once more behind the last tile, because its tile may need a recheck.
  int rechecks_left = HIDES_ANYWHERE ? WORK_STAGES : 0;
  while (index < total || rechecks_left-- > 0) {
    if (index >= total) {
      hand_on({{{}, 0, NO_WORK}, {}, 0});
      continue;
    }
    const SplitWork work = work_at_index(index);
    const int first_query = PACKS_HEADS ? work.tile * rows.queries : work.first_of_rows();
    if (PAIR > 1 || first_query < work.sequence.rows_q) hand_on(work);
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

// Loader is the loading thread, or with pages the loading warp or one of several: it loads all operands of all tiles.
struct Loader {
  const AttentionParams& p;
  SharedStorage& shared;
  Rings rings;
  const ptx::TensorMap *q_map, *k_map, *v_map, *bias_map, *mask_map;
  TileRows rows;
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
      if constexpr (HAS_PAGES) __syncwarp();
      rings.work.release();
    }
  }

 private:
  // signal_nearly_loaded() tells the scheduler once for each tile that few of its keys are left to load.
  DEVICE void signal_nearly_loaded(int keys_left) {
    if (!COUNTS_LEFT || signalled || keys_left > KEYS_LEFT) return;
    if (leads()) ptx::mbarrier_arrive(ptx::shared_address(&shared.nearly_loaded_barrier));
    signalled = true;
  }

  // load_tile() loads the operands of one tile of queries in the order of their use: the next keys come before the
  // values of the current ones.
  DEVICE void load_tile(const TileMessage& work) {
    if constexpr (SECOND_TEAM_WARPGROUPS > 1) rings.forget(shared);
    const Sequence& s = work.sequence;
    Blocks blocks = HAS_BLOCK_MASK ? shared.lists[rings.work.stage]
                                   : Blocks(work.keys.begin, work.keys.end, p, s, work.head, work.tile);
    const int head_kv = PACKS_HEADS ? work.head : work.head / group_size(p);
    const int batch = batch_of(p, s);
    const int row_k = static_cast<int>(s.row_k);
    bool last = blocks.done();
    if (HAS_BLOCK_MASK && !last) {
      const Mask mask(p, s, work.head);
      if constexpr (HAS_PAGES) __syncwarp();  // all lanes have read the list that one of them replaces
      if (leads()) {
        shared.lists[rings.work.stage].list =
            mask.slots + static_cast<i64>(work.tile) * WARPGROUPS_PER_TILE * p.slot_columns;
      }
      if constexpr (HAS_PAGES) __syncwarp();
      prefetched = {blocks.list + 1, blocks.left, blocks.end, 0, blocks.block << 1 | blocks.partial};
      look_ahead(work);
    }
    PagedKeys<KEYS_COME> pages(p, s, k_map, v_map);
    look_up_next(pages, blocks, work);
    int block = last ? 0 : load_keys(blocks, work, row_k, head_kv, batch, pages);
    pages.values_next();
    look_up_next(pages, blocks, work);
    load_queries(work, batch);
    if (HAS_BLOCK_MASK && !last) look_ahead(work);
    while (!last) {
      if constexpr (SECOND_TEAM_WARPGROUPS > 1) rings.forget(shared);
      signal_nearly_loaded(HAS_BLOCK_MASK ? prefetched.left : blocks.end - blocks.block);
      if constexpr (HAS_BIAS_TILES) load_bias(work, block);
      if constexpr (HAS_MASK_TILES) load_mask(work, block);
      const int values = block;
      last = HAS_BLOCK_MASK ? prefetched.left == 0 : blocks.done();
      if (!last) block = load_keys(blocks, work, row_k, head_kv, batch, pages);
      if constexpr (HAS_PAGES) {
        acquire_together(rings.v);
        if (!COPIES_ROWS && leads()) rings.v.expect();
        pages.load_values(rings.v, values, head_kv);
        rings.v.advance();
        pages.values_next();
        look_up_next(pages, blocks, work);
      } else {
        load<BLOCK_N, PANELS_V>(rings.v, v_map, row_k + values * BLOCK_N, head_kv, batch);
      }
      if (HAS_BLOCK_MASK && !last) look_ahead(work);
    }
  }

  // load_queries() loads the tile of queries; a box of several heads has some queries, and for each of them all heads.
  DEVICE void load_queries(const TileMessage& work, int batch) {
    if (!in_first_loading_warp()) return;
    const int first = static_cast<int>(work.sequence.row_q);
    if constexpr (!PACKS_HEADS) {
      load<BLOCK_M, PANELS>(rings.q, q_map, first + work.first_of_rows(), work.head, batch);
    } else {
      acquire_together(rings.q);
      if (leads()) {
        ptx::mbarrier_arrive_expect(rings.q.full(), PANELS * rows.rows() * ROW_BYTES);
        const int head = rows.first_head(work.head), row = first + work.tile * rows.queries;
        load_panels<BLOCK_M, PANELS>(rings.q, q_map, head, row, batch);
      }
      rings.q.advance();
    }
  }

  // load_scores() starts to load a box of a bias or mask, whose first column is `keys`.
  DEVICE void load_scores(u32 target, const ptx::TensorMap* map, u32 barrier, int keys, const Work& work, int row,
                          int head, int batch) {
    if (!leads()) return;
    if constexpr (PACKS_HEADS) {
      ptx::tma_load(target, map, barrier, keys, rows.first_head(work.head), work.tile * rows.queries, batch);
    } else {
      ptx::tma_load(target, map, barrier, keys, row, head, batch);
    }
  }

  // look_up_next() looks up the pages of the keys that come next, if there are any. With a block mask the next keys are
  // known only when they are loaded.
  DEVICE void look_up_next(PagedKeys<KEYS_COME>& pages, const Blocks& blocks, const TileMessage& work) const {
    if (!HAS_BLOCK_MASK && !blocks.done()) pages.look_up(block_of(blocks, work));
  }
  static DEVICE int block_of(const Blocks& blocks, const TileMessage& work) {
    return KEYS_IN_REVERSE ? work.keys.begin + work.keys.end - 1 - blocks.block : blocks.block;
  }

  // look_ahead() begins to read the entry and slots of the block mask for the next tile of keys.
  DEVICE void look_ahead(const Work& work) {
    prefetched.entry = prefetched.next_entry;
    if (prefetched.left > 1) prefetched.next_entry = *prefetched.next++;
    prefetched.slots.find(p, shared.lists[rings.work.stage].list, work.tile, prefetched.entry);
  }

  // load_keys() loads the current tile of keys, and returns its number. With a block mask it also writes the tile's
  // entries and slots for the warpgroups.
  DEVICE int load_keys(Blocks& blocks, const TileMessage& work, int row_k, int head_kv, int batch,
                       PagedKeys<KEYS_COME>& pages) {
    if constexpr (HAS_BLOCK_MASK) {
      const int block = prefetched.entry >> 1;
      const bool last = prefetched.left == 1 || prefetched.next_entry >> 1 >= prefetched.end;
      acquire_together(rings.k);
      if constexpr (HAS_PAGES) {
        pages.look_up(block);
        pages.load_keys(rings.k, block, head_kv);
      } else {
        load_panels<BLOCK_N, PANELS>(rings.k, k_map, row_k + block * BLOCK_N, head_kv, batch);
      }
      const bool masks_all = needs_mask(block, work);
#pragma unroll
      for (int row_group = 0; row_group < WARPGROUPS_PER_TILE; row_group++) {
        bool masked = masks_all, hidden = TEAMS > 1;
#pragma unroll
        for (int slot : prefetched.slots.of[row_group]) {
          masked |= slot != VISIBLE_SLOT;
          hidden &= slot == HIDDEN_SLOT;
        }
        if (leads()) shared.entries[rings.k.stage][row_group] = block << 3 | last << 2 | hidden << 1 | masked;
      }
      if (leads()) {
        shared.slots[rings.k.stage] = prefetched.slots;
        rings.k.expect();
      }
      rings.k.advance();
      prefetched.left = last ? 0 : prefetched.left - 1;
      return block;
    } else {
      const int block = block_of(blocks, work);
      blocks.advance();
      if constexpr (HAS_PAGES) {
        acquire_together(rings.k);
        if (!COPIES_ROWS && leads()) rings.k.expect();
        pages.load_keys(rings.k, block, head_kv);
        rings.k.advance();
      } else {
        load<BLOCK_N, PANELS>(rings.k, k_map, row_k + block * BLOCK_N, head_kv, batch);
      }
      return block;
    }
  }

  // needs_mask() tells whether a tile of keys whose blocks are all visible still needs a mask.
  DEVICE bool needs_mask(int block, const Work& work) const {
    if (HAS_MASK || HAS_ALIBI) return true;
    const Mask mask(p, work.sequence, work.head);
    return !mask.columns_inside(work.tile * BLOCK_M, BLOCK_M, block * BLOCK_N, BLOCK_N);
  }

  // load_mask() loads a tile of the mask; a broadcast axis of it has size 1.
  DEVICE void load_mask(const Work& work, int block) {
    if (!in_first_loading_warp()) return;
    acquire_together(rings.mask);
    if (leads()) ptx::mbarrier_arrive_expect(rings.mask.full(), (PACKS_HEADS ? rows.rows() : BLOCK_M) * MASK_ROW_BYTES);
    load_scores(rings.mask.buffer(), mask_map, rings.mask.full(), block * BLOCK_N, work, work.tile * BLOCK_M,
                p.mask.head_stride == 0 ? 0 : work.head, p.mask.batch_stride == 0 ? 0 : work.sequence.batch);
    rings.mask.advance();
  }

  // load_bias() loads a tile of the bias; a bias that is the same for all queries has one row.
  DEVICE void load_bias(const Work& work, int block) {
    if (!in_first_loading_warp()) return;
    const bool one_row = bias_has_one_row(p);
    acquire_together(rings.bias);
    const u32 bytes = one_row ? ROW_BYTES : PACKS_HEADS ? rows.rows() * ROW_BYTES : BIAS_PANEL_BYTES;
    if (leads()) ptx::mbarrier_arrive_expect(rings.bias.full(), PANELS_BIAS * bytes);
    const int row = one_row ? 0 : work.tile * BLOCK_M, head = p.bias.head_stride == 0 ? 0 : work.head;
    const int batch = p.bias.batch_stride == 0 ? 0 : work.sequence.batch;
#pragma unroll
    for (int panel = 0; panel < PANELS_BIAS; panel++) {
      load_scores(rings.bias.buffer() + panel * BIAS_PANEL_BYTES, bias_map, rings.bias.full(),
                  block * BLOCK_N + panel * BIAS_PANEL, work, row, head, batch);
    }
    rings.bias.advance();
  }
};
