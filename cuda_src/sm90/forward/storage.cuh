// This header has the shared memory of Hopper's forward kernel, and a thread's positions in its circular buffers.
#include "key_tiles.cuh"
#include "pages.cuh"
#include "scores.cuh"
#include "token_scales.cuh"
#include "work.cuh"

constexpr u32 BIAS_BYTES = HAS_BIAS_TILES ? BIAS_TILE_BYTES : 0;
constexpr u32 MASK_BYTES = HAS_MASK_TILES ? BLOCK_M * MASK_ROW_BYTES : 0;

constexpr u32 SCALES_AT = HAS_BIAS_TILES || HAS_MASK_TILES ? BIAS_STAGES * BIAS_BYTES + MASK_STAGES * MASK_BYTES : 0;
constexpr u32 SCALES_BYTES = TOKEN_SCALES ? sizeof(ScaleStorage) : 0;

// bias_has_one_row() tells whether TMA loads one row of the bias for all rows of a tile.
DEVICE bool bias_has_one_row(const AttentionParams& p) { return !PACKS_HEADS && p.bias.row_stride == 0; }

// Staging is shared memory for the epilogue. It holds as many panels of each warp's rows as there is room for, in the
// swizzle of TMA.
template <int NUM_PANELS>
struct Staging {
  alignas(ATOM_BYTES) unsigned char panels[NUM_PANELS][BLOCK_M][ROW_BYTES];
};
template <>
struct Staging<0> {};

// SharedStorage is a thread block's shared memory, or a team's.
struct SharedStorage : Staging<STAGING_PANELS> {          // Staging is a base because an empty base takes no room
  alignas(1024) unsigned char q[QUERY_STAGES * Q_BYTES];  // (QUERY_STAGES, PANELS, BLOCK_M, 64)
  alignas(1024) unsigned char k[STAGES * K_BYTES];        // (STAGES, PANELS, BLOCK_N, 64)
  alignas(1024) unsigned char v[STAGES * V_BYTES];        // (STAGES, PANELS_V, BLOCK_N, 64)
  alignas(1024) unsigned char bias_and_mask[SCALES_AT + SCALES_BYTES > 0 ? SCALES_AT + SCALES_BYTES : 16];
  TileMessage work[WORK_STAGES];
  Blocks lists[WORK_STAGES];  // with a block mask, the tiles of keys of each tile handed on
  // `entries` tell ConsumerKeyIterator which tile of keys a stage holds, and for which rows it is hidden or to be
  // masked.
  int entries[HAS_BLOCK_MASK ? STAGES : 1][ENTRIES_PER_STAGE];
  StageSlots slots[HAS_BLOCK_MASK ? STAGES : 1];
  int non_finite[WORK_STAGES];  // 1 where a tile's result is not finite, so that hidden values may have come into it
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<STAGES> k_barriers, v_barriers;
  RingBarriers<BIAS_STAGES> bias_barriers;
  SeenKeys seen;
  ColumnNumbers<SLOPE_BY_PRODUCT> numbers;
  uint4 index;  // a pair's next tile, in x: a copy has 16 bytes
  RingBarriers<1> index_barriers;
  u64 nearly_loaded_barrier;  // its phases are tiles handed on
  RingBarriers<MASK_STAGES> mask_barriers;
};

// scales_in() are the scales of single keys, which lie behind the bias and the mask, where there are any.
DEVICE ScaleStorage& scales_in(SharedStorage& shared) {
  return reinterpret_cast<ScaleStorage&>(shared.bias_and_mask[SCALES_AT]);
}
DEVICE const ScaleStorage& scales_in(const SharedStorage& shared) {
  return reinterpret_cast<const ScaleStorage&>(shared.bias_and_mask[SCALES_AT]);
}

// RingOfKeys is a ring of keys or values. Rows that cp.async has written (page_rows.cuh) are made visible to wgmma by
// the threads that wait for them.
template <u32 BYTES>
struct RingOfKeys : Ring<STAGES, BYTES, true, PAIR> {
  using Base = Ring<STAGES, BYTES, true, PAIR>;
  DEVICE RingOfKeys(const void* data, const RingBarriers<STAGES>& barriers) : Base(data, barriers) {}
  DEVICE void wait() const {
    Base::wait();
    if constexpr (COPIES_ROWS) ptx::fence_async_shared();
  }
};

// RingOfScales is a ring of scales of single keys, or nothing.
template <bool ANY>
struct RingOfScales : Ring<STAGES, sizeof(TokenScales), true> {
  using Ring<STAGES, sizeof(TokenScales), true>::Ring;
};
template <>
struct RingOfScales<false> {
  static constexpr u32 stage = 0;
  DEVICE RingOfScales(const void*, const RingBarriers<STAGES>&) {}
  DEVICE void acquire() const {}
  DEVICE void publish() {}
  DEVICE void wait() const {}
  DEVICE void release() {}
};

// Rings are one thread's positions in all circular buffers of the kernel.
struct Rings {
  Ring<WORK_STAGES, sizeof(TileMessage), true> work;
  Ring<QUERY_STAGES, Q_BYTES, true> q;
  RingOfKeys<K_BYTES> k;
  RingOfKeys<V_BYTES> v;
  Ring<BIAS_STAGES, BIAS_BYTES, true> bias;
  Ring<MASK_STAGES, MASK_BYTES, true> mask;
  RingOfScales<TOKEN_SCALES> scales;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        q(shared.q, shared.q_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        bias(shared.bias_and_mask, shared.bias_barriers),
        mask(shared.bias_and_mask + BIAS_STAGES * BIAS_BYTES, shared.mask_barriers),
        scales(scales_in(shared).tiles, scales_in(shared).barriers) {}

  // forget() makes the compiler compute addresses anew, because a loading thread next to four warpgroups has few
  // registers.
  DEVICE void forget(SharedStorage& shared) {
    const Rings same(shared);
    const u32 from = same.q.buffers;
    u32 to = from;
    ptx::forget(to);
    work.move(same.work, from, to);
    q.move(same.q, from, to);
    k.move(same.k, from, to);
    v.move(same.v, from, to);
  }
};
