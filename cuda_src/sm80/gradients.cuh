// Gradients by mma.sync without atomics: FlashAttention-2 (Dao 2023), Algorithm 2, as two or three kernels, so that
// every sum has one owner. It serves float32 (in parts) and float64, and dq of 16-bit inputs where results must repeat
// their bits under a block mask. A thread block keeps `rows`, FRAGMENTS * 16 a warp: BLOCK_M queries for dq, BLOCK_N
// keys for dk and dv; it loops over `columns`, the others. `products` (half_tile.cuh, wide_tile.cuh or
// split/sm80_tile.cuh) says how to multiply. backward.cu is the one-pass version, split/sm90_backward.cu the
// counterpart for float32 on Hopper.
#include "products"
#include "../fragment/score_gradient.cuh"
#include "../fragment/softmax_fragment.cuh"

constexpr int FRAGMENT_COLUMNS = (OF_KEYS ? BLOCK_M : BLOCK_N) / KEY_WARPS, FRAGMENT = FRAGMENT_COLUMNS / 2;
using Scores = ScoreGradient<OF_KEYS, FRAGMENT>;
using ColumnIterator = ColumnIteratorOf<OF_KEYS, QueryTileIterator>::Type;

// KEY_WARPS warps have the same rows, and each a part of the columns.
constexpr int ROWS = OF_KEYS ? BLOCK_N : BLOCK_M, COLUMNS = KEY_WARPS * FRAGMENT_COLUMNS;
constexpr int FRAGMENTS = ROWS * KEY_WARPS / (NUM_WARPS * 16);
constexpr int OWN_DIM = HEAD_DIM / KEY_WARPS;
static_assert(KEY_WARPS == 1 || HEAD_DIM == HEAD_DIM_V, "keys and values are divided alike");
static_assert(OF_KEYS == (COMPUTES_DK || COMPUTES_DV), "dk, dv, both, or dq");
static_assert(ROWS * KEY_WARPS == FRAGMENTS * NUM_WARPS * 16, "whole fragments");
// NEEDS_GRADIENTS: dv alone needs no gradients of scores.
constexpr bool NEEDS_GRADIENTS = !OF_KEYS || COMPUTES_DK;
// ALTERNATES_OPERANDS: float64's warps that share rows have a buffer of their own for exchanging results, and load one
// operand while they multiply the other.
constexpr bool ALTERNATES_OPERANDS = KEY_WARPS > 1 && sizeof(Accum) == 8,
               LAST_KEYED = !(ALTERNATES_OPERANDS && COMPUTES_DV), LAST_VALUED = !ALTERNATES_OPERANDS || COMPUTES_DV;
static_assert(!ALTERNATES_OPERANDS || (STAGES == 1 && FRAGMENTS == 1 && !(COMPUTES_DK && COMPUTES_DV)),
              "one product is exchanged a tile");
static_assert(KEY_WARPS == 1 || ALTERNATES_OPERANDS || HEAD_DIM >= 2 * ROWS, "room for the exchange");
// Rows are q and dout, or k and v; columns are k and v, or q and dout.
using RowTile = KeyedTile<ROWS, HEAD_DIM>;
using RowTileV = ValuedTile<ROWS, HEAD_DIM_V>;
using ColumnTile = KeyedTile<COLUMNS, HEAD_DIM>;
using ColumnTileV = ValuedTile<COLUMNS, HEAD_DIM_V>;

struct SharedStorage {
  alignas(128) unsigned char rows[RowTile::BYTES];                            // q or k: (ROWS, HEAD_DIM)
  alignas(128) unsigned char rows_v[NEEDS_GRADIENTS ? RowTileV::BYTES : 16];  // dout or v: (ROWS, HEAD_DIM_V)
  alignas(128) unsigned char columns[STAGES * ColumnTile::BYTES];             // k or q: (STAGES, COLUMNS, HEAD_DIM)
  alignas(128) unsigned char columns_v[STAGES * ColumnTileV::BYTES];  // v or dout: (STAGES, COLUMNS, HEAD_DIM_V)
  Accum lse[STAGES][COLUMNS], delta[STAGES][COLUMNS];  // lse and delta of the columns, if they are queries
  Work work;                                           // read again and again, because registers are scarce
  Factors<ROWS, 1> row_factors;
  Factors<COLUMNS, STAGES> factors;
  u8 seen[HIDES_ANYWHERE ? COLUMNS : 1];
  Accum exchange[ALTERNATES_OPERANDS ? ROWS * COLUMNS : 1];  // scores that warps with the same rows exchange
};

DEVICE void copy_number(float* to, const float* from) { copy_float(to, from); }
DEVICE void copy_number(double* to, const double* from) {
  ptx::cp_async_8(ptx::shared_address(to), from, sizeof(double));
}

// reference_of() is what a query's scores are compared with, from its lse: inf where it sees nothing. weight_of() is
// the weight of a score.
DEVICE Accum reference_of(Accum lse) { return lse == -infinity() ? infinity() : SUBTRACTS_FIRST ? lse : lse * LOG2_E; }
DEVICE Accum weight_of(Accum score, Accum scale, Accum reference) {
  return SUBTRACTS_FIRST ? weight(score * scale, reference) : power_of_2(score * (scale * LOG2_E) - reference);
}

// load_columns() starts to load the current tile of columns, both operands or one. Keys before `first_seen` are hidden
// from all queries, and may hold anything.
template <bool KEYED, bool VALUED>
DEVICE void load_columns(const AttentionParams& p, SharedStorage& shared, u32 stage, const ColumnIterator& iterator,
                         int first_seen) {
  const Sequence& s = shared.work.sequence;
  const int head = OF_KEYS ? iterator.head : iterator.head / group_size(p);
  const int first = iterator.blocks.block * COLUMNS;
  const OperandRows columns = rows_of(p, s, OF_KEYS ? Operand::Q : Operand::K, head);
  const OperandRows columns_v = rows_of(p, s, OF_KEYS ? Operand::DOUT : Operand::V, head);
  if constexpr (KEYED) {
    ColumnTile{ptx::shared_address(shared.columns) + stage * ColumnTile::BYTES}.load(columns, first, first_seen);
  }
  if constexpr (VALUED) {
    ColumnTileV{ptx::shared_address(shared.columns_v) + stage * ColumnTileV::BYTES}.load(columns_v, first, first_seen);
  }
  if constexpr (KEYED != LAST_KEYED) return;
  shared.factors.load(stage, columns, columns_v, first);
  if (OF_KEYS && threadIdx.x < COLUMNS) {
    const i64 row = s.row_q + smaller(first + threadIdx.x, s.len_q - 1);
    copy_number(&shared.lse[stage][threadIdx.x], p.lse.at(batch_of(p, s), row, head));
    copy_number(&shared.delta[stage][threadIdx.x], p.delta.at(batch_of(p, s), row, head));
  }
}

// gather_columns() puts together what warps with the same rows have found of all columns.
template <class X, class Columns>
DEVICE auto& gather_columns(X& x, Accum (&all)[COLUMNS / 2], const Columns& columns, Accum* exchange) {
  if constexpr (KEY_WARPS == 1) {
    return x;
  } else {
    const int warp = threadIdx.x / WARP;
    if constexpr (!ALTERNATES_OPERANDS) {
      exchange = columns.last();
      __syncthreads();
    }
    Accum *place = exchange + warp / KEY_WARPS * (COLUMNS / 2 * WARP) + lane(),
          *own = place + warp % KEY_WARPS * (FRAGMENT * WARP);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) own[e * WARP] = x[e];
    __syncthreads();
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; e++) all[e] = place[e * WARP];
    return all;
  }
}

// gradients_sm80 computes the gradients of one tile of rows: the grid has a block for each tile of each head.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
    gradients_sm80(const __grid_constant__ AttentionParams p) {
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) {
    shared.work = work_of<OF_KEYS>(p, ROWS, OF_KEYS ? p.num_heads_kv : p.num_heads_q, HAS_WINDOW && !OF_KEYS);
  }
  __syncthreads();
  const Work& work = shared.work;
  const Sequence& s = work.sequence;
  const int tile_row = work.tile * ROWS;
  if (tile_row >= (OF_KEYS ? s.rows_k : s.rows_q)) return;

  const int warp = threadIdx.x / WARP, warp_row = warp / KEY_WARPS * FRAGMENTS * 16, first_row = tile_row + warp_row;
  const int own_column = warp % KEY_WARPS * FRAGMENT_COLUMNS, own_dim = warp % KEY_WARPS * OWN_DIM;
  const int own_row = first_row + fragment_row();
  const RowTile rows{ptx::shared_address(shared.rows)}, own_rows = rows.from_row(warp_row);
  const RowTileV rows_v{ptx::shared_address(shared.rows_v)}, own_rows_v = rows_v.from_row(warp_row);

  ColumnIterator iterator(p, work);
  const int first_seen = OF_KEYS ? 0 : Mask(p, s, work.head).columns(0).begin;
  if (!iterator.done()) {
    const int group = group_size(p);
    const int begin = OF_KEYS ? Mask(p, s, work.head * group).columns(0).begin : 0;
    const OperandRows from = rows_of(p, s, OF_KEYS ? Operand::K : Operand::Q, work.head);
    const OperandRows from_v = rows_of(p, s, OF_KEYS ? Operand::V : Operand::DOUT, work.head);
    rows.load(from, tile_row, begin);
    if constexpr (NEEDS_GRADIENTS) rows_v.load(from_v, tile_row, begin);
    shared.row_factors.load(0, from, from_v, tile_row);
    if constexpr (ALTERNATES_OPERANDS) {
      load_columns<!LAST_KEYED, !LAST_VALUED>(p, shared, 0, iterator, first_seen);
      commit_copies();
    }
    load_columns<LAST_KEYED, LAST_VALUED>(p, shared, 0, iterator, first_seen);
    commit_copies();
    if (HIDES_ANYWHERE && threadIdx.x < COLUMNS) shared.seen[threadIdx.x] = 0;
  }
  Accum lse[FRAGMENTS][2], delta[FRAGMENTS][2];  // lse and delta of the rows, if they are queries
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = own_row + 16 * f + 8 * r;
      const bool used = !OF_KEYS && i < s.len_q;
      lse[f][r] = used ? reference_of(*p.lse.at(batch_of(p, s), s.row_q + i, work.head)) : infinity();
      delta[f][r] = used ? *p.delta.at(batch_of(p, s), s.row_q + i, work.head) : 0;
    }
  }

  // 4 stands for a result that is not computed, because arrays must have a size.
  Accum gradient[FRAGMENTS][NEEDS_GRADIENTS ? OWN_DIM / 2 : 4],
      gradient_v[FRAGMENTS][COMPUTES_DV ? HEAD_DIM_V / KEY_WARPS / 2 : 4];
  Accum dslope[FRAGMENTS][2];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) clear(gradient[f]), clear(gradient_v[f]), clear(dslope[f]);
  Units units[FRAGMENTS], units_v[FRAGMENTS];
  for (u32 stage = 0; !iterator.done(); stage ^= STAGES - 1) {
    const int tile_column = iterator.blocks.block * COLUMNS, first_column = tile_column + own_column,
              head = iterator.head;
    const Scores scores(p, s, head);
    const int query = OF_KEYS ? tile_column : HIDES_ANYWHERE ? tile_row : first_row;
    const int queries = OF_KEYS ? COLUMNS : HIDES_ANYWHERE ? ROWS : FRAGMENTS * 16;
    const bool masked = scores.needs_mask(iterator.blocks.partial, query, queries, OF_KEYS ? first_row : tile_column,
                                          OF_KEYS ? FRAGMENTS * 16 : COLUMNS);
    const ColumnTile columns{ptx::shared_address(shared.columns) + stage * ColumnTile::BYTES};
    const ColumnTileV columns_v{ptx::shared_address(shared.columns_v) + stage * ColumnTileV::BYTES};
    // 1. Wait for this tile of columns, and start to load the next.
    wait_for_copies<ALTERNATES_OPERANDS>();
    __syncthreads();
    iterator.advance();
    if constexpr (STAGES == 2) {
      if (!iterator.done()) load_columns<true, true>(p, shared, stage ^ 1, iterator, first_seen);
      commit_copies();
    }

    Accum x[FRAGMENTS][FRAGMENT], y[FRAGMENTS][FRAGMENT];  // S, then P; and dP, then dS: the warp's rows x its columns
#pragma unroll
    for (auto& fragment : x) clear(fragment);
    if constexpr (ALTERNATES_OPERANDS) {
      clear(y[0]);
      if constexpr (COMPUTES_DV) {
        multiply_scores(x, own_rows, columns.from_row(own_column));
      } else {
        multiply_scores(y, own_rows_v, columns_v.from_row(own_column));
      }
      finish_copies();
      if (!iterator.done()) load_columns<!LAST_KEYED, !LAST_VALUED>(p, shared, 0, iterator, first_seen);
      commit_copies();
    }
    // 2. S = Q K^T or its transpose; from it come the weights P.
    if constexpr (LAST_KEYED) multiply_scores(x, own_rows, columns.from_row(own_column));
    Scores::Derivatives derivatives[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      const int row = own_row + 16 * f;
      take_scores(x[f], shared.row_factors, warp_row + 16 * f + fragment_row(), shared.factors, stage, own_column);
      scores.take(derivatives[f], x[f], row, first_column);
      scores.apply(x[f], row, first_column, masked);
      if (HIDES_ANYWHERE && !OF_KEYS && masked) mark_seen(shared.seen + own_column, x[f]);
      const Accum scale = PLAIN_SCORES ? scores.score.scale : 1;
#pragma unroll
      for (int e = 0; e < FRAGMENT; e++) {
        const int column = own_column + fragment_column() + column_offset(e);
        x[f][e] = weight_of(x[f][e], scale, OF_KEYS ? reference_of(shared.lse[stage][column]) : lse[f][e / 2 % 2]);
      }
      scores.mark_dropped(x[f], row, first_column);
    }
    if constexpr (!ALTERNATES_OPERANDS) {
#pragma unroll
      for (auto& fragment : y) clear(fragment);
    }
    // 3. dP = dO V^T or its transpose; from it comes dS.
    if constexpr (NEEDS_GRADIENTS) {
      if constexpr (!ALTERNATES_OPERANDS) multiply_scores(y, own_rows_v, columns_v.from_row(own_column));
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        take_values(y[f], shared.row_factors, warp_row + 16 * f + fragment_row(), shared.factors, stage, own_column);
#pragma unroll
        for (int e = 0; e < FRAGMENT; e++) {
          const int column = own_column + fragment_column() + column_offset(e);
          y[f][e] = score_gradient(y[f][e], x[f][e], OF_KEYS ? shared.delta[stage][column] : delta[f][e / 2 % 2],
                                   static_cast<Accum>(p.dropout_rescale));
        }
      }
    }
    LeftFragment<COLUMNS> left[FRAGMENTS];
    if constexpr (COMPUTES_DV) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        if constexpr (HAS_DROPOUT) {
#pragma unroll
          for (Accum& w : x[f]) w = larger(w, Accum(0));
        }
        Accum rescale[2] = {1, 1}, exchanged[COLUMNS / 2];
        auto& all = gather_columns(x[f], exchanged, columns, shared.exchange);
        if (units_v[f].scale_to_units(all, shared.factors.of_valued(stage), rescale))
          rescale_rows(gradient_v[f], rescale);
        pack(left[f], all);
      }
      // 4. dV += P^T dO.
      multiply_values(gradient_v, left, columns_v, own_dim);
    }
    if constexpr (NEEDS_GRADIENTS) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        derivatives[f].differentiate_rule(y[f]);
        if constexpr (HAS_ALIBI && !OF_KEYS) scores.add_slopes(dslope[f], y[f], own_row + 16 * f, first_column);
        derivatives[f].differentiate_cap(y[f]);
        Accum rescale[2] = {1, 1}, exchanged[COLUMNS / 2];
        auto& all = gather_columns(y[f], exchanged, columns, shared.exchange);
        if (units[f].scale_to_units(all, shared.factors.of_keyed(stage), rescale)) rescale_rows(gradient[f], rescale);
        pack(left[f], all);
      }
      if (HIDES_ANYWHERE && !OF_KEYS && masked) {
        __syncthreads();
        if (threadIdx.x < COLUMNS && shared.seen[threadIdx.x] == 0) columns.clear_row(threadIdx.x);
        __syncthreads();
        if (threadIdx.x < COLUMNS) shared.seen[threadIdx.x] = 0;
      }
      // 5. dQ += dS K or dK += dS^T Q.
      if (sizeof(Element) > 2 || p.dq.data != nullptr) multiply_values(gradient, left, columns, own_dim);
    }
    if constexpr (STAGES == 1) {
      __syncthreads();
      if (!iterator.done()) load_columns<LAST_KEYED, LAST_VALUED>(p, shared, 0, iterator, first_seen);
      commit_copies();
    }
  }

  const Accum scale = static_cast<Accum>(p.softmax_scale), by_scale[2] = {scale, scale};
  const i64 batch = batch_of(p, s);
  const int num_rows = OF_KEYS ? s.rows_k : s.rows_q, len = OF_KEYS ? s.len_k : s.len_q;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    const int row = own_row + 16 * f;
    if constexpr (OF_KEYS) {
      const Accum kept = HAS_DROPOUT ? static_cast<Accum>(p.dropout_rescale) : 1, by_kept[2] = {kept, kept};
      if (COMPUTES_DK && p.dk.data != nullptr) {
        restore_channels(gradient[f], p, work, Operand::K, own_dim);
        write_in_units(units[f], p.dk.at(batch, s.row_k, work.head) + own_dim, p.dk.row_stride, row, len, num_rows,
                       p.head_dim - own_dim, gradient[f], by_scale);
      }
      if (COMPUTES_DV && p.dv.data != nullptr) {
        restore_channels(gradient_v[f], p, work, Operand::V, own_dim);
        write_in_units(units_v[f], p.dv.at(batch, s.row_k, work.head) + own_dim, p.dv.row_stride, row, len, num_rows,
                       p.head_dim_v - own_dim, gradient_v[f], by_kept);
      }
    } else {
      if (HAS_ALIBI && p.dslope_rows.data != nullptr) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          Accum total = sum_of_row<4>(dslope[f][r]);
          const int i = row + 8 * r;
          if constexpr (KEY_WARPS > 1) {
            Accum* totals = reinterpret_cast<Accum*>(shared.rows) + fragment_row();
#pragma unroll
            for (int other = 1; other < KEY_WARPS; other *= 2) {  // the order gives all warps the same bits
              __syncthreads();
              totals[warp * 8] = total;
              __syncthreads();
              total += totals[(warp ^ other) * 8];
            }
          }
          if (lane() % 4 == 0 && i < s.rows_q) *p.dslope_rows.at(batch, s.row_q + i, work.head) = total;
        }
      }
      if (p.dq.data != nullptr) {
        restore_channels(gradient[f], p, work, Operand::Q, own_dim);
        write_in_units(units[f], p.dq.at(batch, s.row_q, work.head) + own_dim, p.dq.row_stride, row, len, num_rows,
                       p.head_dim - own_dim, gradient[f], by_scale);
      }
    }
  }
}
