// This header loads keys and values from pools of pages. One box of TMA brings each stretch of rows that lies together
// both in a page and in a tile of keys; its rows are the greatest common divisor of their sizes. The lanes of the
// loading warp share the boxes of a tile, and each looks its own up in the sequence's table one tile ahead, so that no
// copy waits for the table.
#include "../../around/pages.cuh"
#include "../pipeline.cuh"
#include "token_scales.cuh"
#include "work.cuh"

// COPIES_ROWS tells that threads copy keys and values row by row (page_rows.cuh): where pages are so small that a box
// of TMA has few rows, and where rows are codes. Then three warps load, all but the scheduler's; the first of them also
// loads the other operands.
constexpr int LOADING_WARPS = COPIES_ROWS ? 3 : 1;
constexpr int SCHEDULING_WARP = 1;  // of the warpgroup that loads
DEVICE int warp_of_producer() { return static_cast<int>(threadIdx.x) / WARP - CONSUMERS * (WARPGROUP / WARP); }
DEVICE bool in_first_loading_warp() { return !COPIES_ROWS || warp_of_producer() == 0; }

// LOADS_BY_WARPS tells whether whole warps load; else one thread does.
constexpr bool LOADS_BY_WARPS = HAS_PAGES || COPIES_ROWS || TOKEN_SCALES;
static_assert(!LOADS_BY_WARPS || PAIR == 1, "what a warp loads is for one thread block");

// leads() tells whether the thread announces the bytes that the loading warps bring, and starts the copies that are one
// box.
DEVICE bool leads() { return !LOADS_BY_WARPS || (lane() == 0 && in_first_loading_warp()); }

// acquire_together() waits for a ring's buffer. No lane may fall back by more than a step: the phase that it waits for
// would be over twice.
template <class AnyRing>
DEVICE void acquire_together(const AnyRing& ring) {
  ring.acquire();
  if constexpr (LOADS_BY_WARPS) __syncwarp();
}

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

constexpr int BOXES_OF_LANE = HAS_PAGES ? (BLOCK_N + WARP - 1) / WARP : 1;

// TilePages are the pages of the boxes that a lane loads of a tile of keys.
struct TilePages {
  int of[BOXES_OF_LANE];
};

// KeysCome says how keys come: as one box a tile, as boxes of pages, or row by row.
enum class KeysCome { IN_TILES, IN_BOXES, IN_ROWS };
constexpr KeysCome KEYS_COME = COPIES_ROWS ? KeysCome::IN_ROWS : HAS_PAGES ? KeysCome::IN_BOXES : KeysCome::IN_TILES;

// PagedKeys are the keys of one sequence, and the pages of the tiles whose keys and whose values are loaded next.
template <KeysCome>
struct PagedKeys;
template <>
struct PagedKeys<KeysCome::IN_BOXES> {
  const ptx::TensorMap *k_map, *v_map;
  PageTable table;
  int len_k, box_rows;
  TilePages of_keys, of_values;

  DEVICE PagedKeys(const AttentionParams& p, const Sequence& s, const ptx::TensorMap* k_map,
                   const ptx::TensorMap* v_map)
      : k_map(k_map), v_map(v_map), table(p, s.batch_or_0()), len_k(s.len_k), box_rows(BLOCK_N) {
    for (int other = p.page_size; other != 0;) {
      const int rest = box_rows % other;
      box_rows = other;
      other = rest;
    }
  }

  // look_up() finds the pages of tile `block`, whose keys come next. Entries beyond the keys in use are not read: their
  // boxes are those of a page behind the pool, which TMA fills with zeros.
  DEVICE void look_up(int block) {
#pragma unroll
    for (int i = 0; i < BOXES_OF_LANE; i++) {
      const int row = (lane() + i * WARP) * box_rows, key = block * BLOCK_N + row;
      of_keys.of[i] = row < BLOCK_N && key < len_k ? table.page_of(key) : table.num_pages;
    }
  }
  // values_next() says that the next values are those of the tile whose keys have been loaded.
  DEVICE void values_next() { of_values = of_keys; }
  DEVICE void load_scales(TokenScales&, int, int) const {}

  template <class AnyRing>
  DEVICE void load_keys(const AnyRing& ring, int block, int head) const {
    load<PANELS>(ring, k_map, block, head, of_keys);
  }
  template <class AnyRing>
  DEVICE void load_values(const AnyRing& ring, int block, int head) const {
    load<PANELS_V>(ring, v_map, block, head, of_values);
  }

 private:
  // load() starts the copies of tile `block` into the ring's buffer.
  template <int NUM_PANELS, class AnyRing>
  DEVICE void load(const AnyRing& ring, const ptx::TensorMap* map, int block, int head, const TilePages& pages) const {
#pragma unroll
    for (int i = 0; i < BOXES_OF_LANE; i++) {
      const int row = (lane() + i * WARP) * box_rows;
      if (row >= BLOCK_N) break;
      const int in_page = table.row_of(block * BLOCK_N + row);
#pragma unroll
      for (int panel = 0; panel < NUM_PANELS; panel++) {
        ptx::tma_load(ring.buffer() + (panel * BLOCK_N + row) * ROW_BYTES, map, ring.full(), panel * PANEL, in_page,
                      head, pages.of[i]);
      }
    }
  }
};
template <>
struct PagedKeys<KeysCome::IN_TILES> {
  const AttentionParams& p;
  const ptx::TensorMap *k_map, *v_map;
  int batch, row_k, len_k;

  DEVICE PagedKeys(const AttentionParams& p, const Sequence& s, const ptx::TensorMap* k_map,
                   const ptx::TensorMap* v_map)
      : p(p), k_map(k_map), v_map(v_map), batch(batch_of(p, s)), row_k(static_cast<int>(s.row_k)), len_k(s.len_k) {}
  DEVICE void look_up(int) {}
  DEVICE void values_next() {}

  // load_scales() writes the scales of tile `block` and of its values; those of keys that are not in use are 0.
  DEVICE void load_scales(TokenScales& scales, int block, int head) const {
#pragma unroll
    for (int row = lane(); row < BLOCK_N; row += WARP) {
      const int key = block * BLOCK_N + row;
      scales.of_keys[row] = key < len_k ? scale_at(p.k_scale, batch, row_k + key, head) : 0;
      scales.of_values[row] = key < len_k ? scale_at(p.v_scale, batch, row_k + key, head) : 0;
    }
  }

  template <class AnyRing>
  DEVICE void load_keys(const AnyRing& ring, int block, int head) const {
    if (leads()) load_panels<BLOCK_N, PANELS>(ring, k_map, row_k + block * BLOCK_N, head, batch);
  }
  template <class AnyRing>
  DEVICE void load_values(const AnyRing& ring, int block, int head) const {
    if (leads()) load_panels<BLOCK_N, PANELS_V>(ring, v_map, row_k + block * BLOCK_N, head, batch);
  }
};
