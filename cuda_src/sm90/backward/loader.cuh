// This header is the producer side of Hopper's backward kernels (backward.cu and backward/wide.cu): a warp takes tiles
// of keys, finds the tiles of queries that see them, and loads q, dout, k, v, lse and delta into shared memory. It
// hands the warpgroups a Step for each tile of queries, and the warps that add dq a DqStep.
#include "options.cuh"
#include "rows.cuh"
#include "slopes.cuh"

// ---- Rows that must not count. Padded queries, and keys that no query sees, become 0 in shared memory, because 0 *
// NaN would count. Rows beyond the end of an array need nothing, because TMA has written zeros there.

constexpr int LOADED_KEYS = PAIR * BLOCK_N;  // each block of a pair has the keys of both

// CountedRows are the rows [begin, end) of a tile that count.
struct CountedRows {
  int begin, end;

  DEVICE bool all(int rows) const { return begin <= 0 && end >= rows; }
};

// counted_queries() are the queries of a tile that are in use.
DEVICE CountedRows counted_queries(const AttentionParams& p, const Sequence& s, int first_row) {
  const bool to_the_end = p.cu_seqlens_q == nullptr && s.len_q == p.seqlen_q;
  return {0, to_the_end ? BLOCK_M : s.len_q - first_row};
}

// counted_keys() are the keys of a tile that lengths and window leave to some query.
DEVICE CountedRows counted_keys(const AttentionParams& p, const Sequence& s, int first_key) {
  int begin = 0, end = s.len_k;
  if constexpr (HAS_WINDOW) {
    begin = larger(begin, s.diagonal() - p.window_left);
    end = smaller(end, s.len_q + s.diagonal() + p.window_right);
  }
  const bool to_the_end = p.cu_seqlens_q == nullptr && end == p.seqlen_k;
  return {begin - first_key, to_the_end ? LOADED_KEYS : end - first_key};
}

// clear_others() makes all rows but the counted ones 0. A warp calls it.
template <int ROWS, int NUM_PANELS>
DEVICE void clear_others(u32 tile, CountedRows counted) {
  constexpr int VECTORS = ROW_BYTES / sizeof(uint4);
#pragma unroll 1
  for (int i = lane(); i < ROWS * NUM_PANELS * VECTORS; i += WARP) {
    const int row = i / VECTORS % ROWS;
    if (row >= counted.begin && row < counted.end) continue;
    *static_cast<uint4*>(__cvta_shared_to_generic(tile + i * sizeof(uint4))) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
  __syncwarp();
}

// to_sign() is the number whose addition carries the exponent of infinity and NaN, and no other, into the sign bit.
DEVICE u32 to_sign(__nv_bfloat16) { return 0x0080; }
DEVICE u32 to_sign(__half) { return 0x0400; }

// marked_infinite() gives words whose sign bits say which of two elements are not finite.
DEVICE u32 marked_infinite(u32 pair) { return (pair & 0x7fff7fffu) + to_sign(Element()) * 0x00010001u; }
DEVICE u32 marked_infinite(uint4 x) {
  return marked_infinite(x.x) | marked_infinite(x.y) | marked_infinite(x.z) | marked_infinite(x.w);
}
constexpr u32 SIGNS = 0x80008000u;

// clear_unseen_keys() makes 0 the keys that are not finite and that no query sees. A warp calls it; most tiles are only
// read once.
template <int NUM_PANELS>
DEVICE void clear_unseen_keys(const AttentionParams& p, const Sequence& s, int head_kv, int first_key, u32 tile) {
  const int group = group_size(p);
  constexpr int VECTORS = ROW_BYTES / sizeof(uint4);
  u32 infinite = 0;
#pragma unroll 2
  for (int i = lane(); i < LOADED_KEYS * NUM_PANELS * VECTORS; i += WARP) {
    infinite |= marked_infinite(*static_cast<const uint4*>(__cvta_shared_to_generic(tile + i * sizeof(uint4))));
  }
  if (!__any_sync(ALL_LANES, infinite & SIGNS)) return;
#pragma unroll 1
  for (int row = 0; row < LOADED_KEYS; row++) {
    const auto vector = [&](int i) {
      const u32 address = tile + (i / VECTORS * LOADED_KEYS + row) * ROW_BYTES + i % VECTORS * sizeof(uint4);
      return static_cast<uint4*>(__cvta_shared_to_generic(address));
    };
    infinite = 0;
    for (int i = lane(); i < NUM_PANELS * VECTORS; i += WARP) infinite |= marked_infinite(*vector(i));
    if (!__any_sync(ALL_LANES, infinite & SIGNS)) continue;
    const int key = first_key + row;
    bool seen = false;
    for (int head = head_kv * group; head < (head_kv + 1) * group; head++) {
      const Mask mask(p, s, head);
      const Score score(p, s, head);
      for (int i = lane(); i < s.len_q && !seen; i += WARP) {
        seen = mask.visible(i, key) && score.may_be_seen(i, key);
      }
    }
    if (__any_sync(ALL_LANES, seen)) continue;
    for (int i = lane(); i < NUM_PANELS * VECTORS; i += WARP) *vector(i) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
  __syncwarp();
}

constexpr u32 DOUT_BYTES = BLOCK_M * ROW_BYTES * PANELS_V;

// Maps are the tensor maps of the operands: q, k, v, dout and the bias.
struct Maps {
  const ptx::TensorMap *q, *k, *v, *dout, *bias = nullptr;
};

// Step tells the warpgroups of a tile of queries.
struct Step : SlopePlace {
  int head, first_row;
  u32 masked, last;  // a bit for each warpgroup: it needs a mask; this is its last step
  BlockSlots slots;
};

// DqStep tells the warps that add dq of a tile of queries.
struct DqStep {
  i64 sum;             // query_tile() * DQ_SUMS + which of the tile's sums
  int place_in_order;  // the place of this addition in the order of its sum
  bool last;           // the last step of a tile of keys
  int first_key;

  DEVICE i64 number() const { return sum / DQ_SUMS; }  // query_tile() of the step
};
constexpr int DQ_STEPS = 8;  // more than the tiles of queries that are computed at a time
constexpr i64 NO_DQ = -1;

// NoCheck is the default: no rows are looked for.
struct NoCheck {
  static constexpr bool needed = false;
  DEVICE void operator()(u32) const {}
};

// KeyCheck looks for keys that are hidden one by one from all queries.
struct KeyCheck {
  bool needed;
  const AttentionParams& p;
  const Sequence& s;
  int head_kv, first_key;

  DEVICE void operator()(u32 tile) const {
    if constexpr (HIDES_ANYWHERE) clear_unseen_keys<PANELS>(p, s, head_kv, first_key, tile);
  }
};

// Loader loads tiles as a warp: lane 0 issues the copies, and all lanes clear rows that must not count.
struct Loader {
  u32 clearing;  // a barrier of its own for tiles that are cleared before they are handed on
  u32 clearing_phase = 0;

  // load() loads rows [row, row + ROWS) of a tensor map (head_dim, seqlen, heads, batch). `statistics`: BLOCK_M numbers
  // that go to `target`, or null. `check` may clear more rows of the tile. `other` copies what else belongs to it.
  template <int ROWS, int NUM_PANELS, class AnyRing, class Check = NoCheck, class Other = NothingElse>
  DEVICE void load(AnyRing& ring, const ptx::TensorMap* map, int row, int head, int batch, CountedRows counted,
                   float* target, const float* statistics, Check check = {}, Other other = {}) {
    constexpr u32 BYTES = ROWS * NUM_PANELS * ROW_BYTES + Other::BYTES;
    const bool clears = check.needed || !counted.all(ROWS);
    const u32 landed = clears ? clearing : ring.full();
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect(landed, BYTES + (target == nullptr ? 0 : BLOCK_M * sizeof(float)));
#pragma unroll
      for (int panel = 0; panel < NUM_PANELS; panel++) {
        ptx::tma_load(ring.buffer() + panel * ROWS * ROW_BYTES, map, landed, panel * PANEL, row, head, batch);
      }
      if (target != nullptr) {
        ptx::bulk_load(ptx::shared_address(target), statistics, BLOCK_M * sizeof(float), landed);
      }
      other.load(landed);
    }
    if (clears) {
      wait_for(landed, clearing_phase);
      __syncwarp();
      clearing_phase ^= 1;
      clear_others<ROWS, NUM_PANELS>(ring.buffer(), counted);
      if (check.needed) check(ring.buffer());
      if (lane() == 0) ptx::mbarrier_arrive(ring.full());
    }
    ring.advance();
  }
};

// acquire_by_warp() waits with the whole warp. No lane may still wait when lane 0 goes on: the barrier could be two
// phases further by then.
template <class AnyRing>
DEVICE void acquire_by_warp(const AnyRing& ring) {
  ring.acquire();
  __syncwarp();
}

// of_lane_0() calls `get` in lane 0 and gives its result to all lanes.
template <class Get>
DEVICE u32 of_lane_0(Get get) {
  return __shfl_sync(ALL_LANES, lane() == 0 ? get() : 0, 0);
}

template <class SharedStorage, class Rings>
DEVICE DqStep dq_step(const SharedStorage& shared, const Rings& rings) {
  rings.dq_steps.wait();
  return shared.dq_steps[rings.dq_steps.stage];
}
// next_dq_step() reads a step and releases it; dq_step() leaves it in its place.
template <class SharedStorage, class Rings>
DEVICE DqStep next_dq_step(const SharedStorage& shared, Rings& rings) {
  const DqStep step = dq_step(shared, rings);
  __syncwarp();
  rings.dq_steps.release();
  return step;
}

// Index is where the first block of a pair tells the second one which tile they take.
struct Index {
  uint4 index;  // the index is in x, because a copy has 16 bytes
  RingBarriers<1> barriers;
};

// agreed_index() is called by the loading warps of a pair: the first takes an index, and the second receives it.
template <class SharedStorage, class Take>
DEVICE u32 agreed_index(SharedStorage& shared, u32& phase, Take take) {
  if constexpr (PAIR == 1) {
    return take();
  } else {
    Ring<1, sizeof(uint4)> ring(&shared.index.index, shared.index.barriers);
    ring.phase = phase;
    phase ^= 1;
    if (rank() == 0) {
      acquire_by_warp(ring);
      const u32 index = take();
      if (lane() == 0) {
        shared.index.index.x = index;
        ptx::fence_async_shared();
        ptx::bulk_copy_cluster(ptx::cluster_address(ring.buffer(), 1), ring.buffer(), sizeof(uint4),
                               ptx::cluster_address(ring.full(), 1));
      }
      return index;
    }
    if (lane() == 0) ptx::mbarrier_arrive_expect(ring.full(), sizeof(uint4));
    ring.wait();
    const u32 index = shared.index.index.x;
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive_cluster(ptx::cluster_address(ring.empty_barriers, 0));
    return index;
  }
}

// wait_for_rows() waits until the kernel before has prepared a tile of queries and all before it.
template <class SharedStorage>
DEVICE void wait_for_rows(const AttentionParams& p, SharedStorage& shared, i64 tile) {
  if constexpr (PING_PONG) {
    // Tiles that this lane's thread block of the other kernel has done, as far as is known.
    int& done = shared.rows_ready[lane()];
    while (__any_sync(ALL_LANES, static_cast<i64>(done) * WARP + lane() <= tile)) {
      done = ptx::load_acquire(p.rows_ready + lane());
    }
  }
}

// query_splits() is how many thread blocks share the queries of a tile of keys. Each writes float32 shares of dk and
// dv.
DEVICE int query_splits(const AttentionParams& p) { return SPLITS_QUERIES ? p.splits : 1; }

// QueriesOfKeys iterates over the tiles of queries of a tile of keys.
using QueriesOfKeys = Either<!DETERMINISTIC && !HAS_BLOCK_MASK, GroupedQueryTileIterator, QueryTileIterator>::Type;

// TileLoader is the loading warp: it takes tiles of keys, tells the other warps of each and of its steps, and loads the
// keys and the queries.
template <class SharedStorage, class Rings>
struct TileLoader {
  const AttentionParams& p;
  SharedStorage& shared;
  Rings& rings;
  const Maps& maps;
  Loader& loader;
  const int splits;

  // hand_over() completes a tile of keys, the work of the other warps.
  DEVICE void hand_over(KeyWork& work, const QueriesOfKeys& iterator, int split, int first_key) {
    const Sequence& s = work.sequence;
    if (lane() == 0) {
      work.split = split;
      work.is_hidden = iterator.done();
      if constexpr (SKIPS_STEPS) work.skips = skipped_steps(p, s, iterator, first_key);
      // Padding behind packed keys belongs to no head, so it is not counted.
      if (DQ_BY_HEADS && work.is_hidden && p.dq_order != nullptr && s.batch >= 0) {
        const int head = work.head * group_size(p);
        ptx::add_release(warps_done_at(p, query_tile(p, s, head, 0, BLOCK_M)), DQ_PIECES);
      }
      work.stage = rings.work.stage;
      work.phase = rings.work.phase;
      if (HAS_BIAS_TILES) {
        work.key_stage = rings.k.stage;
        work.key_phase = rings.k.phase;
      }
      ptx::mbarrier_arrive(rings.work.full());
    }
    rings.work.advance();
    __syncwarp();
  }

  // load_keys() loads a tile of values and of keys.
  DEVICE void load_keys(const KeyWork& work, int batch, int key, int first_key, bool hides_keys) {
    const Sequence& s = work.sequence;
    acquire_by_warp(rings.v);
    loader.template load<BLOCK_N, PANELS_V>(rings.v, maps.v, key, work.head, batch, counted_keys(p, s, first_key),
                                            nullptr, nullptr);
    acquire_by_warp(rings.k);
    const int before = rank() * BLOCK_N;
    loader.template load<LOADED_KEYS, PANELS>(rings.k, maps.k, key - before, work.head, batch,
                                              counted_keys(p, s, first_key - before), nullptr, nullptr,
                                              KeyCheck{hides_keys, p, s, work.head, first_key - before});
  }

  // ending_warpgroups() has a bit for each warpgroup whose last step of a tile of keys this is; `next` is behind it.
  // The first warpgroup may skip the last one of all.
  DEVICE int ending_warpgroups(const KeyWork& work, const QueriesOfKeys& next) const {
    return next.done() ? 3 : SKIPS_STEPS && (work.skips & 1) != 0 && next.block() == next.last_block() ? 1 : 0;
  }

  // load_queries() tells the other warps of a step, and loads its rows of q and dout.
  DEVICE void load_queries(const KeyWork& work, QueriesOfKeys& iterator, int batch, int first_key) {
    const Sequence& s = work.sequence;
    const int head = iterator.head, first_row = iterator.first_row(), row = static_cast<int>(s.row_q) + first_row;
    const i64 number = query_tile(p, s, head, iterator.block(), BLOCK_M);
    const int place_in_order = iterator.place_in_order();
    const CountedRows queries = counted_queries(p, s, first_row);
    const int slot = iterator.blocks.partial ? own_slot(p, s, head, first_row, first_key) : VISIBLE_SLOT;
    const u32 ranged = masked_warpgroups(p, s, head, first_row, first_key);
    const u32 masked = ranged | partial_warpgroups(slot);
    iterator.advance();
    acquire_by_warp(rings.dq_steps);
    if (lane() == 0) {
      shared.dq_steps[rings.dq_steps.stage] = {number * DQ_SUMS + place_in_order % DQ_SUMS, place_in_order / DQ_SUMS,
                                               iterator.done(), first_key};
      ptx::mbarrier_arrive(rings.dq_steps.full());
    }
    rings.dq_steps.advance();
    rings.dout.follow(rings.q);
    acquire_by_warp(rings.q);
    Step& step = shared.steps[rings.q.stage];
    if (lane() == 0) {
      step.head = head;
      step.first_row = first_row;
      step.masked = masked;
      step.put(p, work, splits, head);
      step.last = ending_warpgroups(work, iterator);
    }
    step.slots.put(slot, ranged);
    loader.template load<BLOCK_M, PANELS>(
        rings.q, maps.q, row, head, batch, queries, shared.lse[rings.q.stage], p.row_lse + number * BLOCK_M, NoCheck{},
        bias_to_load(p, shared, rings.q.stage, maps.bias, batch, head, first_row, first_key));
    acquire_by_warp(rings.dout);
    loader.template load<BLOCK_M, PANELS_V>(rings.dout, maps.dout, row, head, batch, queries,
                                            shared.delta[rings.dout.stage], p.row_delta + number * BLOCK_M);
  }

  // end() tells the other warps that no tile of keys is left.
  DEVICE void end() {
    ptx::wait_for_kernel_before();  // so that the kernel before is over, too, when this one is
    acquire_by_warp(rings.work);
    acquire_by_warp(rings.dq_steps);
    if (lane() == 0) {
      shared.work[rings.work.stage].tile = NO_TILE;
      ptx::mbarrier_arrive(rings.work.full());
      shared.dq_steps[rings.dq_steps.stage] = {NO_DQ, 0, true, 0};  // the whole step is written, as it is read
      ptx::mbarrier_arrive(rings.dq_steps.full());
    }
  }
};

// load_tiles() is the loop of the loading warp: it takes a tile of keys, tells the other warps of it, and loads the
// keys and, tile by tile, their queries.
template <class SharedStorage, class Rings>
DEVICE void load_tiles(const AttentionParams& p, SharedStorage& shared, Rings rings, const Maps& maps) {
  Loader loader{ptx::shared_address(&shared.clearing)};
  const int splits = query_splits(p);
  TileLoader<SharedStorage, Rings> tiles{p, shared, rings, maps, loader, splits};
  const u32 total = p.num_tiles * num_batch_heads_kv(p) * splits;
  u32 index_phase = 0;
  bool begins = true;  // no tile has been taken yet
  if constexpr (PING_PONG) shared.rows_ready[lane()] = 0;
  for (u32 index = of_lane_0([&] { return first_key_index(p); }); index < total;
       index = agreed_index(
           shared, index_phase, [&] { return of_lane_0([&] { return next_key_index(p, index, total); }); })) {
    acquire_by_warp(rings.work);
    KeyWork& work = shared.work[rings.work.stage];  // kept in shared memory, because registers are scarce
    const int split = splits == 1 ? 0 : index % splits;
    if (lane() == 0) static_cast<Work&>(work) = key_work_at(p, index / splits);
    __syncwarp();
    const Sequence& s = work.sequence;
    if ((work.tile - rank()) * BLOCK_N >= s.rows_k) continue;
    QueriesOfKeys iterator(p, work, index / (gridDim.x / PAIR), splits == 1 ? QueryPart(p) : QueryPart(p, split));
    const int first_key = work.tile * BLOCK_N;
    tiles.hand_over(work, iterator, split, first_key);
    const int batch = batch_of(p, s);
    const int key = static_cast<int>(s.row_k) + first_key;
    const bool hides_keys = HIDES_ANYWHERE && !some_query_sees_all(p, s, iterator, first_key);
    if (!WRITES_DBIAS && !HAS_ALIBI && !iterator.done() && p.rows_ready != nullptr) {
      const int last_head = (work.head + 1) * group_size(p) - 1;
      wait_for_rows(p, shared, query_tile(p, s, last_head, (s.len_q - 1) / BLOCK_M, BLOCK_M));
    }
    bool keys_left = !iterator.done();
    const auto load_keys = [&] {
      tiles.load_keys(work, batch, key, first_key, hides_keys);
      keys_left = false;
    };
    if (begins) {
      // The first tile of keys is loaded while the kernel before still prepares rows. Later ones come behind their
      // first queries, because the tile before gives their buffers free last.
      if (keys_left) load_keys();
      if (p.rows_ready == nullptr) ptx::wait_for_kernel_before();
      begins = false;
    }
    while (!iterator.done()) {
      tiles.load_queries(work, iterator, batch, first_key);
      if (keys_left) load_keys();
    }
  }
  tiles.end();
}
