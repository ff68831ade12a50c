// This kernel multiplies rows by random signs and blocks of SIZE columns by an orthonormal Hadamard matrix, as
// cuflash/fp8.py says. A thread block has some blocks of columns in shared memory, one behind the other. The host
// writes the types `Element` and `Wide`, in which it is computed, in front of this text.
#include "../offset_of.cuh"
#include "four.cuh"

struct Transform {
#include "Transform.members"
};

#include "Transform.layout"

// is_negative() is SplitMix64's top bit for a column.
DEVICE bool is_negative(u64 seed, i64 column) {
  u64 state = seed + static_cast<u64>(column + 1) * 0x9e3779b97f4a7c15ull;
  state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ state >> 27) * 0x94d049bb133111ebull;
  return (state ^ state >> 31) >> 63;
}

extern "C" __global__ void __launch_bounds__(THREADS) hadamard(const Transform p) {
  __shared__ Wide tile[ELEMENTS];
  const i64 begin = static_cast<i64>(blockIdx.x) * ELEMENTS;
  for (int e = threadIdx.x; e < ELEMENTS; e += THREADS) {
    const i64 row = (begin + e) / p.extents.n[3], column = (begin + e) % p.extents.n[3];
    const RowPlace place(row, p.extents, p.source_strides, p.source_strides);
    Wide x = 0;
    if (place.exists) x = static_cast<Wide>(p.source[place.first + column * p.source_strides.n[3]]);
    tile[e] = is_negative(p.seed, column) ? -x : x;
  }
  for (int step = 1; step < SIZE; step *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < ELEMENTS / 2; pair += THREADS) {
      const int upper = pair / step * 2 * step + pair % step, lower = upper + step;
      const Wide a = tile[upper], b = tile[lower];
      tile[upper] = a + b;
      tile[lower] = a - b;
    }
  }
  __syncthreads();
  const i64 total = p.extents.n[0] * p.extents.n[1] * p.extents.n[2] * p.extents.n[3];
  for (int e = threadIdx.x; e < ELEMENTS && begin + e < total; e += THREADS)
    p.target[begin + e] = static_cast<Element>(tile[e] * static_cast<Wide>(p.factor));
}
