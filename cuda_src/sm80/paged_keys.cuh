// This header has keys and values that lie in pools of pages, where each row is found by the sequence's table. It
// is `keys` of forward.cuh in place of own_keys.cuh.
#include "products"
#include "../around/pages.cuh"

struct KeyRows {
  const Element* pool;  // of one head
  i64 page_stride, row_stride;
  PageTable table;
  int num_rows, num_columns;

  // row_at() is one row, which is empty where it is not `inside`.
  DEVICE Rows row_at(int row, bool inside) const {
    const Element* data = inside ? pool + table.page_of(row) * page_stride + table.row_of(row) * row_stride : pool;
    return Rows(data, 0, inside ? 1 : 0, num_columns);
  }
};

DEVICE KeyRows rows_of_keys(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  const bool keyed = operand == Operand::K;
  const Tensor<const Element>& x = keyed ? p.k : p.v;
  return {x.at(0, 0, head), x.batch_stride,
          x.row_stride,     PageTable(p, s.batch_or_0()),
          s.len_k,          keyed ? p.head_dim : p.head_dim_v};
}
