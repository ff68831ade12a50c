// Forward attention on Hopper (sm_90a) where queries, keys and values are e4m3 codes: FlashAttention-3 (Shah et al.
// 2024), section 3.3. One warp loads tiles by TMA, another is the scheduler, two prepare values (values.cuh), and
// CONSUMERS warpgroups of 64 queries each compute; thread blocks are persistent and take tile after tile. Products and
// scales are in codes.cuh; ../forward/forward.cu is the kernel on 16 bits.
#include "values.cuh"

// write_results() writes out * factor, and lse, of the thread's rows of a tile; rows in [len_q, rows_q) are padding and
// become 0. Each of a row's four lanes has lse, and one of them writes it.
DEVICE void write_results(const AttentionParams& p, const TileMessage& work, int row,
                          const float (&out)[HEAD_DIM_V / 2], const float (&factor)[2], const float (&lse)[2]) {
  const Sequence& s = work.sequence;
  const auto& results = reinterpret_cast<const Tensor<Result>&>(p.out);
  Result* data = results.at(batch_of(p, s), s.row_q, work.head);
  if constexpr (sizeof(Result) == 2) {
    write_fragment(data, results.row_stride, row, s.len_q, s.rows_q, p.head_dim_v, out, factor);
  } else {
#pragma unroll
    for (int e = 0; e < HEAD_DIM_V / 2; e++) {
      const int i = row + row_offset(e), column = fragment_column() + column_offset(e);
      if (i < s.rows_q && column < p.head_dim_v) {
        data[i * results.row_stride + column] = i < s.len_q ? out[e] * factor[e / 2 % 2] : 0;
      }
    }
  }
  if (lane() % 4 < 2) {
    const int i = row + 8 * (lane() % 4);
    const float own_lse = lane() % 4 == 0 ? lse[0] : lse[1];
    if (i < s.rows_q) *p.lse.at(batch_of(p, s), s.row_q + i, work.head) = i < s.len_q ? own_lse : -infinity();
  }
}

// OwnTile is what the hooks of scores ask of the current tile of keys.
struct OwnTile {
  int block;
  bool masked;  // with a block mask: some element may be hidden
};

// Consumer is a warpgroup with its tile of queries, and has a function for each step of the loop over tiles of keys.
// Its arrays share no struct, for the reason that ../forward/consumer.cuh tells.
struct Consumer {
  const AttentionParams& p;
  SharedStorage& shared;
  Rings& rings;
  const ProductOrder& order;
  const TileMessage& work;  // read again from shared memory where it is needed: registers are scarce
  const ScoreScales& scales;
  const UnitFragment& scores;
  WeightScales& weight_scales;
  CodeSoftmax& softmax;
  float (&out)[HEAD_DIM_V / 2];              // O (64, HEAD_DIM_V), or what has come to it since it joined the totals
  float (&sums)[SLICES_AT_ONCE][SLICE / 2];  // products of the weights with slices of the values (64, SLICE)
  float (&rescale)[2];                       // what results before the last weights, or totals, are multiplied by
  u32 (&weights)[BLOCK_N / 8];               // P (64, BLOCK_N) as codes
  int& tiles_in_sum;                         // of keys whose products are in `out` and not in the totals
  bool& has_totals;                          // the thread's totals in shared memory are in use
  int& parity;                               // of the flags of seen keys
  const int warpgroup, first_row, row;       // the warpgroup's number, its first row, the thread's first row
  const u32 queries;                         // where the warpgroup's rows are in Q
  const KeyTiles tiles;

  // skip() releases tiles of keys that this warpgroup does not see, and takes its places in the order.
  DEVICE void skip(int from, int to) {
#pragma unroll 1
    for (int number = from; number > to; number--) {
      rings.k.wait();
      rings.k.release();
      order.pass();
      if constexpr (TOKEN_SCALES) {
        rings.scales.wait();
        rings.scales.release();
      }
      rings.columns.wait();
      rings.columns.release();
    }
  }

  // step() is the main loop's body: it computes the weights of a tile of keys while the tensor cores multiply the last
  // ones with their values, if there are any (`first`: there are none).
  DEVICE void step(int number, bool first) {
    float x[BLOCK_N / 2];  // S, then P: the thread's fragment of (64, BLOCK_N)
    const int entry = tiles.entry(number), first_key = (entry >> 1) * BLOCK_N;
    // 1. The products are started in the warpgroup's place in the order.
    multiply(x, first);
    // 2. What does not depend on the products is found meanwhile.
    FragmentBits bits;
    UnitFragment::Random random;
    const bool masked = prepare(bits, random, entry, first_key);
    // 3. Wait for S, and release the keys; products become scores, and scores weights.
    if (first) {
      ptx::wgmma_wait_group<0>();
    } else {
      ptx::wgmma_wait_group<IN_SLICES ? SLICES_AT_ONCE : 1>();
    }
    keep(x);
    rings.k.release();
    find_weights(x, bits, random, first_key, masked, first);
    // 4. O joins the totals where it has seen enough keys, and the weights are rounded.
    if (!IN_SLICES && tiles_in_sum == TILES_OF_SUM) join();
    pack_codes(weights, x);
  }

  // finish() multiplies the last weights with their values, and completes the sums meanwhile.
  DEVICE void finish(float sink, float (&inverse)[2], float (&lse)[2]) {
    start_product();
    order.arrive();
    softmax.finish(sink, inverse, lse);
    if constexpr (IN_SLICES) {
      finish_slices();
    } else {
      finish_product();
      if (has_totals) add_totals();
    }
  }

 private:
  // multiply() starts S = Q K^T and, unless the tile is the first, O += P V of the tile before.
  DEVICE void multiply(float (&x)[BLOCK_N / 2], bool first) {
    rings.k.wait();
    order.wait();
    multiply_queries(x, queries, rings.k.buffer());
    if (!first) {
      rings.columns.wait();
      start_product();
    }
    order.arrive();
  }

  // start_product() starts the product of the weights with all columns of the values, or with the first slices.
  DEVICE void start_product() {
    if constexpr (IN_SLICES) {
#pragma unroll
      for (int slice = 0; slice < SLICES_AT_ONCE; slice++) {
        multiply_weights(sums[slice], weights, rings.columns.buffer(), slice);
      }
    } else {
      multiply_weights(out, weights, rings.columns.buffer(), 0, tiles_in_sum > 0);
    }
  }

  // finish_slices() computes O = O * rescale + P V. The tensor cores multiply the next slices while one is added.
  DEVICE void finish_slices() {
    if constexpr (IN_SLICES) {
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        if (slice + 1 < SLICES) {
          ptx::wgmma_wait_group<SLICES_AT_ONCE - 1>();
        } else {
          ptx::wgmma_wait_group<0>();
        }
        float (&sum)[SLICE / 2] = sums[slice % SLICES_AT_ONCE];
        add_slice(sum, slice);
        if (slice + SLICES_AT_ONCE < SLICES) {
          multiply_weights(sum, weights, rings.columns.buffer(), slice + SLICES_AT_ONCE);
        }
      }
      rings.columns.release();
    }
  }

  DEVICE void add_slice(float (&sum)[SLICE / 2], int slice) {
    keep(sum);
#pragma unroll
    for (int e = 0; e < SLICE / 2; e++) {
      float& total = out[slice * (SLICE / 2) + e];
      total = total * rescale[e / 2 % 2] + sum[e];
    }
  }

  DEVICE void finish_product() {
    ptx::wgmma_wait_group<0>();
    keep(out);
    rings.columns.release();
    tiles_in_sum++;
  }

  // rescale_results() waits for the product under way, and multiplies what there is of O by the factors of its rows.
  DEVICE void rescale_results(const float (&factor)[2]) {
    ptx::wgmma_wait_group<0>();
    keep(out);
    rescale_rows(out, factor);
    if (has_totals) set_factors(factor_of(0) * factor[0], factor_of(1) * factor[1]);
  }

  // join() adds what there is of O to the totals.
  DEVICE void join() {
    if (has_totals) add_totals();
    store_totals();
    tiles_in_sum = 0;
    has_totals = true;
    set_factors(1, 1);
  }

  // factor_of() is what row r of the totals is to be multiplied by. With SHARES_FACTORS the four lanes of a row share
  // it in shared memory, where registers are scarce.
  DEVICE float& factor_of(int r) const {
    if constexpr (!SHARES_FACTORS) return rescale[r];
    return shared.factors[warpgroup * ROWS_OF_WARPGROUP + warp_row() + fragment_row() + 8 * r];
  }
  DEVICE void set_factors(float first, float second) const {
    if constexpr (SHARES_FACTORS) __syncwarp();  // all lanes have read
    factor_of(0) = first;
    factor_of(1) = second;
    if constexpr (SHARES_FACTORS) __syncwarp();
  }

  // add_totals() adds the totals, times their factors, to what there is of O.
  DEVICE void add_totals() {
    const float factor[2] = {factor_of(0), factor_of(1)};
#pragma unroll
    for (int e = 0; e < HEAD_DIM_V / 2; e += 4) {
      const float4 total = shared.totals[IN_SLICES ? 0 : e / 4][threadIdx.x];
      out[e] += total.x * factor[0];
      out[e + 1] += total.y * factor[0];
      out[e + 2] += total.z * factor[1];
      out[e + 3] += total.w * factor[1];
    }
  }

  DEVICE void store_totals() {
#pragma unroll
    for (int e = 0; e < HEAD_DIM_V / 2; e += 4) {
      shared.totals[IN_SLICES ? 0 : e / 4][threadIdx.x] = make_float4(out[e], out[e + 1], out[e + 2], out[e + 3]);
    }
  }

  // prepare() finds visible elements and random bits of a tile, and tells whether elements of it may be hidden, or get
  // a bias.
  DEVICE bool prepare(FragmentBits& bits, UnitFragment::Random& random, int entry, int first_key) {
    const bool is_partial = HAS_MASK || HAS_ALIBI || entry & 1 ||
                            !scores.mask.columns_inside(first_row, ROWS_OF_WARPGROUP, first_key, BLOCK_N);
    const OwnTile tile = {entry >> 1, HAS_BLOCK_MASK && is_partial};
    const bool masked = HAS_BIAS || scores.needs_mask(tile, first_row, ROWS_OF_WARPGROUP);
    if (HAS_BLOCK_MASK && masked) {
      int slots[BLOCKS_OF_ROW];
      find_slots(slots, entry);
      scores.fetch(bits, slots);
    }
    scores.draw_ahead(random, row, first_key);
    if (masked) scores.find_visible(bits, row, first_key);
    if constexpr (TOKEN_SCALES) rings.scales.wait();
    return masked;
  }

  // find_slots() finds the slots of a block mask's 64 x 64 blocks that the warpgroup's queries and a tile of keys
  // touch.
  DEVICE void find_slots(int (&slots)[BLOCKS_OF_ROW], int entry) const {
    if constexpr (HAS_BLOCK_MASK) {
      const Mask mask(p, work.sequence, work.head);
      const int row = work.tile * WARPGROUPS_PER_TILE + warpgroup, first = (entry >> 1) * BLOCK_N / CANONICAL;
#pragma unroll
      for (int i = 0; i < BLOCKS_OF_ROW; i++) {
        const bool inside = row < mask.slot_rows && first + i < mask.slot_columns;
        slots[i] = (entry & 1) == 0 ? VISIBLE_SLOT
                   : inside         ? mask.slots[static_cast<i64>(row) * mask.slot_columns + first + i]
                                    : HIDDEN_SLOT;
      }
    }
  }

  // find_weights() turns products into weights. Between the references of the rows and the exponentials O of the last
  // weights arrives. It then follows the references or, in slices, does so when the next product is added.
  DEVICE void find_weights(float (&x)[BLOCK_N / 2], FragmentBits& bits, UnitFragment::Random& random, int first_key,
                           bool masked, bool first) {
    const SharedScales& of_tile = shared.scales[TOKEN_SCALES ? rings.scales.stage : 0];
    scales.apply(x, of_tile.of_keys);
    scores.apply(x, bits, row, first_key, masked,
                 [&](float (&x)[BLOCK_N / 2], bool masked) { scores.add_bias(x, row, first_key, masked); });
    clear_nan(x, first);
    float bits_of_weights[BIT_ROWS];
    weight_scales.find_bits(bits_of_weights, x, of_tile.of_values, of_tile.top());
    float factor[2];
    const bool grows = softmax.follow(x, factor, bits_of_weights);
    if constexpr (IN_SLICES) {
      if (!first) finish_slices();
      rescale[0] = factor[0];
      rescale[1] = factor[1];
    } else {
      if (grows && !first) rescale_results(factor);
      if (!first) finish_product();
    }
    softmax.weigh(x);
    scores.drop(x, random, row, first_key);
    weight_scales.apply(x, of_tile.of_values, masked);
    if constexpr (TOKEN_SCALES) {
      __syncwarp();
      rings.scales.release();
    }
  }

  // clear_nan() keeps NaN of keys that nobody sees out of the results; x are the scores of this tile.
  DEVICE void clear_nan(const float (&x)[BLOCK_N / 2], bool first) {
    if constexpr (HIDES_ANYWHERE) {
      auto next = rings.columns;
      if (!first) next.advance();
      next.wait();
      bool has_nan = false;
#pragma unroll
      for (int nan : shared.has_nan[next.stage]) has_nan |= nan != 0;
      if (!has_nan) return;
      u8* flags = shared.seen.flags[parity];
      parity ^= 1;
      mark_seen(flags, x);
      sync_team();
      clear_columns(next.buffer(), flags);
      sync_team();
      if (threadIdx.x < BLOCK_N) flags[threadIdx.x] = 0;
    }
  }
};

// consume() is a consumer warpgroup: it computes 64 rows of every tile that it is handed. The products of the last
// weights with their values and those of the next scores are issued together, and the warpgroups take the tensor cores
// in an order (ping-pong), so that exponentials run while products are computed.
DEVICE void consume(const AttentionParams& p, SharedStorage& shared, Rings rings, int warpgroup) {
  const ProductOrder order(warpgroup);
  const TileRows rows(p);
  int parity = 0;
  while (true) {
    rings.work.wait();
    const TileMessage& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const int first_row = work.first_of_rows() + warpgroup * ROWS_OF_WARPGROUP;
    const int row = first_row + warp_row() + fragment_row();
    const OwnRows own(rows, s, work.head, row);
    const ScoreScales scales(p, s, work.head, row, shared.row_scales[TOKEN_SCALES ? threadIdx.x : 0]);
    const UnitFragment scores(p, s, work.head, rows, own, scales.scale);
    WeightScales weight_scales(p, s, work.head);
    float units[UNIT_ROWS];
    scales.units(units, scores.units.unit);
    CodeSoftmax softmax(units);
    float out[HEAD_DIM_V / 2], sums[SLICES_AT_ONCE][SLICE / 2], rescale[2] = {0, 0};
    int tiles_in_sum = 0;
    bool has_totals = false;
    u32 weights[BLOCK_N / 8];
#pragma unroll
    for (int e = 0; e < HEAD_DIM_V / 2; e++) out[e] = 0;
    const KeyRange keys = work.keys;
    const KeyRange seen = HIDES_ANYWHERE || VISITS_ALL_KEYS ? keys : work.own_keys[warpgroup];
    const u32 queries = rings.q.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
    Consumer tile = {p,       shared,        rings,
                     order,   work,          scales,
                     scores,  weight_scales, softmax,
                     out,     sums,          rescale,
                     weights, tiles_in_sum,  has_totals,
                     parity,  warpgroup,     first_row,
                     row,     queries,       KeyTiles(p, work)};

    rings.q.wait();
    const bool sees_keys = seen.begin < seen.end;
    tile.skip(keys.end - 1, sees_keys ? seen.end - 1 : keys.begin - 1);
    if (sees_keys) {
      tile.step(seen.end - 1, true);
#pragma unroll 1
      for (int number = seen.end - 2; number >= seen.begin; number--) tile.step(number, false);
    }
    rings.q.release();
    // The last weights meet their values. A warpgroup without keys takes this place in the order, too. The sink is read
    // here so that no register holds it in the loop.
    const float sink = p.sink == nullptr || work.split() > 0 ? -infinity() : p.sink[work.head];
    float inverse[2] = {0, 0}, lse[2] = {sink, sink};
    if (sees_keys) rings.columns.wait();
    order.wait();
    if (sees_keys) {
      tile.finish(sink, inverse, lse);
      tile.skip(seen.begin - 1, keys.begin - 1);
    } else {
      order.arrive();
    }
    rescale_kept(p, inverse);
    weight_scales.take(inverse, softmax.bits);
    if constexpr (SPLITS_KEYS) {
      write_split(p, work, own, row, out, inverse, lse);
    } else {
      write_results(p, work, row, out, inverse, lse);
    }
    __syncwarp();
    rings.work.release();
  }
  order.drain();
}

static_assert(can_share_registers(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "no warpgroup waits for registers");

// fp8_forward_sm90 is persistent: each multiprocessor has one block, which takes tile after tile.
extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    fp8_forward_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ ptx::TensorMap q_map,
                     const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map) {
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) init_barriers(shared);
  if constexpr (HIDES_ANYWHERE) {
    for (int i = threadIdx.x; i < 2 * BLOCK_N; i += blockDim.x) shared.seen.flags[i / BLOCK_N][i % BLOCK_N] = 0;
  }
  __syncthreads();
  if constexpr (SPLITS_KEYS) ptx::let_next_kernel_begin();  // which merges
  const Rings rings(shared);
  const int warpgroup = own_warpgroup();
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x % WARPGROUP / WARP, 0);
    if (warp >= FIRST_PREPARING_WARP) {
      prepare_values(p, shared, rings, warp - FIRST_PREPARING_WARP);
    } else if (lane() == 0 && warp == 0) {
      load_all(p, shared, rings, &q_map, &k_map, &v_map);
    } else if (lane() == 0) {
      schedule_tiles(p, shared, rings);
    }
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    consume(p, shared, rings, warpgroup);
  }
}
