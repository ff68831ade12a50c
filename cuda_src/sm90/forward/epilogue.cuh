// This header is the epilogue of Hopper's forward kernel: results of a tile are stored by TMA through shared memory, by
// threads where TMA cannot, or as the part of a split or of a chunk of the keys.
#include "scores.cuh"
#include "work.cuh"

// store_rows() is the epilogue by TMA: it writes out * factor for the warp's 16 rows of a tile; rows in [len_q, rows_q)
// are padding and become 0. The boxes of out_map have 16 rows. The boxes of row_map have one row, for tiles of several
// heads and for tiles that also hold rows which must not be written: rows before first_row(), and rows behind a packed
// sequence.
template <int N>
DEVICE void store_rows(const AttentionParams& p, const ptx::TensorMap* out_map, const ptx::TensorMap* row_map,
                       const TileMessage& work, const TileRows& rows, const OwnRows& own, const float (&out)[N],
                       const float (&factor)[2], u32 staging) {
  constexpr int CHUNK = sizeof(Vector), CHUNKS = ROW_BYTES / CHUNK;
  constexpr u32 PANEL_BYTES = BLOCK_M * ROW_BYTES;
  const Sequence& s = work.sequence;
  u32 own_thread = thread_of_team();
  ptx::forget(own_thread);
  const int thread = static_cast<int>(own_thread % WARP);
  const int warp_rows = static_cast<int>(own_thread) / WARP * ROWS_OF_WARP, row = work.first_of_rows() + warp_rows;
  const bool used[2] = {own.query(row + thread / 4, 0) < s.len_q, own.query(row + thread / 4, 1) < s.len_q};
  const int from_row = thread % ROWS_OF_WARP, from_chunk = thread / ROWS_OF_WARP;
  const u32 staged = staging + warp_rows * ROW_BYTES;
#pragma unroll
  for (int first_panel = 0; first_panel < PANELS_V; first_panel += STAGING_PANELS) {
    ptx::bulk_wait_group_read<0>();  // wait until TMA has read what the buffer held before
    __syncwarp();
#pragma unroll
    for (int block = 0; block < STAGING_PANELS * PANEL / 16; block++) {
      const int first = first_panel * (PANEL / 2) + block * 8;
      if (first >= N) break;
      u32 words[4];
      pack_results(words, out, first, factor, used);
      ptx::stmatrix_x4(staged + from_row * ROW_BYTES + block / 4 * PANEL_BYTES +
                           ((2 * (block % 4) + from_chunk) ^ (from_row % CHUNKS)) * CHUNK,
                       words[0], words[1], words[2], words[3]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    const int batch = batch_of(p, s);
    if constexpr (PACKS_HEADS) {
      const int own_row = row + thread, query = rows.query(own_row, s.rows_q);
      if (thread < ROWS_OF_WARP && query < s.rows_q) {
#pragma unroll
        for (int panel = 0; panel < STAGING_PANELS && first_panel + panel < PANELS_V; panel++) {
          ptx::tma_store(row_map, staged + thread * ROW_BYTES + panel * PANEL_BYTES, (first_panel + panel) * PANEL,
                         static_cast<int>(s.row_q) + query, rows.head(own_row, work.head), batch);
        }
      }
      ptx::bulk_commit_group();
      continue;
    }
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

// write_rows() writes out * factor for the thread's rows, which may be of different heads, where TMA does not store.
template <int N>
DEVICE void write_rows(const AttentionParams& p, const TileMessage& work, const OwnRows& own, int row,
                       const float (&out)[N], const float (&factor)[2]) {
  const Sequence& s = work.sequence;
  const i64 batch = batch_of(p, s);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = own.query(row, r);
    if (i >= s.rows_q) continue;
    Element* target = p.out.at(batch, s.row_q + i, own.head(work.head, r));
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int column = fragment_column() + column_offset(e + side);
        if (column < p.head_dim_v) target[column] = from_accum<Element>(i < s.len_q ? out[e + side] * factor[r] : 0);
      }
    }
  }
}

// write_split() writes the thread's rows of a split's result, in float32. Packed sequences whose heads are apart have
// one split, and the batch stride is 0; those whose heads are rows share the splits' arrays.
DEVICE void write_split(const AttentionParams& p, const SplitWork& work, const OwnRows& own, int row,
                        const float (&out)[HEAD_DIM_V / 2], const float (&factor)[2], const float (&lse)[2]) {
  const i64 batch = PACKS_HEADS ? batch_of(p, work.sequence) : work.sequence.batch;
  const i64 split = batch * p.splits + work.split();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = own.query(row, r);
    if (i >= work.sequence.rows_q) continue;
    const bool used = i < work.sequence.len_q;
    const i64 at = work.sequence.row_q + i;
    if (lane() % 4 == 0) *p.lse_splits.at(split, at, own.head(work.head, r)) = used ? lse[r] : -infinity();
    float* target = p.out_splits.at(split, at, own.head(work.head, r));
    // A pair of columns is one store where rows begin at multiples of its size; a row of heads is of any size.
    const bool pairs = reinterpret_cast<u64>(target) % sizeof(float2) == 0;
#pragma unroll
    for (int e = 2 * r; e < HEAD_DIM_V / 2; e += 4) {
      const int column = fragment_column() + column_offset(e);
      const float2 pair = used ? make_float2(out[e] * factor[r], out[e + 1] * factor[r]) : make_float2(0, 0);
      if (pairs && column + 1 < p.head_dim_v) {
        *reinterpret_cast<float2*>(target + column) = pair;
      } else {
        if (column < p.head_dim_v) target[column] = pair.x;
        if (column + 1 < p.head_dim_v) target[column + 1] = pair.y;
      }
    }
  }
}

// write_part() writes the thread's rows of one chunk's result where a list of work cuts the tile (work_list.cuh), in
// float32.
DEVICE void write_part(const AttentionParams& p, const SplitWork& work, const OwnRows& own, int row,
                       const float (&out)[HEAD_DIM_V / 2], const float (&factor)[2], const float (&lse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = own.query(row, r);
    if (i >= work.sequence.rows_q) continue;
    const bool used = i < work.sequence.len_q;
    const i64 at = part_row(p, work.part(), work.head, (row + 8 * r) % BLOCK_M);
    if (lane() % 4 == 0) p.part_lses[at] = used ? lse[r] : -infinity();
    float* target = p.part_outs + at * HEAD_DIM_V + fragment_column();
#pragma unroll
    for (int e = 2 * r; e < HEAD_DIM_V / 2; e += 4) {
      const float2 pair = used ? make_float2(out[e] * factor[r], out[e + 1] * factor[r]) : make_float2(0, 0);
      *reinterpret_cast<float2*>(target + column_offset(e)) = pair;
    }
  }
}

// write_lse() writes lse of the warp's 16 rows. Each of a row's four lanes has it, and one of them writes.
DEVICE void write_lse(const AttentionParams& p, const TileMessage& work, const OwnRows& own, int row, i64 batch,
                      const float (&lse)[2]) {
  const Sequence& s = work.sequence;
  if (lane() % 4 >= 2) return;
  const bool first = lane() % 4 == 0;
  const int i = first ? own.query(row, 0) : own.query(row, 1);
  const int head = first ? own.head(work.head, 0) : own.head(work.head, 1);
  const float own_lse = first ? lse[0] : lse[1];
  if ((PACKS_HEADS || i >= work.first_row()) && i < s.rows_q) {
    *p.lse.at(batch, s.row_q + i, head) = i < s.len_q ? own_lse : -infinity();
  }
}

// write_tile() is the epilogue: it normalises O by `inverse` and writes it with lse, or as this split's or this chunk's
// part of both.
DEVICE void write_tile(const AttentionParams& p, const ptx::TensorMap* out_map, const ptx::TensorMap* row_map,
                       const TileMessage& work, const TileRows& rows, const OwnRows& own, int row,
                       const float (&out)[HEAD_DIM_V / 2], float (&inverse)[2], const float (&lse)[2], u32 staging) {
  rescale_kept(p, inverse);
  if constexpr (SPLITS_KEYS) {
    write_split(p, work, own, row, out, inverse, lse);
  } else if (work.part() != WHOLE) {
    write_part(p, work, own, row, out, inverse, lse);
  } else {
    const Sequence& s = work.sequence;
    const i64 batch = batch_of(p, s);
    if constexpr (STAGING_PANELS > 0) {
      store_rows(p, out_map, row_map, work, rows, own, out, inverse, staging);
    } else if constexpr (PACKS_HEADS) {
      write_rows(p, work, own, row, out, inverse);
    } else {
      write_fragment(p.out.at(batch, s.row_q, work.head), p.out.row_stride, row, s.len_q, s.rows_q, p.head_dim_v, out,
                     inverse);
    }
    write_lse(p, work, own, row, batch, lse);
  }
}
