// This header has the layout of float32 operands as float16 parts, x = (high + middle + low) * factor of its row, which
// lets float16 tensor cores compute with float32's error (docs/kernels.md). split/rows.cu writes the parts into work
// space, and the kernels split/sm90_forward.cu, split/sm90_backward.cu and split/sm80_tile.cuh read them. Padded and
// packed inputs look alike from here on.
#include "../params.cuh"

// SplitTensor is one operand in work space: halves (batch | 1, heads, parts, panels, rows, PANEL), zero beyond
// the head dim, and factors (batch | 1, heads, factor_rows).
struct SplitTensor {
#include "SplitTensor.members"

  DEVICE __half* halves_at(u8* space, i64 batch_head, int part, int panel, i64 row) const {
    return reinterpret_cast<__half*>(space + halves) +
           (((batch_head * parts + part) * panels + panel) * rows + row) * PANEL;
  }
  DEVICE float* factors_at(u8* space, i64 batch_head, i64 row) const {
    return reinterpret_cast<float*>(space + factors) + batch_head * factor_rows + row;
  }
};
#include "SplitTensor.layout"

// SplitOperands are all operands; a copy stands at the beginning of the work space. dout, lse and delta are of the
// backward pass alone.
struct SplitOperands {
#include "SplitOperands.members"

  // lse_at() is the address of a row's lse, which is inf where a query has no weights.
  DEVICE float* lse_at(u8* space, i64 batch_head, i64 row) const {
    return reinterpret_cast<float*>(space + lse) + batch_head * dout.factor_rows + row;
  }
  DEVICE float* delta_at(u8* space, i64 batch_head, i64 row) const {
    return reinterpret_cast<float*>(space + delta) + batch_head * dout.factor_rows + row;
  }
};
#include "SplitOperands.layout"

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
