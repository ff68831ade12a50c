// Forward attention on Hopper: FlashAttention-3 (Shah et al. 2024), Algorithms 1 and 2. One warp loads tiles by TMA,
// another one finds out which, CONSUMERS warpgroups of 64 queries each compute; thread blocks stay and take tile after
// tile.
#include "../softmax_fragment.cuh"
#include "../write_fragment.cuh"
#include "bias_tile.cuh"
#include "epilogue.cuh"
#include "given_work.cuh"
#include "hidden_values.cuh"
#include "unit_fragment.cuh"

struct SharedStorage {
  alignas(1024) unsigned char q[QUERY_STAGES * Q_BYTES];
  alignas(1024) unsigned char k[STAGES * K_BYTES];
  alignas(1024) unsigned char v[STAGES * V_BYTES];
  alignas(1024) unsigned char bias[BIAS_STAGES * BIAS_BYTES];
  Staging staging;
  GivenWork work[WORK_STAGES];
  Blocks lists[WORK_STAGES];                // with a block mask, of the tiles handed on
  int blocks[HAS_BLOCK_MASK ? STAGES : 1];  // of GivenBlocks
  int spoiled[WORK_STAGES];                 // whether hidden values have come into a tile's result
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<STAGES> k_barriers, v_barriers;
  RingBarriers<BIAS_STAGES> bias_barriers;
  SeenKeys seen;
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES, "the plan's shared memory holds the tiles");
constexpr bool HAS_OPTIONS = NUM_OPTIONS > 0;
// Copies of a step: for the first tile of keys, for masked and for other tiles; two: the first is masked, too. A single
// copy takes half as long to compile, and is up to a tenth slower.
constexpr bool WIDE_OPTION = HEAD_DIM > 64 && HAS_OPTIONS && !HAS_BLOCK_MASK;
constexpr int COPIES = NUM_OPTIONS > 1 || HAS_DROPOUT ? 1 : !WIDE_OPTION ? 3 : HAS_ALIBI ? 1 : 2;
static_assert(EARLY_POWERS == 0 || (COPIES == 3 && !HAS_DROPOUT), "early powers are not the first, nor dropped");
static_assert(BLOCK_M == CONSUMERS * ROWS_OF_WARPGROUP, "a warpgroup has 64 queries");

struct Rings {
  Ring<WORK_STAGES, sizeof(GivenWork), true> work;
  Ring<QUERY_STAGES, Q_BYTES, true> q;
  Ring<STAGES, K_BYTES, true> k;
  Ring<STAGES, V_BYTES, true> v;
  Ring<BIAS_STAGES, BIAS_BYTES, true> bias;

  __device__ __forceinline__ explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        q(shared.q, shared.q_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        bias(shared.bias, shared.bias_barriers) {}
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

// The scheduling thread hands tiles to the loading thread and to the warpgroups: nobody else waits for its divisions.
__device__ __forceinline__ void schedule_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings) {
  // The tile, behind those that come round again to the stage that it takes.
  const auto hand_on = [&](const PartialWork& work) {
    bool careful;
    do {
      rings.work.acquire();
      careful = HIDES_ANYWHERE && shared.spoiled[rings.work.stage];
      shared.spoiled[rings.work.stage] = 0;
      GivenWork& given = shared.work[rings.work.stage];
      if (!careful) given = {work};
      given.careful = careful;
      if (HAS_BLOCK_MASK && given.tile >= 0) {
        shared.lists[rings.work.stage] = blocks_of_part(p, given);
        given.empty = shared.lists[rings.work.stage].done();
      }
      rings.work.publish();
    } while (careful);
  };
  const u32 parts = number_of_parts(p), total = p.num_tiles * num_images(p) * parts;
  u32 index = blockIdx.x;
  // Behind the last tile every stage is looked at once more, whether its tile is spoiled.
  int looks = HIDES_ANYWHERE ? WORK_STAGES : 0;
  while (index < total || looks-- > 0) {
    if (index >= total) {
      hand_on({{{}, 0, NO_WORK}, 0});
      continue;
    }
    const PartialWork work = {work_at(p, index / parts), static_cast<int>(index % parts)};
    if (work.tile * BLOCK_M < work.sequence.rows_q) hand_on(work);
    rings.work.acquire();  // not sooner: the next tile is for whoever is the first to be ready for it
    index = next_index(p, index, total);
  }
  rings.work.acquire();
  shared.work[rings.work.stage].tile = NO_TILE;
  rings.work.publish();
}

// The loading thread.
struct Loader {
  const AttentionParams& p;
  SharedStorage& shared;
  Rings rings;
  const ptx::TensorMap *q_map, *k_map, *v_map, *bias_map;

  __device__ __forceinline__ void load_all() {
    while (true) {
      rings.work.wait();
      const GivenWork& work = shared.work[rings.work.stage];
      if (work.tile == NO_TILE) break;
      if (!HIDES_ANYWHERE || work.tile != NO_WORK) load_tile(work);
      rings.work.release();
    }
  }

 private:
  // Tiles come in the order of their use: the next keys before the values of the current ones.
  __device__ __forceinline__ void load_tile(const GivenWork& work) {
    const Sequence& s = work.sequence;
    Blocks blocks = HAS_BLOCK_MASK ? shared.lists[rings.work.stage] : blocks_of_part(p, work);
    const int head_kv = work.head / (p.num_heads_q / p.num_heads_kv);
    const int batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
    const int row_k = static_cast<int>(s.row_k);
    bool last = blocks.done();
    int block = last ? 0 : load_keys(blocks, work, row_k, head_kv, batch);
    load<BLOCK_M, PANELS>(rings.q, q_map, static_cast<int>(s.row_q) + work.tile * BLOCK_M, work.head, batch);
    while (!last) {
      if constexpr (HAS_BIAS_TILES) load_bias(work, block);
      const int values = row_k + block * BLOCK_N;
      last = blocks.done();
      if (!last) block = load_keys(blocks, work, row_k, head_kv, batch);
      load<BLOCK_N, PANELS_V>(rings.v, v_map, values, head_kv, batch);
    }
  }

  // Loads the current tile of keys, advances, and returns its number.
  __device__ __forceinline__ int load_keys(Blocks& blocks, const Work& work, int row_k, int head_kv, int batch) {
    const int block = blocks.block;
    if constexpr (HAS_BLOCK_MASK) {
      const bool masked = needs_mask(blocks, work);
      blocks.advance();
      const bool last = blocks.done(), next_masked = !last && needs_mask(blocks, work);
      rings.k.acquire();
      shared.blocks[rings.k.stage] = GivenBlocks::entry(block, masked, last, next_masked);
    } else {
      blocks.advance();
    }
    load<BLOCK_N, PANELS>(rings.k, k_map, row_k + block * BLOCK_N, head_kv, batch);
    return block;
  }

  // Whether some warpgroup has to mask the current tile of keys.
  __device__ __forceinline__ bool needs_mask(const Blocks& blocks, const Work& work) const {
    if (HAS_MASK || HAS_ALIBI || blocks.partial) return true;
    const Mask mask(p, work.sequence, work.head);
    return !mask.columns_inside(work.tile * BLOCK_M, BLOCK_M, blocks.block * BLOCK_N, BLOCK_N);
  }

  __device__ __forceinline__ void load_bias(const Work& work, int block) {
    const bool one_row = p.bias.row_stride == 0;
    rings.bias.acquire();
    ptx::mbarrier_arrive_expect(rings.bias.full(), PANELS_BIAS * (one_row ? ROW_BYTES : BIAS_PANEL_BYTES));
    const int row = one_row ? 0 : work.tile * BLOCK_M, head = p.bias.head_stride == 0 ? 0 : work.head;
    const int batch = p.bias.batch_stride == 0 ? 0 : work.sequence.batch;
#pragma unroll
    for (int panel = 0; panel < PANELS_BIAS; panel++) {
      ptx::tma_load(rings.bias.buffer() + panel * BIAS_PANEL_BYTES, bias_map, rings.bias.full(),
                    block * BLOCK_N + panel * BIAS_PANEL, row, head, batch);
    }
    rings.bias.advance();
  }
};

// A warpgroup.
__device__ __forceinline__ void attend(const AttentionParams& p, SharedStorage& shared, Rings rings, int warpgroup) {
  const Turns turns(warpgroup);
  HiddenValues hidden(shared.seen);
  // From double once, not for each tile as the compiler would. With options there is no register to hold it.
  float scale = static_cast<float>(p.softmax_scale);
  if constexpr (!HAS_OPTIONS) ptx::keep(scale);
  while (true) {
    rings.work.wait();
    const GivenWork& work = shared.work[rings.work.stage];  // read again where needed: registers are scarce
    if (work.tile == NO_TILE) break;
    if (HIDES_ANYWHERE && work.tile == NO_WORK) {
      __syncwarp();
      rings.work.release();
      continue;
    }
    const Sequence& s = work.sequence;
    const int tile_row = work.tile * BLOCK_M, first_row = tile_row + warpgroup * ROWS_OF_WARPGROUP;
    const int row = first_row + warp_row() + fragment_row();
    const UnitFragment scores(p, s, work.head, HAS_OPTIONS ? static_cast<float>(p.softmax_scale) : scale);
    hidden.begin(p, s, scores.mask);
    FragmentSoftmax softmax = FragmentSoftmax::in_units(scores.units.unit);
    float out[HEAD_DIM_V / 2], rescale[2], inverse[2], lse[2];
    u32 weights[BLOCK_N / 4];
#pragma unroll
    for (int e = 0; e < HEAD_DIM_V / 2; e++) out[e] = 0;

    const float sink = p.sink == nullptr || work.part > 0 ? -infinity() : p.sink[work.head];
    // The warpgroup's own tiles of keys; before and behind them may be some that only others see.
    const GivenBlocks all(p, work);
    GivenBlocks blocks = all;
    if constexpr (!HIDES_ANYWHERE) blocks.limit(p, work, first_row / ROWS_OF_WARPGROUP, ROWS_OF_WARPGROUP);
    const auto pass_over = [&](int begin, int end) {
      for (int block = begin; block < end; block++) {
        rings.k.wait();
        rings.k.release();
        turns.take();
        turns.pass();
        hidden.clear(rings.v, block * BLOCK_N, false);
        rings.v.wait();
        rings.v.release();
      }
    };
    rings.q.wait();
    pass_over(all.next, blocks.done() ? all.end : blocks.next);
    if (blocks.done()) {
      if (!all.done()) {
        turns.take();
        turns.pass();
      }
      rings.q.release();
      softmax.finish(sink, inverse, lse);
    } else {
      const u32 queries = rings.q.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
      const bool careful = HIDES_ANYWHERE && work.careful;
      FragmentBits bits;
      bool last, next_masked;
      const auto needs_mask = [&] { return careful || scores.needs_mask(blocks, first_row, ROWS_OF_WARPGROUP); };
      // What there is to do while the products are computed.
      const auto prepare = [&](int first_key, bool masked) {
        if (masked) scores.find_visible(bits, row, first_key);
        last = blocks.done();
        if constexpr (HAS_BLOCK_MASK) {
          next_masked = careful || blocks.next_masked;
        } else if (!last) {
          blocks.take(rings.k, shared.blocks);
          next_masked = needs_mask();
        }
      };
      // From products to scores in bounds.
      const auto bound = [&](float (&x)[BLOCK_N / 2], float (&shift)[2], int first_key, bool masked) {
        if constexpr (HAS_BIAS_TILES) rings.bias.wait();
        scores.apply(x, shift, bits, row, first_key, masked, [&](float (&x)[BLOCK_N / 2], bool masked) {
          if constexpr (HAS_BIAS_TILES) {
            add_bias_tile(x, rings.bias.buffer(), warpgroup * ROWS_OF_WARPGROUP + warp_row(), p.bias.row_stride == 0,
                          masked);
            __syncwarp();
            rings.bias.release();
          } else {
            scores.add_bias(x, row, first_key, masked);
          }
        });
        if (masked && careful) hidden.find(x);
        return softmax.bound<EXACT_MAXIMA>(x, shift, rescale);
      };
      const auto finish_values = [&] {
        ptx::wgmma_wait_group<0>();
        keep(out);
      };
      // The next scores beside the product of the last weights and their values, if there are any.
      const auto step = [&](bool masked, bool first) {
        float x[BLOCK_N / 2], shift[2] = {0, 0};
        if constexpr (HAS_BLOCK_MASK) {
          blocks.take(rings.k, shared.blocks);
          if (COPIES == 1) masked = needs_mask();
        }
        const int first_key = blocks.block * BLOCK_N;
        if (masked) scores.fetch(bits, row, first_key);
        rings.k.wait();
        turns.take();
        multiply_keys(x, queries, rings.k.buffer());
        if (first) {
          ptx::wgmma_fence();
          ptx::wgmma_commit_group();  // an empty one
        } else {
          rings.v.wait();
          multiply_values(out, weights, rings.v.buffer());
        }
        turns.pass();
        prepare(first_key, masked);
        ptx::wgmma_wait_group<1>();
        keep(x);
        rings.k.release();
        const bool grown = bound(x, shift, first_key, masked);
        if constexpr (EARLY_POWERS > 0) {
          // Some powers beside the end of the product: between branches, or the assembler puts them behind the wait.
          softmax.weigh<0, EARLY_POWERS>(x, shift);
#pragma unroll
          for (int e = 0; e < EARLY_POWERS; e++) ptx::keep(x[e]);
          if (!EXACT_MAXIMA && grown) {
            finish_values();
            rescale_rows(out, rescale);
          }
          finish_values();
          rings.v.release();
          if (EXACT_MAXIMA) rescale_rows(out, rescale);
          softmax.weigh<EARLY_POWERS, BLOCK_N / 2>(x, shift);
          pack(weights, x);
        } else {
          softmax.weigh<0, BLOCK_N / 2>(x, shift);
          scores.drop(x, row, first_key);
          finish_values();
          if (!first) rings.v.release();
          pack(weights, x);
          if (grown) rescale_rows(out, rescale);
        }
        if (masked) hidden.clear(rings.v, first_key, careful);
      };

      if constexpr (COPIES < 3) {
        if constexpr (!HAS_BLOCK_MASK) {
          blocks.take(rings.k, shared.blocks);
          next_masked = needs_mask();
        }
        bool first = true;
        do {
          if (COPIES == 1 || first || next_masked) {
            step(COPIES == 2 || next_masked, first);
          } else {
            step(false, false);
          }
          first = false;
        } while (!last);
      } else {
        float x[BLOCK_N / 2], shift[2] = {0, 0};
        blocks.take(rings.k, shared.blocks);
        const int first_key = blocks.block * BLOCK_N;
        const bool masked = needs_mask();
        if (masked) scores.fetch(bits, row, first_key);
        rings.k.wait();
        turns.take();
        multiply_keys(x, queries, rings.k.buffer());
        turns.pass();
        prepare(first_key, masked);
        ptx::wgmma_wait_group<0>();
        keep(x);
        rings.k.release();
        bound(x, shift, first_key, masked);
        softmax.weigh<0, BLOCK_N / 2>(x, shift);
        scores.drop(x, row, first_key);
        pack(weights, x);
        if (masked) hidden.clear(rings.v, first_key, careful);
        while (!last) {
          if (next_masked) {
            step(true, false);
          } else {  // the commonest has a loop of its own
            do step(false, false);
            while (!HAS_OPTIONS && !last && !next_masked);
          }
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
      if (HIDES_ANYWHERE && !careful && HiddenValues::spoil(out, row, s.len_q)) {
        shared.spoiled[rings.work.stage] = 1;
      }
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
                 const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                 const __grid_constant__ ptx::TensorMap bias_map) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    constexpr int WARPS = CONSUMERS * WARPGROUP / WARP;
    shared.work_barriers.init(WARPS + 1);
    shared.q_barriers.init(WARPS);
    shared.k_barriers.init(WARPS);
    shared.v_barriers.init(WARPS);
    shared.bias_barriers.init(WARPS);
    for (int& spoiled : shared.spoiled) spoiled = 0;
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const Rings rings(shared);
  const int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0);  // uniform, and known to be
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) Loader{p, shared, rings, &q_map, &k_map, &v_map, &bias_map}.load_all();
    if (threadIdx.x == CONSUMERS * WARPGROUP + WARP) schedule_tiles(p, shared, rings);
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    attend(p, shared, rings, warpgroup);
  }
}
