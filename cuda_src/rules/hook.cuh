// This header is where every kernel meets the rules for scores: apply() turns products into scores, hide() makes those
// that may not be seen -inf, and ScoreDerivatives leads gradients of scores back to those of products. A kernel says
// where its elements stand by a place: place.query(e) and place.key(e) are the query and the key of element e, whether
// queries are the rows of a tile or its columns (fragment/place.cuh, portable/tile.cuh).
#include "mask.cuh"
#include "score.cuh"

namespace rules {
// apply() turns products into scores; `biases` are the biases of the elements where they were read already, or null.
// STRICT is that of Score::value.
template <bool STRICT = true, int N, class Place>
DEVICE void apply(Accum (&x)[N], const Score& score, const Place& place, const Accum* biases = nullptr) {
#pragma unroll
  for (int e = 0; e < N; e++) {
    const Accum* own_bias = biases == nullptr ? nullptr : biases + e;
    x[e] = score.value<STRICT>(x[e], place.query(e), place.key(e), own_bias);
  }
}

// hide() makes the scores -inf of which is_hidden(e) is true.
template <int N, class IsHidden>
DEVICE void hide(Accum (&x)[N], IsHidden is_hidden) {
#pragma unroll
  for (int e = 0; e < N; e++) x[e] = is_hidden(e) ? -infinity() : x[e];
}

// hide_by_rules() makes the scores -inf that rules hide which are asked element by element.
template <int N, class Place>
DEVICE void hide_by_rules(Accum (&x)[N], const Mask& mask, const Place& place) {
  if constexpr (ASKS_ELEMENTS) {
    hide(x, [&](int e) { return !mask.in_rules(place.query(e), place.key(e)); });
  }
}

// Derivative holds a derivative at N products or scores; where it is not IN_USE it takes no registers.
template <int N, bool IN_USE>
struct Derivative {
  Accum x[IN_USE ? N : 1];

  // apply() multiplies gradients. A hidden element has ds = 0, and its derivative may be NaN.
  DEVICE void apply(Accum (&ds)[N]) const {
    if constexpr (IN_USE) {
#pragma unroll
      for (int e = 0; e < N; e++) ds[e] = ds[e] == 0 ? Accum(0) : ds[e] * x[e];
    }
  }
};

// ScoreDerivatives holds the derivatives of N scores: that of the user's own rule, by the score that the rule is given,
// and that of the softcap, by the product times the scale. TOGETHER: they are one factor where a kernel has both.
template <int N, bool TOGETHER = false>
struct ScoreDerivatives {
  Derivative<N, HAS_SCORE_MOD> of_rule;
  Derivative<N, HAS_SOFTCAP && !(TOGETHER && HAS_SCORE_MOD)> of_softcap;

  // take_cap() finds the softcap's derivatives, take_rule() the rule's (with the softcap's where they are one), and
  // take() all of them, before the products become scores.
  DEVICE void take_cap(const Score& score, const Accum (&products)[N]) {
    if constexpr (HAS_SOFTCAP && !(TOGETHER && HAS_SCORE_MOD)) {
#pragma unroll
      for (int e = 0; e < N; e++) of_softcap.x[e] = score.derivative(products[e]);
    }
  }
  template <class Place>
  DEVICE void take(const Score& score, const Accum (&products)[N], const Place& place) {
    take_cap(score, products);
    take_rule(score, products, place);
  }
  template <class Place>
  DEVICE void take_rule(const Score& score, const Accum (&products)[N], const Place& place) {
    if constexpr (HAS_SCORE_MOD) {
#pragma unroll
      for (int e = 0; e < N; e++) {
        const int i = place.query(e), j = place.key(e);
        of_rule.x[e] = score.user.derivative(score.before_rule(products[e], i, j), i, j);
      }
#pragma unroll
      for (int e = 0; TOGETHER && HAS_SOFTCAP && e < N; e++) of_rule.x[e] *= score.derivative(products[e]);
    }
  }
  // differentiate_rule() turns gradients of scores into those of the scores that the rule was given, to which a bias
  // and ALiBi were added; differentiate_cap() turns these into gradients of products times the scale.
  DEVICE void differentiate_rule(Accum (&ds)[N]) const { of_rule.apply(ds); }
  DEVICE void differentiate_cap(Accum (&ds)[N]) const { of_softcap.apply(ds); }
  DEVICE void differentiate(Accum (&ds)[N]) const {
    differentiate_rule(ds);
    differentiate_cap(ds);
  }
};
}  // namespace rules
