// The loading warpgroup's warps that neither load nor schedule prepare what TMA cannot bring: values whose keys are
// contiguous, as wgmma wants codes, and scales of single keys. ldmatrix transposes pairs of codes, which are neighbours
// in a row: of two keys a lane gets columns 2 g and 2 g + 1. Byte permutations part the two columns, and stmatrix
// writes each 16 keys of a column as a row (FlashAttention-3, Shah et al. 2024, section 3.3).
#include "loader.cuh"

// transpose_sixteens() transposes 32 keys x 16 columns; keys outside [begin, end), counted in the tile, become 0. It
// returns bits that are not 0 where one of the lane's codes is NaN.
template <bool AT_EDGE>
DEVICE u32 transpose_sixteens(u32 from, u32 to, int keys, int columns, int begin, int end) {
  const int lane_key = keys + lane(), chunk = columns / 16 % 8;
  u32 d[4];
  ptx::ldmatrix_x4_trans(
      d, from + columns / CODE_PANEL * BLOCK_N * ROW_BYTES + lane_key * ROW_BYTES + ((chunk ^ lane_key % 8) * 16));
  u32 nan = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (AT_EDGE) {
      const int key = keys + 8 * i + lane() % 4 * 2;
      if (key < begin || key >= end) d[i] &= 0xffff0000u;
      if (key + 1 < begin || key + 1 >= end) d[i] &= 0xffffu;
    }
    if constexpr (HIDES_ANYWHERE) nan |= ((d[i] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  }
  // Lanes of the upper columns store odd ones first, so that the eight rows of a matrix lie in different banks.
  const u32 even = 0x6420, odd = 0x7531, first = lane() < 16 ? even : odd, second = lane() < 16 ? odd : even;
  const int row = lane() % 8, matrix = lane() / 8;
  const int column = columns + 2 * row + ((row / 4 ^ matrix) & 1);
  ptx::stmatrix_x4(to + column_address(column, keys / 16 + matrix / 2), __byte_perm(d[0], d[1], first),
                   __byte_perm(d[0], d[1], second), __byte_perm(d[2], d[3], first), __byte_perm(d[2], d[3], second));
  return nan;
}

// transpose_values() is a warp's share of the transposition of a tile.
template <bool AT_EDGE>
DEVICE u32 transpose_values(u32 from, u32 to, int warp, int begin, int end) {
  constexpr int GROUPS = BLOCK_N / 32;
  u32 nan = 0;
#pragma unroll 2
  for (int i = warp; i < GROUPS * (HEAD_DIM_V / 16); i += PREPARING_WARPS) {
    nan |= transpose_sixteens<AT_EDGE>(from, to, i % GROUPS * 32, i / GROUPS * 16, begin, end);
  }
  return nan;
}

// load_scales() brings the scales of a tile's keys and values; those of keys that are not in use are never read.
DEVICE void load_scales(const AttentionParams& p, const Sequence& s, int head, SharedScales& scales, int first_key,
                        int begin, int end) {
  const i64 batch = batch_of(p, s);
#pragma unroll 1
  for (int i = threadIdx.x % (PREPARING_WARPS * WARP); i < BLOCK_N; i += PREPARING_WARPS * WARP) {
    const bool used = i >= begin && i < end;
    scales.of_keys[i] = used ? scale_at(p.k_scale, batch, s.row_k + first_key + i, head) : 1;
    scales.of_values[i] = used ? scale_at(p.v_scale, batch, s.row_k + first_key + i, head) : 1;
  }
}

// prepare_values() is one of the preparing warps: it prepares every tile of keys that is loaded.
DEVICE void prepare_values(const AttentionParams& p, SharedStorage& shared, Rings rings, int warp) {
  while (true) {
    rings.work.wait();
    const TileMessage& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const KeyTiles tiles(p, work);
    const int first_seen = Mask(p, s, work.head).columns(0).begin, head = work.head / group_size(p);
#pragma unroll 1
    for (int number = work.keys.end - 1; number >= work.keys.begin; number--) {
      const int first_key = tiles.block(number) * BLOCK_N, begin = first_seen - first_key, end = s.len_k - first_key;
      if constexpr (TOKEN_SCALES) {
        rings.scales.acquire();
        load_scales(p, s, head, shared.scales[rings.scales.stage], first_key, begin, end);
        rings.scales.publish_written();
      }
      rings.v.wait();
      rings.columns.acquire();
      const u32 nan = begin <= 0 && end >= BLOCK_N
                          ? transpose_values<false>(rings.v.buffer(), rings.columns.buffer(), warp, begin, end)
                          : transpose_values<true>(rings.v.buffer(), rings.columns.buffer(), warp, begin, end);
      if constexpr (HIDES_ANYWHERE) {
        const bool any = __any_sync(ALL_LANES, nan != 0);
        if (lane() == 0) shared.has_nan[rings.columns.stage][warp] = any;
      }
      rings.columns.publish_from_warp();
      rings.v.release();
    }
    __syncwarp();
    rings.work.release();
  }
}

// clear_columns() makes the transposed values of keys that no query of the tile sees 0; all consumers do it together.
DEVICE void clear_columns(u32 columns, const u8* seen) {
#pragma unroll 1
  for (int column = threadIdx.x; column < HEAD_DIM_V; column += CONSUMERS * WARPGROUP) {
#pragma unroll 1
    for (int key = 0; key < BLOCK_N; key++) {
      const int place = key_place(key);
      if (seen[key] != 0) continue;
      *static_cast<u8*>(__cvta_shared_to_generic(columns + column_address(column, place / 16) + place % 16)) = 0;
    }
  }
  ptx::fence_async_shared();
}
