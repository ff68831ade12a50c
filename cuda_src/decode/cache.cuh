// This header brings the keys and values of a cache to a warp. Each warp of a decode kernel has keys of its own, so it
// copies them itself into a ring of stages and never waits for another warp: rows of 16 bits, or of e4m3 codes with a
// scale each, in an array or in pages.
#include "../around/code_vector.cuh"
#include "../around/pages.cuh"
#include "../sm80/tile.cuh"

constexpr int CACHE_BYTES = HAS_FP8 ? 1 : sizeof(Element);  // of a number
// A tile of rows counts in elements of 16 bits; one of codes has two in each.
template <int COLUMNS>
using CacheTile = SharedTile<WARP_KEYS, COLUMNS * CACHE_BYTES / 2>;
using KeyTile = CacheTile<HEAD_DIM>;
using ValueTile = CacheTile<HEAD_DIM_V>;

// Stage is what a warp has of WARP_KEYS keys.
struct Stage {
  alignas(LINE_BYTES) u8 k[KeyTile::BYTES];    // (WARP_KEYS, HEAD_DIM)
  alignas(LINE_BYTES) u8 v[ValueTile::BYTES];  // (WARP_KEYS, HEAD_DIM_V)
  // The scales of the rows; there are none without codes.
  alignas(8) float k_scale[HAS_FP8 ? WARP_KEYS : 1], v_scale[HAS_FP8 ? WARP_KEYS : 1];
};

// CacheRows are the rows of keys, or of values, of one (sequence, KV head). An array is one page.
struct CacheRows {
  const u8* data;
  i64 page_stride, row_stride;  // in bytes
  int row_bytes;                // that hold numbers
  const float* scales;          // or null: all are 1
  i64 scale_page_stride, scale_row_stride;

  DEVICE CacheRows(const AttentionParams& p, const Sequence& s, const Tensor<const Element>& x,
                   const Tensor<const float>& scale, int columns, int head) {
    const i64 batch = HAS_PAGES ? 0 : s.batch;
    data = reinterpret_cast<const u8*>(x.data) +
           (batch * x.batch_stride + head * x.head_stride) * static_cast<i64>(CACHE_BYTES);
    page_stride = x.batch_stride * CACHE_BYTES;
    row_stride = x.row_stride * CACHE_BYTES;
    row_bytes = columns * CACHE_BYTES;
    scales = !HAS_FP8 || scale.data == nullptr ? nullptr : scale.at(batch, 0, head);
    scale_page_stride = scale.batch_stride;
    scale_row_stride = scale.row_stride;
  }
  DEVICE bool scales_vary() const {
    return scales != nullptr && (scale_row_stride != 0 || (HAS_PAGES && scale_page_stride != 0));
  }
};

// Cache copies keys [begin, end) of a sequence; what lies outside becomes 0, whatever memory holds there.
struct Cache {
  CacheRows k, v;
  PageTable table;
  int begin, end;
  int page;  // that of the lane's key in the next copy

  DEVICE Cache(const AttentionParams& p, const Sequence& s, int head, int begin, int end)
      : k(p, s, p.k, p.k_scale, p.head_dim, head),
        v(p, s, p.v, p.v_scale, p.head_dim_v, head),
        table(p, s.batch),
        begin(begin),
        end(end),
        page(0) {}

  // find_page() starts to read which page holds the lane's key of those from `first` on.
  DEVICE void find_page(int first) {
    if constexpr (HAS_PAGES) page = table.page_of(own_key(first));
  }

  // load() starts to copy keys and values from `first` on, whose pages were found, and finds those from `next` on.
  DEVICE void load(Stage& to, int first, int next) {
    const int key = own_key(first), row = HAS_PAGES ? table.row_of(key) : key;
    copy_rows<KeyTile>(ptx::shared_address(to.k), k, first, row);
    copy_rows<ValueTile>(ptx::shared_address(to.v), v, first, row);
    if (HAS_FP8 && lane() < WARP_KEYS) {
      copy_scale(to.k_scale + lane(), k, row);
      copy_scale(to.v_scale + lane(), v, row);
    }
    if (next < end) find_page(next);
  }

 private:
  // own_key() is the key whose place the lane finds for all: one in use, also where the keys from `first` on are not.
  DEVICE int own_key(int first) const { return smaller(larger(first + lane() % WARP_KEYS, begin), end - 1); }

  // copy_rows() copies the rows of a tile, of which `own_row` is the lane's own. Most tiles need no test for each
  // vector.
  template <class T>
  DEVICE void copy_rows(u32 to, const CacheRows& rows, int first, int own_row) const {
    static_assert(T::NUM_ROWS * T::PER_ROW % WARP == 0, "all lanes copy alike");
    const i64 own = HAS_PAGES ? page * rows.page_stride + own_row * rows.row_stride : 0;
    const bool is_whole = first >= begin && first + WARP_KEYS <= end && rows.row_bytes == T::ROW_BYTES;
    if constexpr (WARP % T::PER_ROW == 0) {
      if (is_whole) {
        copy_whole_rows<T>(to, rows, first, own);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < T::NUM_ROWS * T::PER_ROW / WARP; i++) {
      const int index = i * WARP + lane(), row = index / T::PER_ROW, vector = index % T::PER_ROW;
      const i64 offset = HAS_PAGES ? __shfl_sync(ALL_LANES, own, row) : (first + row) * rows.row_stride;
      const bool inside = first + row >= begin && first + row < end;
      const int bytes = inside ? clamped(rows.row_bytes - vector * int(VECTOR_BYTES), VECTOR_BYTES) : 0;
      copy_vector<T>(to + T::offset(row, vector), rows.data + (bytes > 0 ? offset + vector * int(VECTOR_BYTES) : 0),
                     bytes);
    }
  }

  // copy_vector() copies 16 bytes. Where a row has fewer bytes than a line, the rest of the line is the row of another
  // head, which a thread block reads at the same time.
  template <class T>
  static DEVICE void copy_vector(u32 to, const void* from, int bytes) {
    ptx::cp_async_16<(T::ROW_BYTES < LINE_BYTES)>(to, from, bytes);
  }

  template <class T>
  static DEVICE void copy_whole_rows(u32 to, const CacheRows& rows, int first, i64 own) {
    constexpr int AT_ONCE = WARP / T::PER_ROW;
    const int own_row = lane() / T::PER_ROW, vector = lane() % T::PER_ROW;
    const u8* from = rows.data + vector * int(VECTOR_BYTES) + (HAS_PAGES ? 0 : (first + own_row) * rows.row_stride);
#pragma unroll
    for (int row = 0; row < T::NUM_ROWS; row += AT_ONCE) {
      const i64 offset = HAS_PAGES ? __shfl_sync(ALL_LANES, own, row + own_row) : 0;
      copy_vector<T>(to + T::offset(row + own_row, vector), from + offset, VECTOR_BYTES);
      if constexpr (!HAS_PAGES) from += AT_ONCE * rows.row_stride;
    }
  }

  DEVICE void copy_scale(float* to, const CacheRows& rows, int row) const {
    if (rows.scales == nullptr) {
      *to = 1;
    } else {
      copy_float(to, rows.scales + page * rows.scale_page_stride + row * rows.scale_row_stride);
    }
  }
};
