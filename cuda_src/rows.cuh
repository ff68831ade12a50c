// Rows of one (sequence, head) in global memory. What lies outside reads as 0, whatever is there.
#pragma once
#include "types.cuh"

struct Rows {
  const Element* data;
  i64 stride;
  int num_rows, num_columns;
  bool vectors;  // 16-byte accesses are aligned

  __device__ __forceinline__ Rows(const Element* data, i64 stride, int num_rows, int num_columns)
      : data(data), stride(stride), num_rows(num_rows), num_columns(num_columns) {
    vectors = (reinterpret_cast<u64>(data) | static_cast<u64>(stride) * sizeof(Element)) % 16 == 0;
  }

  __device__ __forceinline__ Vector read(int row, int column) const {
    Vector x;
    const Element* from = data + row * stride + column;
    const bool inside = row >= 0 && row < num_rows;
    if (vectors && inside && column + VECTOR <= num_columns) return *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) x.e[i] = inside && column + i < num_columns ? from[i] : from_accum<Element>(0);
    return x;
  }
};
