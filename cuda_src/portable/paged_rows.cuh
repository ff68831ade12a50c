// This header reads keys and values that lie in pools of pages, as rows of one sequence: each row is found by the
// sequence's table. It is `keys` of portable/forward.cu in place of own_rows.cuh.
#include "../params.cuh"
#include "../around/pages.cuh"

struct KeyRows {
  Tensor<const Element> pool;
  PageTable table;
  int head, num_rows, num_columns;

  DEVICE Vector read(int row, int column) const {
    const bool inside = row >= 0 && row < num_rows;
    const Element* data = inside ? pool.at(table.page_of(row), table.row_of(row), head) : nullptr;
    return Rows(data, 0, inside ? 1 : 0, num_columns).read(0, column);
  }
};

DEVICE KeyRows rows_of_keys(const AttentionParams& p, const Tensor<const Element>& x, const Sequence& s, i64, int head,
                            int num_columns) {
  return {x, PageTable(p, s.batch_or_0()), head, s.len_k, num_columns};
}
