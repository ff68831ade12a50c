// This header says how the mma.sync kernels multiply float32 elements, as float16 parts (split/layout.cuh): it has
// tiles of parts, their factors, and products whose sums are made as in split/sm90_products.cuh. It is `products` of
// forward.cuh, gradients.cuh and bias.cuh in place of half_tile.cuh; split/rows.cu prepares the operands.
#include "factors.cuh"
#include "layout.cuh"
#include "result_channels.cuh"
#include "../fragment/softmax_fragment.cuh"
#include "../sm80/tile.cuh"

using Result = Element;
constexpr bool FOLLOWS_MAXIMA = false;  // a row's reference may stay below its maximum

// OperandRows are the rows of an operand: its panels (parts, panels, rows, PANEL / 2), where a float stands for a
// pair of halves, and its factors (rows,).
struct OperandRows {
  const float *panels, *factors;
  i64 panel_stride;
  int num_rows;
};
// rows_of() is an operand's rows of one (sequence, head), chunk_of() one panel of all its parts.
DEVICE OperandRows rows_of(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  const SplitOperands& all = *reinterpret_cast<const SplitOperands*>(p.work_space);
  const bool of_keys = operand == Operand::K || operand == Operand::V;
  const bool keyed = operand == Operand::Q || operand == Operand::K;
  const SplitTensor& x = of_keys ? (keyed ? all.k : all.v) : keyed ? all.q : all.dout;
  const i64 batch_head = (p.cu_seqlens_q == nullptr ? s.batch : 0) * (of_keys ? p.num_heads_kv : p.num_heads_q) + head;
  const int row = of_keys ? split_row_k(p, s) : split_row_q(p, s);
  return {reinterpret_cast<const float*>(x.halves_at(p.work_space, batch_head, 0, 0, row)),
          x.factors_at(p.work_space, batch_head, row), i64(x.rows) * PANEL / 2, of_keys ? s.len_k : s.len_q};
}

template <int COLUMNS, int WIDTH>
DEVICE OperandRows chunk_of(const OperandRows& rows, int number) {
  static_assert(WIDTH == PANEL, "a chunk is a panel");
  return {rows.panels + number * rows.panel_stride, rows.factors, COLUMNS / WIDTH * rows.panel_stride, rows.num_rows};
}

constexpr int PANEL_STEPS = PANEL / STEP;

// SplitTile is ROWS x COLUMNS elements in COUNT parts: (COUNT, PANELS, ROWS, PANEL) in shared memory.
template <int COUNT, int ROWS, int COLUMNS>
struct SplitTile {
  using Panel = SharedTile<ROWS, PANEL / 2>;
  static constexpr int PANELS = COLUMNS / PANEL;
  static constexpr bool DECODES = false;
  static constexpr u32 BYTES = COUNT * PANELS * Panel::BYTES;
  u32 address;

  DEVICE Panel panel(int part, int number) const { return {address + (part * PANELS + number) * Panel::BYTES}; }
  // load() fills the tile with rows [first_row, first_row + ROWS); rows before `begin` count as 0.
  DEVICE void load(const OperandRows& rows, int first_row, int begin = 0) const {
    if constexpr (KEY_WARPS > 1) {  // the rows may not be a multiple of the warps
#pragma unroll 1
      for (int i = threadIdx.x; i < COUNT * PANELS * ROWS * Panel::PER_ROW; i += NUM_THREADS) {
        const int row = i / Panel::PER_ROW, vector = i % Panel::PER_ROW, source = first_row + row % ROWS;
        const float* from = rows.panels + row / ROWS * rows.panel_stride + source * (PANEL / 2);
        ptx::cp_async_16(address + Panel::offset(row, vector), from + vector * VECTOR,
                         source >= begin && source < rows.num_rows ? VECTOR_BYTES : 0);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < COUNT * PANELS; i++) {
        const Rows from(rows.panels + i * rows.panel_stride, PANEL / 2, rows.num_rows, PANEL / 2);
        panel(0, i).load(from, first_row, begin);
      }
    }
  }
  DEVICE void clear_row(int row) const {
#pragma unroll 1
    for (int i = 0; i < COUNT * PANELS; i++) panel(0, i).clear_row(row);
  }
  // last() is the last part, which only scores need of queries and keys, so its memory may be used behind them.
  DEVICE float* last() const { return static_cast<float*>(__cvta_shared_to_generic(panel(COUNT - 1, 0).address)); }
  DEVICE SplitTile from_row(int row) const { return {address + row * Panel::ROW_BYTES}; }
};
template <int ROWS, int COLUMNS, bool = false>
using KeyedTile = SplitTile<KEY_PARTS, ROWS, COLUMNS>;
template <int ROWS, int COLUMNS>
using QueriedTile = KeyedTile<ROWS, COLUMNS>;
template <int ROWS, int COLUMNS, bool = false>
using ValuedTile = SplitTile<PARTS, ROWS, COLUMNS>;

// Factors are the factors of the rows of a pair of tiles: (BUFFERS, ROWS) each.
template <int ROWS, int BUFFERS>
struct Factors {
  static_assert(ROWS <= NUM_THREADS, "a thread has one");
  alignas(8) float keyed_factors[BUFFERS][ROWS], valued_factors[BUFFERS][ROWS];

  DEVICE void load(u32 buffer, const OperandRows& keyed, const OperandRows& valued, int first) {
    if (threadIdx.x >= ROWS) return;
    copy_float(&keyed_factors[buffer][threadIdx.x], keyed.factors + first + threadIdx.x);
    copy_float(&valued_factors[buffer][threadIdx.x], valued.factors + first + threadIdx.x);
  }
  DEVICE const float* of_keyed(u32 buffer) const { return keyed_factors[buffer]; }
  DEVICE const float* of_valued(u32 buffer, int begin = 0) const { return valued_factors[buffer] + begin; }
};
// take_scores() turns products of parts of q and k into those of rows; take_values() does so for dout and v. `row` is
// the thread's first.
template <int N, class Rows, class Columns>
DEVICE void take_scores(float (&x)[N], const Rows& rows, int row, const Columns& columns, u32 buffer, int begin = 0) {
  ScoreFactors(rows.of_keyed(0)[row], rows.of_keyed(0)[row + 8]).apply(x, columns.of_keyed(buffer) + begin, true);
}
template <int N, class Rows, class Columns>
DEVICE void take_values(float (&x)[N], const Rows& rows, int row, const Columns& columns, u32 buffer, int begin = 0) {
  multiply_columns(x, columns.of_valued(buffer) + begin, 1);
  const float factor[2] = {rows.of_valued(0)[row], rows.of_valued(0)[row + 8]};
  rescale_rows(x, factor);
}

// Units are the units of the rows of a sum, which are powers of two.
struct Units {
  // Weights may be larger than 1, up to 2^MAX_GROWTH, and their products with factors must not overflow; so they stand
  // lower.
  static constexpr float WEIGHT_TOP = TOP / 256;
  static_assert(MAX_GROWTH <= 8, "256 is the largest weight");
  float unit[2] = {LOWEST_UNIT, LOWEST_UNIT};

  // scale_to_units() multiplies weights by factors, and puts them into units; it returns whether rows of the sum are to
  // be multiplied by rescale.
  template <int N>
  DEVICE bool scale_to_units(float (&x)[N], const float* factors, float (&rescale)[2]) {
    multiply_columns(x, factors, WEIGHT_TOP);
    normalize_rows(x, unit, rescale);
    return __any_sync(ALL_LANES, rescale[0] != 1 || rescale[1] != 1);
  }
  // at() is the factor, perhaps a subnormal, by which a row of the sum is to be multiplied.
  DEVICE float at(int r) const { return ptx::multiply(unit[r], 1 / (WEIGHT_TOP * TOP)); }
};

// restore_channels() multiplies a fragment of a result, of the shape of `operand`, back from column `first` on.
template <int N>
DEVICE void restore_channels(float (&x)[N], const AttentionParams& p, const Work& work, Operand operand, int first) {
  const bool of_k = operand == Operand::K || operand == Operand::V;
  const Channels which = operand == Operand::Q || operand == Operand::K ? Channels::OF_KEYS : Channels::OF_VALUES;
  const int head_kv = of_k ? work.head : work.head / group_size(p);
  const i64 batch_head_kv = batch_of(p, work.sequence) * p.num_heads_kv + head_kv;
  const SplitOperands& all = *reinterpret_cast<const SplitOperands*>(p.work_space);
  if (!needs_factors(all, p.work_space, batch_head_kv, which)) return;
  restore_channels(x, channel_factors(all, p.work_space, batch_head_kv, which) + first, is_divided(of_k, which));
}

// column_of() is where element e of a result stands.
DEVICE int column_of(int e) { return fragment_column() + column_offset(e); }

// multiply_scores() computes x += a b^T: FRAGMENTS * 16 rows of a, all of b. Products of parts that float32 (TF32)
// would not keep are left out.
template <int A_ROWS, int COLUMNS, int ROWS, int FRAGMENTS, int N>
DEVICE void multiply_scores(float (&x)[FRAGMENTS][N], const SplitTile<1, A_ROWS, COLUMNS>& a,
                            const SplitTile<1, ROWS, COLUMNS>& b) {
#pragma unroll 1
  for (int panel = 0; panel < a.PANELS; panel++) {
    multiply_ahead<PANEL_STEPS>(
        x, [&](u32(&to)[4], int f, int step) { a.panel(0, panel).left(to, 16 * f, step); },
        [&](u32(&to)[4], int block, int step) { b.panel(0, panel).right_transposed(to, 16 * block, step); });
  }
}
template <int COUNT, int A_ROWS, int COLUMNS, int ROWS, int FRAGMENTS, int N>
DEVICE void multiply_scores(float (&x)[FRAGMENTS][N], const SplitTile<COUNT, A_ROWS, COLUMNS>& a,
                            const SplitTile<COUNT, ROWS, COLUMNS>& b) {
  static_assert(FRAGMENTS == 1, "registers hold the parts of no more");
  constexpr int AT_ONCE = N < 8 ? N : 8;
  float small[N];
  clear(small);
#pragma unroll 1
  for (int panel = 0; panel < a.PANELS; panel++) {
#pragma unroll UNROLL
    for (int step = 0; step < PANEL_STEPS; step++) {
      u32 left[COUNT][4];
#pragma unroll
      for (int part = 0; part < COUNT; part++) a.panel(part, panel).left(left[part], 0, step);
#pragma unroll
      for (int first = 0; first < N; first += AT_ONCE) {
        u32 right[COUNT][4];
#pragma unroll
        for (int part = 0; part < COUNT; part++) {
          if constexpr (N < 8) {
            b.panel(part, panel).right_of_eight(right[part], 2 * first, step);
          } else {
            b.panel(part, panel).right_transposed(right[part], 2 * first, step);
          }
        }
        if constexpr (COUNT == 3) {
          multiply(small, first, left[2], right[0]);
          multiply(small, first, left[0], right[2]);
          multiply(small, first, left[1], right[1]);
        }
        multiply(small, first, left[1], right[0]);
        if constexpr (COUNT == 3) {
          // Each step has a sum of its own, as the tensor cores cut sums off.
          float sum[AT_ONCE] = {};
          multiply(sum, 0, left[0], right[0]);
#pragma unroll
          for (int e = 0; e < AT_ONCE; e++) x[0][first + e] += sum[e];
        } else {
          multiply(x[0], first, left[0], right[0]);
        }
        multiply(small, first, left[0], right[1]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < N; e++) x[0][e] += small[e];
}

template <int COLUMNS>
using LeftFragment = SplitFragment<COLUMNS>;
constexpr int WARP_KEYS = BLOCK_N;
using Weights = LeftFragment<BLOCK_N>;
template <int N>
DEVICE void pack(SplitFragment<2 * N>& weights, const float (&x)[N]) {
  weights.set(x);
}

// multiply_values() computes x += weights b. TF32's sums, of one part, may stay in the tensor cores; other sums take
// two products of each kind.
template <int ROWS, int COLUMNS, int FRAGMENTS, int N>
DEVICE void multiply_values(float (&x)[FRAGMENTS][N], const SplitFragment<ROWS> (&weights)[FRAGMENTS],
                            const SplitTile<1, ROWS, COLUMNS>& b, int = 0) {
  multiply_ahead<ROWS / STEP>(
      x, [&](u32(&to)[4], int f, int step) { copy_words(to, &weights[f].high[4 * step]); },
      [&](u32(&to)[4], int block, int step) {
        b.panel(0, block / PANEL_STEPS).right(to, STEP * step, block % PANEL_STEPS);
      });
}
template <int COUNT, int ROWS, int COLUMNS, int FRAGMENTS, int N>
DEVICE void multiply_values(float (&x)[FRAGMENTS][N], const SplitFragment<ROWS> (&weights)[FRAGMENTS],
                            const SplitTile<COUNT, ROWS, COLUMNS>& b, int begin = 0) {
  static_assert(FRAGMENTS == 1, "as above");
  constexpr int CHUNK = SUM_COLUMNS / 2;
#pragma unroll
  for (int first = 0; first < N; first += CHUNK) {
    __syncwarp();  // without it the next chunk's parts would take registers early
    float sum[CHUNK], small[CHUNK];
    clear(sum);
    clear(small);
#pragma unroll
    for (int step = 0; step < ROWS / STEP; step++) {
      u32 high[4], low[4];
      copy_words(high, &weights[0].high[4 * step]);
      copy_words(low, &weights[0].low[4 * step]);
#pragma unroll
      for (int block = 0; block < CHUNK; block += 8) {
        const int column = begin / STEP + (first + block) / 8;
        u32 right[2][4];
#pragma unroll
        for (int part = 0; part < 2; part++) {
          b.panel(part, column / PANEL_STEPS).right(right[part], STEP * step, column % PANEL_STEPS);
        }
        multiply(small, block, low, right[0]);
        multiply(sum, block, high, right[0]);
        multiply(small, block, high, right[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < CHUNK; e++) x[0][first + e] += sum[e] + small[e];
  }
}
