// This header merges the results of a thread block's warps, each of which has all queries and some of the keys.
#include "../fragment/softmax_fragment.cuh"

// WarpResults are normalised results of WARPS warps, and their lse.
template <int WARPS>
struct WarpResults {
  Accum out[WARPS][BLOCK_M][HEAD_DIM_V];  // (WARPS, BLOCK_M, HEAD_DIM_V)
  Accum lse[WARPS][BLOCK_M];              // (WARPS, BLOCK_M)
};

// MergedRow is a row of a tile, which some threads share; each merges some of its columns. `thread` counts those of the
// WARPS warps.
template <int WARPS>
struct MergedRow {
  static constexpr int THREADS = WARPS > 1 ? WARPS * WARP / BLOCK_M : 1;
  const WarpResults<WARPS>& results;
  const int number, first_column;
  Accum lse, weights[WARPS];  // of the row, and of the warps' results

  DEVICE MergedRow(const WarpResults<WARPS>& results, int thread)
      : results(results), number(thread / THREADS), first_column(thread % THREADS) {
    Accum top = -infinity(), total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = larger(top, results.lse[w][number]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const Accum own = results.lse[w][number];
      weights[w] = own == -infinity() ? 0 : weight(own, top);
      total += weights[w];
    }
    lse = total == 0 ? -infinity() : top + natural_log(total);
#pragma unroll
    for (Accum& weight : weights) weight = weight == 0 ? 0 : quotient(weight, total);
  }
  DEVICE bool is_first() const { return first_column == 0; }

  // write() writes the thread's columns, or 0 where the row is padding.
  template <class T>
  DEVICE void write(T* target, int columns, bool used) const {
    for (int column = first_column; column < columns; column += THREADS) {
      Accum sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        if (weights[w] != 0) sum += weights[w] * results.out[w][number][column];
      }
      target[column] = T(used ? sum : 0);
    }
  }
};
