// This header is the loading thread of Hopper's forward kernel, or with pages the loading warps: it brings all operands
// of all tiles to shared memory by TMA (FlashAttention-3, Shah et al. 2024, section 3.1: warp specialisation). Keys and
// values in pages come by pages.cuh and page_rows.cuh.
#include "page_rows.cuh"
#include "scheduler.cuh"

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
      if constexpr (LOADS_BY_WARPS) __syncwarp();
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
      if constexpr (LOADS_BY_WARPS) __syncwarp();  // all lanes have read the list that one of them replaces
      if (leads()) {
        shared.lists[rings.work.stage].list =
            mask.slots + static_cast<i64>(work.tile) * WARPGROUPS_PER_TILE * p.slot_columns;
      }
      if constexpr (LOADS_BY_WARPS) __syncwarp();
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
      if constexpr (LOADS_BY_WARPS) {
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
      if constexpr (LOADS_BY_WARPS) {
        load_scales(block, head_kv, pages);
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

  // load_scales() loads the scales of a tile of codes, if each key has its own.
  DEVICE void load_scales(int block, int head_kv, const PagedKeys<KEYS_COME>& pages) {
    if constexpr (TOKEN_SCALES) {
      acquire_together(rings.scales);
      pages.load_scales(scales_in(shared).tiles[rings.scales.stage], block, head_kv);
      rings.scales.publish();
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
