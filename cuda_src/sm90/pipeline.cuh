// Rings of buffers in shared memory between the warp that loads them and the warpgroups that use them, the turns that
// the warpgroups take at the tensor cores, and which tiles a persistent thread block computes.
#include "../fragment/fragment.cuh"
#include "../ptx/sm90.cuh"

DEVICE void sync_cluster() {
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

DEVICE void wait_for(u32 mbarrier, u32 parity) {
  while (!ptx::mbarrier_try_wait(mbarrier, parity)) {
  }
}

template <int STAGES>
struct RingBarriers {
  u64 full[STAGES], empty[STAGES];

  // Every warp of the consumers releases a buffer by itself, and every warp that writes one publishes it.
  DEVICE void init(int consumer_warps, int producers = 1) {
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
      ptx::mbarrier_init(ptx::shared_address(&full[stage]), producers);
      ptx::mbarrier_init(ptx::shared_address(&empty[stage]), consumer_warps);
    }
  }
};

// One side's walk around a ring; both sides visit the buffers in the same order. HURRIED: two buffers change without a
// comparison, where steps wait for it. BLOCKS fill each other's.
template <int STAGES, u32 BYTES, bool HURRIED = false, u32 BLOCKS = 1>
struct Ring {
  static constexpr u32 SIZE = BYTES;
  u32 buffers, full_barriers, empty_barriers;
  u32 stage = 0, phase = 0;

  DEVICE Ring(const void* data, const RingBarriers<STAGES>& barriers)
      : buffers(ptx::shared_address(data)),
        full_barriers(ptx::shared_address(barriers.full)),
        empty_barriers(ptx::shared_address(barriers.empty)) {}

  DEVICE u32 buffer() const { return buffers + stage * BYTES; }
  DEVICE u32 full() const { return full_barriers + stage * 8; }

  DEVICE void advance() {
    if constexpr (HURRIED && STAGES == 2) {
      phase ^= stage;
      stage ^= 1;
      return;
    }
    if constexpr (STAGES > 1) {
      if (++stage < STAGES) return;
      stage = 0;
    }
    phase ^= 1;
  }

  // To where another ring stands that takes as many steps, if it has as many buffers: one place less to keep.
  template <int OTHER_STAGES, u32 OTHER_BYTES>
  DEVICE void follow(const Ring<OTHER_STAGES, OTHER_BYTES>& other) {
    if constexpr (OTHER_STAGES == STAGES) {
      stage = other.stage;
      phase = other.phase;
    }
  }

  // Seen from `to` as the other one is from `from`.
  DEVICE void move(const Ring& other, u32 from, u32 to) {
    buffers = to + (other.buffers - from);
    full_barriers = to + (other.full_barriers - from);
    empty_barriers = to + (other.empty_barriers - from);
  }

  DEVICE Ring behind() const {
    Ring ring = *this;
    ring.stage = stage == 0 ? STAGES - 1 : stage - 1;
    ring.phase = stage == 0 ? phase ^ 1 : phase;
    return ring;
  }
  DEVICE Ring following() const {
    Ring next = *this;
    next.advance();
    return next;
  }

  // The loading thread.
  DEVICE void acquire() const { wait_for(empty_barriers + stage * 8, phase ^ 1); }
  DEVICE void expect(u32 elsewhere = 0) const { ptx::mbarrier_arrive_expect(full(), BYTES + elsewhere); }
  DEVICE void publish() {
    ptx::mbarrier_arrive(full());
    advance();
  }

  // A warp of several that write a buffer together, for TMA or wgmma too.
  DEVICE void publish_part() {
    ptx::fence_async_shared();
    publish_written();
  }
  // For ordinary loads alone.
  DEVICE void publish_written() {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(full());
    advance();
  }

  // The using warps.
  DEVICE void wait() const { wait_for(full(), phase); }
  DEVICE void release() {
    if constexpr (BLOCKS == 1) {
      if (lane() == 0) ptx::mbarrier_arrive(empty_barriers + stage * 8);
    } else if (lane() < BLOCKS) {
      ptx::mbarrier_arrive_cluster(ptx::cluster_address(empty_barriers + stage * 8, lane()));
    }
    advance();
  }
};

// Ping-pong (FlashAttention-3, section 3.1): the warpgroups issue their products in turn, so that the softmax of one
// runs under the products of another.
struct Turns {
  static constexpr int FIRST_BARRIER = 1;  // ids FIRST_BARRIER .. FIRST_BARRIER + CONSUMERS - 1
  int own, next;

  DEVICE Turns(int warpgroup)
      : own(FIRST_BARRIER + warpgroup), next(FIRST_BARRIER + (warpgroup + 1 < CONSUMERS ? warpgroup + 1 : 0)) {
    if (PING_PONG && warpgroup == CONSUMERS - 1) pass();
  }
  DEVICE void take() const {
    if constexpr (PING_PONG) ptx::barrier_sync(own, 2 * WARPGROUP);
  }
  DEVICE void pass() const {
    if constexpr (PING_PONG) ptx::barrier_arrive(next, 2 * WARPGROUP);
  }
  // Takes the turn that is left over.
  DEVICE void finish() const {
    if (PING_PONG && own == FIRST_BARRIER) ptx::barrier_sync(FIRST_BARRIER, 2 * WARPGROUP);
  }
};

// Heads of all sequences; packed sequences are one.
DEVICE u32 num_images(const AttentionParams& p) {
  return p.cu_seqlens_q == nullptr ? p.num_heads_q * p.batch : p.num_heads_q;
}

// Tiles of one head are neighbours, so that blocks that run together share keys in L2. With a window or a block mask,
// which may be one, the last queries, whose rows are the longest, come first, in the last heads in all of these heads
// before the next: blocks end together.
DEVICE Work work_at(const AttentionParams& p, u32 index) {
  const u32 num_tiles = p.num_tiles;
  u32 tile = index % num_tiles, image = index / num_tiles;
  if constexpr (HAS_WINDOW || HAS_BLOCK_MASK) {
    const u32 images = num_images(p), last_heads = images - min(p.heads_together, images);
    if (image >= last_heads) {
      const u32 place = index - last_heads * num_tiles, heads = images - last_heads;
      tile = place / heads;
      image = last_heads + place % heads;
    }
    tile = num_tiles - 1 - tile;
  }
  if (p.cu_seqlens_q != nullptr) return packed_work<false>(p, BLOCK_M, tile, image);
  return {sequence_of(p, image / p.num_heads_q), static_cast<int>(image % p.num_heads_q), static_cast<int>(tile)};
}

// Thread blocks take tiles in order as they become free. Every tile is followed by one ticket, so the last of `total`
// tickets leaves the counter at 0 for the next launch. Without a counter tiles are dealt. Each of two teams has its
// own.
DEVICE u32 take_ticket(const AttentionParams& p, int team = 0) {
  return p.tile_counter == nullptr ? 0 : atomicAdd(p.tile_counter + team, 1u);
}

DEVICE u32 index_of_ticket(const AttentionParams& p, u32 ticket, u32 index, u32 total, u32 takers = gridDim.x,
                           int team = 0) {
  if (p.tile_counter == nullptr) return index + takers;
  if (ticket + 1 == total) p.tile_counter[team] = 0;
  return takers + ticket;
}

DEVICE u32 next_index(const AttentionParams& p, u32 index, u32 total, u32 takers = gridDim.x, int team = 0) {
  return index_of_ticket(p, take_ticket(p, team), index, total, takers, team);
}

constexpr int WORK_STAGES = 2;
using WorkRing = Ring<WORK_STAGES, sizeof(Work)>;
constexpr int NO_TILE = -1;
