// This header has the fast path of a block mask in Hopper's backward kernels. For a tile of queries a warpgroup has the
// blocks of its 64 keys; of a partial block each thread reads the bits of its own fragment in one word.
#include "../../fragment/gradient_fragment.cuh"
#include "../wgmma.cuh"

constexpr int BLOCKS_M = (BLOCK_M + CANONICAL - 1) / CANONICAL, BLOCKS_N = BLOCK_N / CANONICAL;
constexpr int BLOCKS = HAS_BLOCK_MASK ? BLOCKS_M * BLOCKS_N : 0;  // blocks of a tile, (BLOCKS_N, BLOCKS_M)

// BlockSlots has the slots of a tile's blocks; the loading warp hands them on with the queries.
struct BlockSlots {
  int slots[BLOCKS + 1];  // (BLOCKS_N, BLOCKS_M), then `ranged`

  // put() is called by a warp. `ranged` has a bit for each warpgroup from which lengths or window hide something.
  DEVICE void put(int slot, u32 ranged) {
    if (HAS_BLOCK_MASK && lane() <= BLOCKS) slots[lane()] = lane() < BLOCKS ? slot : static_cast<int>(ranged);
    if (HAS_BLOCK_MASK) __syncwarp();
  }
};

// own_slot() is the slot of the lane's block of a tile.
DEVICE int own_slot(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key) {
  if (!HAS_BLOCK_MASK || lane() >= BLOCKS) return VISIBLE_SLOT;
  const Mask mask(p, s, head);
  return mask.slot_at(first_row + static_cast<int>(lane()) % BLOCKS_M * CANONICAL,
                      first_key + static_cast<int>(lane()) / BLOCKS_M * CANONICAL);
}

// partial_warpgroups() has bit w set where some block of warpgroup w is not visible. A warp calls it.
DEVICE u32 partial_warpgroups(int slot) {
  u32 warpgroups = 0;
  if constexpr (HAS_BLOCK_MASK) {
    const u32 blocks = __ballot_sync(ALL_LANES, slot != VISIBLE_SLOT);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) warpgroups |= (blocks >> i & 1) << i / BLOCKS_M;
  }
  return warpgroups;
}

// masked_warpgroups() has bit w set where some query of a tile does not see some key of warpgroup w. Queries beyond the
// sequence do not count.
DEVICE u32 masked_warpgroups(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key) {
  const Mask mask(p, s, head);
  u32 masked = 0;
#pragma unroll
  for (int warpgroup = 0; warpgroup < BLOCK_N / ROWS_OF_WARPGROUP; warpgroup++) {
    const int key = first_key + warpgroup * ROWS_OF_WARPGROUP;
    if ((HAS_MASK && !HAS_MASK_VECTORS) || (HAS_BIAS && !HAS_BIAS_TILES) ||
        !mask.columns_inside(first_row, BLOCK_M, key, ROWS_OF_WARPGROUP))
      masked |= 1u << warpgroup;
  }
  return masked;
}

// SKIPS_STEPS: a warpgroup may skip a step of which it sees nothing (KeyWork::skips). It is then a step behind the
// other: with two stages of queries both would wait for loads, so there must be three. With a block mask it would take
// long to compile.
constexpr bool SKIPS_STEPS =
    BLOCK_N == 2 * BLOCK_M && BLOCK_M == ROWS_OF_WARPGROUP && !HAS_BLOCK_MASK && QUERY_STAGES > 2;
// skipped_steps() finds KeyWork::skips for a tile of keys.
template <class Iterator>
DEVICE u32 skipped_steps(const AttentionParams& p, const Sequence& s, const Iterator& iterator, int first_key) {
  const Mask mask(p, s, iterator.head);
  const auto hidden = [&](int block, int key) {
    return mask.wholly_outside(block * BLOCK_M, BLOCK_M, key, ROWS_OF_WARPGROUP);
  };
  if (p.num_heads_q > p.num_heads_kv || iterator.done()) return 0;
  const int last = iterator.last_block();
  if (iterator.block() == last) return 0;
  return (hidden(last, first_key) ? 1 : 0) | (hidden(iterator.block(), first_key + ROWS_OF_WARPGROUP) ? 2 : 0);
}

// some_query_sees_all() tells whether the list of tiles shows at once that each of a tile's keys is seen, because some
// query sees all of them. A warp calls it.
template <class Iterator>
DEVICE bool some_query_sees_all(const AttentionParams& p, const Sequence& s, const Iterator& iterator, int first_key) {
  bool sees = false;
  if constexpr (HAS_BLOCK_MASK && !HAS_MASK && !HAS_BIAS && !HIDES_BY_RULE) {
    const int* entry = iterator.blocks.list + lane();
    if (!iterator.done() && lane() < iterator.blocks.left && (*entry & 1) == 0 && *entry >> 1 < iterator.blocks.end) {
      const Mask::Range range = Mask(p, s, iterator.head).columns((*entry >> 1) * BLOCK_M);
      sees = range.begin <= first_key && range.end >= smaller(first_key + BLOCK_N, s.len_k);
    }
    sees = __any_sync(ALL_LANES, sees);
  }
  return sees;
}

// BlockBits is a thread's part of its warpgroup's bits, for a tile of queries.
struct BlockBits {
  static constexpr bool HIDES = HAS_BLOCK_MASK;
  const BlockSlots& slots;
  int warpgroup;
  u32 words[HAS_BLOCK_MASK ? BLOCKS_M : 1];

  DEVICE BlockBits(const AttentionParams& p, const BlockSlots& slots, int warpgroup, bool masked)
      : slots(slots), warpgroup(warpgroup) {
    if (HAS_BLOCK_MASK && (masked || HAS_BIAS_TILES)) {  // a bias may hide elements, too
#pragma unroll
      for (int i = 0; i < BLOCKS_M; i++) {
        const int slot = slots.slots[warpgroup * BLOCKS_M + i];
        words[i] = slot == VISIBLE_SLOT ? 0xffffffffu : 0;
        if (slot >= 0) words[i] = p.fragment_bits[static_cast<i64>(slot) * WARPGROUP + threadIdx.x % WARPGROUP];
      }
    }
  }

  // ranged() tells whether lengths and window may hide something of the tile. With 128 queries registers are too scarce
  // to ask.
  DEVICE bool ranged() const { return BLOCKS_M > 1 || (slots.slots[BLOCKS] >> warpgroup & 1); }

  DEVICE void hide(float (&x)[FRAGMENT]) const {
    rules::hide(x, [&](int e) { return (words[e / 32] >> e % 32 & 1) == 0; });
  }
};
