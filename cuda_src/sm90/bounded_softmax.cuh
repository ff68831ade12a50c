// The softmax of scores that softcap bounds: their powers and sums of them stay finite as they are, and 16 bits of
// bfloat16 hold them as exactly as any others. So no maximum is looked for, and nothing is ever rescaled.
#pragma once
#include "../softmax_fragment.cuh"

// With functions of FragmentSoftmax's names; the reference of every row is 0.
struct BoundedSoftmax {
  // The unit for tanh and powers is left to powers: below SMALL tanh is x (LINEAR + CUBIC x^2), within 2^-11 of itself
  // as the instruction is.
  static constexpr float SMALL = 0.4f, LINEAR = 0.99960174f, CUBIC = -0.31317269f;
  float factor;         // from a product to tanh's argument
  float power;          // and from tanh to the power of 2
  float small;          // the square of the largest product that is small
  float linear, cubic;  // of small products and of what their squares are more than `small`
  float sum[2] = {0, 0};

  template <class Units>
  __device__ __forceinline__ explicit BoundedSoftmax(const Units& units)
      : factor(units.factor), power(units.unit * LOG2_E), small(fminf(SMALL * SMALL / (factor * factor), 1e30f)) {
    linear = factor * power * (LINEAR + CUBIC * SMALL * SMALL);
    cubic = factor * factor * factor * power * CUBIC;
  }

  __device__ __forceinline__ float more_than_small(float product) const { return fmaf(product, product, -small); }
  __device__ __forceinline__ float of_small(float product, float more) const {
    return product * fmaf(cubic, more, linear);
  }
  __device__ __forceinline__ float of_any(float product) const { return ptx::tanh(product * factor) * power; }

  // Powers of 2 from the products of a masked tile.
  __device__ __forceinline__ void cap(float (&x)[BLOCK_N / 2]) const {
#pragma unroll
    for (float& product : x) product = of_any(product);
  }

  template <bool EVERY>
  __device__ __forceinline__ bool bound(const float (&)[BLOCK_N / 2], const float (&)[2], float (&)[2]) const {
    return false;
  }

  // Weights of masked tiles from powers of 2, of others from products.
  template <int BEGIN, int END>
  __device__ __forceinline__ void weigh(float (&x)[BLOCK_N / 2], const float (&)[2], bool masked) {
    constexpr int AT_ONCE = BLOCK_N > 80 ? 16 : BLOCK_N / 4;  // for more there are no registers
    static_assert((END - BEGIN) % AT_ONCE == 0 && AT_ONCE % 4 == 0, "whole groups");
#pragma unroll
    for (int begin = BEGIN; begin < END; begin += AT_ONCE) {
      float more[AT_ONCE];
      u32 signs = masked ? 0 : ~0u;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        more[i] = more_than_small(x[begin + i]);
        signs &= __float_as_uint(more[i]);
      }
      if (__all_sync(ALL_LANES, signs >> 31 != 0)) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) x[begin + i] = ptx::ex2(of_small(x[begin + i], more[i]));
      } else {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          float& w = x[begin + i];
          const float more = more_than_small(w);  // each as if alone: no row depends on others
          w = ptx::ex2(masked ? w : more < 0 ? of_small(w, more) : of_any(w));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float row_sum = 0;
#pragma unroll
      for (int e = BEGIN + 2 * r; e < END; e += 4) row_sum += x[e] + x[e + 1];
      sum[r] += row_sum;
    }
  }

  // A sink may be far from all scores: it meets their logarithm.
  __device__ __forceinline__ void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float total = reduce_row<4>(sum[r], [](float a, float b) { return a + b; });
      const float seen = total == 0 ? -infinity() : natural_log(total), top = larger(seen, sink);
      const float own = seen == -infinity() ? 0 : exp_2((seen - top) * LOG2_E);
      const float both = own + (sink == -infinity() ? 0 : exp_2((sink - top) * LOG2_E));
      inverse[r] = own == 0 ? 0 : quotient(own, both * total);
      lse[r] = both == 0 ? -infinity() : top + natural_log(both);
    }
  }
};

__device__ __forceinline__ void cap(const FragmentSoftmax&, float (&)[BLOCK_N / 2]) {}
__device__ __forceinline__ void cap(const BoundedSoftmax& softmax, float (&x)[BLOCK_N / 2]) { softmax.cap(x); }

template <bool BOUNDED, class Units>
__device__ __forceinline__ auto softmax_of(const Units& units) {
  if constexpr (BOUNDED) {
    return BoundedSoftmax(units);
  } else {
    return FragmentSoftmax::in_units(units.unit);
  }
}
