// This header keeps values of hidden keys out of results: they must not count, but 0 * NaN would, so their rows become
// 0 in shared memory. Keys outside lengths and window are known beforehand. Which keys are hidden one by one shows only
// in the scores of all warpgroups together, and finding it out in every tile costs time. So sm90/forward/forward.cu
// computes a tile of queries without looking, and if its result is not finite computes it once more, as a recheck that
// finds the hidden keys. split/sm90_forward.cu and split/sm90_backward.cu look in every masked tile.
#include "../rules/mask.cuh"
#include "wgmma.cuh"

// SeenKeys has a flag for each key of a tile that some query sees: (2, BLOCK_N), where the two buffers alternate.
struct SeenKeys {
  u8 flags[HIDES_ANYWHERE ? 2 : 1][HIDES_ANYWHERE ? BLOCK_N : 1];
};

// The last SECOND_TEAM_WARPGROUPS warpgroups, where there are two teams (forward/work.cuh), compute tiles of their
// own.
constexpr int SECOND_TEAM_WARPGROUPS = TEAMS == 1 ? 0 : CONSUMERS - BLOCK_M / ROWS_OF_WARPGROUP;
constexpr int FIRST_THREAD_OF_SECOND_TEAM = (CONSUMERS - SECOND_TEAM_WARPGROUPS) * WARPGROUP;
DEVICE bool in_second_team() { return TEAMS > 1 && threadIdx.x >= FIRST_THREAD_OF_SECOND_TEAM; }
DEVICE u32 thread_of_team() { return threadIdx.x - in_second_team() * FIRST_THREAD_OF_SECOND_TEAM; }
DEVICE int threads_of_team() {
  return in_second_team() ? SECOND_TEAM_WARPGROUPS * WARPGROUP : FIRST_THREAD_OF_SECOND_TEAM;
}
DEVICE void sync_team() { ptx::barrier_sync(1 + CONSUMERS + in_second_team(), threads_of_team()); }

// HiddenValues clears the rows of hidden values of a tile. All warpgroups of a team agree on whether a tile is masked
// or a recheck, and clear its rows together.
struct HiddenValues {
  SeenKeys& seen;
  int parity;
  int first_seen, end_of_seen;  // the range of keys that some query sees, and whose values count

  DEVICE explicit HiddenValues(SeenKeys& seen) : seen(seen), parity(0), first_seen(0), end_of_seen(0) {
    if (HIDES_ANYWHERE) {
      for (int i = thread_of_team(); i < 2 * BLOCK_N; i += threads_of_team()) seen.flags[i / BLOCK_N][i % BLOCK_N] = 0;
      sync_team();
    }
  }

  DEVICE void begin(const AttentionParams& p, const Sequence& s, const Mask& mask, int first_row = 0) {
    first_seen = mask.columns(first_row).begin;
    // Rows beyond the end of an array need no clearing, because TMA has written zeros there.
    const bool at_end = p.cu_seqlens_k == nullptr && s.len_k == p.seqlen_k;
    end_of_seen = at_end ? s.len_k + BLOCK_N : s.len_k;
  }

  // is_non_finite() tells whether hidden keys may have come into the results of rows `row` and row + 8: whether a
  // result is not finite.
  template <int N>
  static DEVICE bool is_non_finite(const float (&out)[N], int row, int len_q) {
    return is_non_finite(out, row, row + 8, len_q);
  }
  template <int N>
  static DEVICE bool is_non_finite(const float (&out)[N], int query, int other_query, int len_q) {
    float zero[2] = {};
#pragma unroll
    for (int e = 0; e < N; e++) zero[e / 2 % 2] += 0 * out[e];
    return (query < len_q && zero[0] != 0) || (other_query < len_q && zero[1] != 0);
  }

  // find() marks the keys that are seen; x are the scores of a recheck.
  template <int N>
  DEVICE void find(const float (&x)[N]) const {
    if constexpr (HIDES_ANYWHERE) mark_seen(seen.flags[parity], x);
  }

  // clear() makes rows of hidden values 0; `v` is the ring at the values of that tile.
  template <class ValueRing>
  DEVICE void clear(const ValueRing& v, int first_key, bool recheck = true) {
    if (HIDES_ANYWHERE && recheck) {
      u8* flags = seen.flags[parity];
      parity ^= 1;
      v.wait();
      sync_team();
      clear_rows<ValueRing::SIZE>(v.buffer(), [&](int row) { return flags[row] == 0; });
      if (thread_of_team() < BLOCK_N) flags[thread_of_team()] = 0;
    } else {
      const int begin = first_seen - first_key, end = end_of_seen - first_key;
      if (begin <= 0 && end >= BLOCK_N) return;
      v.wait();
      sync_team();  // another warpgroup may still read these rows
      clear_rows<ValueRing::SIZE>(v.buffer(), [&](int row) { return row < begin || row >= end; });
    }
  }

 private:
  // clear_rows() makes the rows for which hidden(row) holds 0.
  template <u32 BYTES, class Hidden>
  static DEVICE void clear_rows(u32 values, Hidden hidden) {
#pragma unroll 1
    for (int row = thread_of_team(); row < BLOCK_N; row += CONSUMERS * WARPGROUP) {
      if (!hidden(row)) continue;
#pragma unroll 1
      for (u32 at = row * ROW_BYTES; at < BYTES; at += BLOCK_N * ROW_BYTES) {  // in each panel
        auto* target = static_cast<uint4*>(__cvta_shared_to_generic(values + at));
#pragma unroll
        for (int i = 0; i < static_cast<int>(ROW_BYTES / sizeof(uint4)); i++) target[i] = make_uint4(0, 0, 0, 0);
      }
    }
    ptx::fence_async_shared();
    sync_team();
  }
};
