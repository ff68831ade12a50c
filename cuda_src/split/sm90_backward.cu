// Gradients in float32 on Hopper's float16 tensor cores (split/layout.cuh): FlashAttention-2 (Dao 2023), Algorithm 2,
// in two passes without atomic additions, as in sm80/gradients.cuh. A thread block keeps keys or queries, its `rows`,
// and visits the others, `columns`, which a thread of its own loads (sm90_backward_loader.cuh).
#include "sm90_backward_loader.cuh"
#include "result_channels.cuh"

using Scores = ScoreGradient<OF_KEYS, COLUMNS / 2>;
// OVERLAPS: where registers allow, the product with dout runs together with the gradient of the scores.
constexpr bool OVERLAPS = COMPUTES_DV && HEAD_DIM + HEAD_DIM_V <= 128;
constexpr int SCORES = COLUMNS / 2;  // elements of a thread's fragment of S

// Gradients are what a thread has of the results of its warpgroup's rows. The arrays of this struct and of
// StepFragments stand in consume() one by one: arrays that belong to step() make 24 to 56 more instructions, because
// the compiler then takes them for new ones in each step, and arrays that share a struct take other registers.
struct Gradients {
  float (&of_rows)[HEAD_DIM / 2];      // dk or dq (64, HEAD_DIM)
  float (&of_values)[HEAD_DIM_V / 2];  // dv (64, HEAD_DIM_V)
  float (&dslope)[2];                  // of the thread's two rows, as all below
  float (&unit)[2], (&unit_v)[2];      // powers of two that of_rows and of_values stand in (normalize_rows())

  DEVICE void clear() {
#pragma unroll
    for (float& x : of_rows) x = 0;
#pragma unroll
    for (float& x : of_values) x = 0;
  }
};

// RowNumbers are numbers of the thread's two rows.
struct RowNumbers {
  ScoreFactors factors;    // of q or k
  float factor_v[2];       // of dout or v
  float lse[2], delta[2];  // where the rows are queries
  float slope[2];          // factors that bring a plain score to natural units

  DEVICE RowNumbers(const SplitOperands& operands, u8* space, i64 batch_head, int row, int last, float scale)
      : factors(*own(operands).factors_at(space, batch_head, at(row, last, 0)),
                *own(operands).factors_at(space, batch_head, at(row, last, 1))),
        factor_v{*own_v(operands).factors_at(space, batch_head, at(row, last, 0)),
                 *own_v(operands).factors_at(space, batch_head, at(row, last, 1))} {
    if constexpr (!OF_KEYS) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        lse[r] = *operands.lse_at(space, batch_head, at(row, last, r));
        delta[r] = *operands.delta_at(space, batch_head, at(row, last, r));
      }
    }
    // The factor is not 0, because its product with -inf must not be NaN.
    slope[0] = larger(factors.to_natural(scale, 0), SMALLEST_NORMAL);
    slope[1] = larger(factors.to_natural(scale, 1), SMALLEST_NORMAL);
  }

 private:
  static DEVICE const SplitTensor& own(const SplitOperands& operands) { return OF_KEYS ? operands.k : operands.q; }
  static DEVICE const SplitTensor& own_v(const SplitOperands& operands) { return OF_KEYS ? operands.v : operands.dout; }
  // at() is where row r lies in work space: behind `row`, but no more than `last` rows.
  static DEVICE int at(int row, int last, int r) { return row + smaller(8 * r, last); }
};

// StepFragments are the thread's fragments of one step of the loop over the columns.
struct StepFragments {
  float (&x)[SCORES], (&y)[SCORES];  // S, then P; and dP, then dS: (64, COLUMNS)
  ExtraSum<COLUMNS>& extra;
  Scores::Derivatives& derivatives;
  float (&sum)[PANEL / 2];                     // a product with one panel of the columns (64, 64)
  float (&rescale_v)[2], (&rescale)[2];        // what earlier sums of the thread's two rows are multiplied by
  SplitFragment<COLUMNS>&weights, &gradients;  // P and dS in parts
};

// Consumer is a warpgroup with its tile of rows, and has a function for each step of the loop over tiles of columns.
struct Consumer {
  const AttentionParams& p;
  const SharedStorage& shared;
  Rings& rings;
  HiddenValues& hidden;
  const Work& work;
  Gradients& sums;
  RowNumbers& numbers;
  const int tile_row, first_row, row;  // of the tile, of the warpgroup, of the thread
  const u32 own_rows;                  // where the warpgroup's rows are in shared memory
  ColumnIterator iterator;

  // needs_mask() tells whether the current tile of columns is masked. All warpgroups have to agree where they look for
  // hidden keys together.
  DEVICE bool needs_mask(const Scores& scores, int first_column) const {
    const bool partial = iterator.blocks.partial;
    return OF_KEYS          ? scores.needs_mask(partial, first_column, COLUMNS, first_row, ROWS_OF_WARPGROUP)
           : HIDES_ANYWHERE ? scores.needs_mask(partial, tile_row, ROWS, first_column, COLUMNS)
                            : scores.needs_mask(partial, first_row, ROWS_OF_WARPGROUP, first_column, COLUMNS);
  }

  // step() is the main loop's body: it adds what a tile of columns gives to the gradients of the rows.
  DEVICE void step(StepFragments& held, const Scores& scores, int first_column, bool masked) {
    // 1. Start S = Q K^T (or its transpose) and dP = dO V^T.
    start_products(held);
    // 2. Wait for S; scores become weights P.
    ptx::wgmma_wait_group<NEEDS_GRADIENTS>();
    finish_scores(held.x, held.extra);
    find_weights(held, scores, first_column, masked);
    // 3. Wait for dP; from it and P comes dS.
    if constexpr (NEEDS_GRADIENTS) find_gradients(held);
    // 4. dV += P^T dO; P is split into parts anew.
    if constexpr (COMPUTES_DV) start_values(held);
    if constexpr (COMPUTES_DV && !OVERLAPS) add_values(held);
    // 5. dK += dS^T Q, or dQ += dS K; dS is split into parts anew.
    if constexpr (NEEDS_GRADIENTS) {
      split_gradients(held, scores, first_column);
      if constexpr (OVERLAPS) add_values(held);
      if (!OF_KEYS && masked) hidden.clear(rings.columns, first_column);
      add_gradients(held);
    }
    __syncwarp();
    rings.columns.release();
  }

 private:
  DEVICE const ColumnVectors& vectors() const { return shared.vectors[rings.columns.stage]; }

  // start_products() waits for the columns, and starts S and, where gradients of scores are needed, dP.
  DEVICE void start_products(StepFragments& held) {
    rings.columns.wait();
    start_scores<HEAD_DIM, ROWS>(held.x, held.extra, own_rows, rings.columns.buffer());
    rings.columns_v.wait();
    if constexpr (NEEDS_GRADIENTS) {
      multiply_transposed<PARTS, HEAD_DIM_V, ROWS, COLUMNS>(held.y, own_rows + ROWS_BYTES, rings.columns_v.buffer());
    }
  }

  // find_weights() turns products into weights, and finds the derivatives of the scores. A weight that dropout drops
  // gets a sign.
  DEVICE void find_weights(StepFragments& held, const Scores& scores, int first_column, bool masked) {
    float (&x)[SCORES] = held.x;
    numbers.factors.apply(x, vectors().factors(), !PLAIN_SCORES);
    scores.take(held.derivatives, x, row, first_column);
    scores.apply(x, row, first_column, masked);
    if (!OF_KEYS && masked) hidden.find(x);
#pragma unroll
    for (int e = 0; e < SCORES; e++) {
      const int r = e / 2 % 2;
      const float reference = OF_KEYS ? vectors().lse(fragment_column() + column_offset(e)) : numbers.lse[r];
      x[e] = ptx::ex2((PLAIN_SCORES ? x[e] * numbers.slope[r] - reference : x[e] - reference) * LOG2_E);
    }
    scores.mark_dropped(x, row, first_column);
  }

  // find_gradients() waits for dP and turns it into dS, still without the derivatives of the scores.
  DEVICE void find_gradients(StepFragments& held) {
    float (&y)[SCORES] = held.y;
    ptx::wgmma_wait_group<0>();
    keep(y);
    if (!COMPUTES_DV) rings.columns_v.release();
    multiply_columns(y, vectors().factors_v(), 1);
#pragma unroll
    for (int e = 0; e < SCORES; e++) {
      const int r = e / 2 % 2;
      const float delta = OF_KEYS ? vectors().delta(fragment_column() + column_offset(e)) : numbers.delta[r];
      y[e] = score_gradient(y[e] * numbers.factor_v[r], held.x[e], delta, static_cast<float>(p.dropout_rescale));
    }
  }

  // start_values() splits the weights into parts, and starts their product with the first panel of dO.
  DEVICE void start_values(StepFragments& held) {
    if constexpr (HAS_DROPOUT) {
#pragma unroll
      for (float& w : held.x) w = larger(w, 0.0f);
    }
    multiply_columns(held.x, vectors().factors_v(), TOP);
    held.rescale_v[0] = held.rescale_v[1] = 1;
    normalize_rows(held.x, sums.unit_v, held.rescale_v);
    held.weights.set(held.x);
    multiply(held.sum, held.weights, rings.columns_v.buffer(), HEAD_DIM_V, 0);
  }

  // add_values() adds that product to dV, computes and adds the other panels, and releases dO.
  DEVICE void add_values(StepFragments& held) {
    finish_product(sums.of_values, held.sum, held.rescale_v, held.weights, rings.columns_v.buffer());
    rings.columns_v.release();
  }

  // split_gradients() multiplies dS by the derivatives of the scores, and splits it into parts.
  DEVICE void split_gradients(StepFragments& held, const Scores& scores, int first_column) {
    held.derivatives.differentiate_rule(held.y);
    if constexpr (HAS_ALIBI && !OF_KEYS) scores.add_slopes(sums.dslope, held.y, row, first_column);
    held.derivatives.differentiate_cap(held.y);
    multiply_columns(held.y, vectors().factors(), TOP);
    held.rescale[0] = held.rescale[1] = 1;
    normalize_rows(held.y, sums.unit, held.rescale);
    held.gradients.set(held.y);
  }

  // add_gradients() multiplies dS with the columns, and adds the products to dK or dQ.
  DEVICE void add_gradients(StepFragments& held) {
    multiply(held.sum, held.gradients, rings.columns.buffer(), HEAD_DIM, 0);
    finish_product(sums.of_rows, held.sum, held.rescale, held.gradients, rings.columns.buffer());
  }
};

// write_dslope() writes what the thread's rows add to the gradient of ALiBi's slope.
DEVICE void write_dslope(const AttentionParams& p, const Work& work, i64 batch, int row, const float (&dslope)[2]) {
  const Sequence& s = work.sequence;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float total = sum_of_row<4>(dslope[r]);
    const int i = row + 8 * r;
    if (lane() % 4 == 0 && i < s.rows_q) *p.dslope_rows.at(batch, s.row_q + i, work.head) = total;
  }
}

// write_gradients() is the epilogue: it writes the sums times the factors of the thread's two rows, and times the units
// that they stand in.
DEVICE void write_gradients(const AttentionParams& p, const SplitOperands& operands, u8* space, const Work& work,
                            i64 batch, int row, Gradients& sums, const float (&factor)[2], const float (&unit)[2],
                            const float (&factor_v)[2], const float (&unit_v)[2]) {
  const Sequence& s = work.sequence;
  u32 head_kv = OF_KEYS ? work.head : work.head / group_size(p);
  ptx::forget(head_kv);  // what follows from it would be held in registers from the beginning on
  const i64 batch_head_kv = batch * p.num_heads_kv + head_kv;
  const auto restore = [&](auto& x, Channels which) {
    if (!needs_factors(operands, space, batch_head_kv, which)) return;
    restore_channels(x, channel_factors(operands, space, batch_head_kv, which), is_divided(OF_KEYS, which));
  };
  if constexpr (OF_KEYS) {
    if (COMPUTES_DK && p.dk.data != nullptr) {
      restore(sums.of_rows, Channels::OF_KEYS);
      write_wide_fragment(p.dk.at(batch, s.row_k, work.head), p.dk.row_stride, row, s.len_k, s.rows_k, p.head_dim,
                          sums.of_rows, factor, unit);
    }
    if (COMPUTES_DV && p.dv.data != nullptr) {
      restore(sums.of_values, Channels::OF_VALUES);
      write_wide_fragment(p.dv.at(batch, s.row_k, work.head), p.dv.row_stride, row, s.len_k, s.rows_k, p.head_dim_v,
                          sums.of_values, factor_v, unit_v);
    }
  } else {
    if (HAS_ALIBI && p.dslope_rows.data != nullptr) write_dslope(p, work, batch, row, sums.dslope);
    if (p.dq.data != nullptr) {
      restore(sums.of_rows, Channels::OF_KEYS);
      write_wide_fragment(p.dq.at(batch, s.row_q, work.head), p.dq.row_stride, row, s.len_q, s.rows_q, p.head_dim,
                          sums.of_rows, factor, unit);
    }
  }
}

// lowered() undoes that weights and what they were multiplied with both stand TOP too high. Subnormals are kept, as
// scales may be tiny.
DEVICE float lowered(float unit) { return ptx::multiply(unit, 1 / (TOP * TOP)); }

// consume() is a consumer warpgroup: it computes the gradients of 64 rows of every tile.
DEVICE void consume(const AttentionParams& p, const SplitOperands& operands, u8* space, SharedStorage& shared,
                    Rings rings, int warpgroup) {
  HiddenValues hidden(shared.seen);
  const float scale = static_cast<float>(p.softmax_scale);
  while (true) {
    rings.work.wait();
    const Work& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const int tile_row = work.tile * ROWS, first_row = tile_row + warpgroup * ROWS_OF_WARPGROUP;
    const int row = first_row + warp_row() + fragment_row();
    const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
    const i64 batch_head = OF_KEYS ? batch * p.num_heads_kv + work.head : batch * p.num_heads_q + work.head;
    const int split_row = (OF_KEYS ? split_row_k(p, s) : split_row_q(p, s)) + row;
    const int last = (OF_KEYS ? s.rows_k : s.rows_q) - 1 - row;
    RowNumbers numbers(operands, space, batch_head, split_row, last, scale);
    if constexpr (!OF_KEYS) hidden.begin(p, s, Mask(p, s, work.head));
    float of_rows[HEAD_DIM / 2], of_values[HEAD_DIM_V / 2], dslope[2] = {0, 0};
    float unit[2] = {LOWEST_UNIT, LOWEST_UNIT}, unit_v[2] = {LOWEST_UNIT, LOWEST_UNIT};
    Gradients sums = {of_rows, of_values, dslope, unit, unit_v};
    sums.clear();
    const u32 own_rows = rings.rows.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
    Consumer tile = {p,       shared,   rings,     hidden, work,     sums,
                     numbers, tile_row, first_row, row,    own_rows, ColumnIterator(p, work)};

    const bool any = !tile.iterator.done();
    if (any) rings.rows.wait();
    while (!tile.iterator.done()) {
      const int first_column = tile.iterator.blocks.block * COLUMNS;
      const Scores scores(p, s, tile.iterator.head);
      const bool masked = tile.needs_mask(scores, first_column);
      tile.iterator.advance();
      float x[SCORES], y[SCORES];
      ExtraSum<COLUMNS> extra;
      Scores::Derivatives derivatives;
      float sum[PANEL / 2], rescale_v[2], rescale[2];
      SplitFragment<COLUMNS> weights, gradients;
      StepFragments held = {x, y, extra, derivatives, sum, rescale_v, rescale, weights, gradients};
      tile.step(held, scores, first_column, masked);
    }
    if (any) rings.rows.release();
    const float kept = OF_KEYS && HAS_DROPOUT ? static_cast<float>(p.dropout_rescale) : 1;
    const float factor[2] = {scale, scale}, lowered_unit[2] = {lowered(unit[0]), lowered(unit[1])};
    const float factor_v[2] = {kept, kept}, lowered_unit_v[2] = {lowered(unit_v[0]), lowered(unit_v[1])};
    write_gradients(p, operands, space, work, batch, row, sums, factor, lowered_unit, factor_v, lowered_unit_v);
    __syncwarp();
    rings.work.release();
  }
}

static_assert(can_share_registers(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "no warpgroup waits for registers");

// split_backward is persistent: each multiprocessor has one block, which takes tile after tile.
extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    split_backward(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitOperands operands,
                   const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                   const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap dout_map) {
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) {
    constexpr int WARPS = CONSUMERS * WARPGROUP / WARP;
    shared.work_barriers.init(WARPS);
    shared.rows_barriers.init(WARPS);
    shared.columns_barriers.init(WARPS);
    shared.columns_v_barriers.init(WARPS);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_kernel_before();

  const Rings rings(shared);
  const int warpgroup = own_warpgroup();
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMERS * WARPGROUP)
      load_tiles(p, operands, p.work_space, shared, rings, &q_map, &k_map, &v_map, &dout_map);
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    consume(p, operands, p.work_space, shared, rings, warpgroup);
  }
}
