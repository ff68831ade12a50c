// Forward attention by mma.sync on 16-bit inputs.
#include "../write_fragment.cuh"
#include "tile.cuh"

using Weights = u32[BLOCK_N / 4];

template <class... Arguments>
__device__ __forceinline__ void multiply_scores(Arguments&&... arguments) {
  multiply_rows(arguments...);
}
template <class... Arguments>
__device__ __forceinline__ void multiply_values(Arguments&&... arguments) {
  multiply_weights(arguments...);
}
template <class... Arguments>
__device__ __forceinline__ void write_results(Arguments&&... arguments) {
  write_fragment(arguments...);
}

#include "forward.cuh"
