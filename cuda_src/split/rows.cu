// This kernel splits q, k, v and, for the backward pass, dout into float16 parts and a factor for each row, and writes
// them into work space (split/layout.cuh). blockIdx.y chooses the operand. For the backward pass lse and delta are
// copied alongside.
#include "../fragment/softmax.cuh"
#include "channels.cuh"
#include "source_row.cuh"
#include "../ptx/sm90.cuh"

constexpr int LANES = COLUMNS / VECTOR < 32 ? COLUMNS / VECTOR : 32;  // lanes that share a row
constexpr int VECTORS = COLUMNS / VECTOR / LANES;                     // vectors that a lane has of a row
constexpr int ROWS_OF_BLOCK = THREADS / LANES;

// These are exponent fields of float32. Rows below 2^-112 take the factor of 2^-112, so that factors and their inverses
// are normal.
constexpr u32 SMALLEST_EXPONENT = EXPONENT_OF_1 - 112;
constexpr u32 TOP_EXPONENT = 14;  // the exponent that the largest element of a row of halves gets
// CUT_OFF is about what the tensor cores cut off a score's sums on average; the third part of a key puts it back. Times
// a query's first part, which may be rounded up, it is less than half of a unit in the last place.
constexpr float CUT_OFF = 0x1.ffcp-26f;

// split_row() splits one row of an operand; OF_K: it is k or v. LANES lanes share a row, and a thread block has
// ROWS_OF_BLOCK. The thread block may have begun before split_channels has ended, so it reads its rows before it waits
// for the factors of channels; only behind that does it write.
template <bool OF_K>
DEVICE void split_row(const AttentionParams& p, const SplitOperands& operands, u8* space,
                      const Tensor<const float>& from, const SplitTensor& to, int head_dim, Channels which,
                      bool with_lse) {
  const int heads = OF_K ? p.num_heads_kv : p.num_heads_q;
  const int blocks = (to.factor_rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK;
  const int num_batch_heads = (p.cu_seqlens_q == nullptr ? p.batch : 1) * heads, batch_head = blockIdx.x / blocks;
  const int row = blockIdx.x % blocks * ROWS_OF_BLOCK + threadIdx.x / LANES;
  if (batch_head >= num_batch_heads) return;
  const int batch = batch_head / heads, head = batch_head % heads, lane = threadIdx.x % LANES;
  const int source = row < to.rows ? source_row<OF_K>(p, batch, row) : -1;
  const float* data = from.at(batch, source < 0 ? 0 : source, head);

  const i64 head_kv = static_cast<i64>(batch) * p.num_heads_kv + head / (heads / p.num_heads_kv);
  const bool has_channels = have_factors(operands);
  const float* channels = channel_factors(operands, space, head_kv, which);
  Vector x[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int column = (i * LANES + lane) * VECTOR;
    x[i] = read_vector(data + column, source >= 0 ? head_dim - column : 0);
  }
  ptx::wait_for_kernel_before();
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) *reinterpret_cast<SplitOperands*>(space) = operands;
  if (with_lse && lane == 0 && row < to.factor_rows) {
    const float lse = source < 0 ? -infinity() : *p.lse.at(batch, source, head);
    *operands.lse_at(space, batch_head, row) = lse == -infinity() ? infinity() : lse;
    *operands.delta_at(space, batch_head, row) = source < 0 ? 0 : *p.delta.at(batch, source, head);
  }
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    if (has_channels) {
      const Vector factors = *reinterpret_cast<const Vector*>(channels + (i * LANES + lane) * VECTOR);
#pragma unroll
      for (int e = 0; e < VECTOR; e++) {
        x[i].e[e] = ptx::multiply(x[i].e[e], is_divided(OF_K, which) ? inverse_of(factors.e[e]) : factors.e[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < VECTOR; e++) {
      const u32 bits = __float_as_uint(x[i].e[e]) << 1 >> 1;
      if (bits < FINITE_EXPONENTS << MANTISSA_BITS && bits > largest) largest = bits;
    }
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    const u32 other = __shfl_xor_sync(ALL_LANES, largest, step);
    largest = other > largest ? other : largest;
  }
  u32 exponent = largest >> MANTISSA_BITS;
  if (largest == 0) exponent = EXPONENT_OF_1;
  if (exponent < SMALLEST_EXPONENT) exponent = SMALLEST_EXPONENT;
  const float up = __uint_as_float((2 * EXPONENT_OF_1 + TOP_EXPONENT - exponent) << MANTISSA_BITS);
  if (lane == 0 && row < to.factor_rows) {
    *to.factors_at(space, batch_head, row) = __uint_as_float((exponent - TOP_EXPONENT) << MANTISSA_BITS);
  }
  if (row >= to.rows) return;

  union Four {
    __half e[VECTOR];
    uint2 vector;
  };
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int column = (i * LANES + lane) * VECTOR;
    const int panel = column / PANEL;
    if (panel >= to.panels) continue;
    Vector rest;
    Four half;
#pragma unroll
    for (int e = 0; e < VECTOR; e++) rest.e[e] = ptx::multiply(x[i].e[e], up);
    for (int part = 0; part < to.parts; part++) {
      if (OF_K && part == 2) {
#pragma unroll
        for (int e = 0; e < VECTOR; e++) {
          const float added = ptx::multiply(ptx::multiply(x[i].e[e], up), CUT_OFF);
          rest.e[e] += added - added == 0 ? added : 0;
        }
      }
#pragma unroll
      for (int e = 0; e < VECTOR; e++) {
        half.e[e] = __float2half_rn(rest.e[e]);
        const float left = rest.e[e] - __half2float(half.e[e]);
        rest.e[e] = left == left ? left : 0;  // infinity and NaN stand in the first part alone
      }
      *reinterpret_cast<uint2*>(to.halves_at(space, batch_head, part, panel, row) + column % PANEL) = half.vector;
    }
  }
}

// split_rows splits rows of one operand: blockIdx.x counts groups of rows over all batch_heads.
extern "C" __global__ void __launch_bounds__(THREADS)
    split_rows(const AttentionParams p, const SplitOperands operands, u8* space) {
  ptx::let_next_kernel_begin();
  switch (blockIdx.y) {
    case 0:
      return split_row<false>(p, operands, space, p.q, operands.q, p.head_dim, Channels::OF_KEYS, false);
    case 1:
      return split_row<true>(p, operands, space, p.k, operands.k, p.head_dim, Channels::OF_KEYS, false);
    case 2:
      return split_row<true>(p, operands, space, p.v, operands.v, p.head_dim_v, Channels::OF_VALUES, false);
    default:
      return split_row<false>(p, operands, space, p.dout, operands.dout, p.head_dim_v, Channels::OF_VALUES, true);
  }
}
