// This header has score, mask and dropout of Hopper's forward kernel: ScoreFragment (fragment/score_fragment.cuh) with
// scores in units, in the order in which the products leave time. The bits of masks and dropout do not depend on the
// products, and are found while these are computed.
#include "../../fragment/score_fragment.cuh"
#include "mask_bits.cuh"
#include "rows.cuh"
#include "slope_product.cuh"

// FragmentBits holds the bits that do not depend on the products, so that they are found while these are computed.
struct FragmentBits {
  static constexpr bool HAS_VISIBLE = READS_MASK || HAS_BLOCK_MASK;
  u32 visible[ELEMENT_WORDS];  // bit e tells whether element e is visible
  u32 blocks[BLOCKS_OF_ROW];   // the bits of the thread's elements in each block of a block mask
};

// TAKES_TANH tells whether products become scores by the tanh instruction. Bounded scores are left to their softmax.
constexpr bool TAKES_TANH = HAS_SOFTCAP && !BOUNDED_SCORES;

// UnitScore computes scores in units, as they stand in the accumulators (16-bit inputs): score = unit * x. The unit is
// multiplied in with the conversion to base 2, which saves a product for each score.
struct UnitScore {
  float unit, slope;  // the slope is in units, too
  float factor;       // factor of a product q.k
  float softcap;

  // The constructor chooses the unit. Scores of any size need natural units, and the user's own rule is given them.
  DEVICE explicit UnitScore(const Score& score) : softcap(score.softcap) {
    unit = ANY_SCORES ? 1 : HAS_SOFTCAP ? score.softcap : PLAIN_SCORES ? score.scale : 1;
    if constexpr (HAS_ALIBI) slope = score.slope / unit;
    factor = HAS_SOFTCAP ? score.scale / score.softcap : score.scale;
  }

  // of_product() is a score before bias and ALiBi. The error of tanh, 2^-11 of the score, is no larger than that of
  // scores rounded to float16.
  DEVICE float of_product(float product) const {
    if constexpr (BOUNDED_SCORES) return product;
    if constexpr (HAS_SOFTCAP) return ptx::tanh(product * factor) * (ANY_SCORES ? softcap : 1);
    return PLAIN_SCORES ? product : product * factor;
  }
};

// UnitFragment turns a warpgroup's products into scores in units, for one (sequence, query head).
struct UnitFragment : ScoreFragment {
  // p, s and head are kept because pointers and strides of bias and masks are computed anew for each tile: registers
  // are scarce.
  const AttentionParams& p;
  const Sequence& s;
  const int& head;
  const TileRows& rows;
  const OwnRows& own;
  UnitScore units;
  float slopes[HAS_ALIBI && PACKS_HEADS ? 2 : 1];  // in units, of the thread's two rows

  DEVICE UnitFragment(const AttentionParams& p, const Sequence& s, const int& head, const TileRows& rows,
                      const OwnRows& own, float scale)
      : ScoreFragment(p, s, head), p(p), s(s), head(head), rows(rows), own(own), units(with_scale(score, scale)) {
    if constexpr (HAS_ALIBI && PACKS_HEADS) {
#pragma unroll
      for (int r = 0; r < 2; r++) slopes[r] = Score(p, s, own.heads[r]).slope / units.unit;
    }
  }

  // needs_mask() tells whether the current tile of keys has to be masked for queries [first_row, first_row + rows).
  template <class AnyBlocks>
  DEVICE bool needs_mask(const AnyBlocks& blocks, int first_row, int num_rows) const {
    if constexpr (HAS_BLOCK_MASK) return blocks.masked;
    if constexpr (PACKS_HEADS) {
      const int first = rows.query(first_row, s.rows_q), last = rows.query(first_row + num_rows - 1, s.rows_q);
      return needs_mask_of(blocks, first, last + 1 - first);
    } else {
      return needs_mask_of(blocks, first_row, num_rows);
    }
  }
  template <class AnyBlocks>
  DEVICE bool needs_mask_of(const AnyBlocks& blocks, int first_row, int rows) const {
    const int first_key = blocks.block * BLOCK_N;
    // Nothing would tell behind the rule that a bias of -inf met a product of NaN.
    if (HAS_BIAS && HAS_SCORE_MOD) return true;
    if (READS_MASK || !own_mask().columns_inside(first_row, rows, first_key, BLOCK_N)) return true;
    // ALiBi is linear on one side of the diagonal, so only tiles that the diagonal crosses take it element by element.
    const int nearest = first_row + s.diagonal() - (first_key + BLOCK_N - 1);
    return HAS_ALIBI && nearest < 0 && nearest + rows + BLOCK_N - 2 > 0;
  }

  // fetch() starts to read the bits of the partial blocks of a block mask.
  DEVICE void fetch(FragmentBits& bits, const int (&slots)[BLOCKS_OF_ROW]) const {
    if constexpr (HAS_BLOCK_MASK) {
#pragma unroll
      for (int i = 0; i < BLOCKS_OF_ROW; i++) {
        const int slot = slots[i];
        bits.blocks[i] = slot == VISIBLE_SLOT ? 0xffffffffu : 0;
        if (slot >= 0) bits.blocks[i] = p.fragment_bits[static_cast<i64>(slot) * WARPGROUP + threadIdx.x % WARPGROUP];
      }
    }
  }

  // find_visible() finds the visible elements of a tile that needs its mask, after fetch().
  DEVICE void find_visible(FragmentBits& bits, int row, int first_key) const {
    if constexpr (FragmentBits::HAS_VISIBLE) find_visible(bits.visible, bits, row, first_key);
  }

  // apply() turns products into scores in units, -inf where hidden. add(x, masked) adds the bias.
  template <class AddBias>
  DEVICE void apply(float (&x)[BLOCK_N / 2], const FragmentBits& bits, int row, int first_key, bool masked,
                    AddBias add) const {
    const Place<false> place = {row, first_key + fragment_column()};
    const UnitScore units = FEW_REGISTERS ? UnitScore(Score(p, s, head)) : this->units;
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) x[e] = units.of_product(x[e]);
    if constexpr (HAS_BIAS) add(x, masked);
    if (HAS_ALIBI && (!SLOPE_BY_PRODUCT || masked)) add_alibi(x, units.slope, row, first_key);
    if constexpr (HAS_SCORE_MOD) {
      const RuleIf<HAS_SCORE_MOD> rule(p, s, head);
#pragma unroll
      for (int e = 0; e < BLOCK_N / 2; e++) {
        // A bias of -inf hides, whatever the rule would make of it.
        const float own = rule.value(x[e], place.query(e), place.key(e));
        x[e] = HAS_BIAS && x[e] == -infinity() ? x[e] : own;
      }
    }
    if (ASKS_EVERYWHERE || masked) rules::hide_by_rules(x, Mask(p, s, head), place);
    if (!masked) return;
    hide_by_rows(
        x, [&](int r) { return columns(own.query(row, r), place.column); },
        [&](int e, const Range& range) {
          if constexpr (FragmentBits::HAS_VISIBLE) return (bits.visible[e / WORD] >> e % WORD & 1) == 0;
          return is_outside(range, e);
        });
  }

  // add_bias() adds a bias that TMA does not load, element by element.
  DEVICE void add_bias(float (&x)[BLOCK_N / 2], int row, int first_key, bool masked) const {
    if constexpr (PACKS_HEADS) return add_bias_by_rows(x, first_key + fragment_column(), masked);
    const Score own_score(p, s, head);
    const int column = first_key + fragment_column();
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) {
      const float bias = own_score.bias_at(row + row_offset(e), column + column_offset(e));
      x[e] = masked && bias == -infinity() ? bias : x[e] + bias;
    }
  }

  // add_bias_by_rows() does so for rows of different heads.
  DEVICE void add_bias_by_rows(float (&x)[BLOCK_N / 2], int column, bool masked) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Score own_score(p, s, own.head(head, r));
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += e % 2 == 0 ? 1 : 3) {
        const float bias = own_score.bias_at(own.query(0, r), column + column_offset(e));
        x[e] = masked && bias == -infinity() ? bias : x[e] + bias;
      }
    }
  }

  // draw_ahead() draws dropout's random bits of the first EARLY_DRAWS groups of 16 keys while products are computed;
  // drop() draws the others, and sets the dropped weights to 0.
  using Random = RandomBits<false, BLOCK_N / 2, HAS_DROPOUT && !PACKS_HEADS ? EARLY_DRAWS : 0>;
  DEVICE void draw_ahead(Random& random, int row, int first_key) const {
    if constexpr (HAS_DROPOUT && EARLY_DRAWS > 0 && !PACKS_HEADS) {
      random.template draw_ahead<true>(own_dropout(), row, first_key + fragment_column());
    }
  }
  DEVICE void drop(float (&weights)[BLOCK_N / 2], Random& random, int row, int first_key) const {
    if constexpr (HAS_DROPOUT && PACKS_HEADS) {
      drop_by_rows(weights, first_key + fragment_column());
    } else if constexpr (HAS_DROPOUT) {
      random.drop(weights, own_dropout(), row, first_key + fragment_column());
    }
  }
  // drop_by_rows() does so for rows of different heads: each row has a call of its own, and takes two of its words.
  DEVICE void drop_by_rows(float (&weights)[BLOCK_N / 2], int column) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Dropout own_dropout(p, s, own.heads[r]);
      const bool high = own.queries[r] & 8;
#pragma unroll
      for (int e = 2 * r; e < BLOCK_N / 2; e += 8) {
        const uint4 words = own_dropout.words(own.queries[r] & ~8, column + column_offset(e));
        drop_pair(weights[e], weights[e + 1], high ? words.z : words.x, own_dropout);
        drop_pair(weights[e + 4], weights[e + 5], high ? words.w : words.y, own_dropout);
      }
    }
  }

 private:
  static DEVICE Score with_scale(Score score, float scale) {
    score.scale = scale;
    return score;
  }

  // FEW_REGISTERS tells that registers are scarce, so that nothing is held that can be computed anew.
  static constexpr bool FEW_REGISTERS = HEAD_DIM_V > 128 || NUM_OPTIONS > 2;

  DEVICE Mask own_mask() const { return FEW_REGISTERS ? Mask(p, s, head) : mask; }
  DEVICE Dropout own_dropout() const { return FEW_REGISTERS ? Dropout(p, s, head) : dropout; }

  using Range = Mask::Range;

  // columns() is the range of keys that lengths and window leave to row i, counted from `column`.
  DEVICE Range columns(int i, int column) const {
    const Mask mask = own_mask();
    const Range range = mask.columns(i);
    return {range.begin - column, i < mask.len_q ? range.end - column : 0};
  }

  // below() is a word whose bits below n are set.
  static DEVICE u32 below(int n) { return n <= 0 ? 0 : n >= WORD ? 0xffffffffu : (1u << n) - 1; }

  DEVICE void find_visible(u32 (&of_elements)[ELEMENT_WORDS], const FragmentBits& bits, int row, int first_key) const {
    const Mask own_mask(p, s, head);
    bool by_rows = READS_MASK;
    // visible[row][word] are the visible columns of the thread's two rows, from the tile's first column on.
    u32 visible[2][WORDS];
#pragma unroll
    for (int word = 0; word < WORDS; word++) visible[0][word] = visible[1][word] = 0xffffffffu;
    if constexpr (READS_MASK) {
      u32 words[2] = {};
      const int j = first_key + lane() % 4 * WORD;
      if (lane() % 4 < WORDS) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          if constexpr (PACKS_HEADS) {
            words[r] = unaligned_mask_word(Mask(p, s, own.heads[r]), own.queries[r], j);
          } else {
            words[r] = own_mask.mask_word(row + 8 * r, j);
          }
        }
      }
#pragma unroll
      for (int word = 0; word < WORDS; word++) {
#pragma unroll
        for (int r = 0; r < 2; r++) visible[r][word] = __shfl_sync(ALL_LANES, words[r], lane() / 4 * 4 + word);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Range range = columns(own.query(row, r), first_key);
      if (range.begin <= 0 && range.end >= BLOCK_N) continue;
      by_rows = true;
#pragma unroll
      for (int word = 0; word < WORDS; word++) {
        visible[r][word] &= below(range.end - word * WORD) & ~below(range.begin - word * WORD);
      }
    }
    // A block of 64 columns has one word for a thread's elements, and 32 columns have half of it.
    const int skipped = BLOCK_N % CANONICAL == 0 ? 0 : first_key % CANONICAL / 2;
#pragma unroll
    for (int i = 0; i < ELEMENT_WORDS; i++) {
      of_elements[i] = HAS_BLOCK_MASK ? bits.blocks[i] : 0xffffffffu;
      if constexpr (HAS_BLOCK_MASK && BLOCK_N % CANONICAL != 0) {
        of_elements[i] = __funnelshift_r(bits.blocks[i], i + 1 < BLOCKS_OF_ROW ? bits.blocks[i + 1] : 0, skipped);
      }
    }
    if (!by_rows) return;
    u32 seen[ELEMENT_WORDS] = {};
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e += 2) {
      const u32 pair = visible[row_offset(e) / 8][column_offset(e) / WORD] >> fragment_column();
      seen[e / WORD] |= (pair >> column_offset(e) % WORD & 3) << e % WORD;
    }
#pragma unroll
    for (int i = 0; i < ELEMENT_WORDS; i++) of_elements[i] &= seen[i];
  }

  // add_alibi_by_rows() is add_alibi() for rows of different heads.
  DEVICE void add_alibi_by_rows(float (&x)[BLOCK_N / 2], int first_key) const {
    const float column = static_cast<float>(fragment_column());
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) {
      const int r = PACKS_HEADS ? row_offset(e) / 8 : 0;
      const float distance = static_cast<float>(own.query(0, r) + s.diagonal() - first_key);
      x[e] -= slopes[r] * fabsf(distance - (column + static_cast<float>(column_offset(e))));
    }
  }

  // add_alibi() subtracts slope * distance element by element.
  DEVICE void add_alibi(float (&x)[BLOCK_N / 2], float slope, int row, int first_key) const {
    if constexpr (PACKS_HEADS) return add_alibi_by_rows(x, first_key);
    const float distance = static_cast<float>(row + s.diagonal() - first_key);
    const float column = static_cast<float>(fragment_column());
#pragma unroll
    for (int e = 0; e < BLOCK_N / 2; e++) {
      const float offset = column + static_cast<float>(column_offset(e));
      x[e] -= slope * fabsf(distance + static_cast<float>(row_offset(e)) - offset);
    }
  }
};
