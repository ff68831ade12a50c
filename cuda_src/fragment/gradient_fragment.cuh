// Weights and gradients of scores on a warp's fragment of 16 keys x FRAGMENT_QUERIES queries.
#include "../rules/mask.cuh"
#include "fragment.cuh"
#include "../rules/score.cuh"
#include "dropout_fragment.cuh"

constexpr int FRAGMENT = FRAGMENT_QUERIES / 2;  // elements of a thread
// lse is in base 2 except beside a bias (softmax_fragment.cuh).
constexpr float LSE_BASE = HAS_BIAS ? 1 : LOG2_E;

using SoftcapFragment = SoftcapDerivative<FRAGMENT>;

// Of a fragment's queries, in registers.
struct QueryValues {
  float x[FRAGMENT / 2];

  DEVICE QueryValues(const float* values) {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e += 4) {
      x[e / 2] = values[fragment_column() + column_offset(e)];
      x[e / 2 + 1] = values[fragment_column() + column_offset(e + 1)];
    }
  }
  DEVICE float operator[](int e) const { return x[e / 4 * 2 + e % 2]; }
};

// The same where they lie, which takes no registers.
struct QueryValuesInPlace {
  const float* values;

  DEVICE explicit QueryValuesInPlace(const float* values) : values(values) {}
  DEVICE float operator[](int e) const { return values[fragment_column() + column_offset(e)]; }
};

// What else hides elements of a fragment: nothing.
struct NoMoreBits {
  static constexpr bool HIDES = false;
};

// 16 keys from first_key on and queries from first_row on. Options are read where they are used: registers are scarce.
struct GradientFragment {
  const AttentionParams& p;
  const Sequence& s;
  int head, row, key;  // the thread's first
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

  // Turns products into weights; hidden ones are 0. lse: inf where a query saw nothing. SCORES: x has scores already,
  // in this unit. OTHER_BITS: what masks hide is left to the caller, or to `bits`.
  template <bool SCORES = false, bool OTHER_BITS = false, typename Values, typename Bits = NoMoreBits>
  DEVICE void weigh(float (&x)[FRAGMENT], const Values& lse, bool masked, float unit = 1, const Bits& bits = {}) const {
    static_assert(!HAS_BLOCK_MASK || Bits::HIDES, "the caller has them");
    const Score score = this->score();
    const float to_base_2 = (SCORES ? unit : scale) * LOG2_E;
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      const float reference = lse[e];
      if constexpr (PLAIN_SCORES || (SCORES && !HAS_BIAS)) {
        x[e] = x[e] * to_base_2 - reference;
      } else {
        const int i = row + column_offset(e), j = key + row_offset(e);
        float value = SCORES ? x[e] : score.value(x[e], i, j);
        if constexpr (SCORES && HAS_ALIBI) value -= score.slope * score.distance(i, j);
        x[e] = HAS_BIAS ? (value - reference) * LOG2_E : value * LOG2_E - reference;
      }
    }
    if constexpr (Bits::HIDES) {
      // Before the powers: a branch behind them would keep the compiler from packing weights between them.
      if (masked) {
        if (bits.ranged()) hide<!OTHER_BITS>(x);
        bits.hide(x);
      }
    } else if (masked) {
      hide<!OTHER_BITS>(x);
    }
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) x[e] = ptx::ex2(x[e]);
  }

  // Sets the signs of weights that dropout drops.
  template <int EARLY>
  using Random = RandomBits<true, FRAGMENT, HAS_DROPOUT ? EARLY : 0>;
  template <bool HELD, int EARLY>
  DEVICE void draw_ahead(RandomBits<true, FRAGMENT, EARLY>& bits) const {
    if constexpr (HAS_DROPOUT && EARLY > 0) bits.template draw_ahead<HELD>(Dropout(p, s, head), key, row);
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
  template <bool BITS>
  DEVICE void hide(float (&x)[FRAGMENT]) const {
    const Mask mask(p, s, head);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int j = key + 8 * r;
      const Mask::Range range = mask.rows(j);
      const int begin = range.begin - row, end = range.end - row;
#pragma unroll
      for (int e = 0; e < FRAGMENT; e++) {
        if (row_offset(e) != 8 * r) continue;
        const int i = column_offset(e);
        bool hidden = (HAS_WINDOW && i < begin) || i >= end;
        if constexpr (HAS_MASK && BITS) hidden |= !mask.in_mask(row + i, j);
        x[e] = hidden ? -infinity() : x[e];
      }
    }
  }
};

// From the gradient of its weight, dp. A dropped weight has its sign bit set. IN_UNITS: the result and delta are
// divided by p.ds_unit.
template <bool IN_UNITS = false>
DEVICE float score_gradient(const AttentionParams& p, float dp, float weight, float delta) {
  if constexpr (HAS_DROPOUT) {
    // The sum is a kept weight twice, without a selection, which takes as long as two sums.
    const float kept = weight + fabsf(weight), unit = IN_UNITS ? 1 : static_cast<float>(p.ds_unit);
    return __fmaf_rn(kept, dp * unit, -delta * fabsf(weight));
  }
  return weight * (dp - delta);
}

// A hidden element's gradient may be NaN. A step that hides nothing need not test.
DEVICE void clear_hidden(float& ds, float weight) { ds = weight == 0 ? 0 : ds; }
template <int N>
DEVICE void clear_hidden(float (&ds)[N], const float (&weights)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) clear_hidden(ds[e], weights[e]);
}

// Weights as a left factor, 0 where dropped.
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
