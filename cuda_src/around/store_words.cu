// store_words writes words that the host passes by value to device memory: parameters that are too many for a kernel.
// It is a launch like others, so that a captured graph may hold it.
using u64 = unsigned long long;
using i64 = long long;
#include "../offset_of.cuh"

struct Words {
  u64 x[MOST_WORDS];
};

struct StoreParams {
#include "StoreParams.members"
};
#include "StoreParams.layout"

extern "C" __global__ void __launch_bounds__(THREADS) store_words(const __grid_constant__ StoreParams p) {
  for (int i = threadIdx.x; i < p.count; i += THREADS) p.target[p.first + i] = p.words.x[i];
}
