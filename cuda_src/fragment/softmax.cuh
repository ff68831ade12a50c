// This header has the online softmax of FlashAttention-2 (Dao 2023, section 3.1) for the portable kernels, with a
// running maximum and a running sum for each row, and the row reductions that other kernels use too. Scores stay in
// natural units until the maximum is subtracted: with a bias of finfo.min, s - m must not overflow before it is scaled
// to base 2. fragment/softmax_fragment.cuh has the form for tensor cores.
#include "../params.cuh"

// reduce_row() combines x over groups of THREADS neighbouring lanes; each lane gets the result.
template <int THREADS, class Operation>
DEVICE Accum reduce_row(Accum x, Operation operation) {
#pragma unroll
  for (int step = THREADS / 2; step > 0; step /= 2) x = operation(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}

template <int THREADS>
DEVICE Accum sum_of_row(Accum x) {
  return reduce_row<THREADS>(x, [](Accum a, Accum b) { return a + b; });
}
template <int THREADS>
DEVICE Accum max_of_row(Accum x) {
  return reduce_row<THREADS>(x, [](Accum a, Accum b) { return larger(a, b); });
}

// weight() is exp(s - reference): the weight of score s in a row whose maximum (or lse) is `reference`.
DEVICE Accum weight(Accum s, Accum reference) { return exp_2((s - reference) * LOG2_E); }

// OnlineSoftmax keeps the state of ROWS rows, each shared by THREADS threads. Each thread holds the sum of its own
// columns; finish() adds them up.
template <int ROWS, int THREADS>
struct OnlineSoftmax {
  Accum maximum[ROWS], sum[ROWS];

  // A sink is a score that counts as seen before all others and has no value row; one thread of a row counts its
  // weight.
  DEVICE OnlineSoftmax(Accum sink, bool counts_sink) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      maximum[r] = sink;
      sum[r] = counts_sink && sink != -infinity() ? 1 : 0;
    }
  }

  // step() turns the scores of one tile into weights; rescale[r] is the factor for the earlier results of row r.
  template <int COLUMNS>
  DEVICE void step(Accum (&s)[ROWS][COLUMNS], Accum (&rescale)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      Accum m = maximum[r];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) m = larger(m, s[r][c]);
      m = max_of_row<THREADS>(m);
      const Accum reference = m == -infinity() ? Accum(0) : m;  // nothing seen yet: all weights are 0, not NaN
      rescale[r] = weight(maximum[r], reference);
      maximum[r] = m;
      Accum row_sum = 0;
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        s[r][c] = weight(s[r][c], reference);
        row_sum += s[r][c];
      }
      sum[r] = sum[r] * rescale[r] + row_sum;
    }
  }

  // finish() completes the sums. inverse[r] normalises row r (0 where it saw nothing), lse[r] is its natural
  // log-sum-exp.
  DEVICE void finish(Accum (&inverse)[ROWS], Accum (&lse)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Accum total = sum_of_row<THREADS>(sum[r]);
      inverse[r] = total == 0 ? Accum(0) : 1 / total;
      lse[r] = total == 0 ? -infinity() : maximum[r] + log_e(total);
    }
  }
};
