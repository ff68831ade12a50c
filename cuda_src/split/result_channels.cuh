// This header multiplies results back by the factors of their channels (channels.cuh), in a warp's fragments, before
// they are written. split/sm90_forward.cu, split/sm90_backward.cu and split/sm80_tile.cuh use it.
#include "../fragment/fragment.cuh"
#include "channels.cuh"

// needs_factors() tells whether a KV head has factors besides 1. The answer takes a while to come, so it is asked for
// early; it is no pointer to the factors, which takes registers that there are not.
DEVICE bool needs_factors(const SplitOperands& operands, u8* space, i64 batch_head_kv, Channels which) {
  return have_factors(operands) && has_factors(operands, channel_factors(operands, space, batch_head_kv, which)) != 0;
}

// restore_channels() divides the columns of x by factors, of which the first is that of column 0, or multiplies them.
// Sums stand far from the ends of float32's range, so this is exact.
template <int N>
DEVICE void restore_channels(float (&x)[N], const float* factors, bool divides) {
  factors += fragment_column();
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    float2 factor = *reinterpret_cast<const float2*>(factors + column_offset(e));
    if (divides) factor = {inverse_of(factor.x), inverse_of(factor.y)};
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      x[e + r] = ptx::multiply(x[e + r], factor.x);
      x[e + r + 1] = ptx::multiply(x[e + r + 1], factor.y);
    }
  }
}
