// Partial results of one attention become its result in one launch: merge_parts merges outs and lses over disjoint keys
// (Dao et al. 2022, section 3.1), sum_parts adds up shares of a gradient. Parts are in `Accum` and may each have some
// of the rows only; a part is read where it has a row. The order of the parts is the order of every sum, so that
// results repeat their bits. A warp has 32 rows of one head: first each lane finds the weights of the parts of one row,
// as lses of neighbouring rows lie side by side; then all lanes add up the columns of one row after the other. The host
// writes `Accum` and `Result`, the type of the result, in front of this text (cuflash/gpu/parts.py).

using i64 = long long;
constexpr int AT_ONCE = 4;       // columns that a lane loads at a time
constexpr int ROWS_AT_ONCE = 4;  // rows whose columns are under way at a time
constexpr int WARPS = THREADS / WARP;

struct PartialResult {
  const Accum* x;    // (batch, rows, heads, columns), contiguous
  const Accum* lse;  // (batch, heads, rows), contiguous; null of gradients
  i64 first_row, rows;
};
struct AllParts {
  PartialResult of[MAX_PARTS];
};
struct MergeParams {
#include "MergeParams.members"
};
#ifndef OFFSET_OF
#define OFFSET_OF(type, member) (unsigned long long)(__INTADDR__(&((type*)0)->member))
#endif
#include "MergeParams.layout"

DEVICE Accum infinity() { return __int_as_float(0x7f800000); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
template <class T>
DEVICE T rounded(Accum x) {
  if constexpr (sizeof(T) > 2) return static_cast<T>(x);
  return T(static_cast<float>(x));
}

// OwnRows are the rows of a warp, of which each lane finds the weights of one.
struct OwnRows {
  i64 batch, first;
  int head;
  bool exist;

  DEVICE explicit OwnRows(const MergeParams& p) {
    const i64 index = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    const i64 groups = (p.rows + WARP - 1) / WARP, of_head = index / p.heads;
    head = static_cast<int>(index - of_head * p.heads);
    batch = of_head / groups;
    first = (of_head - batch * groups) * WARP;
    exist = batch < p.batch;
  }
  // lse_at() is the place of a row in an lse (batch, heads, rows).
  DEVICE i64 lse_at(const MergeParams& p, i64 rows, i64 row) const { return (batch * p.heads + head) * rows + row; }
  // at() is the place of a row in an array (batch, rows, heads, columns).
  DEVICE i64 at(const MergeParams& p, i64 rows, i64 row) const {
    return ((batch * rows + row) * p.heads + head) * p.columns;
  }
};

// Weights are those of the rows of a warp in each part; 0 leaves a part out, even where it is NaN.
using Weights = Accum[MAX_PARTS][WARP];

DEVICE bool has(const PartialResult& part, i64 row) {
  return row >= part.first_row && row < part.first_row + part.rows;
}

// set_weights() finds the weights of the lane's row by the parts' lses, and returns the lse of all of them.
DEVICE Accum set_weights(const MergeParams& p, const OwnRows& own, Weights& weights) {
  const int lane = threadIdx.x % WARP;
  const i64 row = own.first + lane;
  Accum top = -infinity(), total = 0;
  for (int n = 0; n < p.num_parts; n++) {
    const PartialResult& part = p.parts.of[n];
    Accum lse = -infinity();
    if (row < p.rows && has(part, row)) lse = part.lse[own.lse_at(p, part.rows, row - part.first_row)];
    weights[n][lane] = lse;
    if (lse > top) top = lse;
  }
  if (!(top > -infinity())) top = 0;  // no part saw anything, or only NaN
  for (int n = 0; n < p.num_parts; n++) {
    const Accum lse = weights[n][lane];
    weights[n][lane] = lse == -infinity() ? Accum(0) : exponential(lse - top);
    total += weights[n][lane];
  }
  for (int n = 0; n < p.num_parts; n++) {
    if (weights[n][lane] != 0) weights[n][lane] /= total;
  }
  return top + logarithm(total);
}

// COUNT columns of a lane, which one instruction loads or stores.
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) Columns {
  T of[COUNT];
};

// write_columns() writes some rows as the sums of the parts' rows, each times its weight.
template <int COUNT>
DEVICE void write_columns(const MergeParams& p, const OwnRows& own, const Weights& weights, int begin, int column) {
  Columns<Accum, COUNT> sums[ROWS_AT_ONCE] = {};
  for (int n = 0; n < p.num_parts; n++) {
    const PartialResult& part = p.parts.of[n];
    const Accum* x = part.x + own.at(p, part.rows, own.first + begin - part.first_row) + column;
    const i64 stride = static_cast<i64>(p.heads) * p.columns;
    Columns<Accum, COUNT> loaded[ROWS_AT_ONCE] = {};
    Accum weight[ROWS_AT_ONCE];
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
      weight[r] = weights[n][begin + r];
      if (weight[r] != 0) loaded[r] = *reinterpret_cast<const Columns<Accum, COUNT>*>(x + r * stride);
    }
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) sums[r].of[i] += weight[r] * loaded[r].of[i];
    }
  }
  Result* result = static_cast<Result*>(p.result) + column;
#pragma unroll
  for (int r = 0; r < ROWS_AT_ONCE; r++) {
    const i64 row = own.first + begin + r;
    if (row >= p.rows) break;
    Columns<Result, COUNT> written;
#pragma unroll
    for (int i = 0; i < COUNT; i++) written.of[i] = rounded<Result>(sums[r].of[i]);
    *reinterpret_cast<Columns<Result, COUNT>*>(result + own.at(p, p.rows, row)) = written;
  }
}

template <int COUNT>
DEVICE void write_rows(const MergeParams& p, const OwnRows& own, const Weights& weights) {
  for (int begin = 0; begin < WARP && own.first + begin < p.rows; begin += ROWS_AT_ONCE) {
    for (int column = threadIdx.x % WARP * COUNT; column < p.columns; column += COUNT * WARP) {
      write_columns<COUNT>(p, own, weights, begin, column);
    }
  }
}
DEVICE void write_sums(const MergeParams& p, const OwnRows& own, const Weights& weights) {
  __syncwarp();
  // Arrays begin at multiples of 16 bytes, and so do rows of such numbers of columns.
  if (p.columns % AT_ONCE == 0) {
    write_rows<AT_ONCE>(p, own, weights);
  } else {
    write_rows<1>(p, own, weights);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_parts(const MergeParams p) {
  __shared__ Weights weights[WARPS];
  const OwnRows own(p);
  if (!own.exist) return;
  Weights& its = weights[threadIdx.x / WARP];
  const Accum lse = set_weights(p, own, its);
  const i64 row = own.first + threadIdx.x % WARP;
  if (row < p.rows) p.lse[own.lse_at(p, p.rows, row)] = lse;
  write_sums(p, own, its);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(const MergeParams p) {
  __shared__ Weights weights[WARPS];
  const OwnRows own(p);
  if (!own.exist) return;
  Weights& its = weights[threadIdx.x / WARP];
  const int lane = threadIdx.x % WARP;
  for (int n = 0; n < p.num_parts; n++)
    its[n][lane] = own.first + lane < p.rows && has(p.parts.of[n], own.first + lane);
  write_sums(p, own, its);
}
