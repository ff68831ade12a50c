// This header has scales of single keys and values in Hopper's forward kernel on 16 bits over e4m3 codes. Products are
// multiplied by the scale of their key, and weights by that of their value. Such weights may be far from 1, so they
// stand in a unit of their row: the row's largest so far, which is exact then.
#include "../../around/scales.cuh"
#include "../../fragment/softmax_fragment.cuh"
#include "../pipeline.cuh"

// TokenScales are the scales of a tile of keys and of its values, in shared memory.
struct TokenScales {
  static constexpr int KEYS = TOKEN_SCALES ? BLOCK_N : 4;
  alignas(16) float of_keys[KEYS];
  float of_values[KEYS];
};

// ScaleStorage is a ring of them.
struct ScaleStorage {
  TokenScales tiles[STAGES];
  RingBarriers<STAGES> barriers;
};

// scale_columns() multiplies columns of a fragment by `scales` in shared memory; with `keeps_zeros` a 0 stays 0,
// whatever the scale is.
template <int N>
DEVICE void scale_columns(float (&x)[N], const float* scales, bool keeps_zeros) {
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    const float2 pair = *reinterpret_cast<const float2*>(scales + fragment_column() + column_offset(e));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scaled = x[e + i] * (i % 2 == 0 ? pair.x : pair.y);
      x[e + i] = keeps_zeros && x[e + i] == 0 ? 0 : scaled;
    }
  }
}

// RowUnits are the units of the weights of a thread's two rows, against the rows' references.
template <bool ANY>
struct RowUnits {
  float of_rows[2] = {0, 0};

  // take() brings scaled weights to their rows' units, which may grow with them. The references have moved by
  // `rescale` if they have `grown`; it returns whether sums so far must be multiplied by `rescale`, which it sets.
  template <int N>
  DEVICE bool take(float (&weights)[N], float (&rescale)[2], bool grown) {
    float top[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < N; e++) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], fabsf(weights[e]));
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(ALL_LANES, top[r], step));
      const float before = grown ? of_rows[r] * rescale[r] : of_rows[r];
      of_rows[r] = fmaxf(before, top[r]);
      inverse[r] = of_rows[r] > 0 ? 1 / of_rows[r] : 0;
      rescale[r] = before * inverse[r];
    }
    rescale_rows(weights, inverse);
    return rescale[0] != 1 || rescale[1] != 1;
  }

  // apply() multiplies the factors of results.
  DEVICE void apply(float (&inverse)[2]) const {
    inverse[0] *= of_rows[0];
    inverse[1] *= of_rows[1];
  }
};
template <>
struct RowUnits<false> {
  template <int N>
  DEVICE bool take(float (&)[N], float (&)[2], bool grown) {
    return grown;
  }
  DEVICE void apply(float (&)[2]) const {}
};
