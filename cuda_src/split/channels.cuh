// This header has the factors of channels. Where the channels of q and k balance (one is large where the other is
// small, while their products are ordinary) one factor a row would leave the float16 parts of small channels too few
// bits. Powers of two, by which q and v are divided and k and dout multiplied, make the channels of q and v alike;
// products of rows stay what they are, exactly. Results come out in those units, and are multiplied back
// (result_channels.cuh).
#include "layout.cuh"

// These are exponent fields of float32: that of 1, and the number of those of finite numbers.
constexpr u32 EXPONENT_OF_1 = 127, FINITE_EXPONENTS = 255;
constexpr int MANTISSA_BITS = 23;

// Channels names factors: of the channels of q and k, or of those of v and dout.
enum class Channels { OF_KEYS, OF_VALUES };

// have_factors() tells whether channels have factors at all; with splits of one size they have none.
DEVICE bool have_factors(const SplitOperands& operands) { return operands.key_channels != 0; }
// channel_factors() are the factors (channel_columns,) of a KV head. Behind them stands has_factors().
DEVICE float* channel_factors(const SplitOperands& operands, u8* space, i64 batch_head_kv, Channels which) {
  float* all =
      reinterpret_cast<float*>(space + (which == Channels::OF_KEYS ? operands.key_channels : operands.value_channels));
  return all + batch_head_kv * (operands.channel_columns + VECTOR);
}
// has_factors() is 0 where all factors are 1, as those of nearly all heads are.
DEVICE float& has_factors(const SplitOperands& operands, float* factors) { return factors[operands.channel_columns]; }
// is_divided() tells whether an operand is divided by its channels' factors, or else multiplied; of_k: it is k or v. A
// result has the fate of the operand of its shape: dq is divided as q is, and out multiplied as dout is.
DEVICE constexpr bool is_divided(bool of_k, Channels which) { return of_k == (which == Channels::OF_VALUES); }
// inverse_of() is the inverse of a power of two.
DEVICE float inverse_of(float power) { return __uint_as_float(2 * __float_as_uint(1.0f) - __float_as_uint(power)); }
