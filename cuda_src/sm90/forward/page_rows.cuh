// This header loads keys and values from small pages: cp.async copies 16 bytes a thread, because each box of TMA takes
// as long with one row as with many. Eight lanes have 128 bytes of a row. Each loading warp has rows of its own, whose
// pages its lanes look up one tile ahead.
#include "../wgmma.cuh"
#include "pages.cuh"

static_assert(!COPIES_ROWS || (HAS_PAGES && TEAMS == 1 && !HAS_BLOCK_MASK), "lists of keys are one warp's");

template <>
struct PagedKeys<KeysCome::IN_ROWS> {
  static constexpr int CHUNK = sizeof(Vector), CHUNKS = ROW_BYTES / CHUNK, ELEMENTS = CHUNK / sizeof(Element);
  static constexpr int ROWS_AT_ONCE = WARP / CHUNKS;
  static constexpr int ROWS_OF_LOADER =
      (BLOCK_N + LOADING_WARPS * ROWS_AT_ONCE - 1) / (LOADING_WARPS * ROWS_AT_ONCE) * ROWS_AT_ONCE;
  static constexpr int ROWS_OF_LANE = (ROWS_OF_LOADER + WARP - 1) / WARP;
  static_assert(BLOCK_N % ROWS_AT_ONCE == 0, "all lanes of a warp have rows of the tile, or none");

  // Places says where the rows lie that a lane looks up in a tile of keys: each in a page, or NOWHERE, and in a row of
  // that page.
  static constexpr int NOWHERE = -1;
  struct Places {
    int page[ROWS_OF_LANE], row[ROWS_OF_LANE];
  };

  const AttentionParams& p;
  PageTable table;
  int len_k, first_row;  // the first row of each tile that is this warp's
  Places of_keys, of_values;

  DEVICE PagedKeys(const AttentionParams& p, const Sequence& s, const ptx::TensorMap*, const ptx::TensorMap*)
      : p(p), table(p, s.batch_or_0()), len_k(s.len_k) {
    const int warp = warp_of_producer();
    first_row = (warp < SCHEDULING_WARP ? warp : warp - 1) * ROWS_OF_LOADER;
  }

  // look_up() finds the rows of tile `block`, whose keys come next. Entries beyond the keys in use are not read.
  DEVICE void look_up(int block) {
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; i++) {
      const int own = lane() + i * WARP, row = first_row + own, key = block * BLOCK_N + row;
      const bool used = own < ROWS_OF_LOADER && row < BLOCK_N && key < len_k;
      of_keys.page[i] = used ? table.page_of(key) : NOWHERE;
      of_keys.row[i] = used ? table.row_of(key) : 0;
    }
  }
  // values_next() says that the next values are those of the tile whose keys have been loaded.
  DEVICE void values_next() { of_values = of_keys; }

  template <class AnyRing>
  DEVICE void load_keys(const AnyRing& ring, int, int head) const {
    load<PANELS>(ring, p.k, p.head_dim, head, of_keys);
  }
  template <class AnyRing>
  DEVICE void load_values(const AnyRing& ring, int, int head) const {
    load<PANELS_V>(ring, p.v, p.head_dim_v, head, of_values);
  }

 private:
  // load() starts the copies of the warp's rows into the ring's buffer, as TMA swizzles them; rows that lie nowhere
  // become zeros, as do columns behind the last. The buffer is full when the copies of all loading threads have landed.
  template <int NUM_PANELS, class AnyRing>
  DEVICE void load(const AnyRing& ring, const Tensor<const Element>& x, int columns, int head,
                   const Places& places) const {
    const int own_row = lane() / CHUNKS, chunk = lane() % CHUNKS;
#pragma unroll
    for (int place = 0; place < ROWS_OF_LANE; place++) {
      const int rows = smaller(smaller(ROWS_OF_LOADER, BLOCK_N - first_row) - place * WARP, WARP);
#pragma unroll 1
      for (int first = 0; first < rows; first += ROWS_AT_ONCE) {
        const int page = __shfl_sync(ALL_LANES, places.page[place], first + own_row);
        const int row_of_page = __shfl_sync(ALL_LANES, places.row[place], first + own_row);
        const Element* line = x.at(larger(page, 0), row_of_page, head);
        const int row = first_row + place * WARP + first + own_row;
        const u32 target = ring.buffer() + row * ROW_BYTES + (chunk ^ row % CHUNKS) * CHUNK;
#pragma unroll
        for (int panel = 0; panel < NUM_PANELS; panel++) {
          const int column = panel * PANEL + chunk * ELEMENTS;
          const int elements = page == NOWHERE ? 0 : clamped(columns - column, ELEMENTS);
          ptx::cp_async_16(target + panel * BLOCK_N * ROW_BYTES, elements > 0 ? line + column : x.data,
                           elements * static_cast<int>(sizeof(Element)));
        }
      }
    }
    ptx::cp_async_mbarrier_arrive(ring.full());
  }
};
