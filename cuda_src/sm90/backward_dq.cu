// Behind the gradients: dq from its sum, which has the order of fragments, one warpgroup a part.
#include "../write_fragment.cuh"
#include "gradient_rows.cuh"

extern "C" __global__ void __launch_bounds__(DQ_PARTS* WARPGROUP) backward_sm90_dq(const AttentionParams p) {
  const int part = threadIdx.x / WARPGROUP;
  const Work work = work_of<false>(p, BLOCK_M, p.num_heads_q, false);
  const Sequence& s = work.sequence;
  const int first_row = work.tile * BLOCK_M + (DQ_BY_QUERIES ? part * ROWS_OF_WARPGROUP : 0);
  const int column = DQ_BY_QUERIES ? 0 : part * DQ_COLUMNS;
  if (first_row >= s.rows_q) return;
  const i64 batch = p.cu_seqlens_q == nullptr ? s.batch : 0;

  float4 dq[DQ_COLUMNS / 8];
#pragma unroll
  for (float4& x : dq) x = make_float4(0, 0, 0, 0);
  if (first_row < s.len_q) {
    const auto* sum =
        reinterpret_cast<const float4*>(dq_sum_at(p, query_tile(p, s, work.head, work.tile, BLOCK_M), part));
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 8; i++) dq[i] = sum[i * WARP];
  }
  const float scale = static_cast<float>(p.softmax_scale);
  Element* target = p.dq.at(batch, s.row_q, work.head) + column;
  const bool vectors =
      (reinterpret_cast<u64>(target) | static_cast<u64>(p.dq.row_stride) * sizeof(Element)) % sizeof(uint4) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + warp_row() + fragment_row() + 8 * r;
#pragma unroll
    for (int group = 0; group < DQ_COLUMNS / 32; group++) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 x = dq[4 * group + i];
        // Padding is chosen, not multiplied: it may be NaN.
        words[i] = row >= s.len_q ? 0 : packed(Element(), (r == 0 ? x.x : x.z) * scale, (r == 0 ? x.y : x.w) * scale);
      }
      transpose_quad(words);
      const int first = group * 32 + lane() % 4 * VECTOR;
      if (row >= s.rows_q || column + first >= p.head_dim) continue;  // head dims are multiples of VECTOR
      Element* to = target + row * p.dq.row_stride + first;
      if (vectors) {
        // In one store: the compiler would make four of an assignment.
        __stcs(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
      } else {
#pragma unroll
        for (int e = 0; e < VECTOR; e++) reinterpret_cast<unsigned short*>(to)[e] = words[e / 2] >> (e % 2 * 16);
      }
    }
  }
}
