// Forward attention in float32 on Hopper's float16 tensor cores: operands are sums of float16 parts with a factor for
// each row (split/layout.cuh), with which products have float32's error, or with one part TF32's. The loop is that of
// sm90/forward/forward.cu (FlashAttention-3, Shah et al. 2024). split/rows.cu prepares the operands.
#include "../fragment/score_fragment.cuh"
#include "../sm90/hidden_values.cuh"
#include "factors.cuh"
#include "layout.cuh"
#include "result_channels.cuh"
#include "sm90_products.cuh"
#include "softmax.cuh"

constexpr u32 ALL_Q_BYTES = KEY_PARTS * Q_BYTES, ALL_K_BYTES = KEY_PARTS * K_BYTES, ALL_V_BYTES = PARTS * V_BYTES;
// OVERLAPS_VALUES: the product with the values runs together with that of the next scores, where registers hold the
// sums of both.
constexpr int SUMS = KEY_PARTS == 1 ? 1 : HEAD_DIM == 2 * STEPS_OF_SUM * STEP ? 2 : 3;
constexpr bool OVERLAPS_VALUES = KEY_PARTS == 1 || ((SUMS + 1) * BLOCK_N + HEAD_DIM_V + PANEL) / 2 <= 192;
// HOLDS_SCORES: what scores need is held in registers or, where these are scarce, made anew.
constexpr bool HOLDS_SCORES = !(HAS_DROPOUT && HAS_BLOCK_MASK);
constexpr u32 FACTOR_BYTES = BLOCK_N * sizeof(float);

// Factors are the factors of a tile's keys and values.
struct Factors {
  float keys[BLOCK_N], values[BLOCK_N];
};

struct SharedStorage {
  alignas(1024) unsigned char q[QUERY_STAGES * ALL_Q_BYTES];  // (QUERY_STAGES, KEY_PARTS, PANELS, BLOCK_M, 64)
  alignas(1024) unsigned char k[KEY_STAGES * ALL_K_BYTES];    // (KEY_STAGES, KEY_PARTS, PANELS, BLOCK_N, 64)
  alignas(1024) unsigned char v[VALUE_STAGES * ALL_V_BYTES];  // (VALUE_STAGES, PARTS, PANELS_V, BLOCK_N, 64)
  alignas(16) Factors factors[FACTOR_STAGES];
  Work work[WORK_STAGES];
  RingBarriers<WORK_STAGES> work_barriers;
  RingBarriers<QUERY_STAGES> q_barriers;
  RingBarriers<KEY_STAGES> k_barriers;
  RingBarriers<VALUE_STAGES> v_barriers;
  RingBarriers<FACTOR_STAGES> factor_barriers;
  SeenKeys seen;
};
static_assert(BLOCK_M == CONSUMERS * ROWS_OF_WARPGROUP, "a warpgroup has 64 queries");

// Rings are one thread's positions in the circular buffers of the kernel.
struct Rings {
  WorkRing work;
  Ring<QUERY_STAGES, ALL_Q_BYTES> q;
  Ring<KEY_STAGES, ALL_K_BYTES> k;
  Ring<VALUE_STAGES, ALL_V_BYTES> v;
  Ring<FACTOR_STAGES, sizeof(Factors)> factors;

  DEVICE explicit Rings(const SharedStorage& shared)
      : work(shared.work, shared.work_barriers),
        q(shared.q, shared.q_barriers),
        k(shared.k, shared.k_barriers),
        v(shared.v, shared.v_barriers),
        factors(shared.factors, shared.factor_barriers) {}
};

// load_tiles() is the loading thread, which is its own scheduler.
DEVICE void load_tiles(const AttentionParams& p, const SplitOperands& operands, u8* space, SharedStorage& shared,
                       Rings rings, const ptx::TensorMap* q_map, const ptx::TensorMap* k_map,
                       const ptx::TensorMap* v_map) {
  const u32 total = p.num_tiles * num_batch_heads_q(p);
  for (u32 index = blockIdx.x, next; index < total; index = next) {
    next = next_index(p, index, total);
    const Work work = work_at(p, index);
    const Sequence& s = work.sequence;
    if (work.tile * BLOCK_M >= s.rows_q) continue;
    rings.work.acquire();
    shared.work[rings.work.stage] = work;
    rings.work.publish();

    const int head_kv = work.head / group_size(p);
    const int batch = batch_of(p, s);
    const int batch_head_q = batch * p.num_heads_q + work.head, batch_head_kv = batch * p.num_heads_kv + head_kv;
    const int row_q = split_row_q(p, s) + work.tile * BLOCK_M, row_k = split_row_k(p, s);
    const auto load_keys = [&](int row) {
      rings.factors.acquire();
      rings.factors.expect();
      const u32 buffer = rings.factors.buffer();
      ptx::bulk_load(buffer, operands.k.factors_at(space, batch_head_kv, row), FACTOR_BYTES, rings.factors.full());
      ptx::bulk_load(buffer + FACTOR_BYTES, operands.v.factors_at(space, batch_head_kv, row), FACTOR_BYTES,
                     rings.factors.full());
      rings.factors.advance();
      load(rings.k, k_map, row, batch_head_kv);
    };
    Blocks blocks = blocks_of_keys(p, s, work.head, work.tile, BLOCK_M, BLOCK_N);
    if (blocks.done()) continue;
    load_keys(row_k + blocks.block * BLOCK_N);
    load(rings.q, q_map, row_q, batch_head_q);
    while (true) {
      const int values = row_k + blocks.block * BLOCK_N;
      blocks.advance();
      const bool last = blocks.done();
      if (!last) load_keys(row_k + blocks.block * BLOCK_N);
      load(rings.v, v_map, values, batch_head_kv);
      if (last) break;
    }
  }
  rings.work.acquire();
  shared.work[rings.work.stage] = {{}, 0, NO_TILE};
  rings.work.publish();
}

// TileFragments are the arrays that a thread holds of the 64 rows that its warpgroup computes of a tile of queries.
// They share no struct with single numbers, which the compiler would keep in memory with them until all loops are
// unrolled.
struct TileFragments {
  float out[HEAD_DIM_V / 2];       // O (64, HEAD_DIM_V)
  float panel[PANEL / 2];          // a product with one panel of the values (64, 64)
  float rescale[2];                // numbers of the thread's two rows
  SplitFragment<BLOCK_N> weights;  // P (64, BLOCK_N)

  DEVICE TileFragments() {
#pragma unroll
    for (float& x : out) x = 0;
  }
};

// Consumer is a warpgroup with its tile of queries, and has a function for each step of the loop over tiles of keys.
struct Consumer {
  const AttentionParams& p;
  SharedStorage& shared;
  Rings& rings;
  const ProductOrder& order;
  HiddenValues& hidden;
  const Work& work;
  const ScoreFragment& held_scores;
  const ScoreFactors& factors_of_rows;
  SplitSoftmax& softmax;
  TileFragments& held;
  const int tile_row, first_row, row;  // of the tile, of the warpgroup, of the thread
  const u32 queries;                   // where the warpgroup's rows are in Q
  Blocks blocks;

  DEVICE ScoreFragment scores() const {
    return HOLDS_SCORES ? held_scores : ScoreFragment(p, work.sequence, work.head);
  }

  // needs_mask() tells whether the current tile of keys is masked. All warpgroups have to agree where they look for
  // hidden keys together.
  DEVICE bool needs_mask() const {
    return HIDES_ANYWHERE ? scores().needs_mask(blocks, tile_row, BLOCK_M)
                          : scores().needs_mask(blocks, first_row, ROWS_OF_WARPGROUP);
  }

  // step() is the main loop's body: it computes the scores of a tile of keys and turns them into weights, while
  // the weights of the tile before are multiplied with their values. The FIRST tile has none before it.
  template <bool FIRST>
  DEVICE void step(bool masked) {
    float x[BLOCK_N / 2], next_rescale[2];  // S, then P: the thread's fragment of (64, BLOCK_N)
    ExtraSum<BLOCK_N> extra;
    const int first_key = blocks.block * BLOCK_N;
    blocks.advance();
    // 1. Wait for the keys, and for this warpgroup's place in the order.
    rings.k.wait();
    order.wait();
    // 2. Start S = Q K^T of this tile; it ends here where registers do not hold the sums of both products.
    start_scores<HEAD_DIM, BLOCK_M>(x, extra, queries, rings.k.buffer());
    if constexpr (!FIRST && !OVERLAPS_VALUES) {
      ptx::wgmma_wait_group<0>();
      finish_scores(x, extra);
    }
    // 3. Start O += P V of the tile before, and pass the order on.
    if constexpr (!FIRST) start_values();
    order.arrive();
    // 4. Wait for S, and release the keys.
    if constexpr (FIRST || OVERLAPS_VALUES) {
      ptx::wgmma_wait_group<FIRST ? 0 : 1>();
      finish_scores(x, extra);
    }
    rings.k.release();
    if (blocks.done()) rings.q.release();
    // 5. Products become scores, -inf where hidden, and scores weights P.
    find_weights(x, first_key, masked, next_rescale);
    // 6. Wait for O += P V of the tile before, and split P into parts.
    if constexpr (!FIRST) add_values();
    held.weights.set(x);
    held.rescale[0] = next_rescale[0];
    held.rescale[1] = next_rescale[1];
    // 7. Values of hidden keys become 0.
    if (masked) hidden.clear(rings.v, first_key);
  }

  // finish() multiplies the last weights with their values.
  DEVICE void finish() {
    rings.v.wait();
    order.wait();
    multiply(held.panel, held.weights, rings.v.buffer(), HEAD_DIM_V, 0);
    order.arrive();
    add_values();
  }

 private:
  // start_values() starts the product of the last weights and the first panel of their values.
  DEVICE void start_values() {
    rings.v.wait();
    multiply(held.panel, held.weights, rings.v.buffer(), HEAD_DIM_V, 0);
  }

  // add_values() adds that product to O, computes and adds the other panels, and releases the values.
  DEVICE void add_values() {
    finish_product(held.out, held.panel, held.rescale, held.weights, rings.v.buffer());
    rings.v.release();
  }

  // find_weights() leads from products to the weights of their values.
  DEVICE void find_weights(float (&x)[BLOCK_N / 2], int first_key, bool masked, float (&factor)[2]) {
    rings.factors.wait();
    const Factors& factors = shared.factors[rings.factors.stage];
    factors_of_rows.apply(x, factors.keys, !PLAIN_SCORES);
    FragmentOptions options;
    scores().fetch(options, row, first_key);
    scores().apply(x, p, row, first_key, masked, true, options);
    if (masked) hidden.find(x);
    softmax.step(x, factor);
    ScoreFragment(p, work.sequence, work.head).drop(x, row, first_key);  // read again, because registers are scarce
    softmax.scale_to_units(x, factors.values, factor);
    __syncwarp();
    rings.factors.release();
  }
};

// write_tile() is the epilogue: it normalises O and writes it with lse.
DEVICE void write_tile(const Consumer& tile, const SplitOperands& operands, u8* space, i64 batch, float scale,
                       const ScoreFactors& factors_of_rows) {
  const AttentionParams& p = tile.p;
  const Sequence& s = tile.work.sequence;
  const int head = tile.work.head;
  const i64 batch_head_kv = batch * p.num_heads_kv + head / group_size(p);
  const bool restores = needs_factors(operands, space, batch_head_kv, Channels::OF_VALUES);
  float inverse[2], lse[2];
  tile.softmax.finish(scale, factors_of_rows, p.sink == nullptr ? -infinity() : p.sink[head], inverse, lse);
  rescale_kept(p, inverse);
  if (lane() % 4 < 2) {
    const int i = tile.row + 8 * (lane() % 4);
    const float own = lane() % 4 == 0 ? lse[0] : lse[1];
    if (i < s.rows_q) *p.lse.at(batch, s.row_q + i, head) = i < s.len_q ? own : -infinity();
  }
  if (restores) {
    const float* factors = channel_factors(operands, space, batch_head_kv, Channels::OF_VALUES);
    restore_channels(tile.held.out, factors, is_divided(false, Channels::OF_VALUES));
  }
  write_wide_fragment(p.out.at(batch, s.row_q, head), p.out.row_stride, tile.row, s.len_q, s.rows_q, p.head_dim_v,
                      tile.held.out, inverse, tile.softmax.unit);
}

// consume() is a consumer warpgroup: it computes 64 rows of every tile.
DEVICE void consume(const AttentionParams& p, const SplitOperands& operands, u8* space, SharedStorage& shared,
                    Rings rings, int warpgroup) {
  const ProductOrder order(warpgroup);
  HiddenValues hidden(shared.seen);
  const float scale = static_cast<float>(p.softmax_scale);
  while (true) {
    rings.work.wait();
    const Work& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const int tile_row = work.tile * BLOCK_M, first_row = tile_row + warpgroup * ROWS_OF_WARPGROUP;
    const int row = first_row + warp_row() + fragment_row();
    const ScoreFragment scores(p, s, work.head);
    hidden.begin(p, s, scores.mask);
    const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
    const auto row_factor = [&](int r) {
      const int inside = smaller(row + 8 * r, s.rows_q - 1);
      return *operands.q.factors_at(space, batch * p.num_heads_q + work.head, split_row_q(p, s) + inside);
    };
    const ScoreFactors factors_of_rows(row_factor(0), row_factor(1));
    SplitSoftmax softmax(scale, factors_of_rows);
    TileFragments held;
    const u32 queries = rings.q.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
    Consumer tile = {p,      shared,          rings,
                     order,  hidden,          work,
                     scores, factors_of_rows, softmax,
                     held,   tile_row,        first_row,
                     row,    queries,         blocks_of_keys(p, s, work.head, work.tile, BLOCK_M, BLOCK_N)};

    if (!tile.blocks.done()) {
      const bool masked = tile.needs_mask();
      rings.q.wait();
      tile.step<true>(masked);
      while (!tile.blocks.done()) tile.step<false>(tile.needs_mask());
      tile.finish();
    }
    // The factors of rows are read again, because registers are scarce.
    write_tile(tile, operands, space, batch, scale, ScoreFactors(row_factor(0), row_factor(1)));
    __syncwarp();
    rings.work.release();
  }
  order.drain();
}

static_assert(can_share_registers(PRODUCER_REGISTERS, CONSUMER_REGISTERS), "no warpgroup waits for registers");

// split_forward is persistent: each multiprocessor has one block, which takes tile after tile.
extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    split_forward(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitOperands operands, u8* space,
                  const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                  const __grid_constant__ ptx::TensorMap v_map) {
  VIEW_SHARED_STORAGE(shared);
  if (threadIdx.x == 0) {
    constexpr int WARPS = CONSUMERS * WARPGROUP / WARP;
    shared.work_barriers.init(WARPS);
    shared.q_barriers.init(WARPS);
    shared.k_barriers.init(WARPS);
    shared.v_barriers.init(WARPS);
    shared.factor_barriers.init(WARPS);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_kernel_before();

  const Rings rings(shared);
  const int warpgroup = own_warpgroup();
  if (warpgroup == CONSUMERS) {
    ptx::set_registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMERS * WARPGROUP) load_tiles(p, operands, space, shared, rings, &q_map, &k_map, &v_map);
  } else {
    ptx::set_registers_more<CONSUMER_REGISTERS>();
    consume(p, operands, space, shared, rings, CONSUMERS == 1 ? 0 : warpgroup);
  }
}
