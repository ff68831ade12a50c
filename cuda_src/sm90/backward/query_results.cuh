// This header writes dq of Hopper's backward kernels in 16 bits, from fragments of 16 queries of each warp.
#include "../../fragment/fragment.cuh"
#include "results.cuh"

// write_dq_rows() writes the thread's rows `row` and `row` + 8 of `target` (rows, columns), times `scale`; rows in
// [used, rows) are padding and become 0. block_of(i) gives the thread's elements in columns [8 * i, 8 * i + 8).
template <class BlockOf>
DEVICE void write_dq_rows(const AttentionParams& p, Element* target, int row, int used, int rows, int columns,
                          float scale, BlockOf block_of) {
  const bool vectors =
      (reinterpret_cast<u64>(target) | static_cast<u64>(p.dq.row_stride) * sizeof(Element)) % sizeof(uint4) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int own_row = row + 8 * r;
#pragma unroll
    for (int group = 0; group < ceil_div(DQ_COLUMNS, 32); group++) {  // the last group may be a half
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int block = 4 * group + i;
        const float4 x = block < DQ_COLUMNS / 8 ? block_of(block) : float4{};
        words[i] = own_row >= used ? 0 : packed(Element(), (r == 0 ? x.x : x.z) * scale, (r == 0 ? x.y : x.w) * scale);
      }
      transpose_quad(words);
      const int first = group * 32 + lane() % 4 * VECTOR;
      if (own_row >= rows || first >= columns) continue;  // head dims are multiples of VECTOR here
      Element* to = target + own_row * p.dq.row_stride + first;
      if (vectors) {
        __stcs(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
      } else {
#pragma unroll
        for (int e = 0; e < VECTOR; e++) reinterpret_cast<unsigned short*>(to)[e] = words[e / 2] >> (e % 2 * 16);
      }
    }
  }
}
