// This header has the arithmetic with the factors of split rows (split/layout.cuh) on a warp's fragments: products of
// parts become products of rows, and weights are scaled into float16's range before they are split as well.
// split/sm90_forward.cu, split/sm90_backward.cu and split/sm80_tile.cuh use it.
#include "../fragment/fragment.cuh"
#include "../fragment/softmax.cuh"

constexpr u32 EXPONENT_BITS = 0x7f800000;
constexpr float TOP = 16384;              // 2^14: the largest element of a row of halves lies in [TOP, 2 TOP)
constexpr float LOWEST_UNIT = 0x1p-112f;  // the lowest unit whose inverse times TOP is finite
constexpr float SMALLEST_NORMAL = 0x1p-126f;

// power_of_2_below() is the largest power of two that is not above x: the exponent alone is kept.
DEVICE float power_of_2_below(float x) { return __uint_as_float(__float_as_uint(x) & EXPONENT_BITS); }

// top_over() is TOP / unit for a power of two: the exponents are subtracted.
DEVICE float top_over(float unit) {
  return __uint_as_float(__float_as_uint(TOP) + __float_as_uint(1.0f) - __float_as_uint(unit));
}

// multiply_columns() multiplies each column of x by its factor, which lies in shared memory (columns,), and by
// `constant`. Subnormals are kept.
template <int N>
DEVICE void multiply_columns(float (&x)[N], const float* factors, float constant) {
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    float2 factor = *reinterpret_cast<const float2*>(factors + fragment_column() + column_offset(e));
    factor.x *= constant;
    factor.y *= constant;
    x[e] = ptx::multiply(x[e], factor.x);
    x[e + 1] = ptx::multiply(x[e + 1], factor.y);
    x[e + 2] = ptx::multiply(x[e + 2], factor.x);
    x[e + 3] = ptx::multiply(x[e + 3], factor.y);
  }
}

// normalize_rows() puts the largest element of each row near TOP, so that float16 parts hold the row: x becomes x * TOP
// / unit. unit[r], a power of two, is that of all that was added up for row r so far; those sums must first be
// multiplied by rescale[r]. On return rescale[r] also has the ratio of the units. Units depend on elements that are not
// 0 alone.
template <int N>
DEVICE void normalize_rows(float (&x)[N], float (&unit)[2], float (&rescale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float m = 0;
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) m = larger(m, larger(fabsf(x[e]), fabsf(x[e + 1])));
    m = max_of_row<4>(m);
    const float earlier = rescale[r] * unit[r];
    unit[r] = larger(larger(power_of_2_below(m), power_of_2_below(earlier)), LOWEST_UNIT);
    const float up = top_over(unit[r]);
    rescale[r] = earlier * up * (1 / TOP);
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
      x[e] = ptx::multiply(x[e], up);
      x[e + 1] = ptx::multiply(x[e + 1], up);
    }
  }
}

// ScoreFactors turns products of split operands into products of rows. Plain scores leave the part of the rows to the
// scale.
struct ScoreFactors {
  // Rows smaller than SMALL may meet others so large that the product with their factors alone overflows; RELIEF scales
  // such products down first.
  static constexpr float SMALL = 0x1p-34f, RELIEF = 0x1p-60f;
  float of_row[2];  // the factors of the thread's two rows, divided by RELIEF where they are small
  bool small[2];

  DEVICE ScoreFactors(float row_0, float row_1)
      : of_row{row_0 < SMALL ? row_0 / RELIEF : row_0, row_1 < SMALL ? row_1 / RELIEF : row_1},
        small{row_0 < SMALL, row_1 < SMALL} {}

  template <int N>
  DEVICE void apply(float (&x)[N], const float* column_factors, bool with_rows) const {
    if (__any_sync(ALL_LANES, small[0] || small[1])) {
#pragma unroll
      for (int e = 0; e < N; e++) x[e] *= small[e / 2 % 2] ? RELIEF : 1;
    }
    multiply_columns(x, column_factors, 1);
    if (!with_rows) return;
#pragma unroll
    for (int e = 0; e < N; e++) x[e] *= of_row[e / 2 % 2];
  }
  DEVICE float to_natural(float scale, int r) const { return PLAIN_SCORES ? of_row[r] * scale : 1; }
};

// SplitFragment is a fragment of N columns as the left factor of a product, in one part or two.
template <int N>
struct SplitFragment {
  u32 high[N / 4], low[N / 4];

  DEVICE void set(const float (&x)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      high[i] = *reinterpret_cast<const u32*>(&pair);
      if constexpr (PARTS == 2) {
        const float2 kept = __half22float2(pair);
        low[i] = packed(__half(), x[2 * i] - kept.x, x[2 * i + 1] - kept.y);
      }
    }
  }
};
