// The layout of float32 operands as float16 parts, x = (high + middle + low) * factor of its row, which lets float16
// tensor cores compute with float32's error (docs/kernels.md). split_rows.cu writes the parts into work space, and the
// kernels split_forward.cu, split_backward.cu and sm80/split_tile.cuh read them. Padded and packed inputs look alike
// from here on.
#include "../params.cuh"

constexpr int SPLIT_PANEL = 64;  // columns that lie together in memory, as in a panel of shared memory

// SplitTensor is one operand in work space: halves (batch | 1, heads, parts, panels, rows, SPLIT_PANEL), zero beyond
// the head dim, and factors (batch | 1, heads, factor_rows). `image` is the batch_head.
struct SplitTensor {
  i64 halves, factors;  // where halves and factors begin, in bytes
  int rows, factor_rows, panels, parts;

  DEVICE __half* halves_at(u8* space, i64 image, int part, int panel, i64 row) const {
    return reinterpret_cast<__half*>(space + halves) +
           (((image * parts + part) * panels + panel) * rows + row) * SPLIT_PANEL;
  }
  DEVICE float* factors_at(u8* space, i64 image, i64 row) const {
    return reinterpret_cast<float*>(space + factors) + image * factor_rows + row;
  }
};

// SplitOperands are all operands; a copy stands at the beginning of the work space. dout, lse and delta are of the
// backward pass alone.
struct SplitOperands {
  SplitTensor q, k, v, dout;
  i64 lse, delta;  // where lse and delta, each (batch | 1, num_heads_q, factor_rows), begin, in bytes

  // lse_at() is the address of a row's lse, which is inf where a query has no weights.
  DEVICE float* lse_at(u8* space, i64 image, i64 row) const {
    return reinterpret_cast<float*>(space + lse) + image * dout.factor_rows + row;
  }
  DEVICE float* delta_at(u8* space, i64 image, i64 row) const {
    return reinterpret_cast<float*>(space + delta) + image * dout.factor_rows + row;
  }
};

// ROW_ALIGNMENT: factors are copied in units of 16 bytes, so every packed sequence begins at a multiple of this many
// rows.
constexpr int ROW_ALIGNMENT = 4;

// split_begin() is where packed group `group` (params.cuh) begins in work space, if its first row is `begin`. No group
// reaches into the next.
DEVICE int split_begin(int begin, int group) { return (begin / ROW_ALIGNMENT + group) * ROW_ALIGNMENT; }

// split_row_q() and split_row_k() are the first row of a sequence in work space.
DEVICE int split_row_q(const AttentionParams& p, const Sequence& s) {
  return p.cu_seqlens_q == nullptr ? 0 : split_begin(static_cast<int>(s.row_q), s.batch + 1);
}
DEVICE int split_row_k(const AttentionParams& p, const Sequence& s) {
  return p.cu_seqlens_k == nullptr ? 0 : split_begin(static_cast<int>(s.row_k), s.batch + 1);
}
