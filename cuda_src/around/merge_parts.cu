// Partial results of one attention become its result in one launch: merge_parts merges outs and lses over disjoint keys
// (Dao et al. 2022, section 3.1), sum_parts adds up shares of a gradient. Parts are in `Accum` and may each have some
// of the rows only; a part is read where it has a row. The order of the parts is the order of every sum, so that
// results repeat their bits. One warp computes one (batch, row, head), and each lane has every 32nd column. The host
// writes `Accum` and `Result`, the type of the result, in front of this text (cuflash/gpu/parts.py).

using i64 = long long;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int AT_ONCE = 4;  // columns that a lane sums at a time
static_assert(MAX_PARTS <= WARP, "a lane has the lse of a part");

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

// OwnRow is the (batch, row, head) of a warp.
struct OwnRow {
  i64 batch, row;
  int head;
  bool exists;

  DEVICE explicit OwnRow(const MergeParams& p) {
    const i64 index = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    exists = index < p.batch * p.rows * p.heads;
    head = static_cast<int>(index % p.heads);
    row = index / p.heads % p.rows;
    batch = index / p.heads / p.rows;
  }
  // in() is the row's number in a part; negative where the part has no such row.
  DEVICE i64 in(const PartialResult& part) const {
    const i64 own = row - part.first_row;
    return own < part.rows ? own : -1;
  }
};

// write_sum() writes the row as the sum of the parts' rows, each times weight_of(part); a weight of 0 leaves a part
// out, even where it is NaN.
template <class Weight>
DEVICE void write_sum(const MergeParams& p, const OwnRow& own, Weight weight_of) {
  const int lane = threadIdx.x % WARP;
  auto* result = static_cast<Result*>(p.result) + ((own.batch * p.rows + own.row) * p.heads + own.head) * p.columns;
  for (int first = lane; first - lane < p.columns; first += AT_ONCE * WARP) {
    Accum sum[AT_ONCE] = {};
    for (int part = 0; part < p.num_parts; part++) {
      const PartialResult& from = p.parts.of[part];
      const Accum factor = weight_of(part);
      const i64 row = own.in(from);
      if (factor == 0 || row < 0) continue;
      const Accum* x = from.x + ((own.batch * from.rows + row) * p.heads + own.head) * p.columns;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (first + i * WARP < p.columns) sum[i] += factor * x[first + i * WARP];
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i * WARP < p.columns) result[first + i * WARP] = rounded<Result>(sum[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_parts(const MergeParams p) {
  const OwnRow own(p);
  if (!own.exists) return;
  const int lane = threadIdx.x % WARP;
  Accum own_lse = -infinity();  // the lse of the part whose number is the lane's
  if (lane < p.num_parts) {
    const PartialResult& part = p.parts.of[lane];
    const i64 row = own.in(part);
    if (row >= 0) own_lse = part.lse[(own.batch * p.heads + own.head) * part.rows + row];
  }
  Accum top = own_lse, total;
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
    const Accum other = __shfl_xor_sync(ALL_LANES, top, lanes);
    top = other > top || top != top ? other : top;
  }
  if (!(top > -infinity())) top = 0;  // no part saw anything, or only NaN
  const Accum weight = own_lse == -infinity() ? Accum(0) : exponential(own_lse - top);
  total = weight;
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) total += __shfl_xor_sync(ALL_LANES, total, lanes);
  const Accum normalised = total == 0 ? Accum(0) : weight / total;
  write_sum(p, own, [&](int part) { return __shfl_sync(ALL_LANES, normalised, part); });
  if (lane == 0) p.lse[(own.batch * p.heads + own.head) * p.rows + own.row] = top + logarithm(total);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(const MergeParams p) {
  const OwnRow own(p);
  if (own.exists) write_sum(p, own, [](int) { return Accum(1); });
}
