// The online softmax of FlashAttention-2 (Dao 2023, section 3.1), in natural units: beside finfo.min (s - m) must not
// overflow before it is scaled to base 2.
#include "../params.cuh"

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

// The weight of score s in a row whose maximum (or lse) is `reference`.
DEVICE Accum weight(Accum s, Accum reference) { return exp_2((s - reference) * LOG2_E); }

// ROWS rows, each shared by THREADS threads, which keep parts of the sum.
template <int ROWS, int THREADS>
struct OnlineSoftmax {
  Accum maximum[ROWS], sum[ROWS];

  // A sink is a score that was seen before all others and has no value row; one thread of a row counts it.
  DEVICE OnlineSoftmax(Accum sink, bool counts_sink) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      maximum[r] = sink;
      sum[r] = counts_sink && sink != -infinity() ? 1 : 0;
    }
  }

  // Turns scores into weights; rescale[r] is what earlier results of row r are to be multiplied with.
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

  // Completes the sums. inverse[r] normalises row r (0 where it saw nothing), lse[r] is its natural log-sum-exp.
  DEVICE void finish(Accum (&inverse)[ROWS], Accum (&lse)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Accum total = sum_of_row<THREADS>(sum[r]);
      inverse[r] = total == 0 ? Accum(0) : 1 / total;
      lse[r] = total == 0 ? -infinity() : maximum[r] + log_e(total);
    }
  }
};
