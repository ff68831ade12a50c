// This header says how Hopper's backward kernels write float32 results, where WIDE_RESULTS or SPLITS_QUERIES is set: as
// shares of several calls, or of several splits of the queries, are added up before they are rounded.
#include "rows.cuh"

// wide() is an array whose memory holds float32, as the host says by WIDE_RESULTS; its strides are in float32 numbers.
DEVICE Tensor<float> wide(const Tensor<Element>& x) {
  return {reinterpret_cast<float*>(x.data), x.batch_stride, x.row_stride, x.head_stride};
}

// write_pair() writes columns `column` and `column` + 1 of a row.
DEVICE void write_pair(float* target, int column, int head_dim, float a, float b) {
  if (column < head_dim) target[column] = a;
  if (column + 1 < head_dim) target[column + 1] = b;
}
