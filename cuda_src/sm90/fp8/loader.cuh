// The shared memory of Hopper's forward kernel on e4m3 codes (forward.cu), and two threads of its loading warpgroup:
// the scheduler, and the one that loads codes by TMA. The other warps of this warpgroup are in values.cuh.
#include "codes.cuh"

constexpr int PREPARING_WARPS = 2, FIRST_PREPARING_WARP = WARPGROUP / WARP - PREPARING_WARPS;
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / WARP;

// SharedScales are the scales of a tile's keys and of its values, and for each preparing warp the largest magnitude of
// a value's scale among its keys in use.
struct SharedScales {
  alignas(16) float of_keys[TOKEN_SCALES ? BLOCK_N : 4], of_values[TOKEN_SCALES ? BLOCK_N : 4];
  alignas(8) float tops[PREPARING_WARPS];

  DEVICE float top() const { return larger(tops[0], tops[1]); }
};

struct SharedStorage {
  alignas(1024) unsigned char q[QUERY_STAGES * QUERY_CODES_BYTES];   // (QUERY_STAGES, CODE_PANELS, BLOCK_M, 128)
  alignas(1024) unsigned char k[STAGES * KEY_CODES_BYTES];           // (STAGES, CODE_PANELS, BLOCK_N, 128)
  alignas(1024) unsigned char v[STAGES * VALUE_CODES_BYTES];         // (STAGES, CODE_PANELS_V, BLOCK_N, 128)
  alignas(1024) unsigned char columns[STAGES * COLUMN_CODES_BYTES];  // (STAGES, HEAD_DIM_V, 128)
  float4 totals[IN_SLICES ? 1 : HEAD_DIM_V / 8][IN_SLICES ? 1 : CONSUMERS * WARPGROUP];  // O: four numbers of a thread
  float factors[SHARES_FACTORS ? BLOCK_M : 1];  // which the rows of the totals are to be multiplied by
  TileMessage work[WORK_STAGES];
  SharedScales scales[STAGES];
  float2 row_scales[TOKEN_SCALES ? CONSUMERS * WARPGROUP : 1];  // of the two queries of each computing thread
  int has_nan[STAGES][PREPARING_WARPS];                         // with HIDES_ANYWHERE: some value is NaN
  SeenKeys seen;
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<STAGES> k_barriers, v_barriers, column_barriers, scale_barriers;
};

// Rings are one thread's positions in all circular buffers of the kernel.
struct Rings {
  Ring<WORK_STAGES, sizeof(TileMessage), true> work;
  Ring<QUERY_STAGES, QUERY_CODES_BYTES, true> q;
  Ring<STAGES, KEY_CODES_BYTES, true> k;
  Ring<STAGES, VALUE_CODES_BYTES, true> v;         // from the loading thread to the preparing warps
  Ring<STAGES, COLUMN_CODES_BYTES, true> columns;  // from these to the consumers
  Ring<STAGES, sizeof(SharedScales), true> scales;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        q(shared.q, shared.q_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        columns(shared.columns, shared.column_barriers),
        scales(shared.scales, shared.scale_barriers) {}
};

DEVICE void init_barriers(SharedStorage& shared) {
  shared.work_barriers.init(CONSUMER_WARPS + PREPARING_WARPS + 1);
  shared.q_barriers.init(CONSUMER_WARPS);
  shared.k_barriers.init(CONSUMER_WARPS);
  shared.v_barriers.init(PREPARING_WARPS);
  shared.column_barriers.init(CONSUMER_WARPS, PREPARING_WARPS);
  shared.scale_barriers.init(CONSUMER_WARPS, PREPARING_WARPS);
  ptx::fence_mbarrier_init();
}

// KeyTiles are the tiles of keys that a tile of queries sees, by their numbers in TileMessage::keys. With a block mask
// these are places in a list, whose entries ascend.
struct KeyTiles {
  const int* list;  // with a block mask: entries (tile << 1) | partial

  DEVICE KeyTiles(const AttentionParams& p, const Work& work) {
    if constexpr (HAS_BLOCK_MASK) {
      const i64 grid = work.sequence.batch_or_0() * p.block_batch_stride + work.head * p.block_head_stride;
      list = p.block_list + (grid * p.num_lists + work.tile) * p.list_capacity;
    }
  }
  DEVICE int entry(int number) const { return HAS_BLOCK_MASK ? list[number] : number << 1; }
  DEVICE int block(int number) const { return entry(number) >> 1; }

  // keys() are the places of the entries that lengths and window leave.
  static DEVICE KeyRange keys(const AttentionParams& p, const SplitWork& work, const TileRows& rows) {
    const Blocks blocks = blocks_of_split(p, work, rows);
    int left = blocks.left;
    while (left > 0 && blocks.list[left - 1] >> 1 >= blocks.end) left--;
    const int begin = static_cast<int>(blocks.list - KeyTiles(p, work).list);
    return {begin, left > 0 ? begin + left : begin};
  }
};

// schedule_tiles() is the scheduler, a thread of its own so that nobody else waits for its divisions.
DEVICE void schedule_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings) {
  const TileRows rows(p);
  const u32 num_splits = num_splits_of(p), total = p.num_tiles * num_batch_heads_q(p) * num_splits;
  u32 index = blockIdx.x;
  while (index < total) {
    u32 num_heads = p.num_heads_q;
    ptx::forget(num_heads);  // so that no register holds what follows from it beyond this tile
    const SplitWork work = {
        work_at(p, index / num_splits, num_heads, BLOCK_M), {}, static_cast<int>(index % num_splits)};
    if (work.first_of_rows() < work.sequence.rows_q) {
      rings.work.acquire();
      TileMessage& message = shared.work[rings.work.stage];
      message = {work};
      if constexpr (HAS_BLOCK_MASK) {
        message.keys = KeyTiles::keys(p, work, rows);
      } else {
        message.find_keys(p, rows);
      }
      rings.work.publish();
    }
    // The next tile is taken when there is room for it, so that it goes to whoever is ready first.
    rings.work.acquire();
    index = next_index(p, index, total);
  }
  rings.work.acquire();
  shared.work[rings.work.stage].tile = NO_TILE;
  rings.work.publish();
}

// load_codes() is the loading thread's whole step: it waits for the stage, announces its bytes, starts the copies of
// rows [row, row + ROWS) and moves on.
template <int ROWS, int NUM_PANELS, class AnyRing>
DEVICE void load_codes(AnyRing& ring, const ptx::TensorMap* map, i64 row, int head, i64 batch) {
  ring.acquire();
  ring.expect();
#pragma unroll
  for (int panel = 0; panel < NUM_PANELS; panel++) {
    ptx::tma_load(ring.buffer() + panel * ROWS * ROW_BYTES, map, ring.full(), panel * CODE_PANEL, static_cast<int>(row),
                  head, static_cast<int>(batch));
  }
  ring.advance();
}

// load_all() is the loading thread: it loads tile after tile in the order of their use, the next keys before the values
// of the current ones.
DEVICE void load_all(const AttentionParams& p, SharedStorage& shared, Rings rings, const ptx::TensorMap* q_map,
                     const ptx::TensorMap* k_map, const ptx::TensorMap* v_map) {
  while (true) {
    rings.work.wait();
    const TileMessage& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const int head = work.head / group_size(p), begin = work.keys.begin, end = work.keys.end;
    const i64 batch = batch_of(p, s);
    const KeyTiles tiles(p, work);
    const auto row_of = [&](int number) { return s.row_k + tiles.block(number) * BLOCK_N; };
    if (begin < end) load_codes<BLOCK_N, CODE_PANELS>(rings.k, k_map, row_of(end - 1), head, batch);
    load_codes<BLOCK_M, CODE_PANELS>(rings.q, q_map, s.row_q + work.first_of_rows(), work.head, batch);
#pragma unroll 1
    for (int number = end - 1; number >= begin; number--) {
      if (number > begin) load_codes<BLOCK_N, CODE_PANELS>(rings.k, k_map, row_of(number - 1), head, batch);
      load_codes<BLOCK_N, CODE_PANELS_V>(rings.v, v_map, row_of(number), head, batch);
    }
    rings.work.release();
  }
}
