// merge_splits makes one attention of its splits over disjoint keys (Dao et al. 2022, section 3.1; Flash-Decoding's
// reduction). A warp has one row and a vector of columns a lane, and loads SPLITS_AT_ONCE splits at once; where there
// are more splits, several warps of a thread block have the same row. Sums are those of SPLITS_AT_ONCE splits each,
// added up in order, however many rows there are, so that results repeat their bits. The kernel begins while the one
// that writes the splits ends (programmatic dependent launch).
#include "../fragment/softmax.cuh"
#include "../ptx/sm90.cuh"

constexpr int WARPS = THREADS / WARP;
constexpr int MOST_COLUMNS = ALIGNMENT / sizeof(Accum);  // of a lane's vector

template <class T, int COLUMNS>
struct alignas(COLUMNS * sizeof(T)) Columns {
  T x[COLUMNS];
};

// MergedRow is the row of a warp with the first column of a lane. Its index is one of memory for partial results, whose
// size bounds it.
struct MergedRow {
  int batch, row, head, column;
  bool exists;  // the lane's columns do

  DEVICE MergedRow(const AttentionParams& p, u32 index, int columns_of_lane) {
    const u32 columns_of_warp = WARP * columns_of_lane,
              vectors = (p.head_dim_v + columns_of_warp - 1) / columns_of_warp;
    column = static_cast<int>(index % vectors * columns_of_warp + threadIdx.x % WARP * columns_of_lane);
    index /= vectors;
    head = static_cast<int>(index % p.num_heads_q);
    index /= p.num_heads_q;
    row = static_cast<int>(index % p.seqlen_q);
    batch = static_cast<int>(index / p.seqlen_q);
    exists = batch < p.batch && column < p.head_dim_v;
    if (batch >= p.batch) batch = 0;
  }
};

// warps_of_row() is how many warps have a row's splits, until there are SPLITS_AT_ONCE for each.
DEVICE int warps_of_row(const AttentionParams& p) {
  int warps = 1;
  while (warps < WARPS && warps * SPLITS_AT_ONCE < p.splits) warps *= 2;
  return warps;
}

// RowSplits are the splits of a row: its lane's columns, and the lse of the split that has the lane's number.
template <int COLUMNS>
struct RowSplits {
  const AttentionParams& p;
  MergedRow own;
  Columns<Accum, COLUMNS> outs[SPLITS_AT_ONCE];
  Accum own_lse, top, total;

  DEVICE RowSplits(const AttentionParams& p, u32 index) : p(p), own(p, index, COLUMNS) {}

  DEVICE i64 first_split() const { return static_cast<i64>(own.batch) * p.splits; }
  DEVICE Accum lse_of(int split) const {
    return split < p.splits ? *p.lse_splits.at(first_split() + split, own.row, own.head) : -infinity();
  }
  // load() loads the results of SPLITS_AT_ONCE splits.
  DEVICE void load(int first) {
    const Accum* row = p.out_splits.at(first_split(), own.row, own.head) + own.column;
#pragma unroll
    for (int i = 0; i < SPLITS_AT_ONCE; i++) {
      outs[i] = {};
      if (own.exists && first + i < p.splits)
        outs[i] = *reinterpret_cast<const Columns<Accum, COLUMNS>*>(row + (first + i) * p.out_splits.batch_stride);
    }
  }
  DEVICE void load_lse() { own_lse = lse_of(threadIdx.x % WARP); }
  // find_total() finds the largest lse and the sum of all weights.
  DEVICE void find_total() {
    const int lane = threadIdx.x % WARP;
    top = own_lse;
    for (int split = lane + WARP; split < p.splits; split += WARP) top = larger(top, lse_of(split));
    top = max_of_row<WARP>(top);
    if (top == -infinity()) top = 0;  // no split saw anything, or only NaN, which maxima pass over
    total = weight(own_lse, top);
    for (int split = lane + WARP; split < p.splits; split += WARP) total += weight(lse_of(split), top);
    total = sum_of_row<WARP>(total);
  }
  // weighted() is the sum of the loaded splits, whose first one is `first`, times their weights.
  DEVICE Columns<Accum, COLUMNS> weighted(int first) const {
    const Accum lse = first == 0 ? own_lse : lse_of(first + static_cast<int>(threadIdx.x % SPLITS_AT_ONCE));
    const Accum weights = weight(lse, top);
    Columns<Accum, COLUMNS> sum = {};
#pragma unroll
    for (int i = 0; i < SPLITS_AT_ONCE; i++) {
      const Accum own_weight = __shfl_sync(ALL_LANES, weights, i);
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) sum.x[column] += own_weight * outs[i].x[column];
    }
    return sum;
  }
  // write() writes the row's sum over its splits, if the row exists.
  DEVICE void write(const Columns<Accum, COLUMNS>& sum) const {
    if (!own.exists) return;
    Columns<Element, COLUMNS> result;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++)
      result.x[column] = from_accum<Element>(total == 0 ? Accum(0) : sum.x[column] / total);
    Element* out = p.out.at(own.batch, own.row, own.head) + own.column;
    if (reinterpret_cast<u64>(out) % sizeof(result) == 0) {
      *reinterpret_cast<Columns<Element, COLUMNS>*>(out) = result;
    } else {
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) out[column] = result.x[column];
    }
    if (own.column == 0) *p.lse.at(own.batch, own.row, own.head) = top + log_e(total);
  }
};

// merge_two() merges two rows whose splits a warp loads at once: those of one would be too few to load together.
template <int COLUMNS>
DEVICE void merge_two(const AttentionParams& p) {
  const u32 first = 2 * (blockIdx.x * WARPS + threadIdx.x / WARP);
  RowSplits<COLUMNS> a(p, first), b(p, first + 1);
  ptx::wait_for_kernel_before();
  a.load(0);
  b.load(0);
  a.load_lse();
  b.load_lse();
  a.find_total();
  b.find_total();
  a.write(a.weighted(0));
  b.write(b.weighted(0));
}

// merge_one() merges a row by one warp or by several; `sums` are those of the warps, of which each lane has its
// columns.
template <int COLUMNS>
DEVICE void merge_one(const AttentionParams& p, Accum (&sums)[WARPS][WARP * MOST_COLUMNS]) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = warps_of_row(p), own_warp = warp % warps;
  RowSplits<COLUMNS> row(p, (blockIdx.x * WARPS + warp) / warps);
  ptx::wait_for_kernel_before();
  row.load(own_warp * SPLITS_AT_ONCE);
  row.load_lse();
  row.find_total();
  if (warps == 1) {
    row.write(row.weighted(0));
    return;
  }
  Columns<Accum, COLUMNS> sum = {};
  for (int round = 0; round < p.splits; round += warps * SPLITS_AT_ONCE) {
    const int first = round + own_warp * SPLITS_AT_ONCE;
    if (round > 0) row.load(first);
    const Columns<Accum, COLUMNS> of_warp = row.weighted(first);
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) sums[warp][lane * COLUMNS + column] = of_warp.x[column];
    __syncthreads();
    const int left = smaller(ceil_div(p.splits - round, SPLITS_AT_ONCE), warps);
    for (int other = 0; own_warp == 0 && other < left; other++) {
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) sum.x[column] += sums[warp + other][lane * COLUMNS + column];
    }
    __syncthreads();
  }
  if (own_warp == 0) row.write(sum);
}

template <int COLUMNS>
DEVICE void merge(const AttentionParams& p, Accum (&sums)[WARPS][WARP * MOST_COLUMNS]) {
  if constexpr (ROWS_AT_ONCE == 2) {
    merge_two<COLUMNS>(p);
  } else {
    merge_one<COLUMNS>(p, sums);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_splits(const __grid_constant__ AttentionParams p) {
  __shared__ Accum sums[WARPS][WARP * MOST_COLUMNS];
  if (p.head_dim_v % MOST_COLUMNS == 0) {
    merge<MOST_COLUMNS>(p, sums);
  } else {
    merge<1>(p, sums);
  }
}
