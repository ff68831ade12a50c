// This header is the epilogue of the forward kernels by mma.sync (sm80/forward.cuh): it normalises O and writes it with
// lse, or writes the part of a split of the keys.
#include "forward_storage.cuh"

// write_split() writes a warp's results of a split of the keys from a row and a column on.
DEVICE void write_split(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_column,
                        const Units (&units)[FRAGMENTS], const Accum (&out)[FRAGMENTS][WARP_COLUMNS / 2]) {
  const i64 at = batch_of(p, s) * p.splits + own_split(p);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = first_row + 16 * f + fragment_row() + 8 * r;
      if (i >= s.rows_q) continue;
      const Accum unit = units[f].at(r);
      Accum* target = p.out_splits.at(at, s.row_q + i, head);
#pragma unroll
      for (int e = 2 * r; e < WARP_COLUMNS / 2; e += 4) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int column = first_column + column_of(e + side);
          const Accum x = out[f][e + side];
          // A result of 0 stays 0, because the unit of a row that saw nothing may be anything.
          if (column < p.head_dim_v) target[column] = i >= s.len_q || x == 0 ? 0 : times_last(x, unit);
        }
      }
    }
  }
}

// sink_of() is the sink of the tile's head, which counts once: with the first split, and with the first of the warps.
DEVICE Accum sink_of(const AttentionParams& p, int head) {
  const bool is_taken = own_split(p) > 0 || (SPLITS_WARPS && threadIdx.x >= WARP);
  return p.sink == nullptr || is_taken ? -infinity() : p.sink[head];
}

// lse_at() is the place of lse of a row of the tile's head, or of its split.
DEVICE Accum* lse_at(const AttentionParams& p, const Sequence& s, int head, int row) {
  const Tensor<Accum>& lses = SPLITS_KEYS ? p.lse_splits : p.lse;
  return lses.at(batch_of(p, s) * num_splits_of(p) + own_split(p), s.row_q + row, head);
}

// write_warps() is the epilogue where warps have splits of the keys: it merges their results and writes O with lse.
DEVICE void write_warps(const AttentionParams& p, SharedStorage& shared, FragmentSoftmax& softmax, const Units& units,
                        const Accum (&out)[WARP_COLUMNS / 2]) {
  const Sequence& s = shared.work.sequence;
  const int head = shared.work.head;
  auto& results = *reinterpret_cast<OwnResults*>(shared.k);
  softmax.take_factors(shared.softmax);
  __syncthreads();  // all warps have read the keys and the values
  put(results, p, softmax, sink_of(p, head), units, out);
  const MergedRow row(results, threadIdx.x);
  const int i = shared.work.tile * BLOCK_M + row.number;
  if (i >= s.rows_q) return;
  const bool used = i < s.len_q;
  if (row.is_first()) *lse_at(p, s, head, i) = used ? row.lse : -infinity();
  if constexpr (SPLITS_KEYS) {
    row.write(p.out_splits.at(batch_of(p, s) * p.splits + own_split(p), s.row_q + i, head), p.head_dim_v, used);
  } else {
    const auto& rows = reinterpret_cast<const Tensor<Result>&>(p.out);
    row.write(rows.at(batch_of(p, s), s.row_q + i, head), p.head_dim_v, used);
  }
}

// write_rows() is the epilogue of all other tiles: it normalises O and writes it with lse.
DEVICE void write_rows(const AttentionParams& p, SharedStorage& shared, FragmentSoftmax (&softmax)[FRAGMENTS],
                       const Units (&units)[FRAGMENTS], Accum (&out)[FRAGMENTS][WARP_COLUMNS / 2]) {
  const Sequence& s = shared.work.sequence;
  const int warp = threadIdx.x / WARP, key_warp = warp % KEY_WARPS, warp_row = warp / KEY_WARPS * FRAGMENTS * 16;
  const int first_row = shared.work.tile * BLOCK_M + warp_row;
  const auto own_queries = QueryTile{ptx::shared_address(shared.q)}.from_row(warp_row);
  const Accum sink = sink_of(p, shared.work.head);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    Accum inverse[2], lse[2];
    const int row = first_row + 16 * f + fragment_row();
    softmax[f].take_factors(shared.softmax);
    softmax[f].finish(sink, inverse, lse);
    rescale_kept(p, inverse);
    if (lane() % 4 < 2 && key_warp == 0) {
      const int i = row + 8 * (lane() % 4);
      const Accum own = lane() % 4 == 0 ? lse[0] : lse[1];
      if (i < s.rows_q) *lse_at(p, s, shared.work.head, i) = i < s.len_q ? own : -infinity();
    }
    rescale_rows(out[f], inverse);
  }
  if constexpr (SPLITS_KEYS) {
    write_split(p, s, shared.work.head, first_row, key_warp * WARP_COLUMNS, units, out);
  } else {
    const auto& results = reinterpret_cast<const Tensor<Result>&>(p.out);
    write_results(units, own_queries, key_warp * WARP_COLUMNS, results.at(batch_of(p, s), s.row_q, shared.work.head),
                  results.row_stride, first_row, s.len_q, s.rows_q, p.head_dim_v, out);
  }
}
