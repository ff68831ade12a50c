// This header is the epilogue of Hopper's backward kernels: it writes dk and dv of a warp's 16 keys, in 16 bits or, as
// results.cuh says, in float32.
#include "results.cuh"
#include "schedule.cuh"

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

// write_results() writes the warp's rows [row, row + 16) of a tile's (batch, head) of `to`, from column `first` on.
// Each split of the queries has a `to` of its own: (splits * batch, seqlen_k, num_heads_kv, head_dim).
template <int N>
DEVICE void write_results(const AttentionParams& p, const Tensor<Element>& to, const KeyWork& work, int first, int row,
                          int head_dim, const float (&out)[N], const float (&factor)[2], unsigned char* staging) {
  const Sequence& s = work.sequence;
  const i64 batch = batch_of(p, s);
  if constexpr (WIDE_RESULTS || SPLITS_QUERIES) {
    const i64 first_batch = static_cast<i64>(work.split) * (p.cu_seqlens_q == nullptr ? p.batch : 1);
    write_wide_rows(wide(to).at(first_batch + batch, s.row_k, work.head) + first, to.row_stride, row, s.len_k, s.rows_k,
                    head_dim - first, out, factor);
  } else {
    write_rows(to.at(batch, s.row_k, work.head) + first, to.row_stride, row, s.len_k, s.rows_k, head_dim - first, out,
               factor, staging);
  }
}
