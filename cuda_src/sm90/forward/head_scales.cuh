// This header has the scales of e4m3 keys and values in Hopper's forward kernel on 16 bits, where all rows of a head
// share one: products of queries and keys are multiplied by that of the keys, and results by that of the values.
#include "../../around/scales.cuh"
#include "../../fragment/fragment.cuh"

// HeadScales are those of one (sequence, KV head). Plain scores take the scale of keys with the scale of the softmax.
template <bool HAS_CODES>
struct HeadScales {
  float scale;       // of the softmax
  float factor = 1;  // of products

  DEVICE HeadScales(const AttentionParams& p, const Sequence& s, int head_kv, float softmax_scale)
      : scale(softmax_scale) {
    if (s.len_k == 0) return;  // the scale is nobody's, and may be any number
    factor = scale_at(p.k_scale, batch(p, s), 0, head_kv);
    const float both = scale * factor;
    if (PLAIN_SCORES && is_usual(both)) scale = both, factor = 1;
  }

  template <int N>
  DEVICE void apply(float (&x)[N]) const {
    if (factor == 1) return;
#pragma unroll
    for (float& score : x) score *= factor;
  }

  // apply_to_values() multiplies the factors of results; that of a row without keys stays 0.
  static DEVICE void apply_to_values(const AttentionParams& p, const Sequence& s, int head_kv, float (&inverse)[2]) {
    if (s.len_k == 0) return;
    const float of_values = scale_at(p.v_scale, batch(p, s), 0, head_kv);
    if (inverse[0] != 0) inverse[0] *= of_values;
    if (inverse[1] != 0) inverse[1] *= of_values;
  }

 private:
  static DEVICE i64 batch(const AttentionParams& p, const Sequence& s) { return HAS_PAGES ? 0 : batch_of(p, s); }
};
template <>
struct HeadScales<false> {
  float scale;
  DEVICE HeadScales(const AttentionParams&, const Sequence&, int, float softmax_scale) : scale(softmax_scale) {}
  template <int N>
  DEVICE void apply(float (&)[N]) const {}
  static DEVICE void apply_to_values(const AttentionParams&, const Sequence&, int, float (&)[2]) {}
};

// OwnScales are what a consumer needs where codes are multiplied as elements.
using OwnScales = HeadScales<HAS_FP8 && !TOKEN_SCALES>;
