// This header computes weights and gradients of scores on a warp's fragment of 16 keys x FRAGMENT_QUERIES queries, for
// the gradient kernels that compute scores transposed (S^T = K Q^T): sm90/backward/backward.cu, sm90/backward/wide.cu
// and sm80/backward.cu. P^T and dS^T are then already left factors of dV = P^T dO and dK = dS^T Q in the registers
// where they arise. The mathematics is FlashAttention-2 (Dao 2023), Algorithm 2, lines 10 to 14.
#include "dropout_fragment.cuh"
#include "place.cuh"

constexpr int FRAGMENT_QUERIES = BLOCK_M / (QUERY_WARPS * QUERY_PASSES);
constexpr int FRAGMENT = FRAGMENT_QUERIES / 2;  // elements that a thread holds
// LSE_BASE brings lse to base 2, but where scores may have any size (rules/score.cuh).
constexpr float LSE_BASE = ANY_SCORES ? 1 : LOG2_E;

using Derivatives = rules::ScoreDerivatives<FRAGMENT, true>;

// QueryValues holds one number for each query of the thread's elements (lse or delta) in registers.
struct QueryValues {
  float x[FRAGMENT / 2];  // the values of queries fragment_column() + 8 i and the one behind it

  DEVICE QueryValues(const float* values) {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e += 4) {
      x[e / 2] = values[fragment_column() + column_offset(e)];
      x[e / 2 + 1] = values[fragment_column() + column_offset(e + 1)];
    }
  }
  DEVICE float operator[](int e) const { return x[e / 4 * 2 + e % 2]; }
};

// QueryValuesInPlace reads the same numbers from shared memory each time, which takes no registers.
struct QueryValuesInPlace {
  const float* values;

  DEVICE explicit QueryValuesInPlace(const float* values) : values(values) {}
  DEVICE float operator[](int e) const { return values[fragment_column() + column_offset(e)]; }
};

// NoMoreBits is the default of `Bits`: nothing but lengths, window and mask hides elements.
struct NoMoreBits {
  static constexpr bool HIDES = false;
};

// GradientFragment is 16 keys from first_key on and FRAGMENT_QUERIES queries from first_row on. Its options are read
// from the parameters where they are used, because registers are scarce.
struct GradientFragment {
  const AttentionParams& p;
  const Sequence& s;
  int head, row, key;  // head, and the thread's first query and key
  float scale;

  DEVICE GradientFragment(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key,
                          float scale)
      : p(p), s(s), head(head), row(first_row + fragment_column()), key(first_key + fragment_row()), scale(scale) {}
  DEVICE GradientFragment(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key)
      : GradientFragment(p, s, head, first_row, first_key, static_cast<float>(p.softmax_scale)) {}

  DEVICE Score score() const {
    Score score(p, s, head);
    score.scale = scale;
    return score;
  }

  DEVICE Place<true> place() const { return {key, row}; }

  // to_weights() turns products into weights; hidden ones become 0. `lse` is inf where a query saw nothing. SCORES: x
  // holds scores already, in this unit. OTHER_BITS: the caller, or `bits`, hides what masks hide.
  template <bool SCORES = false, bool OTHER_BITS = false, typename Values, typename Bits = NoMoreBits>
  DEVICE void to_weights(float (&x)[FRAGMENT], const Values& lse, bool masked, float unit = 1,
                         const Bits& bits = {}) const {
    static_assert(!HAS_BLOCK_MASK || Bits::HIDES, "the caller has them");
    const Score score = this->score();
    const float to_base_2 = (SCORES ? unit : scale) * LOG2_E;
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      const float reference = lse[e];
      if constexpr (PLAIN_SCORES || (SCORES && !ANY_SCORES)) {
        x[e] = x[e] * to_base_2 - reference;
      } else {
        const int i = row + column_offset(e), j = key + row_offset(e);
        float value = SCORES ? x[e] : score.value(x[e], i, j);
        if constexpr (SCORES && HAS_ALIBI) value -= score.slope * score.distance(i, j);
        x[e] = ANY_SCORES ? (value - reference) * LOG2_E : value * LOG2_E - reference;
      }
    }
    if constexpr (Bits::HIDES) {
      // Scores are hidden before the powers, as a branch behind these would keep the compiler from packing weights
      // early.
      if (masked) {
        if (bits.ranged()) hide_elements<!OTHER_BITS>(x);
        bits.hide(x);
      }
    } else if (masked) {
      hide_elements<!OTHER_BITS>(x);
    }
    if (ASKS_EVERYWHERE || masked) rules::hide_by_rules(x, Mask(p, s, head), place());
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) x[e] = ptx::ex2(x[e]);
  }

  // draw_ahead() draws the random bits of the first EARLY groups of queries; mark_dropped() draws the others, and sets
  // the signs of the weights that dropout drops.
  template <int EARLY>
  using Random = RandomBits<true, FRAGMENT, HAS_DROPOUT ? EARLY : 0>;
  template <bool IN_BRANCH, int EARLY>
  DEVICE void draw_ahead(RandomBits<true, FRAGMENT, EARLY>& bits) const {
    if constexpr (HAS_DROPOUT && EARLY > 0) bits.template draw_ahead<IN_BRANCH>(Dropout(p, s, head), key, row);
  }
  template <int EARLY>
  DEVICE void mark_dropped(float (&weights)[FRAGMENT], RandomBits<true, FRAGMENT, EARLY>& bits) const {
    if constexpr (HAS_DROPOUT) bits.mark(weights, Dropout(p, s, head), key, row);
  }
  DEVICE void mark_dropped(float (&weights)[FRAGMENT]) const {
    RandomBits<true, FRAGMENT> bits;
    mark_dropped(weights, bits);
  }

 private:
  // hide_elements() sets scores to -inf where lengths, window or, with BITS, the dense mask hide them.
  template <bool BITS>
  DEVICE void hide_elements(float (&x)[FRAGMENT]) const {
    const Mask mask(p, s, head);
    const Place<true> place = this->place();
    hide_outside(x, mask, place, [&](int e) {
      if constexpr (HAS_MASK && BITS) return !mask.in_mask(place.query(e), place.key(e));
      return false;
    });
  }
};

// score_gradient() is dS of an element, from dP (`dp`) and its weight. A dropped weight has its sign bit set. IN_UNITS:
// the result and delta are divided by p.ds_unit.
template <bool IN_UNITS = false>
DEVICE float score_gradient(const AttentionParams& p, float dp, float weight, float delta) {
  if constexpr (HAS_DROPOUT) {
    // The sum is twice a kept weight and 0 for a dropped one. It avoids a selection, which takes as long as two sums.
    const float kept = weight + fabsf(weight), unit = IN_UNITS ? 1 : static_cast<float>(p.ds_unit);
    return __fmaf_rn(kept, dp * unit, -delta * fabsf(weight));
  }
  return weight * (dp - delta);
}

// clear_hidden() makes gradients 0 where the weight is: a hidden element's gradient may be NaN. A step that hides
// nothing need not call it.
DEVICE void clear_hidden(float& ds, float weight) { ds = weight == 0 ? 0 : ds; }
template <int N>
DEVICE void clear_hidden(float (&ds)[N], const float (&weights)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) clear_hidden(ds[e], weights[e]);
}

// pack_kept() packs weights as a left factor, 0 where dropped.
DEVICE void pack_kept(u32 (&words)[FRAGMENT / 2], const float (&x)[FRAGMENT]) {
#pragma unroll
  for (int i = 0; i < FRAGMENT / 2; i++) {
    const float low = x[2 * i], high = x[2 * i + 1];
    if constexpr (!HAS_DROPOUT) {
      words[i] = packed(Element(), low, high);
    } else {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
      words[i] = ptx::packed_positive<Element>(low, high);
#else
      words[i] = packed(Element(), larger(low, 0.0f), larger(high, 0.0f));
#endif
    }
  }
}
