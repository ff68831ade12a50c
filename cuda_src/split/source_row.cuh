// This header finds the rows of float32 operands that rows of the work space are split from, and reads them.
#include "layout.cuh"

// source_row() is the source row of a row in work space, or -1 for a gap between packed sequences and for padding: both
// count as 0.
template <bool OF_K>
DEVICE int source_row(const AttentionParams& p, int batch, int row) {
  const int* cu_seqlens = OF_K ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int* lengths = OF_K ? p.kv_lengths : p.q_lengths;
  const int total = OF_K ? p.seqlen_k : p.seqlen_q;
  if (cu_seqlens == nullptr) return row < used_length(lengths, batch, total) ? row : -1;
  const int group = group_at(p, row, [&](int e) { return split_begin(group_begin(cu_seqlens, e, p.batch, total), e); });
  if (group == 0 || group > p.batch) return -1;
  const Sequence s = sequence_of(p, group - 1);
  const int begin = static_cast<int>(OF_K ? s.row_k : s.row_q), in_sequence = row - split_begin(begin, group);
  return in_sequence < (OF_K ? s.len_k : s.len_q) ? begin + in_sequence : -1;
}

// read_vector() reads VECTOR neighbours, of which `left` are in the row; the others count as 0.
DEVICE Vector read_vector(const float* data, int left) {
  if (left >= VECTOR && reinterpret_cast<u64>(data) % sizeof(Vector) == 0) {
    return *reinterpret_cast<const Vector*>(data);
  }
  Vector x;
#pragma unroll
  for (int e = 0; e < VECTOR; e++) x.e[e] = e < left ? data[e] : 0;
  return x;
}
