// From q.k to the score of an element, and back.
#include "../params.cuh"
#include "../ptx/sm80.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
// With an error of 2^-11. Beside other options it spills.
constexpr bool QUICK_TANH =
    sizeof(Element) == 2 && !(HAS_BIAS || HAS_MASK || HAS_ALIBI || HAS_DROPOUT || HAS_BLOCK_MASK);
#else
constexpr bool QUICK_TANH = false;
#endif

// Of one (sequence, query head).
struct Score {
  Accum scale, softcap, slope;
  const BiasElement* bias;  // at (batch, head)
  i64 bias_row_stride, bias_column_stride;
  int bias_last_row, bias_last_column;
  int diagonal;

  DEVICE Score(const AttentionParams& p, const Sequence& s, int head) {
    scale = static_cast<Accum>(p.softmax_scale);
    softcap = static_cast<Accum>(p.softcap);
    diagonal = s.diagonal();
    // Rows outside every sequence have no slopes, and without sequences there is no array of them.
    if constexpr (HAS_ALIBI) slope = s.batch < 0 ? Accum(0) : p.alibi_slopes[s.batch * p.alibi_batch_stride + head];
    if constexpr (HAS_BIAS) {
      bias = p.bias.data + s.batch_or_0() * p.bias.batch_stride + head * p.bias.head_stride;
      bias_row_stride = p.bias.row_stride;
      bias_column_stride = p.bias.column_stride;
      bias_last_row = static_cast<int>(p.bias.num_rows - 1);
      bias_last_column = static_cast<int>(p.bias.num_columns - 1);
    }
  }

  DEVICE Accum capped(Accum product) const {
    if constexpr (QUICK_TANH) return ptx::tanh(static_cast<float>(product * (scale / softcap)));
    return tanh_of(product * scale / softcap);
  }

  // d(score) / d(scale * q.k).
  DEVICE Accum derivative(Accum product) const {
    if constexpr (HAS_SOFTCAP) {
      const Accum t = capped(product);
      return 1 - t * t;
    }
    return 1;
  }

  DEVICE Accum distance(int i, int j) const {
    const int d = i + diagonal - j;
    return static_cast<Accum>(d < 0 ? -d : d);
  }

  DEVICE Accum bias_at(int i, int j) const {
    return to_accum(
        bias[smaller(i, bias_last_row) * bias_row_stride + smaller(j, bias_last_column) * bias_column_stride]);
  }

  // Element (i, j) must lie inside its sequence. A bias of -inf hides, also where the product is NaN; one that is
  // not read yet is null. Else (not STRICT) the result is NaN where that is.
  template <bool STRICT = true>
  DEVICE Accum value(Accum product, int i, int j, const Accum* own_bias = nullptr) const {
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

// Of N products; without softcap it takes no registers.
template <int N>
struct SoftcapDerivative {
  Accum x[HAS_SOFTCAP ? N : 1];

  DEVICE void take(const Score& score, const Accum (&products)[N]) {
    if constexpr (HAS_SOFTCAP) {
#pragma unroll
      for (int e = 0; e < N; e++) x[e] = score.derivative(products[e]);
    }
  }
  // A hidden element has ds = 0, and its derivative may be NaN.
  DEVICE void apply(Accum (&ds)[N]) const {
    if constexpr (HAS_SOFTCAP) {
#pragma unroll
      for (int e = 0; e < N; e++) ds[e] = ds[e] == 0 ? Accum(0) : ds[e] * x[e];
    }
  }
};
