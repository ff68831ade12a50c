// The forward kernel's results leave through shared memory: TMA stores them while the next tile is under way.
#pragma once
#include "forward_loader.cuh"
#include "staged_rows.cuh"

// Writes out * factor for the warp's 16 rows of a tile; rows in [len_q, rows_q) are padding and 0, those before
// first_row() are none. out_map has boxes of 16 rows, row_map of one: before and behind a sequence are others' rows.
template <int N>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const ptx::TensorMap* out_map,
                                           const ptx::TensorMap* row_map, const GivenWork& work, const float (&out)[N],
                                           const float (&factor)[2], u32 staging) {
  constexpr int CHUNK = sizeof(Vector), CHUNKS = ROW_BYTES / CHUNK;
  constexpr u32 PANEL_BYTES = BLOCK_M * ROW_BYTES;
  const Sequence& s = work.sequence;
  u32 own_thread = threadIdx.x;
  ptx::forget(own_thread);  // what follows from it would occupy registers all along
  const int thread = static_cast<int>(own_thread % WARP);
  const int warp_rows = static_cast<int>(own_thread) / WARP * ROWS_OF_WARP, row = work.tile * BLOCK_M + warp_rows;
  const bool used[2] = {row + thread / 4 < s.len_q, row + thread / 4 + 8 < s.len_q};
  const int from_row = thread % ROWS_OF_WARP, from_chunk = thread / ROWS_OF_WARP;
  const u32 staged = staging + warp_rows * ROW_BYTES;
#pragma unroll
  for (int first_panel = 0; first_panel < PANELS_V; first_panel += STAGING_PANELS) {
    ptx::bulk_wait_group_read<0>();  // what was there before
    __syncwarp();
#pragma unroll
    for (int block = 0; block < STAGING_PANELS * PANEL / 16; block++) {
      const int first = first_panel * (PANEL / 2) + block * 8;
      if (first >= N) break;
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = first + 2 * i;
        words[i] = used[i % 2] ? packed(Element(), out[e] * factor[i % 2], out[e + 1] * factor[i % 2]) : 0;
      }
      ptx::stmatrix_x4(staged + from_row * ROW_BYTES + block / 4 * PANEL_BYTES +
                           ((2 * (block % 4) + from_chunk) ^ (from_row % CHUNKS)) * CHUNK,
                       words[0], words[1], words[2], words[3]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    const int batch = p.cu_seqlens_q == nullptr ? s.batch : 0;
    const int first_row = work.first_row();
    const bool whole = row >= first_row && (p.cu_seqlens_q == nullptr || row + ROWS_OF_WARP <= s.rows_q);
    const int own_row = whole ? 0 : thread;
    if (whole ? thread == 0 : thread < ROWS_OF_WARP && row + thread >= first_row && row + thread < s.rows_q) {
      const ptx::TensorMap* map = whole ? out_map : row_map;
#pragma unroll
      for (int panel = 0; panel < STAGING_PANELS && first_panel + panel < PANELS_V; panel++) {
        ptx::tma_store(map, staged + own_row * ROW_BYTES + panel * PANEL_BYTES, (first_panel + panel) * PANEL,
                       static_cast<int>(s.row_q) + row + own_row, work.head, batch);
      }
    }
    ptx::bulk_commit_group();
  }
}
