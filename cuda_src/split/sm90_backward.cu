// Gradients in float32 on Hopper's float16 tensor cores (split/layout.cuh): FlashAttention-2 (Dao 2023), Algorithm 2,
// in two passes without atomic additions, as in sm80/gradients.cuh. OF_KEYS: a thread block keeps BLOCK_N keys and
// computes dk, dv or both; otherwise it keeps BLOCK_M queries and computes dq. `rows` are what a thread block keeps,
// `columns` what it visits.
#include "../sm90/wgmma.cuh"

constexpr int PAIR = 1, KEY_WARPS = 1;  // there are no clusters, and each warp has whole rows
#include "../sm90/backward/schedule.cuh"
#include "../sm90/hidden_values.cuh"
#include "factors.cuh"
#include "layout.cuh"
#include "result_channels.cuh"
#include "sm90_products.cuh"
#include "../fragment/score_gradient.cuh"

constexpr int ROWS = OF_KEYS ? BLOCK_N : BLOCK_M, COLUMNS = OF_KEYS ? BLOCK_M : BLOCK_N;
using Scores = ScoreGradient<OF_KEYS, COLUMNS / 2>;
using ColumnIterator = ColumnIteratorOf<OF_KEYS, QueryTileIterator>::Type;
constexpr bool NEEDS_GRADIENTS = !OF_KEYS || COMPUTES_DK;
static_assert(OF_KEYS == (COMPUTES_DK || COMPUTES_DV), "dk, dv, both, or dq");
constexpr u32 ROWS_BYTES = KEY_PARTS * part_bytes(ROWS, HEAD_DIM);
constexpr u32 ROWS_V_BYTES = NEEDS_GRADIENTS ? PARTS * part_bytes(ROWS, HEAD_DIM_V) : 0;
constexpr u32 COLUMNS_BYTES = KEY_PARTS * part_bytes(COLUMNS, HEAD_DIM);
constexpr u32 COLUMNS_V_BYTES = PARTS * part_bytes(COLUMNS, HEAD_DIM_V);
// OVERLAPS: where registers allow, the product with dout runs together with the gradient of the scores.
constexpr bool OVERLAPS = COMPUTES_DV && HEAD_DIM + HEAD_DIM_V <= 128;
constexpr u32 VECTOR_BYTES = COLUMNS * sizeof(float);

// ColumnVectors are the numbers of a tile's columns: their factors and, if they are queries, lse (inf where they have
// no weights) and delta.
struct ColumnVectors {
  static constexpr int COUNT = OF_KEYS ? 4 : 2;
  float vectors[COUNT][COLUMNS];

  DEVICE const float* factors() const { return vectors[0]; }
  DEVICE const float* factors_v() const { return vectors[1]; }
  DEVICE float lse(int column) const { return vectors[COUNT - 2][column]; }
  DEVICE float delta(int column) const { return vectors[COUNT - 1][column]; }
};

struct SharedStorage {
  // `rows` holds q or k in KEY_PARTS parts, then dout or v in PARTS parts: (parts, panels, ROWS, 64) each.
  alignas(1024) unsigned char rows[ROWS_BYTES + ROWS_V_BYTES];
  alignas(1024) unsigned char columns[STAGES * COLUMNS_BYTES];  // k or q: (STAGES, KEY_PARTS, PANELS, COLUMNS, 64)
  // `columns_v` holds v or dout: (STAGES_V, PARTS, PANELS_V, COLUMNS, 64).
  alignas(1024) unsigned char columns_v[STAGES_V * COLUMNS_V_BYTES];
  alignas(16) ColumnVectors vectors[STAGES];  // the vectors come and go with the columns
  Work work[WORK_STAGES];
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<1> rows_barriers;
  RingBarriers<STAGES> columns_barriers;
  RingBarriers<STAGES_V> columns_v_barriers;
  SeenKeys seen;
};
static_assert(ROWS == CONSUMERS * ROWS_OF_WARPGROUP, "a warpgroup has 64 rows");

// Rings are one thread's positions in the circular buffers of the kernel.
struct Rings {
  WorkRing work;
  Ring<1, ROWS_BYTES + ROWS_V_BYTES> rows;
  Ring<STAGES, COLUMNS_BYTES> columns;
  Ring<STAGES_V, COLUMNS_V_BYTES> columns_v;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        rows(shared.rows, shared.rows_barriers),
        columns(shared.columns, shared.columns_barriers),
        columns_v(shared.columns_v, shared.columns_v_barriers) {}
};

DEVICE Work any_work_at(const AttentionParams& p, u32 index) {
  return OF_KEYS ? key_work_at<true>(p, index) : work_at(p, index);
}

// load_tiles() is the loading thread, which is its own scheduler.
DEVICE void load_tiles(const AttentionParams& p, const SplitOperands& operands, u8* space, SharedStorage& shared,
                       Rings rings, const ptx::TensorMap* q_map, const ptx::TensorMap* k_map,
                       const ptx::TensorMap* v_map, const ptx::TensorMap* dout_map) {
  const u32 total = p.num_tiles * (OF_KEYS ? num_batch_heads_kv(p) : num_batch_heads_q(p));
  for (u32 index = blockIdx.x, next; index < total; index = next) {
    next = next_index(p, index, total);
    const Work work = any_work_at(p, index);
    const Sequence& s = work.sequence;
    if (work.tile * ROWS >= (OF_KEYS ? s.rows_k : s.rows_q)) continue;
    rings.work.acquire();
    shared.work[rings.work.stage] = work;
    rings.work.publish();

    const int group = group_size(p), head_kv = OF_KEYS ? work.head : work.head / group;
    const int batch = batch_of(p, s), batch_head_kv = batch * p.num_heads_kv + head_kv;
    const int first_q = split_row_q(p, s), first_k = split_row_k(p, s);
    bool first = true;
    for (ColumnIterator iterator(p, work); !iterator.done(); iterator.advance()) {
      const int batch_head_q = batch * p.num_heads_q + iterator.head;
      const int row = (OF_KEYS ? first_q : first_k) + iterator.blocks.block * COLUMNS;
      rings.columns.acquire();
      rings.columns.expect(sizeof(ColumnVectors));
      const u32 buffer = ptx::shared_address(&shared.vectors[rings.columns.stage]), full = rings.columns.full();
      const auto load_vector = [&](int number, const float* from) {
        ptx::bulk_load(buffer + number * VECTOR_BYTES, from, VECTOR_BYTES, full);
      };
      if constexpr (OF_KEYS) {
        load_vector(0, operands.q.factors_at(space, batch_head_q, row));
        load_vector(1, operands.dout.factors_at(space, batch_head_q, row));
        load_vector(2, operands.lse_at(space, batch_head_q, row));
        load_vector(3, operands.delta_at(space, batch_head_q, row));
      } else {
        load_vector(0, operands.k.factors_at(space, batch_head_kv, row));
        load_vector(1, operands.v.factors_at(space, batch_head_kv, row));
      }
      const int batch_head = OF_KEYS ? batch_head_q : batch_head_kv,
                own_batch_head = OF_KEYS ? batch_head_kv : batch_head_q;
      ptx::tma_load(rings.columns.buffer(), OF_KEYS ? q_map : k_map, full, 0, row, 0, batch_head);
      rings.columns.advance();
      if (first) {
        const int own = (OF_KEYS ? first_k : first_q) + work.tile * ROWS;
        rings.rows.acquire();
        rings.rows.expect();
        ptx::tma_load(rings.rows.buffer(), OF_KEYS ? k_map : q_map, rings.rows.full(), 0, own, 0, own_batch_head);
        if constexpr (NEEDS_GRADIENTS) {
          ptx::tma_load(rings.rows.buffer() + ROWS_BYTES, OF_KEYS ? v_map : dout_map, rings.rows.full(), 0, own, 0,
                        own_batch_head);
        }
        rings.rows.advance();
        first = false;
      }
      load(rings.columns_v, OF_KEYS ? dout_map : v_map, row, batch_head);
    }
  }
  rings.work.acquire();
  shared.work[rings.work.stage] = {{}, 0, NO_TILE};
  rings.work.publish();
}

// consume() is a consumer warpgroup: it computes the gradients of 64 rows.
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
    const auto at = [&](int r) { return split_row + smaller(8 * r, last); };
    const SplitTensor &own = OF_KEYS ? operands.k : operands.q, &own_v = OF_KEYS ? operands.v : operands.dout;
    const ScoreFactors factors(*own.factors_at(space, batch_head, at(0)), *own.factors_at(space, batch_head, at(1)));
    const float factor_v[2] = {*own_v.factors_at(space, batch_head, at(0)),
                               *own_v.factors_at(space, batch_head, at(1))};
    float lse[2], delta[2];
    if constexpr (!OF_KEYS) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        lse[r] = *operands.lse_at(space, batch_head, at(r));
        delta[r] = *operands.delta_at(space, batch_head, at(r));
      }
      hidden.begin(p, s, Mask(p, s, work.head));
    }
    const float slope[2] = {larger(factors.to_natural(scale, 0), SMALLEST_NORMAL),
                            larger(factors.to_natural(scale, 1), SMALLEST_NORMAL)};

    float gradient[HEAD_DIM / 2], gradient_v[HEAD_DIM_V / 2], dslope[2] = {0, 0};
    float unit[2] = {LOWEST_UNIT, LOWEST_UNIT}, unit_v[2] = {LOWEST_UNIT, LOWEST_UNIT};
#pragma unroll
    for (float& x : gradient) x = 0;
#pragma unroll
    for (float& x : gradient_v) x = 0;

    const u32 own_rows = rings.rows.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
    ColumnIterator iterator(p, work);
    const bool any = !iterator.done();
    if (any) rings.rows.wait();
    while (!iterator.done()) {
      const int first_column = iterator.blocks.block * COLUMNS, head = iterator.head;
      const Scores scores(p, s, head);
      const bool masked =
          OF_KEYS ? scores.needs_mask(iterator.blocks.partial, first_column, COLUMNS, first_row, ROWS_OF_WARPGROUP)
          : HIDES_ANYWHERE
              ? scores.needs_mask(iterator.blocks.partial, tile_row, ROWS, first_column, COLUMNS)
              : scores.needs_mask(iterator.blocks.partial, first_row, ROWS_OF_WARPGROUP, first_column, COLUMNS);
      iterator.advance();

      float x[COLUMNS / 2], y[COLUMNS / 2];  // S, then P; and dP, then dS: the thread's fragment of (64, COLUMNS)
      ExtraSum<COLUMNS> extra;
      // 1. Start S = Q K^T (or its transpose) and dP = dO V^T.
      rings.columns.wait();
      start_scores<HEAD_DIM, ROWS>(x, extra, own_rows, rings.columns.buffer());
      rings.columns_v.wait();
      if constexpr (NEEDS_GRADIENTS) {
        multiply_transposed<PARTS, HEAD_DIM_V, ROWS, COLUMNS>(y, own_rows + ROWS_BYTES, rings.columns_v.buffer());
      }
      const ColumnVectors& vectors = shared.vectors[rings.columns.stage];
      // 2. Wait for S; scores become weights P.
      ptx::wgmma_wait_group<NEEDS_GRADIENTS>();
      finish_scores(x, extra);
      factors.apply(x, vectors.factors(), !PLAIN_SCORES);
      Scores::Derivatives derivatives;
      scores.take(derivatives, x, row, first_column);
      scores.apply(x, row, first_column, masked);
      if (!OF_KEYS && masked) hidden.find(x);
#pragma unroll
      for (int e = 0; e < COLUMNS / 2; e++) {
        const int r = e / 2 % 2;
        const float reference = OF_KEYS ? vectors.lse(fragment_column() + column_offset(e)) : lse[r];
        x[e] = ptx::ex2((PLAIN_SCORES ? x[e] * slope[r] - reference : x[e] - reference) * LOG2_E);
      }
      scores.mark_dropped(x, row, first_column);
      if constexpr (NEEDS_GRADIENTS) {
        // 3. Wait for dP; from it comes dS.
        ptx::wgmma_wait_group<0>();
        keep(y);
        if (!COMPUTES_DV) rings.columns_v.release();
        multiply_columns(y, vectors.factors_v(), 1);
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; e++) {
          const int r = e / 2 % 2;
          const float own_delta = OF_KEYS ? vectors.delta(fragment_column() + column_offset(e)) : delta[r];
          y[e] = score_gradient(y[e] * factor_v[r], x[e], own_delta, static_cast<float>(p.dropout_rescale));
        }
      }
      float sum[PANEL / 2], rescale_v[2] = {1, 1}, rescale[2] = {1, 1};
      SplitFragment<COLUMNS> weights, gradients;
      // 4. dV += P^T dO; P is split into parts anew.
      if constexpr (COMPUTES_DV) {
        if constexpr (HAS_DROPOUT) {
#pragma unroll
          for (float& w : x) w = larger(w, 0.0f);
        }
        multiply_columns(x, vectors.factors_v(), TOP);
        normalize_rows(x, unit_v, rescale_v);
        weights.set(x);
        multiply(sum, weights, rings.columns_v.buffer(), HEAD_DIM_V, 0);
      }
      const auto add_values = [&] {
        ptx::wgmma_wait_group<0>();
        keep(sum);
        add_panel(gradient_v, sum, rescale_v, 0);
#pragma unroll
        for (int panel = 1; panel < PANELS_V; panel++) {
          multiply(sum, weights, rings.columns_v.buffer(), HEAD_DIM_V, panel);
          ptx::wgmma_wait_group<0>();
          keep(sum);
          add_panel(gradient_v, sum, rescale_v, panel);
        }
        rings.columns_v.release();
      };
      if constexpr (COMPUTES_DV && !OVERLAPS) add_values();
      if constexpr (NEEDS_GRADIENTS) {
        // 5. dK += dS^T Q, or dQ += dS K; dS is split into parts anew.
        derivatives.differentiate_rule(y);
        if constexpr (HAS_ALIBI && !OF_KEYS) scores.add_slopes(dslope, y, row, first_column);
        derivatives.differentiate_cap(y);
        multiply_columns(y, vectors.factors(), TOP);
        normalize_rows(y, unit, rescale);
        gradients.set(y);
        if constexpr (OVERLAPS) add_values();
        if (!OF_KEYS && masked) hidden.clear(rings.columns, first_column);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
          multiply(sum, gradients, rings.columns.buffer(), HEAD_DIM, panel);
          ptx::wgmma_wait_group<0>();
          keep(sum);
          add_panel(gradient, sum, rescale, panel);
        }
      }
      __syncwarp();
      rings.columns.release();
    }
    if (any) rings.rows.release();

    // The epilogue. Weights and what they were multiplied with both stand TOP too high; subnormals are kept, as scales
    // may be tiny.
    const auto lowered = [](float unit) { return ptx::multiply(unit, 1 / (TOP * TOP)); };
    u32 head_kv = OF_KEYS ? work.head : work.head / group_size(p);
    ptx::forget(head_kv);  // what follows from it would be held in registers from the beginning on
    const i64 batch_head_kv = batch * p.num_heads_kv + head_kv;
    const auto restore = [&](auto& x, Channels which) {
      if (!needs_factors(operands, space, batch_head_kv, which)) return;
      restore_channels(x, channel_factors(operands, space, batch_head_kv, which), is_divided(OF_KEYS, which));
    };
    const float by_scale[2] = {scale, scale}, lowered_unit[2] = {lowered(unit[0]), lowered(unit[1])};
    if constexpr (OF_KEYS) {
      const float kept = HAS_DROPOUT ? static_cast<float>(p.dropout_rescale) : 1, by_kept[2] = {kept, kept};
      const float lowered_unit_v[2] = {lowered(unit_v[0]), lowered(unit_v[1])};
      if (COMPUTES_DK && p.dk.data != nullptr) {
        restore(gradient, Channels::OF_KEYS);
        write_wide_fragment(p.dk.at(batch, s.row_k, work.head), p.dk.row_stride, row, s.len_k, s.rows_k, p.head_dim,
                            gradient, by_scale, lowered_unit);
      }
      if (COMPUTES_DV && p.dv.data != nullptr) {
        restore(gradient_v, Channels::OF_VALUES);
        write_wide_fragment(p.dv.at(batch, s.row_k, work.head), p.dv.row_stride, row, s.len_k, s.rows_k, p.head_dim_v,
                            gradient_v, by_kept, lowered_unit_v);
      }
    } else {
      if (HAS_ALIBI && p.dslope_rows.data != nullptr) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float total = sum_of_row<4>(dslope[r]);
          const int i = row + 8 * r;
          if (lane() % 4 == 0 && i < s.rows_q) *p.dslope_rows.at(batch, s.row_q + i, work.head) = total;
        }
      }
      if (p.dq.data != nullptr) {
        restore(gradient, Channels::OF_KEYS);
        write_wide_fragment(p.dq.at(batch, s.row_q, work.head), p.dq.row_stride, row, s.len_q, s.rows_q, p.head_dim,
                            gradient, by_scale, lowered_unit);
      }
    }
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
