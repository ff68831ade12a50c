// Gradients on Hopper (sm_90a) for 16-bit inputs up to head dim 128: FlashAttention-2 (Dao 2023), Algorithm 2, in the
// manner of FlashAttention-3 (Shah et al. 2024). A thread block keeps BLOCK_N keys, 64 for each warpgroup, and loops
// over the queries that see them. Scores are transposed, so weights and their gradients stay in registers as left
// factors of dV and dK; dQ takes the gradients of all warpgroups through shared memory, and is added up in global
// memory. backward/rows.cu has the kernels before and behind; backward/wide.cu serves wide heads.
#include "../../fragment/gradient_fragment.cuh"
#include "additions.cuh"
#include "key_results.cuh"
#include "step_scores.cuh"

// ARRIVES_EARLY: a warpgroup passes the order on while its last product still runs. That is a gain with tiles of 128
// queries, a loss with 64.
constexpr bool ARRIVES_EARLY = DQ_BY_QUERIES;

// KeyGradients are the thread's fragments of dk (64, HEAD_DIM) and dv (64, HEAD_DIM_V).
struct KeyGradients {
  float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];

  DEVICE KeyGradients() {
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
  }
};

// Consumer is a thread of a consumer warpgroup, which computes dk and dv of its 64 keys, and its piece of dq of every
// tile of queries. The warpgroups take the tensor cores in an order for the products of the gradients, so that the
// exponentials of one run while the products of the other are computed. dQ of a step is computed in the next one, when
// all warpgroups have written dS.
struct Consumer {
  // Where one piece has all columns of the keys, the other pieces repeat it, and nobody takes their result.
  static constexpr bool HAS_OWN_COLUMNS = !DQ_BY_QUERIES && DQ_COLUMNS < HEAD_DIM;

  const AttentionParams& p;
  SharedStorage& shared;
  Rings rings;
  const int warpgroup;
  const u32 own_keys, own_v;    // where the warpgroup's rows are in K, and V's address from them on
  const u32 own_ds;             // where its panel is in dS
  const u32 dq_ds, dq_columns;  // where the factors of its piece of dq are in dS and K
  DqRing dq_ring;
  const ProductOrder order;
  float scale;

  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared, const Rings& rings, int warpgroup)
      : p(p),
        shared(shared),
        rings(rings),
        warpgroup(warpgroup),
        own_keys(warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES),
        own_v(ptx::shared_address(shared.v) + own_keys),
        own_ds(warpgroup * DS_PANEL_BYTES),
        dq_ds(DQ_BY_QUERIES ? warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES : 0),
        dq_columns(HAS_OWN_COLUMNS ? warpgroup * DQ_COLUMNS / PANEL * BLOCK_N * ROW_BYTES : 0),
        dq_ring(shared.dq[warpgroup], shared.dq_barriers[warpgroup]),
        order(warpgroup),
        scale(static_cast<float>(p.softmax_scale)) {
    ptx::keep(scale);  // converted once, because the conversion units would wait for the tensor cores
  }

  // first_key() is read from shared memory again where it is used: registers are scarce.
  DEVICE int first_key(const KeyWork& work) const { return work.tile * BLOCK_N + warpgroup * ROWS_OF_WARPGROUP; }

  // multiply_values() starts dP^T = V dO^T.
  DEVICE void multiply_values(float (&dp)[FRAGMENT]) const {
    u32 values = own_v;
    // The compiler would otherwise hold descriptors of all values, and spill others.
    if (HAS_BLOCK_MASK || HAS_MASK || QUERY_STAGES > 2) ptx::forget(values);
    multiply_by_rows<HEAD_DIM_V, BLOCK_N, BLOCK_M>(dp, values, rings.dout.buffer());
  }

  // multiply_dq() starts dQ = dS K for a step whose dS all warpgroups have written.
  DEVICE void multiply_dq(float (&dq)[DQ_COLUMNS / 2], const DsRing& ready) const {
    ready.wait();
    multiply_by_columns<BLOCK_N, BLOCK_M>(dq, ready.buffer() + dq_ds, rings.k.buffer() + dq_columns);
  }

  // store_dq() releases dS, and hands the piece of dQ to the warp that adds it.
  DEVICE void store_dq(float (&dq)[DQ_COLUMNS / 2], DsRing ready) {
    keep(dq);
    ready.release();
    dq_ring.acquire();
    if constexpr (WRITES_DQ) {
      stage_rows(dq);
    } else {
#pragma unroll
      for (int i = 0; i < DQ_COLUMNS / 8; i++) {
        shared.dq[warpgroup][dq_ring.stage][dq_place() + i * WARP] = {
            {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]}};
      }
    }
  }

  // stage_rows() writes the warp's 16 rows of a piece of dq in 16 bits, as TMA takes them.
  DEVICE void stage_rows(const float (&dq)[DQ_COLUMNS / 2]) const {
    constexpr int CHUNK = sizeof(Vector), CHUNKS = ROW_BYTES / CHUNK;
    const float own_scale = gradient_scale(), factor[2] = {own_scale, own_scale};
    const bool used[2] = {true, true};
    u32 own_thread = threadIdx.x;
    ptx::forget(own_thread);  // places are computed anew in each step, as registers are scarce
    const int row = own_thread % WARPGROUP / WARP * ROWS_OF_WARP + own_thread % ROWS_OF_WARP;
    const int chunk = own_thread % WARP / ROWS_OF_WARP;
    const u32 to = dq_ring.buffer() + row * ROW_BYTES;
#pragma unroll
    for (int block = 0; block < DQ_COLUMNS / 16; block++) {
      u32 words[4];
      pack_results(words, dq, 8 * block, factor, used);
      ptx::stmatrix_x4(to + block / 4 * DQ_PANEL_BYTES + ((2 * (block % 4) + chunk) ^ (row % CHUNKS)) * CHUNK, words[0],
                       words[1], words[2], words[3]);
    }
  }

  // gradient_scale() is the factor of dq and dk. The scale is converted again where there is dropout: registers are
  // scarce.
  DEVICE float gradient_scale() const { return HAS_DROPOUT ? static_cast<float>(p.softmax_scale) * ds_unit(p) : scale; }

  // hand_on_dq() computes and hands on dQ of a step that the main loop does not.
  DEVICE void hand_on_dq(float (&dq)[DQ_COLUMNS / 2], const DsRing& ready) {
    multiply_dq(dq, ready);
    ptx::wgmma_wait_group<0>();
    store_dq(dq, ready);
    dq_ring.publish_from_warp();
  }

  // step_on() is the main loop's body; it returns whether it was the last step. The first step has a copy of its own,
  // which keeps products out of branches.
  DEVICE bool step_on(const KeyWork& work, KeyGradients& sums, bool first) {
    // S^T, then P^T; dP^T, then dS^T: (64, BLOCK_M); dQ: (64, DQ_COLUMNS).
    float x[FRAGMENT], dp[FRAGMENT], dq[DQ_COLUMNS / 2];
    u32 weights[FRAGMENT / 2], ds[FRAGMENT / 2];  // P^T and dS^T in 16 bits
    rings.dout.follow(rings.q);
    rings.ds.follow(rings.q);
    const DsRing ready = rings.ds.previous_stage();
    // 1. Start S^T = K Q^T.
    rings.q.wait();
    multiply_by_rows<HEAD_DIM, BLOCK_N, BLOCK_M>(x, rings.k.buffer() + own_keys, rings.q.buffer());
    // 2. Start dP^T = V dO^T.
    rings.dout.wait();
    multiply_values(dp);
    // 3. Random bits and the bits of masks are found while the products are computed.
    const Step& step = shared.steps[rings.q.stage];
    StepScores scores(p, step, work, shared.lse[rings.q.stage], warpgroup, first_key(work), scale);
    // 4. Wait for S^T; P^T = exp(S^T - lse). All of this runs while the second product is computed.
    ptx::wgmma_wait_group<1>();
    keep(x);
    scores.find_weights(x, HAS_BIAS_TILES ? bias_panel(shared.bias, rings.q.stage, warpgroup) : 0);
    const QueryValues delta(shared.delta[rings.dout.stage]);
    pack_kept(weights, x);
    // 5. Wait for dP^T; dS^T = P^T (dP^T - delta).
    ptx::wgmma_wait_group<0>();
    keep(dp);
    if (scores.last) rings.v.release();
    const float dslope = scores.find_gradients(dp, x, delta);
    pack(ds, dp);
    // 6. dS goes to shared memory for dQ of all warpgroups.
    rings.ds.acquire();
    store_transposed(rings.ds.buffer() + own_ds, ds);
    // 7. In its place in the order: dQ of the step before, dV += P^T dO, dK += dS^T Q.
    order.wait();
    if (!first) multiply_dq(dq, ready);
    add_product<BLOCK_M>(sums.dv, weights, rings.dout.buffer());
    rings.ds.publish_from_warp();  // its fence waits while the products are computed
    add_product<BLOCK_M>(sums.dk, ds, rings.q.buffer());
    if (!ADDS_SLOPES_EARLY) step.add(p, warpgroup, dslope);
    // 8. The results arrive one by one, and buffers are released as early as possible.
    ptx::wgmma_wait_group<2>();
    if (!first) store_dq(dq, ready);
    ptx::wgmma_wait_group<1>();
    keep(sums.dv);
    rings.dout.release();
    if (ARRIVES_EARLY) order.arrive();
    ptx::wgmma_wait_group<0>();
    keep(sums.dk);
    if (!ARRIVES_EARLY) order.arrive();
    if (!first) dq_ring.publish_from_warp();
    __syncwarp();  // all lanes have read the step
    rings.q.release();
    return scores.last;
  }

  // skip_step() skips a step of which the warpgroup sees nothing: it takes no place in the order, and its part of dS is
  // 0.
  DEVICE void skip_step() {
    rings.dout.follow(rings.q);
    rings.ds.follow(rings.q);
    rings.q.wait();  // without waiting, the buffers could be released twice in a phase
    rings.ds.acquire();
    const u32 zeros[FRAGMENT / 2] = {};
    store_transposed(rings.ds.buffer() + own_ds, zeros);
    rings.ds.publish_from_warp();
    rings.dout.release();
    rings.q.release();
  }

  // visit_queries() is the loop over the tiles of queries that see a tile of keys. It leaves dQ of the last step.
  DEVICE void visit_queries(const KeyWork& work, KeyGradients& sums, float (&dq)[DQ_COLUMNS / 2]) {
    if (HAS_BIAS_TILES) {
      rings.k.stage = work.key_stage;
      rings.k.phase = work.key_phase;
    }
    rings.v.follow(rings.k);
    rings.k.wait();
    rings.v.wait();
    const u32 skips = SKIPS_STEPS ? __shfl_sync(ALL_LANES, work.skips, 0) : 0;
    const bool own = SKIPS_STEPS && (skips >> warpgroup & 1) != 0, skips_first = own && warpgroup == 1;
    if (skips_first) skip_step();
    bool last = step_on(work, sums, true);
    if (skips_first) hand_on_dq(dq, rings.ds.previous_stage().previous_stage());
    while (!last) last = step_on(work, sums, false);
    if (own && !skips_first) {
      hand_on_dq(dq, rings.ds.previous_stage());
      skip_step();
    }
    if (own && skips != 3) {  // the other warpgroup took one place more in the order
      order.wait();
      order.arrive();
    }
    multiply_dq(dq, rings.ds.previous_stage());
    ptx::wgmma_wait_group<0>();
    keep(dq);
    rings.k.release();
  }

  // write() is the epilogue: it writes dk and dv, which pass through the warp's own part of the buffer of dq.
  DEVICE void write(const KeyWork& work, const KeyGradients& sums) {
    const int row = first_key(work) + warp_row();
    dq_ring.acquire();
    auto* staging = reinterpret_cast<unsigned char*>(&shared.dq[warpgroup][dq_ring.stage]);
    staging += WRITES_DQ ? warp_row() * ROW_BYTES : (dq_place() - lane()) * static_cast<int>(sizeof(FourFloats));
    if (p.dk.data != nullptr) {
      const float own_scale = gradient_scale(), factor[2] = {own_scale, own_scale};
      write_results(p, p.dk, work, 0, row, p.head_dim, sums.dk, factor, staging);
    }
    if (p.dv.data != nullptr) {
      const float rescale = HAS_DROPOUT ? static_cast<float>(p.dropout_rescale) : 1, factor[2] = {rescale, rescale};
      write_results(p, p.dv, work, 0, row, p.head_dim_v, sums.dv, factor, staging);
    }
  }
};

// consume() is a consumer warpgroup, which takes tile after tile of keys.
DEVICE void consume(const AttentionParams& p, SharedStorage& shared, const Rings& rings, int warpgroup) {
  Consumer own(p, shared, rings, warpgroup);
  while (true) {
    own.rings.work.wait();
    const KeyWork& work = shared.work[own.rings.work.stage];
    if (work.tile == NO_TILE) break;
    KeyGradients sums;
    float dq[DQ_COLUMNS / 2];
    if (!work.is_hidden) own.visit_queries(work, sums, dq);
    // dq, which a kernel behind waits for, comes before dk and dv if these need not wait for its buffer then, or if no
    // tile follows that would wait for them.
    const bool dq_first = DQ_STAGES > 1 || p.tile_counter == nullptr;
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
      if (dq_first == (turn == 1)) {
        own.write(work, sums);
      } else if (!work.is_hidden) {
        own.store_dq(dq, own.rings.ds.previous_stage());
        own.dq_ring.publish_from_warp();
      }
    }
    own.rings.work.stage = work.stage;
    own.rings.work.phase = work.phase;
    __syncwarp();
    own.rings.work.release();
  }
  own.order.drain();
}

static_assert(can_share_registers(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "no warpgroup waits for registers");

// backward_sm90 is persistent: each multiprocessor has one block, which takes tile after tile.
extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ ptx::TensorMap q_map,
                  const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                  const __grid_constant__ ptx::TensorMap dout_map, const __grid_constant__ ptx::TensorMap bias_map,
                  const __grid_constant__ ptx::TensorMap dbias_map, const __grid_constant__ ptx::TensorMap dq_map) {
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) {
    shared.work_barriers.init(WARPS);
    shared.k_barriers.init(WARPS);
    shared.v_barriers.init(WARPS);
    shared.q_barriers.init(WARPS);
    shared.dout_barriers.init(WARPS);
    shared.ds_barriers.init(WRITES_DBIAS ? WARPS + 1 : WARPS, WARPS);
    for (auto& barriers : shared.dq_barriers) barriers.init(1, WARPGROUP / WARP);
    shared.dq_step_barriers.init(WRITES_DBIAS ? DQ_PIECES + 1 : DQ_PIECES);
    ptx::mbarrier_init(ptx::shared_address(&shared.clearing), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::let_next_kernel_begin();

  Rings rings(shared);
  const int warpgroup = own_warpgroup();
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x % WARPGROUP / WARP, 0);
    if (warp == 0) {
      load_tiles(p, shared, rings, Maps{&q_map, &k_map, &v_map, &dout_map, &bias_map});
    } else if (warp <= DQ_PIECES) {
      if constexpr (WRITES_DQ) {
        write_pieces(p, shared, rings, warp - 1, &dq_map);
      } else if constexpr (ADDS_STEPS) {
        add_steps(p, shared, rings, warp - 1);
      } else {
        add_pieces(p, shared, rings, warp - 1);
      }
    } else if (WRITES_DBIAS) {
      write_bias(p, shared, rings, &dbias_map);
    }
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    consume(p, shared, rings, warpgroup);
  }
}
