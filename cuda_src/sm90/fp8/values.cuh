// The loading warpgroup's warps that neither load nor schedule prepare what TMA cannot bring: values whose keys are
// contiguous, as wgmma wants codes, and scales of single keys. ldmatrix transposes pairs of codes, which are neighbours
// in a row: of two keys a lane gets columns 2 g and 2 g + 1. Byte permutations part the two columns, and stmatrix
// writes each 16 keys of a column as a row (FlashAttention-3, Shah et al. 2024, section 3.3).
#include "loader.cuh"

// A tile is transposed by 32 keys x 16 columns at a time. A warp has every second 32 keys or, where these are of an odd
// number, every second 16 columns.
constexpr int KEYS_AT_ONCE = 32, COLUMNS_AT_ONCE = 16;
constexpr bool SHARES_COLUMNS = BLOCK_N / KEYS_AT_ONCE % PREPARING_WARPS != 0;
constexpr int KEY_SHARES = BLOCK_N / KEYS_AT_ONCE / (SHARES_COLUMNS ? 1 : PREPARING_WARPS);
constexpr int SHARES = KEY_SHARES * (HEAD_DIM_V / COLUMNS_AT_ONCE) / (SHARES_COLUMNS ? PREPARING_WARPS : 1);
// So many reads of shared memory are under way together, if there are registers for them.
constexpr int SHARES_AT_ONCE = SHARES % 4 == 0 && PRODUCER_REGISTERS >= 56 ? 4 : 1;
static_assert(SHARES * PREPARING_WARPS * KEYS_AT_ONCE * COLUMNS_AT_ONCE == BLOCK_N * HEAD_DIM_V,
              "warps have equal shares");

// Transposer is a lane's part in the transposition of tiles. Addresses differ between its shares by constants and, in
// the swizzle, by an exclusive or.
struct Transposer {
  int first_key;       // that the lane has of the warp's first share
  u32 source, target;  // offsets in a tile of values and in the transposed one: those of the first share
  u32 first, second;   // byte permutations; lanes of the upper columns store odd ones first, so that the eight rows
                       // of a matrix lie in different banks

  DEVICE Transposer(int warp, int lane) {
    const int of_warp = SHARES_COLUMNS ? 0 : warp * KEYS_AT_ONCE;
    first_key = of_warp + lane % 4 * 2;
    const int column = SHARES_COLUMNS ? warp * COLUMNS_AT_ONCE : 0;
    const int key = of_warp + lane;
    source = key * ROW_BYTES + ((column / 16 ^ key % 8) * 16);
    const u32 even = 0x6420, odd = 0x7531;
    first = lane < 16 ? even : odd;
    second = lane < 16 ? odd : even;
    const int row = lane % 8, matrix = lane / 8;
    target = column_address(column + 2 * row + ((row / 4 ^ matrix) & 1), of_warp / 16 + matrix / 2);
  }

  // run() transposes the warp's share of a tile; keys outside [begin, end), counted in the tile, become 0. It returns
  // bits that are not 0 where one of the lane's codes is NaN.
  template <bool AT_EDGE>
  DEVICE u32 run(u32 values, u32 columns, int begin, int end) const {
    // Tiles begin at multiples of 1024 bytes, so that the exclusive or leaves their addresses.
    u32 from = values + source, to = columns + target, nan = 0;
    constexpr int AT_ONCE = AT_EDGE ? 1 : SHARES_AT_ONCE;
#pragma unroll(AT_EDGE ? 1 : SHARES)
    for (int share = 0; share < SHARES; share += AT_ONCE) {
      ptx::forget(from);  // or all addresses would be kept in registers, of which there are too few
      ptx::forget(to);
      u32 d[AT_ONCE][4];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) ptx::ldmatrix_x4_trans(d[i], source_of(from, share + i));
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if constexpr (AT_EDGE) hide(d[i], first_key + keys_of(share + i), begin, end);
        if constexpr (HIDES_ANYWHERE) {
#pragma unroll
          for (const u32 pair : d[i]) nan |= ((pair & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
        }
        ptx::stmatrix_x4(target_of(to, share + i), __byte_perm(d[i][0], d[i][1], first),
                         __byte_perm(d[i][0], d[i][1], second), __byte_perm(d[i][2], d[i][3], first),
                         __byte_perm(d[i][2], d[i][3], second));
      }
    }
    return nan;
  }

 private:
  // The keys and columns of a share, counted from those of the warp's first one.
  static DEVICE constexpr int keys_of(int share) {
    return share % KEY_SHARES * KEYS_AT_ONCE * (SHARES_COLUMNS ? 1 : PREPARING_WARPS);
  }
  static DEVICE constexpr int columns_of(int share) {
    return share / KEY_SHARES * COLUMNS_AT_ONCE * (SHARES_COLUMNS ? PREPARING_WARPS : 1);
  }
  static DEVICE u32 source_of(u32 from, int share) {
    const int columns = columns_of(share);
    return (from ^ columns % CODE_PANEL) + columns / CODE_PANEL * BLOCK_N * ROW_BYTES + keys_of(share) * ROW_BYTES;
  }
  static DEVICE u32 target_of(u32 to, int share) { return (to ^ keys_of(share)) + columns_of(share) * ROW_BYTES; }

  // hide() makes a lane's codes of a share 0 outside [begin, end); `first` is its first key.
  static DEVICE void hide(u32 (&d)[4], int first, int begin, int end) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = first + 8 * i;
      if (key < begin || key >= end) d[i] &= 0xffff0000u;
      if (key + 1 < begin || key + 1 >= end) d[i] &= 0xffffu;
    }
  }
};

// TokenScales are a lane's scales of single keys and values on their way from memory: those of a tile are asked for
// while the tile before is transposed.
struct TokenScales {
  static constexpr int LANES = PREPARING_WARPS * WARP, KEYS = TOKEN_SCALES ? (BLOCK_N + LANES - 1) / LANES : 1;
  float of_keys[KEYS], of_values[KEYS];
  float most = WeightScales::LEAST;  // the largest scale of a value in the tiles so far of these queries

  // load() asks for the scales of a tile's keys in [begin, end), counted in the tile. Of others the keys' are 1 and
  // the values' 0.
  DEVICE void load(const AttentionParams& p, const Sequence& s, int head, int first_key, int begin, int end) {
    const i64 batch = batch_of(p, s);
#pragma unroll
    for (int n = 0; n < KEYS; n++) {
      const int i = number(n);
      const bool is_used = i >= begin && i < end && i < BLOCK_N;
      of_keys[n] = is_used ? scale_at(p.k_scale, batch, s.row_k + first_key + i, head) : 1;
      of_values[n] = is_used ? scale_at(p.v_scale, batch, s.row_k + first_key + i, head) : 0;
    }
  }

  // store() writes the scales to shared memory. One that is infinite becomes NaN, and does not count for the largest.
  DEVICE void store(SharedScales& scales, int warp) {
    u32 top = 0;
#pragma unroll
    for (int n = 0; n < KEYS; n++) {
      const int i = number(n);
      const float magnitude = fabsf(of_values[n]);
      const bool is_finite = magnitude < infinity();
      if (is_finite) top = __float_as_uint(magnitude) > top ? __float_as_uint(magnitude) : top;
      if (BLOCK_N % LANES == 0 || i < BLOCK_N) {
        scales.of_keys[i] = of_keys[n];
        scales.of_values[i] = is_finite ? of_values[n] : of_values[n] - of_values[n];  // NaN
      }
    }
    top = __reduce_max_sync(ALL_LANES, static_cast<int>(top));  // numbers from 0 on are in the order of their bits
    const float own = WeightScales::follow(__uint_as_float(top), most);
    if (lane() == 0) scales.tops[warp] = own;
  }

 private:
  static DEVICE int number(int n) { return n * LANES + threadIdx.x % LANES; }
};

// prepare_values() is one of the preparing warps: it prepares every tile of keys that is loaded.
DEVICE void prepare_values(const AttentionParams& p, SharedStorage& shared, Rings rings, int warp) {
  TokenScales scales;
  while (true) {
    rings.work.wait();
    const TileMessage& work = shared.work[rings.work.stage];
    if (work.tile == NO_TILE) break;
    const Sequence& s = work.sequence;
    const KeyTiles tiles(p, work);
    const int first_seen = Mask(p, s, work.head).columns(0).begin, head = work.head / group_size(p);
    const auto load_scales = [&](int number) {
      const int first_key = tiles.block(number) * BLOCK_N;
      if (TOKEN_SCALES) scales.load(p, s, head, first_key, first_seen - first_key, s.len_k - first_key);
    };
    scales.most = WeightScales::LEAST;
    if (work.keys.begin < work.keys.end) load_scales(work.keys.end - 1);
#pragma unroll 1
    for (int number = work.keys.end - 1; number >= work.keys.begin; number--) {
      const int first_key = tiles.block(number) * BLOCK_N, begin = first_seen - first_key, end = s.len_k - first_key;
      rings.columns.follow(rings.v);
      rings.scales.follow(rings.v);
      if constexpr (TOKEN_SCALES) {
        rings.scales.acquire();
        scales.store(shared.scales[rings.scales.stage], warp);
        rings.scales.publish_written();
        if (number > work.keys.begin) load_scales(number - 1);
      }
      u32 thread = warp * WARP + lane();
      ptx::forget(thread);  // so that no register holds what follows from it beyond this tile
      const Transposer transposer(thread / WARP, thread % WARP);
      rings.v.wait();
      rings.columns.acquire();
      const u32 nan = begin <= 0 && end >= BLOCK_N
                          ? transposer.run<false>(rings.v.buffer(), rings.columns.buffer(), begin, end)
                          : transposer.run<true>(rings.v.buffer(), rings.columns.buffer(), begin, end);
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
