// This header has tiles in shared memory for the mma.sync kernels: their loads (cp.async), a warp's reads of them as
// factors (ldmatrix), the warp's products, and the iterator over tiles of queries. forward.cuh, gradients.cuh,
// backward.cu and bias.cuh build on it. The plan puts half_tile.cuh (16 bits), wide_tile.cuh (float64) or
// split/sm80_tile.cuh (float32 in parts) before them, which say how the elements are multiplied.
#include "../fragment/fragment.cuh"
#include "../rules/mask.cuh"

constexpr int NUM_THREADS = NUM_WARPS * WARP;
constexpr u32 VECTOR_BYTES = 16;

// copy_float() starts to copy a number. The copy is complete for this thread behind wait_for_copies(), for all threads
// behind a barrier.
DEVICE void copy_float(float* to, const float* from) {
  if constexpr (ASYNC_COPIES) {
    ptx::cp_async_4(ptx::shared_address(to), from, sizeof(float));
  } else {
    *to = *from;
  }
}
DEVICE void commit_copies() {
  if constexpr (ASYNC_COPIES) ptx::cp_async_commit_group();
}
template <int PENDING = 0>  // the number of commits that may still be under way
DEVICE void wait_for_copies() {
  if constexpr (ASYNC_COPIES) ptx::cp_async_wait_group<PENDING>();
}
// finish_copies() waits for the copies of all threads.
DEVICE void finish_copies() {
  wait_for_copies();
  __syncthreads();
}

// SharedTile is ROWS x COLUMNS elements at a shared address, row by row. Vectors are permuted within 128 bytes or less
// (swizzle), so that the eight rows of a matrix of ldmatrix lie in different banks. DERIVES_ADDRESSES: one of a
// thread's addresses is computed, and the others follow from it, where registers are too few for each.
template <int ROWS, int COLUMNS, bool DERIVES_ADDRESSES = false>
struct SharedTile {
  static constexpr u32 ROW_BYTES = COLUMNS * sizeof(Element), BYTES = ROWS * ROW_BYTES;
  static constexpr bool DECODES = false;  // what is loaded is what is multiplied
  static constexpr int NUM_ROWS = ROWS, PER_ROW = COLUMNS / VECTOR;
  // SPAN is the number of vectors among which the swizzle permutes.
  static constexpr int SPAN = PER_ROW % 8 == 0 ? 8 : PER_ROW % 4 == 0 ? 4 : 2;
  static_assert(PER_ROW % SPAN == 0, "whole spans");
  u32 address;

  // swizzle() is the number that permutes a row's vectors, and offset() the place of a vector in bytes.
  static DEVICE u32 swizzle(int row) {
    // Reads of float64 factors (wide_tile.cuh) differ: the first bit of the row moves a vector by four.
    if constexpr (sizeof(Element) == 8 && SPAN == 8) return (row & 6) ^ (row & 1) * 4;
    return row / (8 / SPAN) % SPAN;
  }
  static DEVICE u32 offset(int row, int vector) { return row * ROW_BYTES + (vector ^ swizzle(row)) * VECTOR_BYTES; }

  // load() fills the tile with rows [first_row, first_row + ROWS), each warp a part of them; rows before `begin` count
  // as 0.
  DEVICE void load(Rows rows, int first_row, int begin = 0) const {
    // LANES, a power of two, is the number of threads that share a row.
    constexpr int LANES = (PER_ROW & -PER_ROW) < WARP ? PER_ROW & -PER_ROW : WARP;
    constexpr int WARP_ROWS = ROWS / NUM_WARPS, ROWS_AT_ONCE = WARP / LANES;
    static_assert(WARP_ROWS % ROWS_AT_ONCE == 0, "all threads copy alike");
    const int own_row = threadIdx.x / WARP * WARP_ROWS + lane() / LANES, own_vector = lane() % LANES;
    const Element* from = rows.data + element_offset(first_row + own_row, rows.stride) + own_vector * VECTOR;
    const u32 own = address + offset(own_row, own_vector);
    static_assert(!DERIVES_ADDRESSES || (WARP_ROWS & (WARP_ROWS - 1)) == 0,
                  "bits of own_row and of `row` below, which swap alone");
    const auto place = [=](int row, int v) {
      if constexpr (!DERIVES_ADDRESSES) return address + offset(own_row + row, own_vector + v);
      return (own ^ swizzle(row) * VECTOR_BYTES) + row * ROW_BYTES + v * VECTOR_BYTES;
    };
    // Most tiles need no test for each vector.
    if (ALIGNED && first_row >= begin && first_row + ROWS <= rows.num_rows && rows.num_columns == COLUMNS) {
#pragma unroll(NUM_WARPS == 2 && ROWS == 64 ? 4 : WARP_ROWS / ROWS_AT_ONCE)  // with two warps each has many addresses
      for (int row = 0; row < WARP_ROWS; row += ROWS_AT_ONCE) {
#pragma unroll
        for (int v = 0; v < PER_ROW; v += LANES) {
          if constexpr (ASYNC_COPIES) {
            ptx::cp_async_16(place(row, v), from + v * VECTOR, VECTOR_BYTES);
          } else {
            store(place(row, v), *reinterpret_cast<const Vector*>(from + v * VECTOR));
          }
        }
        from += ROWS_AT_ONCE * rows.stride;
      }
      return;
    }
#pragma unroll 1
    for (int row = 0; row < WARP_ROWS; row += ROWS_AT_ONCE) {
      const int source = first_row + own_row + row;
#pragma unroll
      for (int v = 0; v < PER_ROW; v += LANES) {
        const int vector = own_vector + v;
        if constexpr (ASYNC_COPIES && ALIGNED) {
          const int left = source >= begin && source < rows.num_rows ? rows.num_columns - vector * VECTOR : 0;
          ptx::cp_async_16(place(row, v), from + v * VECTOR,
                           left >= VECTOR ? VECTOR_BYTES
                           : left <= 0    ? 0
                                          : left * static_cast<int>(sizeof(Element)));
        } else {
          store(place(row, v), rows.read(source < begin ? -1 : source, vector * VECTOR));
        }
      }
      from += ROWS_AT_ONCE * rows.stride;
    }
  }

  // load() takes a source whose rows are found one by one, as those of pages are.
  template <class Source>
  DEVICE void load(const Source& rows, int first_row, int begin = 0) const {
    constexpr int LANES = (PER_ROW & -PER_ROW) < WARP ? PER_ROW & -PER_ROW : WARP;
    constexpr int WARP_ROWS = ROWS / NUM_WARPS, ROWS_AT_ONCE = WARP / LANES;
    const int own_row = threadIdx.x / WARP * WARP_ROWS + lane() / LANES, own_vector = lane() % LANES;
#pragma unroll 1
    for (int row = own_row; row < own_row + WARP_ROWS; row += ROWS_AT_ONCE) {
      const int source = first_row + row;
      const Rows one = rows.row_at(source, source >= begin && source < rows.num_rows);
#pragma unroll
      for (int v = 0; v < PER_ROW; v += LANES) {
        const int vector = own_vector + v;
        const u32 to = address + offset(row, vector);
        if constexpr (ASYNC_COPIES && ALIGNED) {
          const int left = one.num_rows * (one.num_columns - vector * VECTOR);
          const int elements = left >= VECTOR ? VECTOR : larger(left, 0);
          ptx::cp_async_16(to, one.data + vector * VECTOR, elements * static_cast<int>(sizeof(Element)));
        } else {
          store(to, one.read(0, vector * VECTOR));
        }
      }
    }
  }

  static DEVICE void store(u32 to, const Vector& x) { *static_cast<Vector*>(__cvta_shared_to_generic(to)) = x; }

  DEVICE Vector read(int row, int vector) const {
    return *static_cast<const Vector*>(__cvta_shared_to_generic(address + offset(row, vector)));
  }

  // store_fragment() stores a warp's packed accumulator: 16 rows, columns from `column` on. Rows 8 apart are swizzled
  // alike.
  template <int N>
  DEVICE void store_fragment(const u32 (&pairs)[N], int column) const {
    const int vector = column / VECTOR;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int row = row_offset(2 * i), at = fragment_row() + (DERIVES_ADDRESSES ? 0 : row);
      const u32 to = address + offset(at, vector + i / 2) + fragment_column() * sizeof(Element);
      *static_cast<u32*>(__cvta_shared_to_generic(to + (DERIVES_ADDRESSES ? row * ROW_BYTES : 0))) = pairs[i];
    }
  }

  // is_finite() tells whether all elements of a row are finite.
  DEVICE bool is_finite(int row) const {
    bool finite = true;
    for (int v = 0; v < PER_ROW; v++) {
      const Vector x = read(row, v);
#pragma unroll
      for (int e = 0; e < VECTOR; e++) finite &= to_accum(x.e[e]) - to_accum(x.e[e]) == 0;
    }
    return finite;
  }

  DEVICE void clear_row(int row) const {
#pragma unroll
    for (int v = 0; v < PER_ROW; v++) store(address + offset(row, v), Vector{});
  }

  // from_row() is the tile from a row on, which is a multiple of 16.
  DEVICE SharedTile from_row(int row) const { return {address + row * ROW_BYTES}; }

  // lane_address() is the lane's part of the address of a 16 x 16 block: rows by lane % 16 and the second eight columns
  // by lane / 16, or (ACROSS) the other way round. block_address() adds the block's part.
  template <bool ACROSS>
  DEVICE u32 lane_address() const {
    const int row = ACROSS ? lane() / 16 * 8 + lane() % 8 : lane() % 16, vector = ACROSS ? lane() / 8 % 2 : lane() / 16;
    return address + offset(row, vector);
  }
  static DEVICE u32 block_address(u32 lane_address, int row, int step) {
    constexpr int STEPS = SPAN / 2;  // a step is two vectors
    return (lane_address ^ (step % STEPS * 2 * VECTOR_BYTES)) + step / STEPS * (SPAN * VECTOR_BYTES) + row * ROW_BYTES;
  }

  // These functions read 16 x 16 blocks at (row, 16 * step) as factors: left as it lies, left transposed, right
  // transposed (the rows of the tile are columns of the factor), right as it lies. The first two registers of a right
  // factor are eight columns.
  DEVICE void left(u32 (&a)[4], int row, int step) const {
    ptx::ldmatrix_x4(a, block_address(lane_address<false>(), row, step));
  }
  DEVICE void left_transposed(u32 (&a)[4], int row, int step) const {
    ptx::ldmatrix_x4_trans(a, block_address(lane_address<true>(), row, step));
  }
  DEVICE void right_transposed(u32 (&b)[4], int row, int step) const {
    ptx::ldmatrix_x4(b, block_address(lane_address<true>(), row, step));
  }
  // right_of_eight() reads eight rows alone, twice.
  DEVICE void right_of_eight(u32 (&b)[4], int row, int step) const {
    ptx::ldmatrix_x4(b, block_address(address + offset(lane() % 8, lane() / 8 % 2), row, step));
  }
  DEVICE void right(u32 (&b)[4], int row, int step) const {
    ptx::ldmatrix_x4_trans(b, block_address(lane_address<false>(), row, step));
  }
};

template <int N>
DEVICE void clear(Accum (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) x[e] = 0;
}

// Multiplied is the type of the factors of a product: float32 comes in float16 parts.
template <class T>
struct Multiplied {
  using Type = T;
};
template <>
struct Multiplied<float> {
  using Type = __half;
};

// multiply() computes d += a b, 16 x 16 times 16 x 16, where d is elements first .. first + 7 of an accumulator, or all
// four of one of four.
template <int N>
DEVICE void multiply(float (&x)[N], int first, const u32 (&a)[4], const u32 (&b)[4]) {
#pragma unroll
  for (int half = 0; half < (N < 8 ? 1 : 2); half++) {
    float (&d)[4] = *reinterpret_cast<float (*)[4]>(&x[first + 4 * half]);
    if constexpr (PRODUCT_DEPTH == 16) {
      ptx::mma_m16n8k16<Multiplied<Element>::Type>(d, a, {b[2 * half], b[2 * half + 1]});
    } else {
      ptx::mma_m16n8k8_f16(d, {a[0], a[1]}, b[2 * half]);
      ptx::mma_m16n8k8_f16(d, {a[2], a[3]}, b[2 * half + 1]);
    }
  }
}

// multiply_ahead() computes x += a b in STEPS steps of depth 16. left(f, step) and right(block, step) read 16 x 16
// blocks of a and b AHEAD blocks before they are used, so that reads overlap with products.
template <int STEPS, int FRAGMENTS, int N, class Left, class Right>
DEVICE void multiply_ahead(float (&x)[FRAGMENTS][N], const Left& left, const Right& right) {
  constexpr int BLOCKS = N / 8, TOTAL = STEPS * BLOCKS, AHEAD = FRAGMENTS == 1 ? 2 : 1, RING = AHEAD + 1;
  u32 a[RING][FRAGMENTS][4], b[RING][4];
#pragma unroll
  for (int next = 0; next < TOTAL + AHEAD; next++) {
    const int i = next - AHEAD;
    if (next < TOTAL) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        if (next % BLOCKS == 0) left(a[next / BLOCKS % RING][f], f, next / BLOCKS);
      }
      right(b[next % RING], next % BLOCKS, next / BLOCKS);
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      if (i >= 0) multiply(x[f], i % BLOCKS * 8, a[i / BLOCKS % RING][f], b[i % RING]);
    }
  }
}

// multiply_rows() computes x += a b^T, where a and b are tiles: FRAGMENTS * 16 rows of a, all of b. WHOLE: without a
// loop, where registers allow.
template <bool WHOLE, class A, class B, int FRAGMENTS, int N>
DEVICE void multiply_rows(float (&x)[FRAGMENTS][N], const A& a, const B& b) {
  constexpr int STEPS = A::PER_ROW * VECTOR / STEP, UNROLLED = WHOLE ? STEPS : STEPS % 4 == 0 ? 4 : 2;
#pragma unroll 1
  for (int first = 0; first < STEPS; first += UNROLLED) {
    multiply_ahead<UNROLLED>(
        x, [&](u32(&to)[4], int f, int step) { a.left(to, 16 * f, first + step); },
        [&](u32(&to)[4], int block, int step) { b.right_transposed(to, 16 * block, first + step); });
  }
}

DEVICE void copy_words(u32 (&to)[4], const u32* from) {
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = from[i];
}

// multiply_weights() computes x += weights b for columns of b from `column` on; weights are packed accumulators.
template <class B, int FRAGMENTS, int M, int N>
DEVICE void multiply_weights(float (&x)[FRAGMENTS][N], const u32 (&weights)[FRAGMENTS][M], const B& b, int column = 0) {
  multiply_ahead<M / 4>(
      x, [&](u32(&to)[4], int f, int step) { copy_words(to, &weights[f][4 * step]); },
      [&](u32(&to)[4], int block, int step) { b.right(to, STEP * step, column / 16 + block); });
}

// multiply_depth_range() computes x += a b for DEPTH columns of a and rows of b from `first` on, and columns of b from
// `column` on.
template <int DEPTH, class A, class B, int FRAGMENTS, int N>
DEVICE void multiply_depth_range(float (&x)[FRAGMENTS][N], const A& a, int first, const B& b, int column) {
  const B rows = b.from_row(first);
  multiply_ahead<DEPTH / STEP>(
      x, [&](u32(&to)[4], int f, int step) { a.left(to, 16 * f, first / STEP + step); },
      [&](u32(&to)[4], int block, int step) { rows.right(to, STEP * step, column / 16 + block); });
}

// multiply_columns() computes x += a^T b for columns of a from `row` on (the rows of x) and columns of b from `column`
// on.
template <class A, class B, int FRAGMENTS, int N>
DEVICE void multiply_columns(float (&x)[FRAGMENTS][N], const A& a, int row, const B& b, int column) {
  multiply_ahead<A::NUM_ROWS / STEP>(
      x, [&](u32(&to)[4], int f, int step) { a.left_transposed(to, STEP * step, row / 16 + f); },
      [&](u32(&to)[4], int block, int step) { b.right(to, STEP * step, column / 16 + block); });
}

// write_through() is the epilogue by way of shared memory, so that neighbouring lanes store whole lines. It writes a
// warp's accumulators, columns from `column` on, to rows from `row` on of `data` (rows, head_dim); rows in [len, rows)
// are padding and become 0.
template <class T, int FRAGMENTS, int N>
DEVICE void write_through(const T& staging, int column, Element* data, i64 row_stride, int row, int len, int rows,
                          int head_dim, const float (&out)[FRAGMENTS][N]) {
  __syncwarp();  // every lane has read what was there
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    u32 pairs[N / 2];
    pack(pairs, out[f]);
    staging.from_row(16 * f).store_fragment(pairs, column);
  }
  __syncwarp();
  constexpr int PER_ROW = 2 * N / VECTOR, LANES = PER_ROW & -PER_ROW, ROWS_AT_ONCE = WARP / LANES;
  const bool vectors =
      ((reinterpret_cast<u64>(data) | static_cast<u64>(row_stride) * sizeof(Element)) % 16 | head_dim % VECTOR) == 0;
  const int own = lane() / LANES, begin = column + lane() % LANES * VECTOR;
  Element* target = data + (row + own) * row_stride + begin;
  if (vectors) {
#pragma unroll
    for (int i = 0; i < 16 * FRAGMENTS; i += ROWS_AT_ONCE, target += ROWS_AT_ONCE * row_stride) {
#pragma unroll
      for (int v = 0; v < PER_ROW; v += LANES) {
        const Vector x = row + own + i < len ? staging.read(own + i, begin / VECTOR + v) : Vector{};
        if (row + own + i < rows && begin + v * VECTOR < head_dim) *reinterpret_cast<Vector*>(target + v * VECTOR) = x;
      }
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < smaller(16 * FRAGMENTS, rows - row - own); i += ROWS_AT_ONCE) {
#pragma unroll 1
      for (int v = 0; v < PER_ROW; v += LANES) {
        const Vector x = row + own + i < len ? staging.read(own + i, begin / VECTOR + v) : Vector{};
#pragma unroll
        for (int e = 0; e < VECTOR; e++) {
          if (begin + v * VECTOR + e < head_dim) target[i * row_stride + v * VECTOR + e] = x.e[e];
        }
      }
    }
  }
}

template <int FRAGMENTS, int N>
DEVICE void scale_all(float (&x)[FRAGMENTS][N], float factor) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int e = 0; e < N; e++) x[f][e] *= factor;
  }
}

enum class Operand { Q, K, V, DOUT };

// Namespace `direct` is for operands that are used as they lie in their arrays; split/sm80_tile.cuh has the same names
// for operands in parts.
namespace direct {

template <int ROWS, int COLUMNS, bool DERIVES_ADDRESSES = false>
using KeyedTile = SharedTile<ROWS, COLUMNS, DERIVES_ADDRESSES>;  // a tile of queries or keys
template <int ROWS, int COLUMNS>
using QueriedTile = KeyedTile<ROWS, COLUMNS, true>;  // the queries of a forward pass
template <int ROWS, int COLUMNS, bool DERIVES_ADDRESSES = false>
using ValuedTile = SharedTile<ROWS, COLUMNS, DERIVES_ADDRESSES>;  // a tile of values or dout

using Result = Element;
constexpr bool FOLLOWS_MAXIMA = false;  // a row's reference may stay below its maximum

using OperandRows = Rows;
// rows_of() is an operand's rows of one (sequence, head).
DEVICE Rows rows_of(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  const bool of_keys = operand == Operand::K || operand == Operand::V;
  const bool keyed = operand == Operand::Q || operand == Operand::K;
  const Tensor<const Element>& x = of_keys ? (keyed ? p.k : p.v) : keyed ? p.q : p.dout;
  return Rows(x.at(batch_of(p, s), of_keys ? s.row_k : s.row_q, head), x.row_stride, of_keys ? s.len_k : s.len_q,
              keyed ? p.head_dim : p.head_dim_v);
}

// chunk_of() is chunk `number` of WIDTH columns.
template <int, int WIDTH>
DEVICE Rows chunk_of(Rows rows, int number) {
  rows.data += number * WIDTH;
  rows.num_columns = smaller(rows.num_columns - number * WIDTH, WIDTH);
  return rows;
}

// Factors, take_scores(), take_values(), Units and restore_channels() do nothing here: elements that are used as they
// lie have no factors.
template <int, int>
struct Factors {
  template <class Source>
  DEVICE void load(u32, const Source&, const Source&, int) {}
  DEVICE const float* of_keyed(u32) const { return nullptr; }
  DEVICE const float* of_valued(u32, int = 0) const { return nullptr; }
};
template <class... Arguments>
DEVICE void take_scores(Arguments&&...) {}
template <class... Arguments>
DEVICE void take_values(Arguments&&...) {}
struct Units {
  template <class X>
  DEVICE bool scale_to_units(X&, const float*, Accum (&)[2]) {
    return false;
  }
  DEVICE Accum at(int) const { return 1; }
};
template <class... Arguments>
DEVICE void restore_channels(Arguments&&...) {}
// column_of() is where element e of a result stands.
DEVICE int column_of(int e) { return fragment_column() + column_offset(e); }

}  // namespace direct

// QueryTileIterator iterates over the tiles of queries, of all query heads of the group, that see some key of a tile.
struct QueryTileIterator {
  // IN_REGISTERS: the ends are held in registers, except with a block mask, whose bits take registers.
  static constexpr bool IN_REGISTERS = !HAS_BLOCK_MASK;
  const AttentionParams& p;
  const Work& work;
  int held_tile, head, held_end;
  Blocks blocks;

  DEVICE QueryTileIterator(const AttentionParams& p, const Work& work)
      : p(p), work(work), held_tile(work.tile), head(work.head * group()), held_end(head + group()), blocks(of_head()) {
    skip();
  }
  DEVICE int first_row() const { return blocks.block * BLOCK_M; }
  // keys_in_reverse() is the number of the current tile if each head's tiles are visited from the last.
  DEVICE int keys_in_reverse() const {
    const Blocks all = of_head();
    return all.block + all.end - 1 - blocks.block;
  }
  DEVICE bool done() const { return IN_REGISTERS ? head == held_end : blocks.done(); }
  DEVICE void advance() {
    blocks.advance();
    skip();
  }

 private:
  DEVICE int group() const { return group_size(p); }
  DEVICE int end_head() const { return IN_REGISTERS ? held_end : (work.head + 1) * group(); }
  DEVICE Blocks of_head() const {
    return blocks_of_queries(p, work.sequence, head, IN_REGISTERS ? held_tile : work.tile, BLOCK_M, BLOCK_N);
  }
  DEVICE void skip() {
    while (blocks.done() && ++head < end_head()) blocks = of_head();
  }
};
