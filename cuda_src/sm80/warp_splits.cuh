// Where a tile has few queries, each warp may have some of its keys and a softmax of its own (SPLITS_WARPS), as a
// thread block has a split of all keys in Flash-Decoding. This header hands a warp's results to those who merge them.
#include "tile.cuh"
#include "warp_results.cuh"

using OwnResults = WarpResults<(SPLITS_WARPS ? NUM_WARPS : 1)>;

// put() writes the results of a warp; behind it all threads see those of all warps.
template <int N, class U>
DEVICE void put(OwnResults& to, const AttentionParams& p, const FragmentSoftmax& softmax, Accum sink, const U& units,
                const Accum (&x)[N]) {
  const int warp = threadIdx.x / WARP;
  Accum inverse[2], own[2];
  softmax.finish(sink, inverse, own);
  rescale_kept(p, inverse);
#pragma unroll
  for (int e = 0; e < N; e++) {
    const int r = e / 2 % 2;
    // A result of 0 stays 0, because the unit of a row that saw nothing may be anything.
    to.out[warp][fragment_row() + 8 * r][column_of(e)] = x[e] == 0 ? 0 : x[e] * inverse[r] * units.at(r);
  }
  if (lane() % 4 < 2) to.lse[warp][fragment_row() + 8 * (lane() % 4)] = lane() % 4 == 0 ? own[0] : own[1];
  __syncthreads();
}
