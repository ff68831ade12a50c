// This header has products by wgmma of operands in float16 parts (docs/kernels.md). The tensor cores cut sums off
// instead of rounding them, so the small products come first, and sums over many tiles are made outside of the tensor
// cores. split/sm90_forward.cu and split/sm90_backward.cu use it; split/sm80_tile.cuh is the counterpart by mma.sync.
#include "../sm90/wgmma.cuh"
#include "factors.cuh"

static_assert(KEY_PARTS == 3 && PARTS == 2 || KEY_PARTS == 1 && PARTS == 1, "float32 or TF32");

// part_bytes() is the size of one part of a tile.
DEVICE constexpr u32 part_bytes(int rows, int columns) { return rows * ROW_BYTES * ((columns + PANEL - 1) / PANEL); }

// load() loads the rows from `row` on of a batch_head: all panels of all parts.
template <class AnyRing>
DEVICE void load(AnyRing& ring, const ptx::TensorMap* map, int row, int batch_head) {
  ring.acquire();
  ring.expect();
  ptx::tma_load(ring.buffer(), map, ring.full(), 0, row, 0, batch_head);
  ring.advance();
}

// multiply_parts() starts x = a b^T, or x += a b^T with `accumulate`, for one part of a and one of b: a is 64 of the
// ROWS rows of a tile, b the rows of a tile. Both are DEPTH columns wide, of which `steps` steps from `begin` on count.
template <int DEPTH, int ROWS, int N>
DEVICE void multiply_parts(float (&x)[N], u32 a, int part_a, u32 b, int part_b, int begin, int steps, bool accumulate) {
  u32 from_a = a + part_a * part_bytes(ROWS, DEPTH), from_b = b + part_b * part_bytes(2 * N, DEPTH);
  ptx::forget(from_a);
  ptx::forget(from_b);
  const u64 left = rows_descriptor(from_a), right = rows_descriptor(from_b);
#pragma unroll
  for (int i = 0; i < steps; i++) {
    ptx::wgmma_ss<__half, 0, 0>(x, left + step_offset(begin + i, ROWS) / 16, right + step_offset(begin + i, 2 * N) / 16,
                                accumulate || i > 0);
  }
}

// multiply_transposed() starts x = a b^T. With two parts it leaves out middle * middle, which is 2^-22 of a term at
// most.
template <int COUNT, int DEPTH, int ROWS, int N>
DEVICE void multiply_transposed(float (&x)[N / 2], u32 a, u32 b) {
  constexpr int STEPS = DEPTH / STEP;
  ptx::wgmma_fence();
  if constexpr (COUNT == 2) {
    multiply_parts<DEPTH, ROWS>(x, a, 1, b, 0, 0, STEPS, false);
    multiply_parts<DEPTH, ROWS>(x, a, 0, b, 1, 0, STEPS, true);
  }
  multiply_parts<DEPTH, ROWS>(x, a, 0, b, 0, 0, STEPS, COUNT == 2);
  ptx::wgmma_commit_group();
}

// A sum of scores takes at most STEPS_OF_SUM steps of the largest product, because the numbers that are cut off add up.
// The first such sum follows the small products into x; the others are sums of their own (ExtraSum), which float32
// units add. split/rows.cu puts in what is still cut off on average.
constexpr int STEPS_OF_SUM = 2;
template <int COLUMNS>
using ExtraSum = float[KEY_PARTS == 3 ? COLUMNS / 2 : 1];

// start_scores() starts x and `extra`, of which finish_scores() makes a b^T.
template <int DEPTH, int ROWS, int N, int EXTRA>
DEVICE void start_scores(float (&x)[N], float (&extra)[EXTRA], u32 a, u32 b) {
  if constexpr (KEY_PARTS == 1) {
    multiply_transposed<1, DEPTH, ROWS, 2 * N>(x, a, b);
  } else {
    constexpr int STEPS = DEPTH / STEP, SUMS = STEPS / STEPS_OF_SUM, SMALL = 5;
    static_assert(SUMS >= 2 && SUMS * STEPS_OF_SUM == STEPS, "whole sums");
    float next[N];
    const auto start_sum = [&](float (&sum)[N], int number, bool accumulate) {
      multiply_parts<DEPTH, ROWS>(sum, a, 0, b, 0, number * STEPS_OF_SUM, STEPS_OF_SUM, accumulate);
    };
    const auto start_small = [&](int i) {
      // The small products come in the order 2 0, 0 2, 1 0, 1 1, 0 1 of the parts of a and b; other orders take
      // more registers than there are.
      multiply_parts<DEPTH, ROWS>(x, a, i == 0 ? 2 : i == 2 || i == 3, b, i == 1 ? 2 : i > 2, 0, STEPS, i > 0);
    };
    ptx::wgmma_fence();
    start_sum(extra, 1, false);
    if constexpr (SUMS > 2) {
      start_sum(next, 2, false);
      ptx::wgmma_commit_group();
#pragma unroll
      for (int sum = 2; sum < SUMS; sum++) {  // the additions run while a small product is computed
        if (sum - 2 < SMALL) {
          start_small(sum - 2);
          ptx::wgmma_commit_group();
          ptx::wgmma_wait_group<1>();
        } else {
          ptx::wgmma_wait_group<0>();
        }
        keep(extra);
        keep(next);
#pragma unroll
        for (int e = 0; e < N; e++) extra[e] += next[e];
        ptx::wgmma_fence();
        if (sum + 1 < SUMS) {
          start_sum(next, sum + 1, false);
          ptx::wgmma_commit_group();
        }
      }
    }
#pragma unroll
    for (int i = smaller(SUMS - 2, SMALL); i < SMALL; i++) start_small(i);
    start_sum(x, 0, true);
    ptx::wgmma_commit_group();
  }
}

// finish_scores() adds both, behind the wait for them.
template <int N, int EXTRA>
DEVICE void finish_scores(float (&x)[N], float (&extra)[EXTRA]) {
  keep(x);
  if constexpr (EXTRA == N) {
    keep(extra);
#pragma unroll
    for (int e = 0; e < N; e++) x[e] += extra[e];
  }
}

// multiply() starts sum = weights b for one panel of a tile b, which has N rows of `columns` columns.
template <int N>
DEVICE void multiply(float (&sum)[PANEL / 2], const SplitFragment<N>& weights, u32 b, int columns, int panel) {
  const auto multiply_part = [&](const u32(&a)[N / 4], int part, bool first) {
    u32 from = b + part * part_bytes(N, columns) + panel * part_bytes(N, PANEL);
    ptx::forget(from);
    const u64 right = ptx::wgmma_descriptor(from, N * ROW_BYTES, ATOM_BYTES);
#pragma unroll
    for (int step = 0; step < N / STEP; step++) {
      ptx::wgmma_rs<__half, 1>(sum, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                               right + step * (STEP * ROW_BYTES / 16), !first || step > 0);
    }
  };
  ptx::wgmma_fence();
  if constexpr (PARTS == 2) {
    multiply_part(weights.low, 0, true);
    multiply_part(weights.high, 1, false);
  }
  multiply_part(weights.high, 0, PARTS == 1);
  ptx::wgmma_commit_group();
}

// add_panel() computes out = out * factor[row] + sum for one panel of out. The addition is rounded, unlike the tensor
// cores'.
template <int N>
DEVICE void add_panel(float (&out)[N], const float (&sum)[PANEL / 2], const float (&factor)[2], int panel) {
#pragma unroll
  for (int e = 0; e < PANEL / 2; e++) {
    out[panel * (PANEL / 2) + e] = out[panel * (PANEL / 2) + e] * factor[e / 2 % 2] + sum[e];
  }
}

// finish_product() waits for the product `sum` of the weights and the first panel of a tile b, adds it to the results,
// and computes and adds those of the other panels.
template <int N, int M>
DEVICE void finish_product(float (&out)[N], float (&sum)[PANEL / 2], const float (&factor)[2],
                           const SplitFragment<M>& weights, u32 b) {
#pragma unroll
  for (int panel = 0; panel < 2 * N / PANEL; panel++) {
    if (panel > 0) multiply(sum, weights, b, 2 * N, panel);
    ptx::wgmma_wait_group<0>();
    keep(sum);
    add_panel(out, sum, factor, panel);
  }
}
