// Where a tile has few queries, each warp may have some of its keys and a softmax of its own (SPLITS_WARPS), as a
// thread block has a split of all keys in Flash-Decoding. This header merges the results of a thread block's warps.
#include "../fragment/softmax_fragment.cuh"
#include "tile.cuh"

constexpr int MERGED_WARPS = SPLITS_WARPS ? NUM_WARPS : 1;

// WarpResults are normalised results of the warps, and their lse.
struct WarpResults {
  Accum out[MERGED_WARPS][BLOCK_M][HEAD_DIM_V];  // (NUM_WARPS, BLOCK_M, HEAD_DIM_V)
  Accum lse[MERGED_WARPS][BLOCK_M];              // (NUM_WARPS, BLOCK_M)

  // put() writes the results of a warp; behind it all threads see those of all warps.
  template <int N, class U>
  DEVICE void put(const AttentionParams& p, const FragmentSoftmax& softmax, Accum sink, const U& units,
                  const Accum (&x)[N]) {
    const int warp = threadIdx.x / WARP;
    Accum inverse[2], own[2];
    softmax.finish(sink, inverse, own);
    rescale_kept(p, inverse);
#pragma unroll
    for (int e = 0; e < N; e++) {
      const int r = e / 2 % 2;
      // A result of 0 stays 0, because the unit of a row that saw nothing may be anything.
      out[warp][fragment_row() + 8 * r][column_of(e)] = x[e] == 0 ? 0 : x[e] * inverse[r] * units.at(r);
    }
    if (lane() % 4 < 2) lse[warp][fragment_row() + 8 * (lane() % 4)] = lane() % 4 == 0 ? own[0] : own[1];
    __syncthreads();
  }
};

// MergedRow is a row of a tile, which some threads share; each merges some of its columns.
struct MergedRow {
  static constexpr int THREADS = SPLITS_WARPS ? NUM_THREADS / BLOCK_M : 1;
  const WarpResults& results;
  const int number;
  Accum lse, weights[MERGED_WARPS];  // of the row, and of the warps' results

  DEVICE explicit MergedRow(const WarpResults& results) : results(results), number(threadIdx.x / THREADS) {
    Accum top = -infinity(), total = 0;
#pragma unroll
    for (int w = 0; w < MERGED_WARPS; w++) top = larger(top, results.lse[w][number]);
#pragma unroll
    for (int w = 0; w < MERGED_WARPS; w++) {
      const Accum own = results.lse[w][number];
      weights[w] = own == -infinity() ? 0 : weight(own, top);
      total += weights[w];
    }
    lse = total == 0 ? -infinity() : top + natural_log(total);
#pragma unroll
    for (Accum& weight : weights) weight = weight == 0 ? 0 : quotient(weight, total);
  }
  DEVICE bool is_first() const { return threadIdx.x % THREADS == 0; }

  // write() writes the thread's columns, or 0 where the row is padding.
  template <class T>
  DEVICE void write(T* target, int columns, bool used) const {
    for (int column = threadIdx.x % THREADS; column < columns; column += THREADS) {
      Accum sum = 0;
#pragma unroll
      for (int w = 0; w < MERGED_WARPS; w++) {
        if (weights[w] != 0) sum += weights[w] * results.out[w][number][column];
      }
      target[column] = T(used ? sum : 0);
    }
  }
};
