// This header is a warp of the kernels of gradients.cuh, with a function for each step of their loop over the tiles of
// columns. What a step keeps in arrays belongs to the kernel, and its functions take one fragment of it: the compiler
// makes other code where a function has an array of its own, or the loop over the fragments.
#include "gradients_storage.cuh"

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

// clear_all() makes fragments 0.
DEVICE void clear_all(Accum (&fragments)[FRAGMENTS][FRAGMENT]) {
#pragma unroll
  for (auto& fragment : fragments) clear(fragment);
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

// ColumnStep is where a tile of columns stands: its buffer, and the warp's first column of the sequence.
struct ColumnStep {
  const u32 stage;
  const int first_column;
};

// RowWarp is a warp of a tile of rows, and has a function for each step of the loop over the tiles of columns.
struct RowWarp {
  const AttentionParams& p;
  SharedStorage& shared;
  const Work& work;
  const Sequence& s;
  const WarpPlace& own;
  const RowTile rows, own_rows;       // the tile's q or k, and the warp's
  const RowTileV rows_v, own_rows_v;  // the tile's dout or v, and the warp's

  DEVICE RowWarp(const AttentionParams& p, SharedStorage& shared, const WarpPlace& own)
      : p(p),
        shared(shared),
        work(shared.work),
        s(work.sequence),
        own(own),
        rows{ptx::shared_address(shared.rows)},
        own_rows(rows.from_row(own.warp_row)),
        rows_v{ptx::shared_address(shared.rows_v)},
        own_rows_v(rows_v.from_row(own.warp_row)) {}

  // needs_mask() tells whether the warp's part of a tile of columns may have hidden elements or, where warps look for
  // hidden keys together, the whole tile.
  DEVICE bool needs_mask(const Scores& scores, const ColumnIterator& iterator) const {
    const int tile_column = iterator.blocks.block * COLUMNS;
    const int query = OF_KEYS ? tile_column : HIDES_ANYWHERE ? own.tile_row : own.first_row;
    const int queries = OF_KEYS ? COLUMNS : HIDES_ANYWHERE ? ROWS : FRAGMENTS * 16;
    return scores.needs_mask(iterator.blocks.partial, query, queries, OF_KEYS ? own.first_row : tile_column,
                             OF_KEYS ? FRAGMENTS * 16 : COLUMNS);
  }

  // read_numbers() reads lse and delta of the thread's rows of fragment f, if they are queries.
  DEVICE void read_numbers(Accum (&lse)[2], Accum (&delta)[2], int f) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = own.own_row + 16 * f + 8 * r;
      const bool used = !OF_KEYS && i < s.len_q;
      lse[r] = used ? reference_of(*p.lse.at(batch_of(p, s), s.row_q + i, work.head)) : infinity();
      delta[r] = used ? *p.delta.at(batch_of(p, s), s.row_q + i, work.head) : 0;
    }
  }

  // load_columns() starts to load the tile of columns of the iterator, both operands or one. Keys before `first_seen`
  // are hidden from all queries, and may hold anything.
  template <bool KEYED, bool VALUED>
  DEVICE void load_columns(u32 stage, const ColumnIterator& iterator, int first_seen) const {
    const int head = OF_KEYS ? iterator.head : iterator.head / group_size(p);
    const int first = iterator.blocks.block * COLUMNS;
    const OperandRows columns = rows_of(p, s, OF_KEYS ? Operand::Q : Operand::K, head);
    const OperandRows columns_v = rows_of(p, s, OF_KEYS ? Operand::DOUT : Operand::V, head);
    if constexpr (KEYED) {
      ColumnTile{ptx::shared_address(shared.columns) + stage * ColumnTile::BYTES}.load(columns, first, first_seen);
    }
    if constexpr (VALUED) {
      ColumnTileV{ptx::shared_address(shared.columns_v) + stage * ColumnTileV::BYTES}.load(columns_v, first,
                                                                                           first_seen);
    }
    if constexpr (KEYED != LAST_KEYED) return;
    shared.factors.load(stage, columns, columns_v, first);
    if (OF_KEYS && threadIdx.x < COLUMNS) {
      const i64 row = s.row_q + smaller(first + threadIdx.x, s.len_q - 1);
      copy_number(&shared.lse[stage][threadIdx.x], p.lse.at(batch_of(p, s), row, head));
      copy_number(&shared.delta[stage][threadIdx.x], p.delta.at(batch_of(p, s), row, head));
    }
  }

  // multiply_first() multiplies with the operand that came first: S for dv, dP for the others.
  DEVICE void multiply_first(Accum (&x)[FRAGMENTS][FRAGMENT], Accum (&y)[FRAGMENTS][FRAGMENT],
                             const ColumnTile& columns, const ColumnTileV& columns_v) const {
    if constexpr (COMPUTES_DV) {
      multiply_scores(x, own_rows, columns.from_row(own.own_column));
    } else {
      multiply_scores(y, own_rows_v, columns_v.from_row(own.own_column));
    }
  }

  // find_scores() turns the products of fragment f (`x`) into scores; `derivatives` takes what dS will need of them.
  DEVICE void find_scores(Accum (&x)[FRAGMENT], Scores::Derivatives& derivatives, const Scores& scores,
                          const ColumnStep& at, int f, bool masked) const {
    const int row = own.own_row + 16 * f;
    take_scores(x, shared.row_factors, own.warp_row + 16 * f + fragment_row(), shared.factors, at.stage,
                own.own_column);
    scores.take(derivatives, x, row, at.first_column);
    scores.apply(x, row, at.first_column, masked);
  }

  // find_weights() turns scores into weights P. `column_lse` are those of the tile's columns, if they are queries.
  DEVICE void find_weights(Accum (&x)[FRAGMENT], const Scores& scores, const Accum (&row_lse)[2],
                           const Accum (&column_lse)[COLUMNS], const ColumnStep& at, int f) const {
    const Accum scale = PLAIN_SCORES ? scores.score.scale : 1;
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      const int column = own.own_column + fragment_column() + column_offset(e);
      x[e] = weight_of(x[e], scale, OF_KEYS ? reference_of(column_lse[column]) : row_lse[e / 2 % 2]);
    }
    scores.mark_dropped(x, own.own_row + 16 * f, at.first_column);
  }

  // find_gradients() turns dP of fragment f (`y`) into dS, by its weights.
  DEVICE void find_gradients(Accum (&y)[FRAGMENT], const Accum (&weights)[FRAGMENT], const Accum (&delta)[2],
                             const ColumnStep& at, int f) const {
    take_values(y, shared.row_factors, own.warp_row + 16 * f + fragment_row(), shared.factors, at.stage,
                own.own_column);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      const int column = own.own_column + fragment_column() + column_offset(e);
      y[e] = score_gradient(y[e], weights[e], OF_KEYS ? shared.delta[at.stage][column] : delta[e / 2 % 2],
                            static_cast<Accum>(p.dropout_rescale));
    }
  }

  // drop() makes the weights that dropout drops 0.
  static DEVICE void drop(Accum (&weights)[FRAGMENT]) {
    if constexpr (HAS_DROPOUT) {
#pragma unroll
      for (Accum& w : weights) w = larger(w, Accum(0));
    }
  }

  // differentiate() turns dS of fragment f (`y`) into the gradients of products; dslope takes what the scores add to
  // the slope's gradient.
  DEVICE void differentiate(Accum (&y)[FRAGMENT], const Scores::Derivatives& derivatives, const Scores& scores,
                            Accum (&dslope)[2], const ColumnStep& at, int f) const {
    derivatives.differentiate_rule(y);
    if constexpr (HAS_ALIBI && !OF_KEYS) scores.add_slopes(dslope, y, own.own_row + 16 * f, at.first_column);
    derivatives.differentiate_cap(y);
  }

  // pack_in_units() makes a fragment (`x`) a left factor, in the units of its sum. `factors` are those of the columns.
  // The caller has the arrays `rescale` and `exchanged`, because elsewhere they would change the code that the compiler
  // makes.
  template <class F, int N>
  DEVICE void pack_in_units(LeftFragment<COLUMNS>& left, Accum (&x)[FRAGMENT], Units& units, F factors, Accum (&sum)[N],
                            Accum (&rescale)[2], Accum (&exchanged)[COLUMNS / 2], const ColumnTile& columns) const {
    auto& all = gather_columns(x, exchanged, columns, shared.exchange);
    if (units.scale_to_units(all, factors, rescale)) rescale_rows(sum, rescale);
    pack(left, all);
  }

  // clear_unseen() makes keys that no query of the tile sees 0, as they may hold anything.
  DEVICE void clear_unseen(const ColumnTile& columns) const {
    __syncthreads();
    if (threadIdx.x < COLUMNS && shared.seen[threadIdx.x] == 0) columns.clear_row(threadIdx.x);
    __syncthreads();
    if (threadIdx.x < COLUMNS) shared.seen[threadIdx.x] = 0;
  }
};
