// Float32 operands in float16 parts: x = (high + middle + low) * factor of its row (docs/kernels.md). Padded and packed
// inputs look alike from here on.
#include "../params.cuh"

constexpr int SPLIT_PANEL = 64;  // columns that lie together, as in shared memory

// One operand in work space: halves (batch | 1, heads, parts, panels, rows, SPLIT_PANEL), zero beyond the head dim, and
// factors (batch | 1, heads, factor_rows).
struct SplitTensor {
  i64 halves, factors;  // where they begin, in bytes
  int rows, factor_rows, panels, parts;

  DEVICE __half* halves_at(u8* space, i64 image, int part, int panel, i64 row) const {
    return reinterpret_cast<__half*>(space + halves) +
           (((image * parts + part) * panels + panel) * rows + row) * SPLIT_PANEL;
  }
  DEVICE float* factors_at(u8* space, i64 image, i64 row) const {
    return reinterpret_cast<float*>(space + factors) + image * factor_rows + row;
  }
};

// They stand at the beginning of the work space, too. dout, lse and delta are only of the backward pass.
struct SplitOperands {
  SplitTensor q, k, v, dout;
  i64 lse, delta;  // where they begin, in bytes

  // Inf where a query has no weights.
  DEVICE float* lse_at(u8* space, i64 image, i64 row) const {
    return reinterpret_cast<float*>(space + lse) + image * dout.factor_rows + row;
  }
  DEVICE float* delta_at(u8* space, i64 image, i64 row) const {
    return reinterpret_cast<float*>(space + delta) + image * dout.factor_rows + row;
  }
};

// Factors are copied in units of 16 bytes, so every packed sequence begins at a multiple of this many rows.
constexpr int ROW_ALIGNMENT = 4;

// Where packed group `group` (params.cuh) begins, whose first row is `begin`: no group reaches into the next.
DEVICE int split_begin(int begin, int group) { return (begin / ROW_ALIGNMENT + group) * ROW_ALIGNMENT; }

DEVICE int split_row_q(const AttentionParams& p, const Sequence& s) {
  return p.cu_seqlens_q == nullptr ? 0 : split_begin(static_cast<int>(s.row_q), s.batch + 1);
}
DEVICE int split_row_k(const AttentionParams& p, const Sequence& s) {
  return p.cu_seqlens_k == nullptr ? 0 : split_begin(static_cast<int>(s.row_k), s.batch + 1);
}
