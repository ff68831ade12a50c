// This header turns a product q.k into a score and finds the score's derivative: scale, softcap (Gemma 2's tanh), bias
// and ALiBi (Press et al. 2022), and the user's own rule, in that order. It works on one element at a time, so every
// family of kernels uses it; kernels for tensor cores have quicker forms of some steps (sm90/forward/scores.cuh).
#include "../params.cuh"
#include "options.cuh"
#include "user.cuh"
#include "../ptx/sm80.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
// QUICK_TANH takes the tanh instruction, whose error is 2^-11, for 16-bit inputs. It is not used together with other
// options, which leave it too few registers.
constexpr bool QUICK_TANH = sizeof(Element) == 2 && NUM_OPTIONS == HAS_SOFTCAP;
#else
constexpr bool QUICK_TANH = false;
#endif

// Score holds what one (sequence, query head) needs to turn products into scores.
struct Score {
  Accum scale, softcap, slope;
  const BiasElement* bias;  // (seqlen_q, seqlen_k) at this (batch, head); a broadcast axis has stride 0
  i64 bias_row_stride, bias_column_stride;
  int bias_last_row, bias_last_column;
  int diagonal;
  int first_q, first_k, stride;  // positions of a part (HAS_PLACE): row i is the whole's first_q + i * stride
  RuleIf<HAS_SCORE_MOD> user;

  DEVICE Score(const AttentionParams& p, const Sequence& s, int head) : user(p, s, head) {
    scale = static_cast<Accum>(p.softmax_scale);
    softcap = static_cast<Accum>(p.softcap);
    diagonal = s.diagonal();
    if constexpr (HAS_PLACE) {
      first_q = p.place_first_q + p.place_diagonal;
      first_k = p.place_first_k;
      stride = p.place_stride;
    }
    // Rows outside every sequence have no slope, and without sequences there is no array of slopes to read.
    if constexpr (HAS_ALIBI) slope = s.batch < 0 ? Accum(0) : p.alibi_slopes[s.batch * p.alibi_batch_stride + head];
    if constexpr (HAS_BIAS) {
      bias = p.bias.data + s.batch_or_0() * p.bias.batch_stride + head * p.bias.head_stride;
      bias_row_stride = p.bias.row_stride;
      bias_column_stride = p.bias.column_stride;
      bias_last_row = static_cast<int>(p.bias.num_rows - 1);
      bias_last_column = static_cast<int>(p.bias.num_columns - 1);
    }
  }

  // capped() is tanh(scale * product / softcap): the score in units of softcap.
  DEVICE Accum capped(Accum product) const {
    if constexpr (QUICK_TANH) return ptx::tanh(static_cast<float>(product * (scale / softcap)));
    return tanh_of(product * scale / softcap);
  }

  // derivative() is d(score) / d(scale * q.k).
  DEVICE Accum derivative(Accum product) const {
    if constexpr (HAS_SOFTCAP) {
      const Accum t = capped(product);
      return 1 - t * t;
    }
    return 1;
  }

  // distance() is how far key j is from the diagonal of query i, which ALiBi multiplies by its slope.
  DEVICE Accum distance(int i, int j) const {
    const int d = HAS_PLACE ? first_q - first_k + (i - j) * stride : i + diagonal - j;
    return static_cast<Accum>(d < 0 ? -d : d);
  }

  // bias_at() is the bias of element (i, j).
  DEVICE Accum bias_at(int i, int j) const {
    return to_accum(
        bias[smaller(i, bias_last_row) * bias_row_stride + smaller(j, bias_last_column) * bias_column_stride]);
  }

  // value() is the score of element (i, j), which must lie inside its sequence. `own_bias` is the bias where it was
  // read already; null makes this function read it. STRICT: a bias of -inf hides the element even where the product is
  // NaN; otherwise the result is NaN where the product is.
  template <bool STRICT = true>
  DEVICE Accum value(Accum product, int i, int j, const Accum* own_bias = nullptr) const {
    // Without a rule the value is returned as it is: a variable that holds it costs registers, of which the largest
    // tiles have none left.
    if constexpr (!HAS_SCORE_MOD) return before_rule<STRICT>(product, i, j, own_bias);
    const Accum s = before_rule<STRICT>(product, i, j, own_bias);
    if constexpr (HAS_BIAS) {
      if ((own_bias == nullptr ? bias_at(i, j) : *own_bias) == -infinity()) return -infinity();
    }
    return user.value(s, i, j);
  }

  // may_be_seen() tells whether bias and rule leave element (i, j) of a key that is not finite, whose product is NaN.
  DEVICE bool may_be_seen(int i, int j) const {
    return value(HAS_SCORE_MOD ? infinity() - infinity() : Accum(0), i, j) != -infinity();
  }

  // before_rule() is the score that the user's own rule is given.
  template <bool STRICT = true>
  DEVICE Accum before_rule(Accum product, int i, int j, const Accum* own_bias = nullptr) const {
    Accum s = product * scale;
    if constexpr (HAS_SOFTCAP) s = softcap * capped(product);
    if constexpr (HAS_BIAS) {
      const Accum b = own_bias == nullptr ? bias_at(i, j) : *own_bias;
      s = STRICT && b == -infinity() ? b : s + b;
    }
    if constexpr (HAS_ALIBI) s -= slope * distance(i, j);
    return s;
  }
};
