// This header has the fast path of the softcap in Hopper's backward kernels, with few registers. A score's weight tells
// its tanh again, so nothing has to be kept for the derivative. A bias may swallow the score in the sum; there the
// derivative is kept.
#include "../../fragment/gradient_fragment.cuh"
#include "../wgmma.cuh"

// TAKES_SOFTCAP: softcap is applied here. With the user's own rule, whose derivative no weight tells, to_weights()
// does it, and Derivatives keeps both derivatives.
constexpr bool TAKES_SOFTCAP = HAS_SOFTCAP && !HAS_SCORE_MOD;
constexpr bool KEEPS_DERIVATIVE = TAKES_SOFTCAP && HAS_BIAS;

// quotient() is within two units in the last place where dk or dv leave few registers: a division's slow path takes
// some.
DEVICE float quotient(float a, float b) {
  if constexpr (HEAD_DIM > 128) return __fdividef(a, b);
  return a / b;
}

// GIVES_SCORES: products are scores, in units of unit_of(), before they become weights.
constexpr bool GIVES_SCORES = HAS_BIAS_TILES || TAKES_SOFTCAP;
DEVICE float unit_of(const GradientFragment& scores) {
  return HAS_SOFTCAP ? static_cast<float>(scores.p.softcap) : scores.scale;
}
// HOLDS_PLACES: the compiler would hold random bits or ALiBi's distances from the scores to their gradients.
constexpr bool HOLDS_PLACES = HAS_SOFTCAP || HAS_DROPOUT;

// CappedAlibi is what ALiBi subtracts from scores whose unit is softcap.
struct CappedAlibi {
  float slope, distance;  // the distance is that of the thread's first element

  DEVICE explicit CappedAlibi(const GradientFragment& scores) : slope(0), distance(0) {
    if constexpr (HAS_ALIBI) {
      const Score score = scores.score();
      slope = quotient(score.slope, score.softcap);
      distance = static_cast<float>(scores.row + score.diagonal - scores.key);
    }
  }
  DEVICE float operator[](int e) const {
    return slope * fabsf(distance + static_cast<float>(column_offset(e) - row_offset(e)));
  }
};

// SoftcapFactors holds the derivatives of a thread's elements in 16 bits each: in registers or, for the widest heads,
// in vectors of the thread's own in shared memory.
constexpr bool SHARED_FACTORS = KEEPS_DERIVATIVE && HEAD_DIM_V > 192;
template <bool SHARED = SHARED_FACTORS>
struct SoftcapFactors {
  u32 words[KEEPS_DERIVATIVE ? FRAGMENT / 2 : 1];

  DEVICE explicit SoftcapFactors(void*) {}
  DEVICE u32& operator[](int i) { return words[i]; }
};
template <>
struct SoftcapFactors<true> {
  u32* words;  // the thread's first vector; a warp's vectors lie side by side

  DEVICE explicit SoftcapFactors(void* first) : words(static_cast<u32*>(first)) {}
  DEVICE u32& operator[](int i) { return words[i / 4 * WARP * 4 + i % 4]; }
};

// apply_softcap() turns products into scores whose unit is softcap, with the error of the forward pass
// (forward/scores.cuh). A bias that is read element by element is added here, too, and ALiBi is left for later.
template <class Factors>
DEVICE void apply_softcap(float (&x)[FRAGMENT], const GradientFragment& scores, Factors& factors) {
  if constexpr (KEEPS_DERIVATIVE) {
    const Score score = scores.score();
    const float factor = quotient(scores.scale, score.softcap);
    u32 row = scores.row, key = scores.key;
    ptx::forget(row);  // the compiler would otherwise hold what follows from row and key
    ptx::forget(key);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e += 2) {
      float derivative[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float& own = x[e + i];
        own = ptx::tanh(own * factor);
        derivative[i] = 1 - fminf(own * own, 1);
        if constexpr (!HAS_BIAS_TILES) {
          const float bias =
              score.bias_at(static_cast<int>(row) + column_offset(e + i), static_cast<int>(key) + row_offset(e + i));
          own = bias == -infinity() ? bias : own * score.softcap + bias;
        }
      }
      factors[e / 2] = packed(Element(), derivative[0], derivative[1]);
    }
  } else if constexpr (TAKES_SOFTCAP) {
    const CappedAlibi alibi(scores);
    const float factor = quotient(scores.scale, unit_of(scores));
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      x[e] = ptx::tanh(x[e] * factor);
      if constexpr (HAS_ALIBI) x[e] -= alibi[e];
    }
  }
}

// cap_gradient() multiplies N gradients, those from element `first` on, by softcap's derivative, which their weights
// tell.
template <class Values, int N>
DEVICE void cap_gradient(float (&ds)[FRAGMENT], const float (&weights)[N], int first, const Values& lse,
                         const GradientFragment& scores) {
  const CappedAlibi alibi(scores);
  const float unit = quotient(1, unit_of(scores) * LOG2_E);
#pragma unroll
  for (int e = 0; e < N; e++) {
    float tanh = (ptx::lg2(fabsf(weights[e])) + lse[first + e]) * unit;
    if constexpr (HAS_ALIBI) tanh += alibi[first + e];
    ds[first + e] *= 1 - fminf(tanh * tanh, 1);
  }
}

// apply_softcap_gradient() turns gradients of scores into those of products. A weight of 0 has no gradient.
template <class Values, class Factors>
DEVICE void apply_softcap_gradient(float (&ds)[FRAGMENT], const float (&weights)[FRAGMENT], const Values& lse,
                                   const GradientFragment& scores, Factors& factors) {
  if constexpr (KEEPS_DERIVATIVE) {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e += 2) {
      const float2 factor = unpacked(Element(), factors[e / 2]);
      ds[e] *= factor.x;
      ds[e + 1] *= factor.y;
    }
  } else if constexpr (TAKES_SOFTCAP) {
    cap_gradient(ds, weights, 0, lse, scores);
  }
}

// FewDerivatives holds the derivatives of a thread's scores with few registers: those of the softcap as above, and that
// of the user's own rule.
struct FewDerivatives {
  SoftcapFactors<> factors;
  Derivatives derivatives;

  DEVICE explicit FewDerivatives(void* first) : factors(first) {}

  // take() finds the derivatives, and turns products into scores where GIVES_SCORES is due to the softcap.
  DEVICE void take(float (&x)[FRAGMENT], const GradientFragment& scores) {
    apply_softcap(x, scores, factors);
    if constexpr (HAS_SCORE_MOD) derivatives.take(scores.score(), x, scores.place());
  }
  // differentiate_rule() turns gradients of scores into those of the scores that the rule was given, to which a bias
  // and ALiBi were added; differentiate_cap() turns these into gradients of products.
  DEVICE void differentiate_rule(float (&ds)[FRAGMENT]) const { derivatives.differentiate_rule(ds); }
  template <class Values>
  DEVICE void differentiate_cap(float (&ds)[FRAGMENT], const float (&weights)[FRAGMENT], const Values& lse,
                                const GradientFragment& scores) {
    apply_softcap_gradient(ds, weights, lse, scores, factors);
  }
};
