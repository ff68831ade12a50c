// This header has the factors of channels. Where the channels of q and k balance (one is large where the other is
// small, while their products are ordinary) one factor a row would leave the float16 parts of small channels too few
// bits. Powers of two, by which q and dout are divided and k and v multiplied, make the channels of q and dout alike;
// products of rows stay what they are, exactly. Gradients come out in those units, and are multiplied back.
#include "layout.cuh"

// These are exponent fields of float32: that of 1, and the number of those of finite numbers.
constexpr u32 EXPONENT_OF_1 = 127, FINITE_EXPONENTS = 255;
constexpr int MANTISSA_BITS = 23;

// Channels names a table of factors: of the channels of q and k, or of those of v and dout. Each (batch, KV head) has
// TABLES, which are both.
enum class Channels { OF_KEYS, OF_VALUES };

// channel_factors() are the factors (COLUMNS,) of a KV head.
DEVICE float* channel_factors(const SplitOperands& operands, u8* space, i64 batch_head_kv, Channels which) {
  const i64 table = batch_head_kv * TABLES + static_cast<int>(which);
  return reinterpret_cast<float*>(space + operands.channels) + table * COLUMNS;
}
// inverse_of() is the inverse of a power of two.
DEVICE float inverse_of(float power) { return __uint_as_float(2 * __float_as_uint(1.0f) - __float_as_uint(power)); }
