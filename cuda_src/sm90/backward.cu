// Gradients on Hopper (FlashAttention-2, Dao 2023, Algorithm 2, in the manner of FlashAttention-3): a thread block has
// BLOCK_N keys, each warpgroup 64 of them, and walks the queries that see them. One warp loads by TMA. A warpgroup
// computes transposed scores, so that weights and their gradients stay in registers as left factors of dv and dk; dq
// takes the gradients of all warpgroups through shared memory, and is added up in global memory.
#include "../write_fragment.cuh"
#include "gradient_fragment.cuh"
#include "gradient_products.cuh"
#include "gradient_rows.cuh"
#include "gradient_schedule.cuh"
#include "hidden_rows.cuh"

constexpr u32 DOUT_BYTES = BLOCK_M * ROW_BYTES * PANELS_V;
constexpr u32 DS_PANEL_BYTES = BLOCK_M * ROW_BYTES, DS_BYTES = CONSUMERS * DS_PANEL_BYTES;
constexpr int DS_BUFFERS = 2;  // one is written while the other is read

// What the warpgroups have to know of a tile of queries.
struct Step {
  i64 number;  // query_tile
  int head, first_row;
  u32 masked;  // a bit for each warpgroup
  bool last;
};

struct SharedStorage {
  alignas(1024) unsigned char k[K_BYTES];
  alignas(1024) unsigned char v[V_BYTES];
  alignas(1024) unsigned char q[QUERY_STAGES * Q_BYTES];
  alignas(1024) unsigned char dout[DOUT_STAGES * DOUT_BYTES];
  alignas(1024) unsigned char ds[DS_BUFFERS * DS_BYTES];
  float lse[QUERY_STAGES][BLOCK_M];
  float delta[DOUT_STAGES][BLOCK_M];
  Step steps[QUERY_STAGES];
  KeyWork work[WORK_STAGES];
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<1> k_barriers, v_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<DOUT_STAGES> dout_barriers;
  u64 clearing;
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the plan's shared memory holds the tiles");
static_assert(BLOCK_N == CONSUMERS * ROWS_OF_WARPGROUP, "a warpgroup has 64 keys");

struct Rings {
  Ring<WORK_STAGES, sizeof(KeyWork)> work;
  Ring<1, K_BYTES> k;
  Ring<1, V_BYTES> v;
  Ring<QUERY_STAGES, Q_BYTES> q;
  Ring<DOUT_STAGES, DOUT_BYTES> dout;

  __device__ __forceinline__ explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        q(shared.q, shared.q_barriers),
        dout(shared.dout, shared.dout_barriers) {}
};

struct Maps {
  const ptx::TensorMap *q, *k, *v, *dout;
};

// The loading warp's way to bring tiles: lane 0 issues, all lanes clear rows that must not count.
struct Loader {
  SharedStorage& shared;
  u32 clearing_phase = 0;

  // Rows [row, row + ROWS) of a tensor (head_dim, seqlen, heads, batch), panel by panel. statistics: BLOCK_M numbers to
  // `target`, or null.
  template <int ROWS, int NUM_PANELS, class AnyRing>
  __device__ __forceinline__ void load(AnyRing& ring, const ptx::TensorMap* map, int row, int head, int batch,
                                       CountedRows counted, float* target, const float* statistics) {
    constexpr u32 BYTES = ROWS * NUM_PANELS * ROW_BYTES;
    const bool clears = !counted.all(ROWS);
    const u32 landed = clears ? ptx::shared_address(&shared.clearing) : ring.full();
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect(landed, BYTES + (target == nullptr ? 0 : BLOCK_M * sizeof(float)));
#pragma unroll
      for (int panel = 0; panel < NUM_PANELS; panel++) {
        ptx::tma_load(ring.buffer() + panel * ROWS * ROW_BYTES, map, landed, panel * PANEL, row, head, batch);
      }
      if (target != nullptr) {
        ptx::bulk_load(ptx::shared_address(target), statistics, BLOCK_M * sizeof(float), landed);
      }
    }
    if (clears) {
      wait_for(landed, clearing_phase);
      clearing_phase ^= 1;
      clear_others<ROWS, NUM_PANELS>(ring.buffer(), counted);
      if (lane() == 0) ptx::mbarrier_arrive(ring.full());
    }
    ring.advance();
  }
};

// The loading warp.
__device__ __forceinline__ void load_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings,
                                           const Maps& maps) {
  Loader loader{shared};
  const u32 total = p.num_tiles * num_key_images(p);
  for (u32 index = blockIdx.x, next; index < total; index = next) {
    next = lane() == 0 ? next_index(p, index, total) : 0;
    next = __shfl_sync(ALL_LANES, next, 0);
    Work work = key_work_at(p, index);
    if (work.tile * BLOCK_N >= work.sequence.rows_k) continue;
    QueryWalk walk(p, work);
    rings.work.acquire();
    const Sequence& s = shared.work[rings.work.stage].sequence;
    if (lane() == 0) {
      shared.work[rings.work.stage] = {work, walk.done()};
      ptx::mbarrier_arrive(rings.work.full());
    }
    rings.work.advance();
    __syncwarp();
    const int batch = p.cu_seqlens_q == nullptr ? s.batch : 0, first_key = work.tile * BLOCK_N;
    const int key = static_cast<int>(s.row_k) + first_key;
    for (bool first = true; !walk.done(); first = false) {
      const int head = walk.head, first_row = walk.first_row(), row = static_cast<int>(s.row_q) + first_row;
      const i64 number = query_tile(p, s, head, walk.blocks.block);
      const CountedRows queries = counted_queries(p, s, first_row);
      const u32 masked = masked_warpgroups(p, s, head, first_row, first_key, walk.blocks.partial);
      walk.advance();
      if (first) {
        rings.k.acquire();
        loader.load<BLOCK_N, PANELS>(rings.k, maps.k, key, work.head, batch, counted_keys(p, s, first_key), nullptr,
                                     nullptr);
      }
      rings.q.acquire();
      if (lane() == 0) shared.steps[rings.q.stage] = {number, head, first_row, masked, walk.done()};
      loader.load<BLOCK_M, PANELS>(rings.q, maps.q, row, head, batch, queries, shared.lse[rings.q.stage],
                                   p.row_lse + number * BLOCK_M);
      if (first) {
        rings.v.acquire();
        loader.load<BLOCK_N, PANELS_V>(rings.v, maps.v, key, work.head, batch, counted_keys(p, s, first_key), nullptr,
                                       nullptr);
      }
      rings.dout.acquire();
      loader.load<BLOCK_M, PANELS_V>(rings.dout, maps.dout, row, head, batch, queries, shared.delta[rings.dout.stage],
                                     p.row_delta + number * BLOCK_M);
    }
  }
  rings.work.acquire();
  if (lane() == 0) {
    shared.work[rings.work.stage].tile = NO_TILE;
    ptx::mbarrier_arrive(rings.work.full());
  }
}

// Says that this warpgroup's part of dS is written, and waits for the other's.
__device__ __forceinline__ void exchange(int warpgroup) {
  ptx::barrier_arrive(1 + warpgroup, CONSUMERS * WARPGROUP);
  ptx::barrier_sync(1 + (warpgroup ^ 1), CONSUMERS * WARPGROUP);
}

// Adds a warpgroup's part of dq to the sum.
__device__ __forceinline__ void add_dq(FourFloats* sum, const float (&dq)[DQ_COLUMNS / 2]) {
#pragma unroll
  for (int i = 0; i < DQ_COLUMNS / 8; i++) {
    ptx::add_f32_x4(sum[i * WARPGROUP].x, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
}

// A warpgroup.
__device__ __forceinline__ void differentiate(const AttentionParams& p, SharedStorage& shared, Rings rings,
                                              int warpgroup) {
  const u32 own_keys = warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
  const u32 own_k = ptx::shared_address(shared.k) + own_keys, own_v = ptx::shared_address(shared.v) + own_keys;
  const u32 own_ds = warpgroup * DS_PANEL_BYTES;
  // Of dq: queries of its own, or columns.
  const u32 dq_ds = DQ_BY_QUERIES ? warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES : 0;
  const u32 dq_k = ptx::shared_address(shared.k) + (DQ_BY_QUERIES ? 0 : warpgroup * DQ_PANELS * BLOCK_N * ROW_BYTES);
  u32 ds_buffer = ptx::shared_address(shared.ds), other_ds_buffer = ds_buffer + DS_BYTES;

  while (true) {
    rings.work.wait();
    const KeyWork& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const int first_key = work.tile * BLOCK_N + warpgroup * ROWS_OF_WARPGROUP;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;

    if (!work.unseen) {
      bool first = true;
      auto q = rings.q;  // ahead of rings.q while the last dk is not complete
      rings.k.wait();
      rings.v.wait();
      while (true) {
        float x[FRAGMENT], dp[FRAGMENT], dq[DQ_COLUMNS / 2];
        u32 weights[FRAGMENT / 2], ds[FRAGMENT / 2];
        q.wait();
        multiply_by_rows<HEAD_DIM, BLOCK_N, BLOCK_M>(x, own_k, q.buffer());
        rings.dout.wait();
        multiply_by_rows<HEAD_DIM_V, BLOCK_N, BLOCK_M>(dp, own_v, rings.dout.buffer());
        const Step& step = shared.steps[q.stage];
        const GradientFragment scores(p, s, step.head, step.first_row, first_key);
        const bool masked = step.masked >> warpgroup & 1, last = step.last;
        const KeptWeights kept = scores.kept();
        ptx::wgmma_wait_group<1>();
        keep(x);
        if (OVERLAP_DK && !first) rings.q.release();
        first = false;
        scores.weigh(x, shared.lse[q.stage], masked);
        ptx::wgmma_wait_group<0>();
        keep(dp);
        pack_kept(weights, x, kept);
        scores.differentiate(dp, x, kept, shared.delta[rings.dout.stage], masked);
        pack(ds, dp);
        store_transposed(ds_buffer + own_ds, ds);
        add_product<BLOCK_M>(dv, weights, rings.dout.buffer());
        ptx::fence_async_shared();
        exchange(warpgroup);
        multiply_by_columns<BLOCK_N, BLOCK_M>(dq, ds_buffer + dq_ds, dq_k);
        add_product<BLOCK_M>(dk, ds, q.buffer());
        ptx::wgmma_wait_group<1>();
        keep(dv);
        keep(dq);
        rings.dout.release();
        FourFloats* sum = dq_sum_at(p, step.number, warpgroup);
        if constexpr (!OVERLAP_DK) {
          ptx::wgmma_wait_group<0>();
          keep(dk);
          rings.q.release();
        }
        if (p.dq_sum != nullptr) add_dq(sum, dq);
        q.advance();
        const u32 buffer = ds_buffer;
        ds_buffer = other_ds_buffer;
        other_ds_buffer = buffer;
        if (last) break;
      }
      if constexpr (OVERLAP_DK) {
        ptx::wgmma_wait_group<0>();
        keep(dk);
        rings.q.release();
      }
      rings.k.release();
      rings.v.release();
    }

    const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
    const int row = first_key + warp_row() + fragment_row();
    const float scale = static_cast<float>(p.softmax_scale);
    const float rescale = HAS_DROPOUT ? static_cast<float>(p.dropout_rescale) : 1;
    if (p.dk.data != nullptr) {
      const float factor[2] = {scale, scale};
      write_fragment(p.dk.at(batch, s.row_k, work.head), p.dk.row_stride, row, s.len_k, s.rows_k, p.head_dim, dk,
                     factor);
    }
    if (p.dv.data != nullptr) {
      const float factor[2] = {rescale, rescale};
      write_fragment(p.dv.at(batch, s.row_k, work.head), p.dv.row_stride, row, s.len_k, s.rows_k, p.head_dim_v, dv,
                     factor);
    }
    __syncwarp();
    rings.work.release();
  }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ ptx::TensorMap q_map,
                  const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                  const __grid_constant__ ptx::TensorMap dout_map) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    constexpr int WARPS = CONSUMERS * WARPGROUP / WARP;
    shared.work_barriers.init(WARPS);
    shared.k_barriers.init(WARPS);
    shared.v_barriers.init(WARPS);
    shared.q_barriers.init(WARPS);
    shared.dout_barriers.init(WARPS);
    ptx::mbarrier_init(ptx::shared_address(&shared.clearing), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const Rings rings(shared);
  const int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);  // uniform, and known to be
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x < CONSUMERS * WARPGROUP + WARP) load_tiles(p, shared, rings, {&q_map, &k_map, &v_map, &dout_map});
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    differentiate(p, shared, rings, warpgroup);
  }
}
