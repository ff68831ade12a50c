// This header lets warps share queries in the forward kernels by mma.sync (KEY_WARPS > 1): each has some of a tile's
// keys and of the result's columns, and they exchange weights, maxima and sums by way of shared memory.
#include "forward_storage.cuh"

// across_warps() combines a number of each of a thread's rows over all keys of the tile, by way of shared memory.
template <class Combine>
DEVICE void across_warps(SharedStorage& shared, Accum (&x)[FRAGMENTS][2], int warp_row, int key_warp, Combine combine) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Accum own = reduce_row<4>(x[f][r], combine);
      if (lane() % 4 == 0) shared.of_rows[key_warp][warp_row + 16 * f + fragment_row() + 8 * r] = own;
    }
  }
  __syncthreads();
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp_row + 16 * f + fragment_row() + 8 * r;
      x[f][r] = shared.of_rows[0][row];
#pragma unroll
      for (int w = 1; w < KEY_WARPS; w++) x[f][r] = combine(x[f][r], shared.of_rows[w][row]);
    }
  }
}

// find_totals() finds the sums of a thread's rows over all keys so far.
DEVICE void find_totals(SharedStorage& shared, Accum (&total)[FRAGMENTS][2],
                        const FragmentSoftmax (&softmax)[FRAGMENTS], int warp_row, int key_warp) {
  __syncthreads();  // every thread has read what was combined before
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) total[f][0] = softmax[f].sum[0], total[f][1] = softmax[f].sum[1];
  across_warps(shared, total, warp_row, key_warp, [](Accum a, Accum b) { return a + b; });
}

// share() puts a warp's packed weights into shared memory for the warps with the same queries.
template <class W, class T>
DEVICE void share(const W& weights, const T& shared) {
  shared.store_fragment(weights, threadIdx.x / WARP % KEY_WARPS * WARP_KEYS);
}

// multiply_shared() computes out += weights values: weights of own keys are in registers, those of other warps in
// `shared`.
template <class W, class T, int N>
DEVICE void multiply_shared(Accum (&out)[FRAGMENTS][N], const W (&weights)[FRAGMENTS], const T& shared,
                            const ValueTile& values) {
  const int warp = threadIdx.x / WARP, key_warp = warp % KEY_WARPS;
  multiply_weights(out, weights, values.from_row(key_warp * WARP_KEYS), key_warp * WARP_COLUMNS);
  ptx::barrier_sync(1 + warp / KEY_WARPS, KEY_WARPS * WARP);
#pragma unroll 1
  for (int other = 1; other < KEY_WARPS; other++) {
    multiply_depth_range<WARP_KEYS>(out, shared, (key_warp + other) % KEY_WARPS * WARP_KEYS, values,
                                    key_warp * WARP_COLUMNS);
  }
}
