// This header is the epilogue of Hopper's backward kernels: it writes dk and dv of a warp's 16 keys, in 16 bits or,
// with WIDE_RESULTS, in float32, so that shares of several calls are added up before they are rounded. With
// ADDS_RESULTS the results are added to what the arrays hold.
#include "rows.cuh"

// wide() is an array whose memory holds float32, as the host says by WIDE_RESULTS; its strides are in float32 numbers.
DEVICE Tensor<float> wide(const Tensor<Element>& x) {
  return {reinterpret_cast<float*>(x.data), x.batch_stride, x.row_stride, x.head_stride};
}

// write_pair() writes columns `column` and `column` + 1 of a row.
DEVICE void write_pair(float* target, int column, int head_dim, float a, float b) {
  if (column < head_dim) target[column] = ADDS_RESULTS ? target[column] + a : a;
  if (column + 1 < head_dim) target[column + 1] = ADDS_RESULTS ? target[column + 1] + b : b;
}

// write_wide_rows() is write_rows() in float32.
template <int N>
DEVICE void write_wide_rows(float* data, i64 row_stride, int row, int len, int rows, int head_dim,
                            const float (&out)[N], const float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + fragment_row() + 8 * r;
    if (i >= rows) continue;
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
      const bool used = i < len;
      write_pair(data + i * row_stride, fragment_column() + column_offset(e), head_dim, used ? out[e] * factor[r] : 0,
                 used ? out[e + 1] * factor[r] : 0);
    }
  }
}

// write_results() writes the warp's rows [row, row + 16) of one (batch, head) of `to`, from column `first` on.
template <int N>
DEVICE void write_results(const AttentionParams& p, const Tensor<Element>& to, const Sequence& s, int head, int first,
                          int row, int head_dim, const float (&out)[N], const float (&factor)[2],
                          unsigned char* staging) {
  const i64 batch = batch_of(p, s);
  if constexpr (WIDE_RESULTS) {
    write_wide_rows(wide(to).at(batch, s.row_k, head) + first, to.row_stride, row, s.len_k, s.rows_k, head_dim - first,
                    out, factor);
  } else {
    write_rows(to.at(batch, s.row_k, head) + first, to.row_stride, row, s.len_k, s.rows_k, head_dim - first, out,
               factor, staging);
  }
}
