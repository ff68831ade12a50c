// Forward attention on Hopper: FlashAttention-3 (Shah et al. 2024), Algorithms 1 and 2. One warp loads tiles by TMA,
// CONSUMERS warpgroups of 64 queries each compute; thread blocks stay and take tile after tile.
#include "../softmax_fragment.cuh"
#include "../write_fragment.cuh"
#include "epilogue.cuh"
#include "hidden_values.cuh"
#include "parts.cuh"
#include "schedule.cuh"

struct SharedStorage {
  alignas(1024) unsigned char q[QUERY_STAGES * Q_BYTES];
  alignas(1024) unsigned char k[STAGES * K_BYTES];
  alignas(1024) unsigned char v[STAGES * V_BYTES];
  Staging staging;
  PartialWork work[WORK_STAGES];
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<STAGES> k_barriers, v_barriers;
  SeenKeys seen;
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the plan's shared memory holds the tiles");
static_assert(BLOCK_M == CONSUMERS * ROWS_OF_WARPGROUP, "a warpgroup has 64 queries");

struct Rings {
  Ring<WORK_STAGES, sizeof(PartialWork)> work;
  Ring<QUERY_STAGES, Q_BYTES> q;
  Ring<STAGES, K_BYTES> k;
  Ring<STAGES, V_BYTES> v;

  __device__ __forceinline__ explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        q(shared.q, shared.q_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers) {}
};

// One tile of rows [row, row + ROWS) of a tensor (head_dim, seqlen, heads, batch), panel by panel.
template <int ROWS, int NUM_PANELS, class AnyRing>
__device__ __forceinline__ void load(AnyRing& ring, const ptx::TensorMap* map, int row, int head, int batch) {
  ring.acquire();
  ring.expect();
#pragma unroll
  for (int panel = 0; panel < NUM_PANELS; panel++) {
    ptx::tma_load(ring.buffer() + panel * ROWS * ROW_BYTES, map, ring.full(), panel * PANEL, row, head, batch);
  }
  ring.advance();
}

// The loads of one tile, in the order of their use: the next keys before the values of the current ones.
__device__ __forceinline__ void load_tile(const AttentionParams& p, const PartialWork& work, Rings& rings,
                                          const ptx::TensorMap* q_map, const ptx::TensorMap* k_map,
                                          const ptx::TensorMap* v_map) {
  const Sequence& s = work.sequence;
  const int head_kv = work.head / (p.num_heads_q / p.num_heads_kv);
  const int batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
  const int row_q = static_cast<int>(s.row_q) + work.tile * BLOCK_M, row_k = static_cast<int>(s.row_k);
  Blocks blocks = blocks_of_part(p, work);
  bool last = blocks.done();
  if (!last) load<BLOCK_N, PANELS>(rings.k, k_map, row_k + blocks.block * BLOCK_N, head_kv, batch);
  load<BLOCK_M, PANELS>(rings.q, q_map, row_q, work.head, batch);
  while (!last) {
    const int values = row_k + blocks.block * BLOCK_N;
    blocks.advance();
    last = blocks.done();
    if (!last) load<BLOCK_N, PANELS>(rings.k, k_map, row_k + blocks.block * BLOCK_N, head_kv, batch);
    load<BLOCK_N, PANELS_V>(rings.v, v_map, values, head_kv, batch);
  }
}

// The loading thread.
__device__ __forceinline__ void load_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings,
                                           const ptx::TensorMap* q_map, const ptx::TensorMap* k_map,
                                           const ptx::TensorMap* v_map) {
  const u32 parts = number_of_parts(p), total = p.num_tiles * num_images(p) * parts;
  for (u32 index = blockIdx.x; index < total;) {
    const u32 ticket = take_ticket(p);  // on its way while this tile is loaded
    const PartialWork work = {work_at(p, index / parts), static_cast<int>(index % parts)};
    if (work.tile * BLOCK_M < work.sequence.rows_q) {
      rings.work.acquire();
      shared.work[rings.work.stage] = work;
      rings.work.publish();
      load_tile(p, work, rings, q_map, k_map, v_map);
    }
    index = index_of_ticket(p, ticket, index, total);
  }
  rings.work.acquire();
  shared.work[rings.work.stage] = {{{}, 0, NO_TILE}, 0};
  rings.work.publish();
}

// A warpgroup.
__device__ __forceinline__ void attend(const AttentionParams& p, SharedStorage& shared, Rings rings, int warpgroup) {
  const Turns turns(warpgroup);
  HiddenValues hidden(shared.seen);
  const float scale = static_cast<float>(p.softmax_scale);
  while (true) {
    rings.work.wait();
    const PartialWork& work = shared.work[rings.work.stage];  // read again where needed: registers are scarce
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const int tile_row = work.tile * BLOCK_M, first_row = tile_row + warpgroup * ROWS_OF_WARPGROUP;
    const int row = first_row + warp_row() + fragment_row();
    const ScoreFragment scores(p, s, work.head);
    hidden.begin(p, s, scores.mask);
    FragmentSoftmax softmax(scale);
    float out[HEAD_DIM_V / 2], rescale[2], inverse[2], lse[2];
    u32 weights[BLOCK_N / 4];
#pragma unroll
    for (int e = 0; e < HEAD_DIM_V / 2; e++) out[e] = 0;

    const float sink = p.sink == nullptr || work.part > 0 ? -infinity() : p.sink[work.head];
    // The warpgroup's own tiles of keys; before and behind them may be some that only others see.
    const Blocks all = blocks_of_part(p, work);
    Blocks blocks = all;
    if constexpr (!HIDES_ANYWHERE) {
      const Blocks own = blocks_of_keys(p, s, work.head, first_row / ROWS_OF_WARPGROUP, ROWS_OF_WARPGROUP, BLOCK_N);
      blocks.block = larger(own.block, all.block);
      blocks.end = smaller(own.end, all.end);
    }
    const auto pass_over = [&](int begin, int end) {
      for (int block = begin; block < end; block++) {
        rings.k.wait();
        rings.k.release();
        turns.take();
        turns.pass();
        hidden.clear(rings.v, block * BLOCK_N);
        rings.v.wait();
        rings.v.release();
      }
    };
    rings.q.wait();
    pass_over(all.block, blocks.done() ? all.end : blocks.block);
    if (blocks.done()) {
      if (!all.done()) {
        turns.take();
        turns.pass();
      }
      rings.q.release();
      softmax.finish(sink, inverse, lse);
    } else {
      const u32 queries = rings.q.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
      // Whether the current tile needs its mask. All warpgroups have to agree where they look for hidden keys together.
      const auto needs_mask = [&] {
        return HIDES_ANYWHERE ? scores.needs_mask(blocks, tile_row, BLOCK_M)
                              : scores.needs_mask(blocks, first_row, ROWS_OF_WARPGROUP);
      };
      // From the first scores to the weights of their values.
      const auto weigh = [&](float (&x)[BLOCK_N / 2], int first_key, bool masked) {
        scores.apply(x, row, first_key, masked);
        if (masked) hidden.find(x);
        const bool grown = softmax.step(x, rescale);
        scores.drop(x, row, first_key);
        return grown;
      };
      // The next scores beside the product of the last weights and their values.
      const auto step = [&](bool masked) {
        float x[BLOCK_N / 2];
        const int first_key = blocks.block * BLOCK_N;
        blocks.advance();
        rings.k.wait();
        turns.take();
        multiply_keys(x, queries, rings.k.buffer());
        rings.v.wait();
        multiply_values(out, weights, rings.v.buffer());
        turns.pass();
        ptx::wgmma_wait_group<1>();
        keep(x);
        rings.k.release();
        const bool grown = weigh(x, first_key, masked);
        ptx::wgmma_wait_group<0>();
        keep(out);
        rings.v.release();
        pack(weights, x);
        if (grown) rescale_rows(out, rescale);
        if (masked) hidden.clear(rings.v, first_key);
      };

      {
        float x[BLOCK_N / 2];
        const int first_key = blocks.block * BLOCK_N;
        const bool masked = needs_mask();
        blocks.advance();
        rings.k.wait();
        turns.take();
        multiply_keys(x, queries, rings.k.buffer());
        turns.pass();
        ptx::wgmma_wait_group<0>();
        keep(x);
        rings.k.release();
        weigh(x, first_key, masked);
        pack(weights, x);
        if (masked) hidden.clear(rings.v, first_key);
      }
      // Two copies of the step, so that the common one is short.
      while (!blocks.done()) {
        if (needs_mask()) {
          step(true);
        } else {
          step(false);
        }
      }
      rings.v.wait();
      turns.take();
      multiply_values(out, weights, rings.v.buffer());
      turns.pass();
      rings.q.release();
      softmax.finish(sink, inverse, lse);
      ptx::wgmma_wait_group<0>();
      keep(out);
      rings.v.release();
      pass_over(blocks.end, all.end);
    }

    if constexpr (HAS_DROPOUT) {
      inverse[0] *= static_cast<float>(p.dropout_rescale);
      inverse[1] *= static_cast<float>(p.dropout_rescale);
    }
    if constexpr (SPLIT) {
      write_part(p, work, row, out, inverse, lse);
    } else {
      const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
      if (lane() % 4 < 2) {
        const int i = row + 8 * (lane() % 4);
        const float own = lane() % 4 == 0 ? lse[0] : lse[1];
        if (i < s.rows_q) *p.lse.at(batch, s.row_q + i, work.head) = i < s.len_q ? own : -infinity();
      }
      Element* target = p.out.at(batch, s.row_q, work.head);
      if constexpr (STAGING) {
        const int staged_row = static_cast<int>(threadIdx.x) / WARP * ROWS_OF_WARP;
        write_rows(target, p.out.row_stride, tile_row + staged_row, s.len_q, s.rows_q, p.head_dim_v, out, inverse,
                   shared.staging.rows[staged_row]);
      } else {
        write_fragment(target, p.out.row_stride, row, s.len_q, s.rows_q, p.head_dim_v, out, inverse);
      }
    }
    __syncwarp();
    rings.work.release();
  }
  turns.finish();
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    forward_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ ptx::TensorMap q_map,
                 const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    constexpr int WARPS = CONSUMERS * WARPGROUP / WARP;
    shared.work_barriers.init(WARPS);
    shared.q_barriers.init(WARPS);
    shared.k_barriers.init(WARPS);
    shared.v_barriers.init(WARPS);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const Rings rings(shared);
  const int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);  // uniform, and known to be
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) load_tiles(p, shared, rings, &q_map, &k_map, &v_map);
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    attend(p, shared, rings, warpgroup);
  }
}
