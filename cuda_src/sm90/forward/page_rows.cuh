// This header loads keys and values row by row. From small pages cp.async copies 16 bytes a thread, because each box of
// TMA takes as long with one row as with many; eight lanes have 128 bytes of a row. Of e4m3 codes, which have not
// become elements of 16 bits before the kernel, threads make these; four lanes have the 64 codes of a panel's row. Each
// loading warp has rows of its own, whose places its lanes look up one tile ahead.
#include "../../around/code_vector.cuh"
#include "../wgmma.cuh"
#include "pages.cuh"

static_assert(!COPIES_ROWS || (TEAMS == 1 && !HAS_BLOCK_MASK), "lists of keys are one warp's");

template <>
struct PagedKeys<KeysCome::IN_ROWS> {
  static constexpr int CHUNK = sizeof(Vector), CHUNKS = ROW_BYTES / CHUNK, ELEMENTS = CHUNK / sizeof(Element);
  static constexpr int LANES_OF_ROW = HAS_FP8 ? PANEL / CODES : CHUNKS, ROWS_AT_ONCE = WARP / LANES_OF_ROW;
  static constexpr int ROWS_OF_LOADER =
      (BLOCK_N + LOADING_WARPS * ROWS_AT_ONCE - 1) / (LOADING_WARPS * ROWS_AT_ONCE) * ROWS_AT_ONCE;
  static constexpr int ROWS_OF_LANE = (ROWS_OF_LOADER + WARP - 1) / WARP;
  static_assert(BLOCK_N % ROWS_AT_ONCE == 0, "all lanes of a warp have rows of the tile, or none");

  // Places says where the rows lie that a lane looks up in a tile of keys: each in a page, or NOWHERE, and in a row of
  // that page. Without pages rows follow each other, and nothing is looked up.
  static constexpr int NOWHERE = -1;
  struct Places {
    int page[HAS_PAGES ? ROWS_OF_LANE : 1], row[HAS_PAGES ? ROWS_OF_LANE : 1];
  };

  const AttentionParams& p;
  PageTable table;
  i64 batch;
  int row_k, len_k;
  int first_row;  // the first row of each tile that is this warp's
  Places of_keys, of_values;

  DEVICE PagedKeys(const AttentionParams& p, const Sequence& s, const ptx::TensorMap*, const ptx::TensorMap*)
      : p(p),
        table(p, HAS_PAGES ? s.batch_or_0() : 0),
        batch(batch_of(p, s)),
        row_k(static_cast<int>(s.row_k)),
        len_k(s.len_k) {
    const int warp = warp_of_producer();
    first_row = (warp < SCHEDULING_WARP ? warp : warp - 1) * ROWS_OF_LOADER;
  }

  // look_up() finds the rows of tile `block`, whose keys come next. Entries beyond the keys in use are not read.
  DEVICE void look_up(int block) {
    if constexpr (HAS_PAGES) {
#pragma unroll
      for (int i = 0; i < ROWS_OF_LANE; i++) {
        const int own = lane() + i * WARP, row = first_row + own, key = block * BLOCK_N + row;
        const bool used = own < ROWS_OF_LOADER && row < BLOCK_N && key < len_k;
        of_keys.page[i] = used ? table.page_of(key) : NOWHERE;
        of_keys.row[i] = used ? table.row_of(key) : 0;
      }
    }
  }
  // values_next() says that the next values are those of the tile whose keys have been loaded.
  DEVICE void values_next() {
    if constexpr (HAS_PAGES) of_values = of_keys;
  }

  template <class AnyRing>
  DEVICE void load_keys(const AnyRing& ring, int block, int head) const {
    if constexpr (HAS_FP8) {
      decode<PANELS>(ring, codes_of(p.k), p.head_dim, head, of_keys, block);
    } else {
      load<PANELS>(ring, p.k, p.head_dim, head, of_keys);
    }
  }
  template <class AnyRing>
  DEVICE void load_values(const AnyRing& ring, int block, int head) const {
    if constexpr (HAS_FP8) {
      decode<PANELS_V>(ring, codes_of(p.v), p.head_dim_v, head, of_values, block);
    } else {
      load<PANELS_V>(ring, p.v, p.head_dim_v, head, of_values);
    }
  }

  // load_scales() writes the scales of the keys that come next, and of their values.
  DEVICE void load_scales(TokenScales& scales, int block, int head) const {
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; i++) {
      const int own = lane() + i * WARP, row = first_row + own, key = block * BLOCK_N + row;
      if (own >= ROWS_OF_LOADER || row >= BLOCK_N) continue;
      const int place = HAS_PAGES ? i : 0;  // without pages nothing is looked up
      const bool used = HAS_PAGES ? of_keys.page[place] != NOWHERE : key < len_k;
      const i64 page = HAS_PAGES ? of_keys.page[place] : batch, own_row = HAS_PAGES ? of_keys.row[place] : row_k + key;
      scales.of_keys[row] = used ? scale_at(p.k_scale, page, own_row, head) : 0;
      scales.of_values[row] = used ? scale_at(p.v_scale, page, own_row, head) : 0;
    }
  }

 private:
  // Line is a row of one head, which is in use or becomes zeros.
  struct Line {
    const u8* codes;
    bool used;
  };
  // line_at() is the warp's row `own` at a place, of WARP rows.
  DEVICE Line line_at(const Tensor<const u8>& x, int head, const Places& places, int place, int own, int block) const {
    if constexpr (HAS_PAGES) {
      const int page = __shfl_sync(ALL_LANES, places.page[place], own);
      const int row_of_page = __shfl_sync(ALL_LANES, places.row[place], own);
      return {x.at(larger(page, 0), row_of_page, head), page != NOWHERE};
    } else {
      const int key = block * BLOCK_N + first_row + place * WARP + own;
      return {x.at(batch, row_k + key, head), key < len_k};
    }
  }

  // rows_at() counts the warp's rows at a place, of WARP rows.
  DEVICE int rows_at(int place) const {
    return smaller(smaller(ROWS_OF_LOADER, BLOCK_N - first_row) - place * WARP, WARP);
  }

  // decode() makes elements of the warp's rows in the ring's buffer, as TMA would swizzle them; rows that lie nowhere
  // become zeros, as do columns behind the last. A lane reads several vectors of codes before it uses any, because its
  // next keys wait for memory.
  template <int NUM_PANELS, class AnyRing>
  DEVICE void decode(const AnyRing& ring, const Tensor<const u8>& x, int columns, int head, const Places& places,
                     int block) const {
    constexpr int STEPS = WARP / ROWS_AT_ONCE;                             // of rows at a place
    constexpr int GROUP = NUM_PANELS % 2 == 0 ? 2 : NUM_PANELS;            // panels at once
    constexpr int AT_ONCE = GROUP == 1 ? STEPS : NUM_PANELS == 2 ? 2 : 1;  // steps at once
    const int own_row = lane() / LANES_OF_ROW, vector = lane() % LANES_OF_ROW;
#pragma unroll
    for (int place = 0; place < ROWS_OF_LANE; place++) {
      const int rows = rows_at(place);
#pragma unroll 1
      for (int first = 0; first < rows; first += AT_ONCE * ROWS_AT_ONCE) {
#pragma unroll 1
        for (int panel = 0; panel < NUM_PANELS; panel += GROUP) {
          CodeVector codes[AT_ONCE][GROUP];
#pragma unroll
          for (int step = 0; step < AT_ONCE; step++) {
            const Line line = line_at(x, head, places, place, first + step * ROWS_AT_ONCE + own_row, block);
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
              const int column = (panel + i) * PANEL + vector * CODES;
              codes[step][i] = read_codes<true>(line.codes + column, line.used ? columns - column : 0);
            }
          }
#pragma unroll
          for (int step = 0; step < AT_ONCE; step++) {
            const int own = first + step * ROWS_AT_ONCE;
            if (own >= rows) break;
            const int row = first_row + place * WARP + own + own_row;
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
              const u32 target = ring.buffer() + ((panel + i) * BLOCK_N + row) * ROW_BYTES;
#pragma unroll
              for (int half = 0; half < 2; half++) {
                *static_cast<uint4*>(at_shared(target + ((2 * vector + half) ^ row % CHUNKS) * CHUNK)) =
                    elements_of(codes[step][i], half);
              }
            }
          }
        }
      }
    }
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(ring.full());
  }

  // load() starts the copies of the warp's rows into the ring's buffer, as TMA swizzles them; rows that lie nowhere
  // become zeros, as do columns behind the last. The buffer is full when the copies of all loading threads have landed.
  template <int NUM_PANELS, class AnyRing>
  DEVICE void load(const AnyRing& ring, const Tensor<const Element>& x, int columns, int head,
                   const Places& places) const {
    const int own_row = lane() / CHUNKS, chunk = lane() % CHUNKS;
#pragma unroll
    for (int place = 0; place < ROWS_OF_LANE; place++) {
      const int rows = rows_at(place);
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
