// This header is a consumer warpgroup of Hopper's forward kernel: what it holds of a tile of queries, and a function
// for each step of its loop over the tiles of keys. The loop issues the next scores before the product of the last
// weights and values (FlashAttention-3, Algorithm 2), and the warpgroups take the tensor cores in an order (ping-pong),
// so that exponentials run while products are computed. forward.cu has the loop over the tiles of queries.
#include "head_scales.cuh"
#include "softmax.cuh"
#include "storage.cuh"

// COPIES is how many copies of a step the loop has: for the first tile of keys, for masked and for other tiles; with
// two, the first tile takes the masked copy, too. Kernels on codes have long loaders, and fewer copies, which compile
// in less time.
constexpr int COPIES = NUM_OPTIONS > 1 || HAS_DROPOUT || HAS_SCORE_MOD || HAS_MASK_MOD || (HAS_FP8 && HAS_OPTIONS) ? 1
                       : (HEAD_DIM > 64 && (HAS_MASK || HAS_BIAS)) || HAS_FP8                                      ? 2
                                                                                                                   : 3;
// EARLY_QUERIES: where the next queries have no buffer of their own, the last step of a tile releases its queries as
// soon as it can.
constexpr bool EARLY_QUERIES = TEAMS > 1 || (QUERY_STAGES == 1 && (!HAS_OPTIONS || (HAS_BLOCK_MASK && COPIES == 3)));
static_assert(EARLY_POWERS == 0 || (COPIES == 3 && !HAS_DROPOUT), "early powers are not the first, nor dropped");
static_assert(!WAITS_AFTER_POWERS || (COPIES == 1 && !EARLY_QUERIES && !BOUNDED_SCORES), "queries are released once");
static_assert(TEAMS == 1 || (COPIES == 3 && !PING_PONG && BLOCK_N <= WARPGROUP), "no team waits for another");

// Position is where a tile of keys stands in a run of them: ANY is a copy of a step for all positions.
enum class Position { FIRST, LATER, ANY };

constexpr int SCORES = BLOCK_N / 2, RESULTS = HEAD_DIM_V / 2;  // elements of a thread's fragment of S and of O

// TileFragments are the fragments that a thread holds of the 64 rows that its warpgroup computes of a tile of queries,
// and RowNumbers are numbers of its two rows. They share no struct with each other nor with single numbers: until all
// loops are unrolled the compiler keeps in memory what does, and makes longer code of it, or leaves it there.
struct TileFragments {
  float out[RESULTS];                            // O (64, HEAD_DIM_V)
  u32 weights[BLOCK_N / 4];                      // P (64, BLOCK_N) in 16 bits
  u32 queries[QUERY_STEPS_IN_REGISTERS + 1][4];  // the first steps of Q, because shared memory is busy
  FragmentBits bits;
  UnitFragment::Random random;

  DEVICE TileFragments() {
#pragma unroll
    for (float& x : out) x = 0;
  }
};

struct RowNumbers {
  static constexpr int SINKS = PACKS_HEADS ? 2 : 1;  // the thread's rows may be of two heads
  float rescale[2], sink[SINKS], inverse[2], lse[2];

  // No loop over the rows: the compiler of CUDA 13.0 would keep these and the rows' places in memory.
  DEVICE RowNumbers(const AttentionParams& p, const TileMessage& work, const OwnRows& own)
      : sink{sink_of(p, work, own, 0)}, inverse{0, 0} {
    if constexpr (SINKS > 1) sink[SINKS - 1] = sink_of(p, work, own, 1);
    lse[0] = sink[0];
    lse[1] = sink[SINKS - 1];
  }

 private:
  static DEVICE float sink_of(const AttentionParams& p, const TileMessage& work, const OwnRows& own, int r) {
    return p.sink == nullptr || work.split() > 0 ? -infinity() : p.sink[own.head(work.head, r)];
  }
};

// Consumer is a warpgroup with its tile of queries, and has a function for each step of the loop over tiles of keys.
struct Consumer {
  const AttentionParams& p;
  SharedStorage& shared;
  Rings& rings;
  const ProductOrder& order;
  HiddenValues& hidden;
  const TileMessage& work;  // read again from shared memory where it is needed: registers are scarce
  const UnitFragment& scores;
  const OwnScales& scales;
  const SlopeProduct<SLOPE_BY_PRODUCT>& slope;
  RowSoftmax& softmax;
  TileFragments& held;
  RowNumbers& numbers;
  const int warpgroup, first_row, row;  // the warpgroup's number in its team, its first row, the thread's first row
  // `blocks` are the warpgroup's own tiles of keys; before and behind them may be some that only other warpgroups see.
  ConsumerKeyIterator blocks;
  int row_group;
  u32 queries;             // where the warpgroup's rows are in Q
  bool rechecks;           // the tile is a recheck (is_recheck())
  bool last, next_masked;  // the current tile of keys is the last; the next one takes its mask
  SlackDelay<KEYS_IN_REVERSE> delay;
  RowUnits<TOKEN_SCALES> units;

  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared, Rings& rings, const ProductOrder& order,
                  HiddenValues& hidden, const TileMessage& work, const UnitFragment& scores, const OwnScales& scales,
                  const SlopeProduct<SLOPE_BY_PRODUCT>& slope, RowSoftmax& softmax, TileFragments& held,
                  RowNumbers& numbers, int warpgroup, int first_row, int row)
      : p(p),
        shared(shared),
        rings(rings),
        order(order),
        hidden(hidden),
        work(work),
        scores(scores),
        scales(scales),
        slope(slope),
        softmax(softmax),
        held(held),
        numbers(numbers),
        warpgroup(warpgroup),
        first_row(first_row),
        row(row),
        blocks(work, HIDES_ANYWHERE || VISITS_ALL_KEYS ? work.keys : work.own_keys[warpgroup]),
        row_group(warpgroup + work.first_row_group()) {}

  // begin() takes the queries, and the first tile of keys.
  DEVICE void begin() {
    queries = rings.q.buffer() + warpgroup * ROWS_OF_WARPGROUP * ROW_BYTES;
    const u32 own_row = queries + (warp_row() + lane() % 16) * ROW_BYTES;
#pragma unroll
    for (int step = 0; step < QUERY_STEPS_IN_REGISTERS; step++) {
      ptx::ldmatrix_x4(held.queries[step],
                       own_row + step / 4 * BLOCK_M * ROW_BYTES + ((step % 4 * 2 + lane() / 16) ^ lane() % 8) * 16);
    }
    rechecks = HIDES_ANYWHERE && work.recheck;
    take();
  }

  // is_recheck() tells whether the tile is a recheck. Where none can be it is known at once, which makes shorter code.
  DEVICE bool is_recheck() const { return HIDES_ANYWHERE && rechecks; }

  // take() moves on to the next tile of keys; a recheck visits hidden ones as well.
  DEVICE void take() {
    blocks.take(rings.k, shared.entries, row_group);
    if constexpr (TEAMS > 1) blocks.hidden &= !is_recheck();
  }

  // needs_mask() tells whether the current tile of keys takes the masked way.
  DEVICE bool needs_mask() const {
    return is_recheck() || !slope.has_parts() || scores.needs_mask(blocks, first_row, ROWS_OF_WARPGROUP);
  }

  // tiles_left() counts the current tile of keys and those behind it.
  DEVICE int tiles_left() const {
    if constexpr (HAS_BLOCK_MASK) return shared.lists[rings.work.stage].left;
    return 1 + (KEYS_IN_REVERSE ? blocks.next - blocks.end : blocks.end - blocks.next);
  }

  // settle() finds how far a row's maximum may grow before the row follows it; that is known behind the row's first
  // weights.
  DEVICE void settle() {
    if constexpr (!FOLLOWS_EVERY_MAXIMUM) find_slack(softmax, tiles_left());
  }

  // step() is the main loop's body: it computes the scores of a tile of keys and turns them into weights, while
  // the tensor cores also multiply the weights of the tile before with their values, if there is one (`first`: there is
  // none).
  template <Position POSITION>
  DEVICE void step(bool masked, bool first) {
    float x[SCORES], shift[2] = {0, 0};  // S, then P: the thread's fragment of (64, BLOCK_N)
    const int first_key = blocks.block * BLOCK_N;
    // 1. Wait for the keys, and for this warpgroup's place in the order.
    wait_for_keys(masked);
    order.wait();
    // 2. Start S = Q K^T of this tile.
    start_scores(x, first_key, masked);
    // 3. Start O += P V of the tile before.
    start_values<POSITION>(first);
    // 4. Pass the order on; masks and random bits are prepared while the products are computed.
    order.arrive();
    prepare(shift, first_key, masked);
    // 5. Wait for S, multiply it by the scales of codes, and release the keys.
    ptx::wgmma_wait_group<POSITION == Position::FIRST ? 0 : 1>();
    keep(x);
    multiply_by_scales(x);
    release_keys();
    // 6. Products become scores, -inf where hidden, and the rows' references follow.
    const bool grown = find_scores<POSITION>(x, shift, first_key, masked);
    // 7. Scores become weights P; O of the tile before arrives, is rescaled, and its values are released.
    if constexpr (POSITION == Position::FIRST) {
      begin_weights(x, shift, first_key, masked, grown);
    } else {
      find_weights(x, shift, first_key, masked, first, grown);
    }
    // 8. Values of hidden keys become 0.
    if (masked) hidden.clear(rings.v, first_key, is_recheck());
  }

  // visit_run() calls step() for each tile of keys of a run that the warpgroup sees.
  DEVICE void visit_run() {
    if constexpr (COPIES < 3) {
      next_masked = needs_mask();
      bool first = true;
      do {
        if (COPIES == 1 || first || next_masked) {
          step<Position::ANY>(COPIES == 2 || next_masked, first);
        } else {
          step<Position::ANY>(false, false);
        }
        if (first) settle();
        first = false;
        if (HAS_BLOCK_MASK && !last) {
          take();
          next_masked = needs_mask();
        }
      } while (!last);
    } else {
      step<Position::FIRST>(needs_mask(), true);
      while (!last) {
        if constexpr (HAS_BLOCK_MASK) {
          take();
          if (blocks.hidden) break;
          next_masked = needs_mask();
        }
        if (next_masked) {
          step<Position::LATER>(true, false);
        } else {
          // Plain tiles, the most common, have a loop of their own; where all tiles may be masked it is not worth the
          // code.
          do step<Position::LATER>(false, false);
          while (!HIDES_ANYWHERE && !last && !next_masked);
        }
      }
    }
  }

  // finish_run() multiplies the last weights with their values, and completes the sums meanwhile.
  DEVICE void finish_run() {
    rings.v.wait();
    order.wait();
    add_product<BLOCK_N>(held.out, held.weights, rings.v.buffer());
    order.arrive();
    if (!EARLY_QUERIES && !BOUNDED_SCORES && !WAITS_AFTER_POWERS) rings.q.release();
    softmax.finish(numbers.sink, numbers.inverse, numbers.lse);
    finish_values();
    rings.v.release();
  }

  // skip_hidden() releases tiles of keys between two runs, which a block mask hides from the warpgroup.
  DEVICE void skip_hidden() {
    while (blocks.hidden) {
      release_keys();
      hidden.clear(rings.v, blocks.block * BLOCK_N, false);
      rings.v.wait();
      rings.v.release();
      if (blocks.done()) break;
      take();
    }
  }

  // ask_for_recheck() has a tile whose result is not finite computed again, as hidden values may have come into it.
  DEVICE void ask_for_recheck() const {
    if (HIDES_ANYWHERE && !is_recheck() &&
        HiddenValues::is_non_finite(held.out, scores.own.query(row, 0), scores.own.query(row, 1),
                                    work.sequence.len_q)) {
      shared.non_finite[rings.work.stage] = 1;
    }
  }

 private:
  DEVICE void wait_for_keys(bool masked) {
    if (masked) scores.fetch(held.bits, shared.slots[HAS_BLOCK_MASK ? rings.k.stage : 0].of[row_group]);
    if constexpr (!HAS_BLOCK_MASK) rings.k.wait();  // with a block mask, take() has waited already
  }

  // start_scores() starts S = Q K^T, and ALiBi's step of it.
  DEVICE void start_scores(float (&x)[SCORES], int first_key, bool masked) {
    u32 left[4];
    slope.find_left(left, first_key, masked);
    multiply_by_rows<HEAD_DIM, BLOCK_M, BLOCK_N, QUERY_STEPS_IN_REGISTERS>(
        x, queries, rings.k.buffer(), [&] { slope.multiply(x, left, shared.numbers); }, held.queries);
  }

  template <Position POSITION>
  DEVICE void start_values(bool first) {
    if (POSITION == Position::ANY && first) {
      ptx::wgmma_fence();
      ptx::wgmma_commit_group();  // an empty group, so that the waits below count the same
    } else if (POSITION != Position::FIRST) {
      rings.v.wait();
      add_product<BLOCK_N>(held.out, held.weights, rings.v.buffer());
    }
  }

  DEVICE void finish_values() {
    ptx::wgmma_wait_group<0>();
    keep(held.out);
  }

  // multiply_by_scales() multiplies products by the scales of keys, of which codes have some.
  DEVICE void multiply_by_scales(float (&x)[SCORES]) const {
    scales.apply(x);
    if constexpr (TOKEN_SCALES) {
      rings.scales.wait();
      scale_columns(x, scales_in(shared).tiles[rings.scales.stage].of_keys, false);
    }
  }

  // scale_weights() multiplies weights by the scales of their values, and tells whether O of the tiles before must be
  // rescaled.
  DEVICE bool scale_weights(float (&x)[SCORES], bool masked, bool grown) {
    if constexpr (TOKEN_SCALES) {
      scale_columns(x, scales_in(shared).tiles[rings.scales.stage].of_values, masked || HAS_BIAS);
      __syncwarp();
      rings.scales.release();
      return units.take(x, numbers.rescale, grown);
    }
    return grown;
  }

  // prepare() does what there is to do while the products are computed: random bits, visible elements, the next
  // tile.
  DEVICE void prepare(float (&shift)[2], int first_key, bool masked) {
    if (delay.is_over()) settle();
    scores.draw_ahead(held.random, row, first_key);
    if (masked) scores.find_visible(held.bits, row, first_key);
    last = blocks.done();
    if (!HAS_BLOCK_MASK && !last) {
      take();
      next_masked = needs_mask();
    }
    slope.leave_out(shift, first_key, masked);
  }

  DEVICE void release_keys() {
    // All lanes must have read the entries; with ping-pong the named barriers see to it.
    if constexpr (HAS_BLOCK_MASK && !PING_PONG) __syncwarp();
    rings.k.release();
    if (EARLY_QUERIES && (TEAMS > 1 ? blocks.done() : last)) rings.q.release();
  }

  // find_scores() turns products into scores, and finds whether the rows' references must grow. The first tile is
  // capped as if masked, so that it is the same code either way.
  template <Position POSITION>
  DEVICE bool find_scores(float (&x)[SCORES], const float (&shift)[2], int first_key, bool masked) {
    if (POSITION == Position::FIRST || masked) to_exponents(softmax, x);
    if constexpr (HAS_BIAS_TILES) rings.bias.wait();
    scores.apply(x, held.bits, row, first_key, masked,
                 [&](float (&x)[SCORES], bool masked) { add_bias(x, first_key, masked); });
    if constexpr (HAS_MASK_TILES) {
      rings.mask.wait();
      hide_by_mask_tile(x, rings.mask.buffer(), warpgroup * ROWS_OF_WARPGROUP + warp_row());
      __syncwarp();
      rings.mask.release();
    }
    if (masked && is_recheck()) hidden.find(x);
    return softmax.template bound<FOLLOWS_EVERY_MAXIMUM>(x, shift, numbers.rescale);
  }

  // add_bias() adds the bias, of a tile in shared memory or element by element.
  DEVICE void add_bias(float (&x)[SCORES], int first_key, bool masked) {
    if constexpr (HAS_BIAS_TILES) {
      add_bias_tile(x, rings.bias.buffer(), warpgroup * ROWS_OF_WARPGROUP + warp_row(), bias_has_one_row(p), masked);
      __syncwarp();
      rings.bias.release();
    } else {
      scores.add_bias(x, row, first_key, masked);
    }
  }

  // find_weights() turns scores into weights while O of the tile before arrives; then O is rescaled where rows have
  // grown, and the values are released, if there are any.
  DEVICE void find_weights(float (&x)[SCORES], const float (&shift)[2], int first_key, bool masked, bool first,
                           bool grown) {
    if constexpr (EARLY_POWERS > 0) {
      find_weights_early<EARLY_POWERS>(x, shift, masked, grown);
    } else {
      // This branch also keeps the powers before the wait.
      if (BOUNDED_SCORES && last) rings.q.release();
      grown |= softmax.template to_weights<0, SCORES>(x, shift, numbers.rescale, masked);
      scores.drop(x, held.random, row, first_key);
      grown = scale_weights(x, masked, grown);
      // This release is a branch because otherwise the wait would stand before powers and draws.
      if (WAITS_AFTER_POWERS && last) rings.q.release();
      finish_values();
      if (!first) rings.v.release();
      pack(held.weights, x);
      if (grown) rescale_rows(held.out, numbers.rescale);
    }
  }

  // begin_weights() does so for the first tile of a run, whose sums may set the rows' slack.
  DEVICE void begin_weights(float (&x)[SCORES], const float (&shift)[2], int first_key, bool masked, bool grown) {
    if (TEAMS > 1 && grown) rescale_rows(held.out, numbers.rescale);
    if (BOUNDED_SCORES && last) rings.q.release();
    const bool delayed = delay.begin(masked);
    softmax.template begin<!FOLLOWS_EVERY_MAXIMUM>(x, shift, delayed ? 0 : tiles_left());
    scores.drop(x, held.random, row, first_key);
    scale_weights(x, masked, false);
    pack(held.weights, x);
  }

  // find_weights_early() computes some powers while the product ends. They stand between branches, or the assembler
  // would put them behind the wait.
  template <int EARLY>
  DEVICE void find_weights_early(float (&x)[SCORES], const float (&shift)[2], bool masked, bool grown) {
    softmax.template to_weights<0, EARLY>(x, shift, numbers.rescale, masked);
#pragma unroll
    for (int e = 0; e < EARLY; e++) ptx::keep(x[e]);
    if (grown) {
      finish_values();
      rescale_rows(held.out, numbers.rescale);
    }
    finish_values();
    rings.v.release();
    softmax.template to_weights<EARLY, SCORES>(x, shift, numbers.rescale, masked);
    pack(held.weights, x);
  }
};
