// Forward attention on Hopper (sm_90a) for 16-bit inputs: FlashAttention-3 (Shah et al. 2024), Algorithms 1 and 2. One
// warp loads tiles by TMA, another is the scheduler, and CONSUMERS warpgroups of 64 queries each compute; thread blocks
// are persistent and take tile after tile. Decoding needs no kernel of its own: the query heads of a group are rows of
// one tile (rows.cuh), so that keys are read once. The producers are in loader.cuh and scheduler.cuh, the steps
// of the loop over the keys in consumer.cuh, and what is stored at the end in epilogue.cuh.
#include "consumer.cuh"
#include "epilogue.cuh"
#include "loader.cuh"
#include "unseen_tiles.cuh"

// SCALE_ONCE: the scale is converted to float32 once and held in a register, where there is one.
constexpr bool SCALE_ONCE = !HAS_OPTIONS || ((HAS_BIAS || HAS_DROPOUT) && NUM_OPTIONS == 1 && HEAD_DIM_V <= 128);

// clear_rows_of_nobody() makes the rows that no box fills (rows.cuh) zeros, once, as all boxes leave out the same ones.
DEVICE void clear_rows_of_nobody(const AttentionParams& p, SharedStorage& shared) {
  if (TileRows(p).rows() == BLOCK_M) return;
  const auto clear = [](unsigned char* bytes, u32 size) {
    for (u32 at = threadIdx.x * sizeof(uint4); at < size; at += blockDim.x * sizeof(uint4)) {
      *reinterpret_cast<uint4*>(bytes + at) = make_uint4(0, 0, 0, 0);
    }
  };
  clear(shared.q, sizeof(shared.q));
  if (HAS_BIAS_TILES || HAS_MASK_TILES) clear(shared.bias_and_mask, sizeof(shared.bias_and_mask));
  ptx::fence_async_shared();
}

// consume() is a consumer warpgroup: it computes 64 rows of every tile that it is handed.
DEVICE void consume(const AttentionParams& p, SharedStorage& shared, Rings rings, int warpgroup,
                    const ptx::TensorMap* out_map, const ptx::TensorMap* row_map) {
  const ProductOrder order(KEYS_IN_REVERSE ? CONSUMERS - 1 - warpgroup : warpgroup);
  const TileRows rows(p);
  HiddenValues hidden(shared.seen);
  // The scale is converted once where there is a register to hold it: with a bias each step would convert it, and wait
  // for it.
  float scale = static_cast<float>(p.softmax_scale);
  if constexpr (SCALE_ONCE) ptx::keep(scale);
  while (true) {
    rings.work.wait();
    // Read again from shared memory where it is needed: registers are scarce.
    const TileMessage& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    if (HIDES_ANYWHERE && work.tile == NO_WORK) {
      __syncwarp();
      rings.work.release();
      continue;
    }
    const Sequence& s = work.sequence;
    const int first_row = work.first_of_rows() + warpgroup * ROWS_OF_WARPGROUP;
    const int row = first_row + warp_row() + fragment_row();
    const OwnRows own(rows, s, work.head, row);
    const int head_kv = PACKS_HEADS ? work.head : work.head / group_size(p);
    const OwnScales scales(p, s, head_kv, SCALE_ONCE ? scale : static_cast<float>(p.softmax_scale));
    const UnitFragment scores(p, s, work.head, rows, own, scales.scale);
    hidden.begin(p, s, scores.mask, work.first_row());
    const SlopeProduct<SLOPE_BY_PRODUCT> slope(scores.units, s, first_row);
    RowSoftmax softmax = softmax_of(scores);
    TileFragments held;
    RowNumbers numbers(p, work, own);
    Consumer tile(p, shared, rings, order, hidden, work, scores, scales, slope, softmax, held, numbers, warpgroup,
                  first_row, row);
    const ConsumerKeyIterator all(work, work.keys);

    rings.q.wait();
    // takes_place() tells whether rows without keys take their extra place in the order before or behind the others'
    // keys.
    const auto takes_place = [&](bool before_keys) {
      const int query = rows.query(first_row, s.rows_q);
      const bool is_above = query < s.len_q && !sees_later_keys(scores.mask, work, query);
      return takes_extra_place(is_above, before_keys) && tile.blocks.done() && !all.done();
    };
    if (takes_place(true)) order.pass();
    skip_key_tiles(rings, order, hidden, all.next, tile.blocks.done() ? all.end : tile.blocks.next);
    if (tile.blocks.done()) {
      if (takes_place(false)) order.pass();
      rings.q.release();
    } else {
      tile.begin();
      // This loop runs once for each run of tiles of keys that the warpgroup sees; with two teams tiles between them
      // may be hidden from it.
      do {
        tile.skip_hidden();
        if (tile.blocks.hidden) break;
        tile.visit_run();
        tile.finish_run();
      } while (TEAMS > 1 && tile.blocks.hidden);
      skip_key_tiles(rings, order, hidden, tile.blocks.end, all.end);
      tile.ask_for_recheck();
    }

    scales.apply_to_values(p, s, head_kv, numbers.inverse);
    tile.units.apply(numbers.inverse);
    write_tile(p, out_map, row_map, work, rows, own, row, held.out, numbers.inverse, numbers.lse,
               ptx::shared_address(&shared));
    __syncwarp();
    rings.work.release();
  }
  order.drain();
  // The block must not end before TMA has read its shared memory.
  if (STAGING_PANELS > 0) ptx::bulk_wait_group_read<0>();
}

static_assert(can_share_registers(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "no warpgroup waits for registers");

// forward_sm90 is persistent: each multiprocessor has one block, which takes tile after tile.
extern "C" __global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    forward_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ ptx::TensorMap q_map,
                 const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                 const __grid_constant__ ptx::TensorMap bias_map, const __grid_constant__ ptx::TensorMap mask_map,
                 const __grid_constant__ ptx::TensorMap out_map, const __grid_constant__ ptx::TensorMap row_map) {
  static_assert(sizeof(SharedStorage) <= SMEM_BYTES / TEAMS);
  VIEW_SHARED_STORAGE(all_shared);
  // Each team has two of the producer warps.
  const int producer_thread = static_cast<int>(threadIdx.x) - CONSUMERS * WARPGROUP;
  const Team team = {
      TEAMS == 1 ? 0
                 : __shfl_sync(ALL_LANES, producer_thread < 0 ? in_second_team() : producer_thread / (2 * WARP), 0)};
  SharedStorage& shared = (&all_shared)[team.number];
  if (threadIdx.x == team.number * FIRST_THREAD_OF_SECOND_TEAM) {
    const int warps = threads_of_team() / WARP;
    shared.work_barriers.init(warps + LOADING_WARPS);
    shared.q_barriers.init(warps);
    shared.k_barriers.init(PAIR * warps, COPIES_ROWS ? LOADING_WARPS * WARP : 1);
    shared.v_barriers.init(PAIR * warps, COPIES_ROWS ? LOADING_WARPS * WARP : 1);
    if (PAIR > 1) shared.index_barriers.init(1);
    shared.bias_barriers.init(warps);
    if (HAS_MASK_TILES) shared.mask_barriers.init(warps);
    if (TOKEN_SCALES) scales_in(shared).barriers.init(warps, LOADING_WARPS * WARP);
    ptx::mbarrier_init(ptx::shared_address(&shared.nearly_loaded_barrier), 1);
    for (int& non_finite : shared.non_finite) non_finite = 0;
    ptx::fence_mbarrier_init();
  }
  shared.numbers.fill();
  if constexpr (PACKS_HEADS) clear_rows_of_nobody(p, shared);
  if constexpr (PAIR == 1) {
    __syncthreads();
  } else {
    sync_cluster();
  }

  if constexpr (SPLITS_KEYS || HAS_WORK_LIST) ptx::let_next_kernel_begin();  // which merges
  const Rings rings(shared);
  const int warpgroup = own_warpgroup();
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    const u32 first = CONSUMERS * WARPGROUP + team.number * 2 * WARP;
    if (COPIES_ROWS      ? warp_of_producer() != SCHEDULING_WARP
        : LOADS_BY_WARPS ? threadIdx.x / WARP == first / WARP
                         : threadIdx.x == first)
      Loader{p, shared, rings, &q_map, &k_map, &v_map, &bias_map, &mask_map, TileRows(p)}.load_all();
    if (threadIdx.x == first + WARP) schedule_tiles(p, shared, rings, team);
    if constexpr (ZEROES_BY_LENGTHS || (ZEROES_HIDDEN && HAS_WINDOW)) {
      if (producer_thread >= WARPGROUP - ZEROING_THREADS) {
        zero_hidden_tiles(p, producer_thread - (WARPGROUP - ZEROING_THREADS));
      }
    }
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    consume(p, shared, rings, warpgroup - team.number * WARPGROUPS_PER_TILE, &out_map, &row_map);
  }
  if (PAIR > 1) sync_cluster();  // the other block of the pair may still send to this one
}
