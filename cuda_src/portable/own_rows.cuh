// This header reads keys and values that lie in arrays of their own, as rows of one sequence. portable/forward.cu
// includes it as `keys`; paged_rows.cuh is its counterpart for pools of pages.
#include "../params.cuh"

using KeyRows = Rows;

DEVICE KeyRows rows_of_keys(const AttentionParams&, const Tensor<const Element>& x, const Sequence& s, i64 batch,
                            int head, int num_columns) {
  return Rows(x.at(batch, s.row_k, head), x.row_stride, s.len_k, num_columns);
}
