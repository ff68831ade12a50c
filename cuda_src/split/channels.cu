// This kernel finds the factors of channels (channels.cuh) before the operands are split (rows.cu).
//
// A channel's factor follows from the mean exponent of its elements in the rows of q (or v) that are in use. Few rows
// with extreme numbers hardly move it, nor do rows that have the same number in all channels. Where the means are
// within 2^SPREAD of each other all factors are 1, as parts have bits to spare, so that ordinary inputs keep their
// bits.
#include "channels.cuh"
#include "../ptx/sm90.cuh"
#include "source_row.cuh"

constexpr int MOST_ROWS = 64;                                          // rows that are looked at, evenly spaced
constexpr int LANES = COLUMNS / VECTOR, ROWS_APART = THREADS / LANES;  // threads that share a row, and rows at once
// AT_ONCE rows of a thread are on their way at once: all that it has, as far as registers hold them.
constexpr int AT_ONCE = ROWS_APART < 8 ? 8 : MOST_ROWS / ROWS_APART;
constexpr int FEWEST_ROWS = 16;  // fewer say little of a channel
constexpr int SPREAD = 8, MOST_SHIFT = 40;
// LARGEST_EXPONENT is the exponent field of the largest element over its factor: sums of such do not overflow.
constexpr int LARGEST_EXPONENT = static_cast<int>(EXPONENT_OF_1) + 60;

// ChannelRange is the range of the mean exponents of some channels, and the rows of that with the most.
struct ChannelRange {
  int largest, smallest, most_rows;

  DEVICE void take(const ChannelRange& other) {
    largest = larger(largest, other.largest);
    smallest = smaller(smallest, other.smallest);
    most_rows = larger(most_rows, other.most_rows);
  }
  DEVICE ChannelRange of_lane(int step) const {
    return {__shfl_xor_sync(ALL_LANES, largest, step), __shfl_xor_sync(ALL_LANES, smallest, step),
            __shfl_xor_sync(ALL_LANES, most_rows, step)};
  }
};

// Exponents are those of a channel's elements in some rows.
struct Exponents {
  int sum, count, top;

  // take() counts an element; an infinity, NaN, 0 and a subnormal say nothing.
  DEVICE void take(float x) {
    const int exponent = __float_as_uint(x) << 1 >> (MANTISSA_BITS + 1);
    if (exponent == 0 || exponent == static_cast<int>(FINITE_EXPONENTS)) return;
    sum += exponent;
    count++;
    top = larger(top, exponent);
  }
  DEVICE void take(const Exponents& other) {
    sum += other.sum;
    count += other.count;
    top = larger(top, other.top);
  }
};

struct SharedChannels {
  Exponents exponents[ROWS_APART][COLUMNS];
  ChannelRange ranges[COLUMNS / WARP];
};

// rows_in_use() is the number of rows of work space among which those in use lie.
template <bool OF_K>
DEVICE int rows_in_use(const AttentionParams& p, int batch, int rows) {
  const int* lengths = OF_K ? p.kv_lengths : p.q_lengths;
  const bool is_packed = (OF_K ? p.cu_seqlens_k : p.cu_seqlens_q) != nullptr;
  return is_packed ? rows : used_length(lengths, batch, OF_K ? p.seqlen_k : p.seqlen_q);
}

// mean_of() is the nearest integer to sum / count.
DEVICE int mean_of(int sum, int count) { return (2 * sum + count) / (2 * count); }

extern "C" __global__ void __launch_bounds__(THREADS)
    split_channels(const AttentionParams p, const SplitOperands operands, u8* space) {
  __shared__ SharedChannels shared;
  ptx::let_next_kernel_begin();
  const bool of_keys = blockIdx.y == 0;
  const Tensor<const float>& from = of_keys ? p.q : p.v;
  const int columns = of_keys ? p.head_dim : p.head_dim_v, heads = of_keys ? group_size(p) : 1;
  const int column = threadIdx.x % LANES * VECTOR;
  const int batch = blockIdx.x / p.num_heads_kv, first_head = blockIdx.x % p.num_heads_kv * heads;
  const int rows =
      of_keys ? rows_in_use<false>(p, batch, operands.q.rows) : rows_in_use<true>(p, batch, operands.v.rows);
  const int head_rows = larger(smaller(MOST_ROWS / heads, rows), 1), head_rows_apart = rows / head_rows;
  const int num_rows = head_rows * smaller(heads, MOST_ROWS);
  // 1. Each thread sums the exponents of VECTOR channels over some rows, of which it reads AT_ONCE at once.
  Exponents own[VECTOR] = {};
  for (int first = threadIdx.x / LANES; first < num_rows; first += AT_ONCE * ROWS_APART) {
    Vector x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int number = first + i * ROWS_APART;
      const int of_head = heads == 1 ? number : number / heads, row = of_head * head_rows_apart;
      const int source = of_keys ? source_row<false>(p, batch, row) : source_row<true>(p, batch, row);
      const bool inside = number < num_rows && source >= 0;
      const float* data = from.at(batch, inside ? source : 0, first_head + number - of_head * heads) + column;
      x[i] = read_vector(data, inside ? columns - column : 0);
    }
#pragma unroll
    for (const Vector& of_row : x) {
#pragma unroll
      for (int e = 0; e < VECTOR; e++) own[e].take(of_row.e[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < VECTOR; e++) shared.exponents[threadIdx.x / LANES][column + e] = own[e];
  __syncthreads();
  // 2. The mean of each channel, and the range of means that a warp has.
  ChannelRange range = {0, static_cast<int>(FINITE_EXPONENTS), 0};
  Exponents of_channel = {};
  int mean = 0;
  if (threadIdx.x < COLUMNS) {
#pragma unroll
    for (auto& of_rows : shared.exponents) of_channel.take(of_rows[threadIdx.x]);
    if (of_channel.count > 0) {
      mean = mean_of(of_channel.sum, of_channel.count);
      range = {mean, mean, of_channel.count};
    }
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) range.take(range.of_lane(step));
    if (threadIdx.x % WARP == 0) shared.ranges[threadIdx.x / WARP] = range;
  }
  __syncthreads();
  // 3. The factors, of means against the largest.
  if (threadIdx.x >= COLUMNS) return;
#pragma unroll
  for (const ChannelRange& of_warp : shared.ranges) range.take(of_warp);
  const bool any = range.most_rows >= FEWEST_ROWS && range.largest - range.smallest > SPREAD;
  int shift = 0;
  if (any && of_channel.count > 0) {
    shift = larger(mean - range.largest, larger(-MOST_SHIFT, of_channel.top - LARGEST_EXPONENT));
  }
  const Channels which = of_keys ? Channels::OF_KEYS : Channels::OF_VALUES;
  float* factors = channel_factors(operands, space, blockIdx.x, which);
  factors[threadIdx.x] = __uint_as_float((EXPONENT_OF_1 + smaller(shift, 0)) << MANTISSA_BITS);
  if (threadIdx.x == 0) has_factors(operands, factors) = any;
}
