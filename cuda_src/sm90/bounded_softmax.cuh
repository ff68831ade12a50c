// The softmax of scores that softcap bounds: their powers and sums of them stay finite as they are, and 16 bits of
// bfloat16 hold them as exactly as any others. So no maximum is looked for, and nothing is ever rescaled.
#pragma once
#include "../softmax_fragment.cuh"

// With functions of FragmentSoftmax's names; the reference of every row is 0.
struct BoundedSoftmax {
  // The unit for tanh and powers is left to powers: below SMALL tanh is x (1 + CUBIC x^2), within 2^-11 of itself as
  // the instruction is. The smallest are as they are: an error that all have in common would be one of lse.
  static constexpr float SMALL = 0.385f, CUBIC = -0.31775113f;
  float factor;         // from a product to tanh's argument
  float power;          // and from tanh to the power of 2
  float small;          // the largest product that is small
  float linear, cubic;  // of small products
  float sum[2] = {0, 0};

  template <class Units>
  DEVICE explicit BoundedSoftmax(const Units& units)
      : factor(units.factor), power(units.unit * LOG2_E), small(fminf(SMALL / fabsf(factor), 1e18f)) {
    linear = factor * power;
    cubic = factor * factor * factor * power * CUBIC;
  }

  DEVICE float of_small(float product) const { return product * fmaf(cubic, product * product, linear); }
  DEVICE float of_any(float product) const { return ptx::tanh(product * factor) * power; }

  // Powers of 2 from the products of a masked tile.
  DEVICE void cap(float (&x)[BLOCK_N / 2]) const {
#pragma unroll
    for (float& product : x) product = of_any(product);
  }

  template <bool EVERY>
  DEVICE bool bound(const float (&)[BLOCK_N / 2], const float (&)[2], float (&)[2]) const {
    return false;
  }

  // Weights of masked tiles from powers of 2, of others from products.
  template <int BEGIN, int END>
  DEVICE void weigh(float (&x)[BLOCK_N / 2], const float (&)[2], bool masked) {
    float top = 0;
#pragma unroll
    for (int e = BEGIN; e < END; e++) top = larger(top, fabsf(x[e]));
    if (!masked && __all_sync(ALL_LANES, top <= small)) {
#pragma unroll
      for (int e = BEGIN; e < END; e++) x[e] = ptx::ex2(of_small(x[e]));
    } else {
#pragma unroll
      for (int e = BEGIN; e < END; e++) {  // each as if alone: no row depends on others
        x[e] = ptx::ex2(masked ? x[e] : fabsf(x[e]) <= small ? of_small(x[e]) : of_any(x[e]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float row_sum = 0;
#pragma unroll
      for (int e = BEGIN + 2 * r; e < END; e += 4) {
        row_sum += x[e];
        row_sum += x[e + 1];
      }
      sum[r] += row_sum;
    }
  }

  // A sink may be far from all scores: it meets their logarithm.
  DEVICE void finish(float sink, float (&inverse)[2], float (&lse)[2]) const {
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

DEVICE void cap(const FragmentSoftmax&, float (&)[BLOCK_N / 2]) {}
DEVICE void cap(const BoundedSoftmax& softmax, float (&x)[BLOCK_N / 2]) { softmax.cap(x); }

template <bool BOUNDED, class Units>
DEVICE auto softmax_of(const Units& units) {
  if constexpr (BOUNDED) {
    return BoundedSoftmax(units);
  } else {
    return FragmentSoftmax::in_units(units.unit);
  }
}
