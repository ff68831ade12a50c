// Gradients by mma.sync without atomics: FlashAttention-2 (Dao 2023), Algorithm 2, as two or three kernels, so that
// every sum has one owner. It serves float32 (in parts) and float64, and dq of 16-bit inputs where results must repeat
// their bits under a block mask. A thread block keeps `rows`, FRAGMENTS * 16 a warp: BLOCK_M queries for dq, BLOCK_N
// keys for dk and dv; it loops over `columns`, the others. `products` (half_tile.cuh, wide_tile.cuh or
// split/sm80_tile.cuh) says how to multiply. gradients_steps.cuh has the steps of the loop, gradients_epilogue.cuh what
// is written at the end. backward.cu is the one-pass version, split/sm90_backward.cu the counterpart for float32 on
// Hopper.
#include "gradients_epilogue.cuh"
#include "gradients_steps.cuh"

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

  // WarpPlace does not compute these itself, because for sm_120 the compiler would make other code.
  const int own_warp = threadIdx.x / WARP, warp_row = own_warp / KEY_WARPS * FRAGMENTS * 16;
  const int first_row = tile_row + warp_row;
  const int own_column = own_warp % KEY_WARPS * FRAGMENT_COLUMNS, own_dim = own_warp % KEY_WARPS * OWN_DIM;
  const int own_row = first_row + fragment_row();
  const WarpPlace own = {tile_row, own_warp, warp_row, first_row, own_column, own_dim, own_row};
  const RowWarp warp(p, shared, own);
  ColumnIterator iterator(p, work);
  const int first_seen = OF_KEYS ? 0 : Mask(p, s, work.head).columns(0).begin;
  if (!iterator.done()) {
    const int group = group_size(p);
    const int begin = OF_KEYS ? Mask(p, s, work.head * group).columns(0).begin : 0;
    const OperandRows from = rows_of(p, s, OF_KEYS ? Operand::K : Operand::Q, work.head);
    const OperandRows from_v = rows_of(p, s, OF_KEYS ? Operand::V : Operand::DOUT, work.head);
    warp.rows.load(from, own.tile_row, begin);
    if constexpr (NEEDS_GRADIENTS) warp.rows_v.load(from_v, own.tile_row, begin);
    shared.row_factors.load(0, from, from_v, own.tile_row);
    if constexpr (ALTERNATES_OPERANDS) {
      warp.load_columns<!LAST_KEYED, !LAST_VALUED>(0, iterator, first_seen);
      commit_copies();
    }
    warp.load_columns<LAST_KEYED, LAST_VALUED>(0, iterator, first_seen);
    commit_copies();
    if (HIDES_ANYWHERE && threadIdx.x < COLUMNS) shared.seen[threadIdx.x] = 0;
  }
  Accum lse[FRAGMENTS][2], delta[FRAGMENTS][2];  // lse and delta of the rows, if they are queries
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) warp.read_numbers(lse[f], delta[f], f);

  // The warp's rows x its columns of dq or dk, and of dv, and the thread's terms of the slope's gradient.
  Accum gradient[FRAGMENTS][KEYED_GRADIENT], gradient_v[FRAGMENTS][VALUED_GRADIENT];
  Accum dslope[FRAGMENTS][2];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) clear(gradient[f]), clear(gradient_v[f]), clear(dslope[f]);
  Units units[FRAGMENTS], units_v[FRAGMENTS];

  for (u32 stage = 0; !iterator.done(); stage ^= STAGES - 1) {
    const ColumnStep at = {stage, iterator.blocks.block * COLUMNS + own.own_column};
    const Scores scores(p, s, iterator.head);
    const bool masked = warp.needs_mask(scores, iterator);
    const ColumnTile columns{ptx::shared_address(shared.columns) + stage * ColumnTile::BYTES};
    const ColumnTileV columns_v{ptx::shared_address(shared.columns_v) + stage * ColumnTileV::BYTES};
    // 1. Wait for this tile of columns, and start to load the next.
    wait_for_copies<ALTERNATES_OPERANDS>();
    __syncthreads();
    iterator.advance();
    if constexpr (STAGES == 2) {
      if (!iterator.done()) warp.load_columns<true, true>(stage ^ 1, iterator, first_seen);
      commit_copies();
    }

    Accum x[FRAGMENTS][FRAGMENT], y[FRAGMENTS][FRAGMENT];  // S, then P; and dP, then dS: the warp's rows x its columns
    clear_all(x);
    if constexpr (ALTERNATES_OPERANDS) {
      clear(y[0]);
      warp.multiply_first(x, y, columns, columns_v);
      finish_copies();
      if (!iterator.done()) warp.load_columns<!LAST_KEYED, !LAST_VALUED>(0, iterator, first_seen);
      commit_copies();
    }
    // 2. S = Q K^T or its transpose; from it come the weights P.
    if constexpr (LAST_KEYED) multiply_scores(x, warp.own_rows, columns.from_row(own.own_column));
    Scores::Derivatives derivatives[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      warp.find_scores(x[f], derivatives[f], scores, at, f, masked);
      if (HIDES_ANYWHERE && !OF_KEYS && masked) mark_seen(shared.seen + own.own_column, x[f]);
      warp.find_weights(x[f], scores, lse[f], shared.lse[stage], at, f);
    }
    if constexpr (!ALTERNATES_OPERANDS) clear_all(y);
    // 3. dP = dO V^T or its transpose; from it comes dS.
    if constexpr (NEEDS_GRADIENTS) {
      if constexpr (!ALTERNATES_OPERANDS) multiply_scores(y, warp.own_rows_v, columns_v.from_row(own.own_column));
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) warp.find_gradients(y[f], x[f], delta[f], at, f);
    }
    LeftFragment<COLUMNS> left[FRAGMENTS];
    // 4. dV += P^T dO.
    if constexpr (COMPUTES_DV) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        warp.drop(x[f]);
        Accum rescale[2] = {1, 1}, exchanged[COLUMNS / 2];
        warp.pack_in_units(left[f], x[f], units_v[f], shared.factors.of_valued(stage), gradient_v[f], rescale,
                           exchanged, columns);
      }
      multiply_values(gradient_v, left, columns_v, own.own_dim);
    }
    // 5. dQ += dS K or dK += dS^T Q.
    if constexpr (NEEDS_GRADIENTS) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        warp.differentiate(y[f], derivatives[f], scores, dslope[f], at, f);
        Accum rescale[2] = {1, 1}, exchanged[COLUMNS / 2];
        warp.pack_in_units(left[f], y[f], units[f], shared.factors.of_keyed(stage), gradient[f], rescale, exchanged,
                           columns);
      }
      if (HIDES_ANYWHERE && !OF_KEYS && masked) warp.clear_unseen(columns);
      if (sizeof(Element) > 2 || p.dq.data != nullptr) multiply_values(gradient, left, columns, own.own_dim);
    }
    if constexpr (STAGES == 1) {
      __syncthreads();
      if (!iterator.done()) warp.load_columns<LAST_KEYED, LAST_VALUED>(0, iterator, first_seen);
      commit_copies();
    }
  }

  const Epilogue epilogue(p, shared, own);
  const Accum by_scale[2] = {epilogue.scale, epilogue.scale};
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    const int row = own.own_row + 16 * f;
    if constexpr (OF_KEYS) {
      const Accum kept = HAS_DROPOUT ? static_cast<Accum>(p.dropout_rescale) : 1, by_kept[2] = {kept, kept};
      if (COMPUTES_DK && p.dk.data != nullptr) epilogue.write_dk(row, gradient[f], units[f], by_scale);
      if (COMPUTES_DV && p.dv.data != nullptr) epilogue.write_dv(row, gradient_v[f], units_v[f], by_kept);
    } else {
      if (HAS_ALIBI && p.dslope_rows.data != nullptr) epilogue.write_dslopes(row, dslope[f]);
      if (p.dq.data != nullptr) epilogue.write_dq(row, gradient[f], units[f], by_scale);
    }
  }
}
