// This header lets the warps of a persistent Hopper kernel work together: it has circular buffers in shared memory
// between the warp that loads and the warpgroups that compute (CUTLASS's PipelineTmaAsync), the order in which
// warpgroups use the tensor cores (ping-pong), and the scheduler that gives thread blocks their tiles. The forward
// kernels use all of it; backward/schedule.cuh adds the backward kernels' scheduler.
#include "../fragment/fragment.cuh"
#include "../ptx/sm90.cuh"

// can_share_registers() tells whether setmaxnreg can give warpgroups these registers. It hands on those with which the
// block began, for each thread a multiple of 8; a warpgroup that asks for more than are left waits for ever.
constexpr bool can_share_registers(int of_producer, int of_consumer) {
  constexpr int WARPGROUPS = CONSUMERS + 1, AT_LAUNCH = REGISTERS_OF_SM / (WARPGROUPS * WARPGROUP) / 8 * 8;
  return of_producer + CONSUMERS * of_consumer <= WARPGROUPS * AT_LAUNCH;
}

// sync_cluster() is a barrier of all threads of the cluster.
DEVICE void sync_cluster() {
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// wait_for() waits until the phase of this parity has ended.
DEVICE void wait_for(u32 mbarrier, u32 parity) {
  while (!ptx::mbarrier_try_wait(mbarrier, parity)) {
  }
}

// RingBarriers are the mbarriers of a circular buffer: full[stage] ends a phase when a buffer is filled, empty[stage]
// when all consumers have released it.
template <int STAGES>
struct RingBarriers {
  u64 full[STAGES], empty[STAGES];

  // Each consumer warp releases a buffer by itself, and each warp that writes one publishes it.
  DEVICE void init(int consumer_warps, int producers = 1) {
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
      ptx::mbarrier_init(ptx::shared_address(&full[stage]), producers);
      ptx::mbarrier_init(ptx::shared_address(&empty[stage]), consumer_warps);
    }
  }
};

// Ring is one side's position in a circular buffer of STAGES buffers of BYTES; both sides visit the buffers in the same
// order. TOGGLES_STAGE: with two buffers the stage changes without a comparison, which helps where steps wait for it.
// BLOCKS: so many thread blocks of a cluster fill each other's buffers, so a release goes to all of them.
template <int STAGES, u32 BYTES, bool TOGGLES_STAGE = false, u32 BLOCKS = 1>
struct Ring {
  static constexpr u32 SIZE = BYTES;
  u32 buffers, full_barriers, empty_barriers;  // shared addresses of stage 0
  u32 stage = 0, phase = 0;

  DEVICE Ring(const void* data, const RingBarriers<STAGES>& barriers)
      : buffers(ptx::shared_address(data)),
        full_barriers(ptx::shared_address(barriers.full)),
        empty_barriers(ptx::shared_address(barriers.empty)) {}

  DEVICE u32 buffer() const { return buffers + stage * BYTES; }
  DEVICE u32 full() const { return full_barriers + stage * 8; }

  DEVICE void advance() {
    if constexpr (TOGGLES_STAGE && STAGES == 2) {
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

  // follow() moves to where another ring stands that takes as many steps, if it has as many buffers: that is one
  // position less to keep in registers.
  template <int OTHER_STAGES, u32 OTHER_BYTES, bool TOGGLES>
  DEVICE void follow(const Ring<OTHER_STAGES, OTHER_BYTES, TOGGLES>& other) {
    if constexpr (OTHER_STAGES == STAGES) {
      stage = other.stage;
      phase = other.phase;
    }
  }

  // move() makes this ring the other one, with addresses counted from `to` instead of `from`.
  DEVICE void move(const Ring& other, u32 from, u32 to) {
    buffers = to + (other.buffers - from);
    full_barriers = to + (other.full_barriers - from);
    empty_barriers = to + (other.empty_barriers - from);
  }

  // previous_stage() is the position one step earlier.
  DEVICE Ring previous_stage() const {
    Ring ring = *this;
    ring.stage = stage == 0 ? STAGES - 1 : stage - 1;
    ring.phase = stage == 0 ? phase ^ 1 : phase;
    return ring;
  }

  // The producer's side: acquire() waits until the buffer is free, expect() announces its bytes, and publish() hands it
  // over.
  DEVICE void acquire() const { wait_for(empty_barriers + stage * 8, phase ^ 1); }
  DEVICE void expect(u32 elsewhere = 0) const { ptx::mbarrier_arrive_expect(full(), BYTES + elsewhere); }
  DEVICE void publish() {
    ptx::mbarrier_arrive(full());
    advance();
  }

  // publish_from_warp() hands over the part of a buffer that one of several warps wrote, for TMA or wgmma too.
  DEVICE void publish_from_warp() {
    ptx::fence_async_shared();
    publish_written();
  }
  // publish_written() hands over a buffer to consumers that only use ordinary loads.
  DEVICE void publish_written() {
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(full());
    advance();
  }

  // The consumers' side: each warp waits until the buffer is full, and releases it.
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

// ProductOrder is the ping-pong of FlashAttention-3 (section 3.1): the warpgroups issue their products in an order, so
// that the softmax of one runs while the products of another are computed. It is CUTLASS's OrderedSequenceBarrier on
// named barriers.
struct ProductOrder {
  // Named barriers FIRST_BARRIER .. FIRST_BARRIER + CONSUMERS - 1 are the warpgroups'.
  static constexpr int FIRST_BARRIER = 1;
  int own, next;

  DEVICE ProductOrder(int warpgroup)
      : own(FIRST_BARRIER + warpgroup), next(FIRST_BARRIER + (warpgroup + 1 < CONSUMERS ? warpgroup + 1 : 0)) {
    if (PING_PONG && warpgroup == CONSUMERS - 1) arrive();
  }
  // wait() waits for this warpgroup's place in the order; arrive() lets the next warpgroup go.
  DEVICE void wait() const {
    if constexpr (PING_PONG) ptx::barrier_sync(own, 2 * WARPGROUP);
  }
  DEVICE void arrive() const {
    if constexpr (PING_PONG) ptx::barrier_arrive(next, 2 * WARPGROUP);
  }
  // pass() uses up a place without a product.
  DEVICE void pass() const {
    wait();
    arrive();
  }
  // drain() takes the place in the order that is left over at the end.
  DEVICE void drain() const {
    if (PING_PONG && own == FIRST_BARRIER) ptx::barrier_sync(FIRST_BARRIER, 2 * WARPGROUP);
  }
};

// num_batch_heads_of() is the number of batch_heads; packed sequences count as one.
DEVICE u32 num_batch_heads_of(const AttentionParams& p, int num_heads) {
  return p.cu_seqlens_q == nullptr ? num_heads * p.batch : num_heads;
}
DEVICE u32 num_batch_heads_q(const AttentionParams& p) { return num_batch_heads_of(p, p.num_heads_q); }

// work_at() is the scheduler's map from an index to a tile of queries. Tiles of one head are neighbours, so that blocks
// that run together share keys in L2. With a window, or with a block mask, which may be one, the last queries, whose
// rows are the longest, come first. In the last heads they come first in all of these heads before the next tile, so
// that blocks end together. `num_heads` are the heads of which each has tiles, of `block` queries; with a window the
// first `left_out` tiles of each head have no index.
template <bool KEYS_IN_PAGES = false>
DEVICE Work work_at(const AttentionParams& p, u32 index, int num_heads, int block, u32 left_out = 0) {
  const u32 num_tiles = p.num_tiles - left_out;
  u32 tile = index % num_tiles, batch_head = index / num_tiles;
  if constexpr (HAS_WINDOW || HAS_BLOCK_MASK) {
    const u32 num_batch_heads = num_batch_heads_of(p, num_heads),
              last_heads = num_batch_heads - min(p.num_grouped_heads, num_batch_heads);
    if (batch_head >= last_heads) {
      const u32 place = index - last_heads * num_tiles, heads = num_batch_heads - last_heads;
      tile = place / heads;
      batch_head = last_heads + place % heads;
    }
    tile = p.num_tiles - 1 - tile;
  }
  if (p.cu_seqlens_q != nullptr) return packed_work<false, KEYS_IN_PAGES>(p, block, tile, batch_head);
  return {sequence_of(p, batch_head / num_heads), static_cast<int>(batch_head % num_heads), static_cast<int>(tile)};
}
DEVICE Work work_at(const AttentionParams& p, u32 index) { return work_at(p, index, p.num_heads_q, BLOCK_M); }

// take_ticket() takes the next tile for a thread block that has become free. Every tile is followed by one ticket, so
// the last of `total` tickets leaves the counter at 0 for the next launch. Without a counter tiles are dealt out round
// robin. Each of two teams has a counter of its own.
DEVICE u32 take_ticket(const AttentionParams& p, int team = 0) {
  return p.tile_counter == nullptr ? 0 : atomicAdd(p.tile_counter + team, 1u);
}

// index_of_ticket() is the index of the tile that a ticket stands for; `takers` thread blocks began with tiles 0 to
// takers - 1.
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
constexpr int NO_TILE = -1;  // in place of a tile's number: there are no more tiles
