// Forward attention on Hopper (sm_90a) for 16-bit inputs: FlashAttention-3 (Shah et al. 2024), Algorithms 1 and 2. One
// warp loads tiles by TMA, another is the scheduler, and CONSUMERS warpgroups of 64 queries each compute; thread blocks
// are persistent and take tile after tile. Decoding needs no kernel of its own: the query heads of a group are rows of
// one tile (rows.cuh), so that keys are read once. The producers are in forward/loader.cuh, the products in wgmma.cuh,
// the softmax in ../softmax_fragment.cuh and bounded_softmax.cuh.
#include "epilogue.cuh"
#include "loader.cuh"
#include "softmax.cuh"

// SCALE_ONCE: the scale is converted to float32 once and held in a register, where there is one.
constexpr bool SCALE_ONCE = !HAS_OPTIONS || ((HAS_BIAS || HAS_DROPOUT) && NUM_OPTIONS == 1 && HEAD_DIM_V <= 128);
// COPIES is how many copies of a step the loop has: for the first tile of keys, for masked and for other tiles; with
// two, the first tile takes the masked copy, too.
constexpr int COPIES = NUM_OPTIONS > 1 || HAS_DROPOUT || HAS_SCORE_MOD || HAS_MASK_MOD ? 1
                       : HEAD_DIM > 64 && (HAS_MASK || HAS_BIAS)                       ? 2
                                                                                       : 3;
// EARLY_QUERIES: where the next queries have no buffer of their own, the last step of a tile releases its queries as
// soon as it can.
constexpr bool EARLY_QUERIES = TEAMS > 1 || (QUERY_STAGES == 1 && (!HAS_OPTIONS || (HAS_BLOCK_MASK && COPIES == 3)));
static_assert(EARLY_POWERS == 0 || (COPIES == 3 && !HAS_DROPOUT), "early powers are not the first, nor dropped");
static_assert(!WAITS_AFTER_POWERS || (COPIES == 1 && !EARLY_QUERIES && !BOUNDED_SCORES), "queries are released once");
static_assert(TEAMS == 1 || (COPIES == 3 && !PING_PONG && BLOCK_N <= WARPGROUP), "no team waits for another");

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

// Position is where a tile of keys stands in a run of them: ANY is a copy of a step for all positions.
enum class Position { FIRST, LATER, ANY };
template <Position POSITION>
struct At {
  static constexpr Position VALUE = POSITION;
};

// consume() is a consumer warpgroup: it computes 64 rows of every tile that it is handed. Its loop over the keys issues
// the next scores before the product of the last weights and values (FlashAttention-3, Algorithm 2), and the warpgroups
// take the tensor cores in an order (ping-pong), so that exponentials run while products are computed.
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
    const int row_group = warpgroup + work.first_row_group();
    const int first_row = work.first_of_rows() + warpgroup * ROWS_OF_WARPGROUP;
    const int row = first_row + warp_row() + fragment_row();
    const OwnRows own(rows, s, work.head, row);
    const UnitFragment scores(p, s, work.head, rows, own, SCALE_ONCE ? scale : static_cast<float>(p.softmax_scale));
    const SlopeProduct<SLOPE_BY_PRODUCT> slope(scores.units, s, first_row);
    hidden.begin(p, s, scores.mask, work.first_row());
    auto softmax = softmax_of(scores);
    // The thread's fragment of O (64, HEAD_DIM_V), and numbers of its two rows.
    float out[HEAD_DIM_V / 2], rescale[2], inverse[2], lse[2];
    u32 weights[BLOCK_N / 4];  // P (64, BLOCK_N) in 16 bits
#pragma unroll
    for (int e = 0; e < HEAD_DIM_V / 2; e++) out[e] = 0;

    constexpr int SINKS = PACKS_HEADS ? 2 : 1;  // the thread's rows may be of two heads
    float sink[SINKS];
#pragma unroll
    for (int r = 0; r < SINKS; r++) {
      sink[r] = p.sink == nullptr || work.split() > 0 ? -infinity() : p.sink[own.head(work.head, r)];
    }
    // `blocks` are the warpgroup's own tiles of keys; before and behind them may be some that only other warpgroups
    // see.
    const ConsumerKeyIterator all(work, work.keys);
    ConsumerKeyIterator blocks = all;
    if constexpr (!HIDES_ANYWHERE) blocks = ConsumerKeyIterator(work, work.own_keys[warpgroup]);
    // skip_key_tiles() releases tiles of keys that this warpgroup does not see. It still takes its place in the order,
    // and helps to clear hidden values.
    const auto skip_key_tiles = [&](int from, int to) {
      for (int block = from; ConsumerKeyIterator::in_order(block, to); block += KEYS_IN_REVERSE ? -1 : 1) {
        rings.k.wait();
        rings.k.release();
        order.wait();
        order.arrive();
        hidden.clear(rings.v, block * BLOCK_N, false);
        rings.v.wait();
        rings.v.release();
      }
    };
    // use_extra_place() uses up a place in the order without a product. A warpgroup with keys takes one place more than
    // it has tiles of keys, for the last product with values, so a warpgroup without keys must do the same. Whoever
    // takes this extra place sooner must be sooner in the order, too; else it might hold up the order while it waits
    // for others to clear values. Rows above all keys take it before the tiles of the others, and rows that are not in
    // use behind them; where keys are visited from the last on (KEYS_IN_REVERSE) it is the other way round.
    const auto use_extra_place = [&](bool before_keys) {
      const bool is_used = HAS_WINDOW && !HIDES_ANYWHERE && rows.query(first_row, s.rows_q) < s.len_q;
      if (before_keys != (KEYS_IN_REVERSE ? !is_used : is_used) || !blocks.done() || all.done()) return;
      order.wait();
      order.arrive();
    };
    inverse[0] = inverse[1] = 0;
    lse[0] = sink[0];
    lse[1] = sink[SINKS - 1];
    rings.q.wait();
    use_extra_place(true);
    skip_key_tiles(all.next, blocks.done() ? all.end : blocks.next);
    if (blocks.done()) {
      use_extra_place(false);
      rings.q.release();
    } else {
      const u32 queries = rings.q.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
      // The first QUERY_STEPS_IN_REGISTERS steps of the queries are held in registers, because shared memory is busy.
      u32 query_fragments[QUERY_STEPS_IN_REGISTERS + 1][4];
      const u32 own_row = queries + (warp_row() + lane() % 16) * ROW_BYTES;
#pragma unroll
      for (int step = 0; step < QUERY_STEPS_IN_REGISTERS; step++) {
        ptx::ldmatrix_x4(query_fragments[step],
                         own_row + step / 4 * BLOCK_M * ROW_BYTES + ((step % 4 * 2 + lane() / 16) ^ lane() % 8) * 16);
      }
      const bool recheck = HIDES_ANYWHERE && work.recheck;
      FragmentBits bits;
      bool last, next_masked;
      // A tile under the diagonal comes first with KEYS_IN_REVERSE; some of its rows see too little to predict
      // anything, so the slack of the softmax is found after the second tile.
      int unsettled = 0;
      // needs_mask() tells whether the current tile of keys takes the masked way.
      const auto needs_mask = [&] {
        return recheck || !slope.has_parts() || scores.needs_mask(blocks, first_row, ROWS_OF_WARPGROUP);
      };
      const auto slots = [&]() -> const int (&)[BLOCKS_OF_ROW] {
        return shared.slots[HAS_BLOCK_MASK ? rings.k.stage : 0].of[row_group];
      };
      // take() moves on to the next tile of keys; a recheck visits hidden ones as well.
      const auto take = [&] {
        blocks.take(rings.k, shared.entries, row_group);
        if constexpr (TEAMS > 1) blocks.hidden &= !recheck;
      };
      // multiply() starts S = Q K^T, and ALiBi's step of it.
      const auto multiply = [&](float (&x)[BLOCK_N / 2], int first_key, bool masked) {
        u32 left[4];
        slope.find_left(left, first_key, masked);
        multiply_by_rows<HEAD_DIM, BLOCK_M, BLOCK_N, QUERY_STEPS_IN_REGISTERS>(
            x, queries, rings.k.buffer(), [&] { slope.multiply(x, left, shared.numbers); }, query_fragments);
      };
      // tiles_left() counts the current tile of keys and those behind it.
      const auto tiles_left = [&] {
        if constexpr (HAS_BLOCK_MASK) return shared.lists[rings.work.stage].left;
        return 1 + (KEYS_IN_REVERSE ? blocks.next - blocks.end : blocks.end - blocks.next);
      };
      // settle() finds how far a row's maximum may grow before the row follows it; that is known behind the row's first
      // weights.
      const auto settle = [&] {
        if constexpr (!FOLLOWS_EVERY_MAXIMUM) find_slack(softmax, tiles_left());
      };
      // prepare() does what there is to do while the products are computed: random bits, visible elements, the next
      // tile.
      UnitFragment::Random random;
      const auto prepare = [&](int first_key, bool masked) {
        if (KEYS_IN_REVERSE && unsettled > 0 && --unsettled == 0) settle();
        scores.draw_ahead(random, row, first_key);
        if (masked) scores.find_visible(bits, row, first_key);
        last = blocks.done();
        if (!HAS_BLOCK_MASK && !last) {
          blocks.take(rings.k, shared.entries, row_group);
          next_masked = needs_mask();
        }
      };
      const auto release_keys = [&] {
        // All lanes must have read the entries; with ping-pong the named barriers see to it.
        if constexpr (HAS_BLOCK_MASK && !PING_PONG) __syncwarp();
        rings.k.release();
        if (EARLY_QUERIES && (TEAMS > 1 ? blocks.done() : last)) rings.q.release();
      };
      // bound() turns products into scores, -inf where hidden, and finds whether the rows' references must grow.
      const auto bound = [&](float (&x)[BLOCK_N / 2], float (&shift)[2], int first_key, bool masked) {
        if constexpr (HAS_BIAS_TILES) rings.bias.wait();
        scores.apply(x, bits, row, first_key, masked, [&](float (&x)[BLOCK_N / 2], bool masked) {
          if constexpr (HAS_BIAS_TILES) {
            add_bias_tile(x, rings.bias.buffer(), warpgroup * ROWS_OF_WARPGROUP + warp_row(), bias_has_one_row(p),
                          masked);
            __syncwarp();
            rings.bias.release();
          } else {
            scores.add_bias(x, row, first_key, masked);
          }
        });
        if constexpr (HAS_MASK_TILES) {
          rings.mask.wait();
          hide_by_mask_tile(x, rings.mask.buffer(), warpgroup * ROWS_OF_WARPGROUP + warp_row());
          __syncwarp();
          rings.mask.release();
        }
        if (masked && recheck) hidden.find(x);
        return softmax.bound<FOLLOWS_EVERY_MAXIMUM>(x, shift, rescale);
      };
      const auto finish_values = [&] {
        ptx::wgmma_wait_group<0>();
        keep(out);
      };
      // begin_weights() turns the scores of a run's first tile into weights, whose sums may set the rows' slack.
      const auto begin_weights = [&](float (&x)[BLOCK_N / 2], float (&shift)[2], int first_key, bool masked,
                                     bool grown) {
        if (TEAMS > 1 && grown) rescale_rows(out, rescale);
        if (BOUNDED_SCORES && last) rings.q.release();
        if (KEYS_IN_REVERSE && masked) unsettled = 2;
        softmax.begin<!FOLLOWS_EVERY_MAXIMUM>(x, shift, KEYS_IN_REVERSE && masked ? 0 : tiles_left());
        scores.drop(x, random, row, first_key);
        pack(weights, x);
      };
      // to_weights() turns scores into weights while O of the tile before arrives; then O is rescaled where rows have
      // `grown`, and the values are released, if there are any (`first`: there are none).
      const auto to_weights = [&](float (&x)[BLOCK_N / 2], float (&shift)[2], int first_key, bool masked, bool first,
                                  bool grown) {
        if constexpr (EARLY_POWERS > 0) {
          // Some powers are computed while the product ends. They stand between branches, or the assembler would put
          // them behind the wait.
          softmax.to_weights<0, EARLY_POWERS>(x, shift, rescale, masked);
#pragma unroll
          for (int e = 0; e < EARLY_POWERS; e++) ptx::keep(x[e]);
          if (grown) {
            finish_values();
            rescale_rows(out, rescale);
          }
          finish_values();
          rings.v.release();
          softmax.to_weights<EARLY_POWERS, BLOCK_N / 2>(x, shift, rescale, masked);
          pack(weights, x);
        } else {
          // This branch also keeps the powers before the wait.
          if (BOUNDED_SCORES && last) rings.q.release();
          grown |= softmax.to_weights<0, BLOCK_N / 2>(x, shift, rescale, masked);
          scores.drop(x, random, row, first_key);
          // This release is a branch because otherwise the wait would stand before powers and draws.
          if (WAITS_AFTER_POWERS && last) rings.q.release();
          finish_values();
          if (!first) rings.v.release();
          pack(weights, x);
          if (grown) rescale_rows(out, rescale);
        }
      };
      // step() is the main loop's body: it computes the scores of a tile of keys and turns them into weights, while the
      // tensor cores also multiply the weights of the tile before with their values, if there is one (`first`: there is
      // none).
      const auto step = [&](auto at, bool masked, bool first) {
        constexpr Position POSITION = decltype(at)::VALUE;
        float x[BLOCK_N / 2], shift[2] = {0, 0};  // S, then P: the thread's fragment of (64, BLOCK_N)
        const int first_key = blocks.block * BLOCK_N;
        // 1. Wait for the keys, and for this warpgroup's place in the order.
        if (masked) scores.fetch(bits, slots());
        if constexpr (!HAS_BLOCK_MASK) rings.k.wait();  // with a block mask, take() has waited already
        order.wait();
        // 2. Start S = Q K^T of this tile.
        multiply(x, first_key, masked);
        // 3. Start O += P V of the tile before.
        if (POSITION == Position::ANY && first) {
          ptx::wgmma_fence();
          ptx::wgmma_commit_group();  // an empty group, so that the waits below count the same
        } else if (POSITION != Position::FIRST) {
          rings.v.wait();
          add_product<BLOCK_N>(out, weights, rings.v.buffer());
        }
        // 4. Pass the order on; masks and random bits are prepared while the products are computed.
        order.arrive();
        prepare(first_key, masked);
        slope.leave_out(shift, first_key, masked);
        // 5. Wait for S, and release the keys.
        ptx::wgmma_wait_group<POSITION == Position::FIRST ? 0 : 1>();
        keep(x);
        release_keys();
        // 6. Products become scores, and the rows' references follow. The first tile is capped as if masked, so that it
        // is the same code either way.
        if (POSITION == Position::FIRST || masked) to_exponents(softmax, x);
        const bool grown = bound(x, shift, first_key, masked);
        // 7. Scores become weights P; O of the tile before arrives, is rescaled, and its values are released.
        if constexpr (POSITION == Position::FIRST) {
          begin_weights(x, shift, first_key, masked, grown);
        } else {
          to_weights(x, shift, first_key, masked, first, grown);
        }
        // 8. Values of hidden keys become 0.
        if (masked) hidden.clear(rings.v, first_key, recheck);
      };

      take();
      // The outer loop runs once for each run of tiles of keys that the warpgroup sees; with two teams tiles between
      // them may be hidden from it.
      do {
        while (blocks.hidden) {
          release_keys();
          hidden.clear(rings.v, blocks.block * BLOCK_N, false);
          rings.v.wait();
          rings.v.release();
          if (blocks.done()) break;
          take();
        }
        if (blocks.hidden) break;
        if constexpr (COPIES < 3) {
          next_masked = needs_mask();
          bool first = true;
          do {
            if (COPIES == 1 || first || next_masked) {
              step(At<Position::ANY>(), COPIES == 2 || next_masked, first);
            } else {
              step(At<Position::ANY>(), false, false);
            }
            if (first) settle();
            first = false;
            if (HAS_BLOCK_MASK && !last) {
              take();
              next_masked = needs_mask();
            }
          } while (!last);
        } else {
          step(At<Position::FIRST>(), needs_mask(), true);
          while (!last) {
            if constexpr (HAS_BLOCK_MASK) {
              take();
              if (blocks.hidden) break;
              next_masked = needs_mask();
            }
            if (next_masked) {
              step(At<Position::LATER>(), true, false);
            } else {
              // Plain tiles, the most common, have a loop of their own; where all tiles may be masked it is not worth
              // the code.
              do step(At<Position::LATER>(), false, false);
              while (!HIDES_ANYWHERE && !last && !next_masked);
            }
          }
        }
        // The last weights meet their values, and the sums are completed meanwhile.
        rings.v.wait();
        order.wait();
        add_product<BLOCK_N>(out, weights, rings.v.buffer());
        order.arrive();
        if (!EARLY_QUERIES && !BOUNDED_SCORES && !WAITS_AFTER_POWERS) rings.q.release();
        softmax.finish(sink, inverse, lse);
        ptx::wgmma_wait_group<0>();
        keep(out);
        rings.v.release();
      } while (TEAMS > 1 && blocks.hidden);
      skip_key_tiles(blocks.end, all.end);
      if (HIDES_ANYWHERE && !recheck &&
          HiddenValues::is_non_finite(out, own.query(row, 0), own.query(row, 1), s.len_q)) {
        shared.non_finite[rings.work.stage] = 1;
      }
    }

    write_tile(p, out_map, row_map, work, rows, own, row, out, inverse, lse, ptx::shared_address(&shared));
    __syncwarp();
    rings.work.release();
  }
  order.drain();
  // The block must not end before TMA has read its shared memory.
  if (STAGING_PANELS > 0) ptx::bulk_wait_group_read<0>();
}

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

  const Rings rings(shared);
  const int warpgroup = own_warpgroup();
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    const u32 first = CONSUMERS * WARPGROUP + team.number * 2 * WARP;
    if (COPIES_ROWS ? warp_of_producer() != SCHEDULING_WARP
        : HAS_PAGES ? threadIdx.x / WARP == first / WARP
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
