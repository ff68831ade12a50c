// Keys and values in e4m3 that lie in pools of pages, where each row and its scale are found by the sequence's table.
// It is `keys` of forward.cuh in place of own_codes.cuh.
#include "products"
#include "../around/pages.cuh"

struct KeyRows {
  const u8* data;  // the pool, of one head
  i64 page_stride, row_stride;
  const float* scales;  // likewise, or null
  i64 scale_page_stride, scale_row_stride;
  PageTable table;
  int num_rows, num_columns;

  DEVICE const u8* codes_at(int row) const {
    return data + table.page_of(row) * page_stride + table.row_of(row) * row_stride;
  }
  DEVICE const float* scale_at(int row) const {
    return scales + table.page_of(row) * scale_page_stride + table.row_of(row) * scale_row_stride;
  }
  DEVICE bool scales_vary() const { return scale_page_stride != 0 || scale_row_stride != 0; }
};

DEVICE KeyRows rows_of_keys(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  const bool keyed = operand == Operand::K;
  const Tensor<const u8> x = codes_of(keyed ? p.k : p.v);
  const Tensor<const float>& scale = keyed ? p.k_scale : p.v_scale;
  return {x.at(0, 0, head),
          x.batch_stride,
          x.row_stride,
          scales_at(scale, 0, 0, head),
          scale.batch_stride,
          scale.row_stride,
          PageTable(p, s.batch_or_0()),
          s.len_k,
          keyed ? p.head_dim : p.head_dim_v};
}
