// merge_tiles makes one result of the parts of each tile whose keys were cut into chunks (sm90/forward/work_list.cuh):
// an attention over disjoint keys (Dao et al. 2022, section 3.1). One warp computes one row, each lane every 32nd
// column. Thread blocks share the rows that there are, of which the host knows nothing. The chunks' order is the order
// of every sum, so that results repeat their bits. The kernel begins while the one before it ends (programmatic
// dependent launch).
#include "../fragment/softmax.cuh"
#include "../ptx/sm90.cuh"
#include "../sm90/forward/work_list.cuh"

// A part's rows have HEAD_DIM_V columns, as the kernel's have, which writes zeros behind head_dim_v.
constexpr int COLUMNS_OF_LANE = (HEAD_DIM_V + WARP - 1) / WARP;

extern "C" __global__ void __launch_bounds__(THREADS) merge_tiles(const AttentionParams p) {
  constexpr int WARPS = THREADS / WARP;
  const int lane = threadIdx.x % WARP, heads = group_size(p), queries = BLOCK_M / heads;
  ptx::wait_for_kernel_before();
  const i64 rows = static_cast<i64>(work_counts(p).cut_tiles) * p.num_heads_kv * BLOCK_M;
  const i64 step = static_cast<i64>(gridDim.x) * WARPS;
  for (i64 index = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP; index < rows; index += step) {
    const int row = static_cast<int>(index % BLOCK_M), head_kv = static_cast<int>(index / BLOCK_M % p.num_heads_kv);
    const CutTile tile = cut_tiles(p)[index / BLOCK_M / p.num_heads_kv];
    const int query = tile.tile * queries + row / heads, head = head_kv * heads + row % heads;
    const i64 begin = group_begin(p.cu_seqlens_q, tile.group, p.batch, p.seqlen_q);
    const i64 end = group_begin(p.cu_seqlens_q, tile.group + 1, p.batch, p.seqlen_q);
    if (row >= queries * heads || begin + query >= end) continue;
    const auto lse_of = [&](int part) { return p.part_lses[part_row(p, tile.first_part + part, head_kv, row)]; };

    Accum top = -infinity();
    for (int part = lane; part < tile.parts; part += WARP) top = larger(top, lse_of(part));
    top = max_of_row<WARP>(top);
    if (top == -infinity()) top = 0;  // no part saw anything, or only NaN, which maxima pass over
    Accum total = 0, sum[COLUMNS_OF_LANE] = {};
#pragma unroll 4
    for (int part = 0; part < tile.parts; part++) {
      const Accum own = weight(lse_of(part), top);
      const Accum* columns = p.part_outs + part_row(p, tile.first_part + part, head_kv, row) * HEAD_DIM_V;
      total += own;
#pragma unroll
      for (int i = 0; i < COLUMNS_OF_LANE; i++) {
        if ((i + 1) * WARP <= HEAD_DIM_V || lane + i * WARP < HEAD_DIM_V) sum[i] += own * columns[lane + i * WARP];
      }
    }
    const Accum inverse = total == 0 ? 0 : 1 / total;
    Element* out = p.out.at(0, begin + query, head);
#pragma unroll
    for (int i = 0; i < COLUMNS_OF_LANE; i++) {
      if (lane + i * WARP < p.head_dim_v) out[lane + i * WARP] = from_accum<Element>(sum[i] * inverse);
    }
    if (lane == 0) *p.lse.at(0, begin + query, head) = top + log_e(total);
  }
}
