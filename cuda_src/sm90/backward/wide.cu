// Gradients on Hopper (sm_90a) for 16-bit inputs with wide heads, whose dk and dv for 64 keys fill the registers of a
// warpgroup each; options that take many registers use it from narrower heads on. One warpgroup computes the weights
// and dv, one their gradients and dk, one dq. The mathematics is that of backward.cu: FlashAttention-2 (Dao 2023),
// Algorithm 2. Where shared memory has room, two thread blocks are a cluster, and each adds dq for the keys of both in
// every other step.
#include "../../fragment/gradient_fragment.cuh"
#include "loader.cuh"
#include "options.cuh"
#include "key_results.cuh"
#include "query_results.cuh"

constexpr u32 DS_PANEL_BYTES = BLOCK_M * ROW_BYTES, DS_BYTES = PAIR * DS_PANEL_BYTES;
constexpr int WEIGHT_VECTORS = FRAGMENT / 4;  // vectors of four weights of a thread
constexpr u32 WEIGHT_BYTES = WEIGHT_VECTORS * WARPGROUP * sizeof(FourFloats);
constexpr int WARPS = WARPGROUP / WARP;
constexpr int DK_BARRIER = 1;  // a named barrier of the warpgroup of dk
// DK_REGISTERS is what the other warpgroups leave to the warpgroup of dk.
constexpr int DK_REGISTERS = REGISTERS_OF_SM / WARPGROUP - CONSUMER_REGISTERS - DQ_REGISTERS - PRODUCER_REGISTERS;
// FEW_REGISTERS: there are options next to a dv that takes most registers. lse is then read from shared memory each
// time, so that queries are released late.
constexpr bool FEW_REGISTERS = HEAD_DIM > 128 && NUM_OPTIONS > HAS_ALIBI;

struct SharedStorage {
  alignas(1024) unsigned char k[PAIR * K_BYTES];               // (PANELS, PAIR * BLOCK_N, 64)
  alignas(1024) unsigned char v[V_BYTES];                      // (PANELS_V, BLOCK_N, 64)
  alignas(1024) unsigned char q[QUERY_STAGES * Q_BYTES];       // (QUERY_STAGES, PANELS, BLOCK_M, 64)
  alignas(1024) unsigned char dout[DOUT_STAGES * DOUT_BYTES];  // (DOUT_STAGES, PANELS_V, BLOCK_M, 64)
  // (DS_STAGES, PAIR, BLOCK_M, 64): dS for the keys of both blocks.
  alignas(1024) unsigned char ds[DS_STAGES * DS_BYTES];
  alignas(1024) unsigned char sent[PAIR == 1 ? 1 : DS_PANEL_BYTES];  // (BLOCK_M, 64): dS on its way to the other block
  FourFloats weights[WARPS][WEIGHT_VECTORS][WARP];                   // weights, from the warpgroup of dv to that of dk
  float lse[QUERY_STAGES][BLOCK_M];
  float delta[DOUT_STAGES][BLOCK_M];
  Step steps[QUERY_STAGES];
  DqStep dq_steps[DQ_STEPS];
  KeyWork work[WORK_STAGES];
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<1> k_barriers, v_barriers, weight_barriers, sent_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<DOUT_STAGES> dout_barriers;
  RingBarriers<DS_STAGES> ds_barriers;
  RingBarriers<DQ_STEPS> dq_step_barriers;
  RingBarriers<DETERMINISTIC ? DQ_STEPS : 1> order_barriers, added_barriers;
  u64 clearing;  // a barrier (Loader::clearing)
  Index index;
  GradientBias bias;
};
static_assert(DS_PANEL_BYTES / WARPS == ROWS_OF_WARP * ROW_BYTES, "room for a warp's rows");
static_assert(!(HAS_DROPOUT && HAS_SCORE_MOD), "a weight's sign tells that it is dropped");
static_assert(BLOCK_N == ROWS_OF_WARPGROUP && BLOCK_M == ROWS_OF_WARPGROUP && CONSUMERS == 3, "one tile of 64 x 64");

// is_own() tells whether this block of a pair computes dq of a step. Each computes it for the keys of both in every
// other step, so that half as much is added in memory.
DEVICE bool is_own(u32 step) { return static_cast<int>(step % PAIR) == rank(); }

// Rings are one thread's positions in the circular buffers of the kernel.
struct Rings {
  Ring<WORK_STAGES, sizeof(KeyWork)> work;
  Ring<1, PAIR * K_BYTES> k;
  Ring<1, V_BYTES> v;
  Ring<QUERY_STAGES, Q_BYTES> q;
  Ring<DOUT_STAGES, DOUT_BYTES> dout;
  Ring<DS_STAGES, DS_BYTES> ds;
  Ring<1, DS_PANEL_BYTES> sent;
  Ring<1, WEIGHT_BYTES> weights;
  Ring<DQ_STEPS, sizeof(DqStep)> dq_steps;
  // The rings `order` and `added` carry no data: they tell that a step's place in the order has come, and that its dq
  // is on its way. Their buffers are those of the steps, and are free again with them.
  Ring<DETERMINISTIC ? DQ_STEPS : 1, 0> order, added;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        q(shared.q, shared.q_barriers),
        dout(shared.dout, shared.dout_barriers),
        ds(shared.ds, shared.ds_barriers),
        sent(shared.sent, shared.sent_barriers),
        weights(shared.weights, shared.weight_barriers),
        dq_steps(shared.dq_steps, shared.dq_step_barriers),
        order(shared.dq_steps, shared.order_barriers),
        added(shared.dq_steps, shared.added_barriers) {}
};

// Gradient is 64 rows of dk or dv in pieces of WIDTH columns and one of REST: products of 256 columns take more
// registers than a thread has when it is launched.
template <int COLUMNS>
struct Gradient {
  static constexpr int WIDTH = COLUMNS % 128 == 0 ? 128 : PANEL, PIECES = COLUMNS / WIDTH, REST = COLUMNS % WIDTH;
  float x[PIECES][WIDTH / 2];            // the thread's fragment of each piece
  float rest[REST == 0 ? 1 : REST / 2];  // and of the last one, where it is narrower

  DEVICE Gradient() {
#pragma unroll
    for (auto& piece : x) {
#pragma unroll
      for (float& e : piece) e = 0;
    }
#pragma unroll
    for (float& e : rest) e = 0;
  }
  // add() starts to add factor b over the BLOCK_M rows of b.
  DEVICE void add(u32 (&factor)[FRAGMENT / 2], u32 b) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      add_product<BLOCK_M>(x[piece], factor, b + piece * (WIDTH / PANEL) * BLOCK_M * ROW_BYTES);
    }
    if constexpr (REST > 0) {
      add_product<BLOCK_M>(rest, factor, b + PIECES * (WIDTH / PANEL) * BLOCK_M * ROW_BYTES);
    }
  }
  // wait() waits for the sums, and write() is the epilogue.
  DEVICE void wait() {
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (auto& piece : x) keep(piece);
    if constexpr (REST > 0) keep(rest);
  }
  DEVICE void write(const AttentionParams& p, const KeyWork& work, const Tensor<Element>& to, int head_dim, float scale,
                    void* staging) const {
    if (to.data == nullptr) return;
    const float factor[2] = {scale, scale};
    const auto write_piece = [&](int piece, const auto& own) {
      write_results(p, to, work, piece * WIDTH, work.tile * BLOCK_N + warp_row(), head_dim, own, factor,
                    static_cast<unsigned char*>(staging));
    };
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) write_piece(piece, x[piece]);
    if constexpr (REST > 0) write_piece(PIECES, rest);
  }
};

// CAPS_LATE: the warpgroup of dk finds softcap's derivative, because the slopes' gradient comes from the gradients of
// scores before that derivative.
constexpr bool CAPS_LATE = WRITES_DSLOPES && TAKES_SOFTCAP;
static_assert(!(WRITES_DSLOPES && KEEPS_DERIVATIVE), "the weights come with the derivative that the other one kept");

// cap_late() turns gradients of scores into those of products, by the weights that the warpgroup of dv handed on.
DEVICE void cap_late(float (&ds)[FRAGMENT], const GradientFragment& scores,
                     const FourFloats (&vectors)[WEIGHT_VECTORS][WARP], const float* lse) {
#pragma unroll
  for (int i = 0; i < WEIGHT_VECTORS; i++) {
    const FourFloats weights = vectors[i][lane()];
    cap_gradient(ds, weights.x, 4 * i, QueryValuesInPlace(lse), scores);
  }
}

// own_warp() is the warp's number in its warpgroup.
DEVICE int own_warp() { return threadIdx.x % WARPGROUP / WARP; }

// compute_dv() is the warpgroup of dv: it computes the weights P^T of a tile of keys, hands them to the warpgroup of
// dk, and adds P^T dO to dv.
DEVICE void compute_dv(const AttentionParams& p, SharedStorage& shared, Rings& rings, const KeyWork& work, u32&) {
  Gradient<HEAD_DIM_V> dv;
  float scale = static_cast<float>(p.softmax_scale);
  ptx::keep(scale);
  if (!work.is_hidden) {
    rings.k.wait();
    for (bool last = false; !last;) {
      float x[FRAGMENT];
      rings.q.wait();
      multiply_by_rows<HEAD_DIM, LOADED_KEYS, BLOCK_M>(x, rings.k.buffer() + rank() * BLOCK_N * ROW_BYTES,
                                                       rings.q.buffer());
      const Step& step = shared.steps[rings.q.stage];
      const GradientFragment scores(p, work.sequence, step.head, step.first_row, work.tile * BLOCK_N + warp_row(),
                                    scale);
      bool masked = step.masked != 0;
      last = step.last;
      const LseValues<FEW_REGISTERS> lse(shared.lse[rings.q.stage]);
      GradientFragment::Random<EARLY_DRAWS> random;
      scores.draw_ahead<HOLDS_DRAWS>(random);
      const BlockBits bits(p, step.slots, 0, masked);
      const MaskBits mask(p, work.sequence, step.head, step.first_row, work.tile * BLOCK_N + warp_row());
      ptx::wgmma_wait_group<0>();
      keep(x);
      if (SHARED_FACTORS) rings.weights.acquire();
      FewDerivatives derivatives(&shared.weights[own_warp()][0][lane()]);
      derivatives.take(x, scores);
      if constexpr (HAS_BIAS_TILES) masked |= add_bias(x, scores, bias_panel(shared.bias, rings.q.stage, 0));
      to_weights(x, scores, lse, masked, bits);
      mask.clear_hidden(x);
      GradientFragment same = scores;
      // Without this, draws and ALiBi's distances would be held all along.
      if constexpr (FEW_REGISTERS && HOLDS_PLACES) {
        u32 first_row = step.first_row;
        ptx::forget(first_row);
        same.row = first_row + fragment_column();
      }
      same.mark_dropped(x, random);
      const auto release = [&] {
        __syncwarp();
        rings.q.release();
      };
      if (!FEW_REGISTERS) release();
      u32 packed_weights[FRAGMENT / 2];
      pack_kept(packed_weights, x);
      // The derivatives of scores are factors of the gradients, like the weights.
      derivatives.differentiate_rule(x);
      if (!CAPS_LATE) derivatives.differentiate_cap(x, x, lse, same);
      if (FEW_REGISTERS) release();
      if (!SHARED_FACTORS) rings.weights.acquire();
#pragma unroll
      for (int i = 0; i < WEIGHT_VECTORS; i++) {
        FourFloats weights;
#pragma unroll
        for (int e = 0; e < 4; e++) weights.x[e] = x[4 * i + e];
        shared.weights[own_warp()][i][lane()] = weights;
      }
      rings.weights.publish_written();
      rings.dout.wait();
      dv.add(packed_weights, rings.dout.buffer());
      dv.wait();
      rings.dout.release();
    }
    rings.k.release();
  }
  rings.weights.acquire();
  dv.write(p, work, p.dv, p.head_dim_v, HAS_DROPOUT ? static_cast<float>(p.dropout_rescale) : 1,
           shared.weights[own_warp()]);
}

// publish_own() hands dS to the own warpgroup of dq. Its fence waits while a product is computed.
template <class DsRing>
DEVICE void publish_own(DsRing& ring) {
  ptx::fence_async_shared();
  __syncwarp();
  if (lane() == 0) {
    if (PAIR > 1 && own_warp() == 0) {
      ptx::mbarrier_arrive_expect(ring.full(), DS_PANEL_BYTES);
    } else {
      ptx::mbarrier_arrive(ring.full());
    }
  }
  ring.advance();
}

// send() sends dS to the warpgroup of dq of the other block.
DEVICE void send(Rings& rings, u32 step) {
  ptx::fence_async_shared();
  ptx::barrier_sync(DK_BARRIER, WARPGROUP);
  if (threadIdx.x % WARPGROUP == 0) {
    const u32 other = rank() ^ 1, stage = step / PAIR % DS_STAGES;
    ptx::bulk_copy_cluster(ptx::cluster_address(rings.ds.buffers + stage * DS_BYTES + rank() * DS_PANEL_BYTES, other),
                           rings.sent.buffer(), DS_PANEL_BYTES,
                           ptx::cluster_address(rings.ds.full_barriers + stage * 8, other));
  }
  rings.sent.advance();
}

// compute_dk() is the warpgroup of dk: it computes dP^T and dS^T, hands dS to a warpgroup of dq, and adds dS^T Q to dk.
DEVICE void compute_dk(const AttentionParams& p, SharedStorage& shared, Rings& rings, const KeyWork& work, u32& steps) {
  Gradient<HEAD_DIM> dk;
  if (!work.is_hidden) {
    rings.v.wait();
    for (bool last = false; !last;) {
      float dp[FRAGMENT];
      rings.dout.wait();
      multiply_by_rows<HEAD_DIM_V, BLOCK_N, BLOCK_M>(dp, rings.v.buffer(), rings.dout.buffer());
      rings.q.wait();
      const Step& step = shared.steps[rings.q.stage];
      const bool masked = HAS_BIAS_TILES || HAS_MASK_VECTORS || HIDES_BY_RULE || step.masked != 0;
      last = step.last;
      const QueryValues delta(shared.delta[rings.dout.stage]);
      rings.weights.wait();
      ptx::wgmma_wait_group<0>();
      keep(dp);
      if (last) rings.v.release();
#pragma unroll
      for (int i = 0; i < WEIGHT_VECTORS; i++) {
        const FourFloats weights = shared.weights[own_warp()][i][lane()];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float& x = dp[4 * i + e];
          x = score_gradient<!WRITES_DBIAS>(p, x, weights.x[e], delta[4 * i + e]);
        }
      }
      if (masked) {
#pragma unroll
        for (int i = 0; i < WEIGHT_VECTORS; i++) {
          const FourFloats weights = shared.weights[own_warp()][i][lane()];
#pragma unroll
          for (int e = 0; e < 4; e++) clear_hidden(dp[4 * i + e], weights.x[e]);
        }
      }
      const GradientFragment scores(p, work.sequence, step.head, step.first_row, work.tile * BLOCK_N + warp_row());
      step.add(p, 0, slope_terms(scores, dp));
      if constexpr (CAPS_LATE) cap_late(dp, scores, shared.weights[own_warp()], shared.lse[rings.q.stage]);
      u32 ds[FRAGMENT / 2];
      pack(ds, dp);
      const bool own = is_own(steps);
      if (own) {
        rings.ds.acquire();
      } else {
        rings.sent.acquire();
      }
      store_transposed(own ? rings.ds.buffer() + rank() * DS_PANEL_BYTES : rings.sent.buffer(), ds);
      __syncwarp();  // all lanes must have read the weights and delta
      rings.weights.release();
      rings.dout.release();
      dk.add(ds, rings.q.buffer());
      if (own) {
        publish_own(rings.ds);
      } else {
        send(rings, steps);
      }
      steps++;
      dk.wait();
      rings.q.release();
    }
  }
  rings.ds.acquire();
  dk.write(p, work, p.dk, p.head_dim, static_cast<float>(p.softmax_scale) * ds_unit(p),
           shared.ds + rings.ds.stage * DS_BYTES + rank() * DS_PANEL_BYTES + own_warp() * DS_PANEL_BYTES / WARPS);
  ptx::barrier_sync(DK_BARRIER, WARPGROUP);  // all warps must have left the buffer of dS before it is used again
}

// accumulate_dq() adds dq of a step to its sum; the FIRST is stored, so that nobody clears the sum.
template <bool FIRST>
DEVICE void accumulate_dq(const AttentionParams& p, const Rings& rings, const DqStep& step) {
#pragma unroll 1
  for (int piece = 0; piece < DQ_PIECES; piece++) {
    float dq[DQ_COLUMNS / 2];
    multiply_by_columns<LOADED_KEYS, BLOCK_M>(
        dq, rings.ds.buffer(), rings.k.buffer() + piece * (DQ_COLUMNS / PANEL) * LOADED_KEYS * ROW_BYTES);
    FourFloats* sum = dq_sum_at(p, step.sum, piece);
    if (DETERMINISTIC && piece == 0) rings.order.wait();  // all pieces of a tile are added in one place of the order
    ptx::wgmma_wait_group<0>();
    keep(dq);
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 8; i++) {
      if (FIRST) {
        reinterpret_cast<float4*>(sum)[i * WARP] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      } else {
        ptx::add_f32_x4(sum[i * WARP].x, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      }
    }
  }
}

// write_dq() computes dq of a step that has all keys, and writes it.
DEVICE void write_dq(const AttentionParams& p, const Rings& rings, const DqStep& step) {
  const QueryPlace place(p, step.number());
  Element* target = p.dq.at(place.batch, place.row, place.head);
  const int rows = p.seqlen_q - place.row;
  const float scale = static_cast<float>(p.softmax_scale) * ds_unit(p);
#pragma unroll 1
  for (int piece = 0; piece < DQ_PIECES; piece++) {
    float dq[DQ_COLUMNS / 2];
    multiply_by_columns<LOADED_KEYS, BLOCK_M>(
        dq, rings.ds.buffer(), rings.k.buffer() + piece * (DQ_COLUMNS / PANEL) * LOADED_KEYS * ROW_BYTES);
    ptx::wgmma_wait_group<0>();
    keep(dq);
    const int first = piece * DQ_COLUMNS;
    write_dq_rows(
        p, target + first, warp_row() + fragment_row(), rows, rows, p.head_dim - first, scale,
        [&](int block) { return make_float4(dq[4 * block], dq[4 * block + 1], dq[4 * block + 2], dq[4 * block + 3]); });
  }
}

// compute_dq() is the warpgroup of dq: it computes dQ = dS K of every step that is its own, and adds it to the sums.
DEVICE void compute_dq(const AttentionParams& p, SharedStorage& shared, Rings& rings, const KeyWork& work, u32& steps) {
  if (work.is_hidden) return;
  rings.k.wait();
  for (bool last = false; !last;) {
    const DqStep step = DETERMINISTIC ? dq_step(shared, rings) : next_dq_step(shared, rings);
    last = step.last;
    if (DETERMINISTIC) {
      rings.order.follow(rings.dq_steps);
      rings.added.follow(rings.dq_steps);
    }
    if (!is_own(steps++)) continue;
    rings.ds.wait();
    if constexpr (WRITES_DQ) {
      if (DETERMINISTIC) rings.order.wait();
      write_dq(p, rings, step);
    } else if (p.dq_sum == nullptr) {
      if (DETERMINISTIC) rings.order.wait();
    } else if (DETERMINISTIC && step.place_in_order == 0) {
      accumulate_dq<true>(p, rings, step);
    } else {
      accumulate_dq<false>(p, rings, step);
    }
    __syncwarp();
    if (PAIR > 1 && lane() == 0) {
      ptx::mbarrier_arrive_cluster(ptx::cluster_address(rings.sent.empty_barriers, rank() ^ 1));
    }
    rings.ds.release();
    if (DETERMINISTIC) {
      rings.added.publish_written();
      rings.dq_steps.release();
    }
  }
  rings.k.release();
}

// watch_order() is the warp that waits until a step's place in the order has come, ahead of its use.
DEVICE void watch_order(const AttentionParams& p, const SharedStorage& shared, Rings& rings) {
  while (true) {
    const DqStep step = next_dq_step(shared, rings);
    if (step.sum == NO_DQ) break;
    if (p.dq_sum != nullptr && lane() == 0) wait_for_earlier_additions(p, step.sum, 0, step.place_in_order);
    rings.order.publish_written();
  }
}

// signal_additions() is the warp that passes the order on: it waits for additions to arrive while the next products are
// computed.
DEVICE void signal_additions(const AttentionParams& p, const SharedStorage& shared, Rings& rings) {
  while (true) {
    const DqStep step = dq_step(shared, rings);
    if (step.sum == NO_DQ) break;
    rings.added.wait();
    rings.added.advance();
    __syncwarp();
    rings.dq_steps.release();
    if (p.dq_sum != nullptr && lane() == 0) signal_addition(p, step.sum, 0);
  }
}

DEVICE void sync_pair() {
  if constexpr (PAIR == 1) {
    __syncthreads();
  } else {
    sync_cluster();
  }
}

// for_each_tile() calls a warpgroup's function for each tile of keys.
template <auto WORK_ON>
DEVICE void for_each_tile(const AttentionParams& p, SharedStorage& shared, Rings& rings) {
  u32 steps = 0;
  while (true) {
    rings.work.wait();
    const KeyWork& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    WORK_ON(p, shared, rings, work, steps);
    __syncwarp();
    rings.work.release();
  }
}

// backward_sm90_wide is persistent: each multiprocessor has one block, which takes tile after tile.
extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_sm90_wide(const __grid_constant__ AttentionParams p, const __grid_constant__ ptx::TensorMap q_map,
                       const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                       const __grid_constant__ ptx::TensorMap dout_map, const __grid_constant__ ptx::TensorMap bias_map,
                       const __grid_constant__ ptx::TensorMap, const __grid_constant__ ptx::TensorMap) {
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) {
    shared.work_barriers.init(CONSUMERS * WARPS);
    shared.k_barriers.init(2 * WARPS);
    shared.v_barriers.init(WARPS);
    shared.q_barriers.init(2 * WARPS);
    shared.dout_barriers.init(2 * WARPS);
    shared.weight_barriers.init(WARPS, WARPS);
    shared.ds_barriers.init(WARPS, WARPS);
    shared.sent_barriers.init(WARPS);
    shared.dq_step_barriers.init(DETERMINISTIC ? WARPS + 2 : WARPS);
    shared.order_barriers.init(WARPS);
    shared.added_barriers.init(1, WARPS);
    shared.index.barriers.init(1);
    ptx::mbarrier_init(ptx::shared_address(&shared.clearing), 1);
    ptx::fence_mbarrier_init();
  }
  sync_pair();
  ptx::let_next_kernel_begin();

  Rings rings(shared);
  const int warpgroup = own_warpgroup();
  if (warpgroup == 0) {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    for_each_tile<compute_dv>(p, shared, rings);
  } else if (warpgroup == 1) {
    ptx::set_registers_more<DK_REGISTERS>();
    for_each_tile<compute_dk>(p, shared, rings);
  } else if (warpgroup == 2) {
    ptx::set_registers_fewer<DQ_REGISTERS>();
    for_each_tile<compute_dq>(p, shared, rings);
  } else {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(ALL_LANES, own_warp(), 0);
    if (warp == 0) {
      load_tiles(p, shared, rings, Maps{&q_map, &k_map, &v_map, &dout_map, &bias_map});
    } else if (DETERMINISTIC && warp == 1) {
      signal_additions(p, shared, rings);
    } else if (DETERMINISTIC && warp == 2) {
      watch_order(p, shared, rings);
    }
  }
  if (PAIR > 1) sync_pair();  // the other block may still send to this one
}
