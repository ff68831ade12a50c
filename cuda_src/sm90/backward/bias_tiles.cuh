// This header has the fast path of a bias in Hopper's backward kernels: TMA loads its tiles together with the queries
// that they are added to.
#include "derivatives.cuh"
#include "schedule.cuh"

static_assert(!(HAS_SCORE_MOD && HAS_BIAS_TILES), "the rule is given scores with their bias, element by element");

struct GradientBias {
  alignas(HAS_BIAS_TILES ? 1024 : 1) unsigned char tiles[HAS_BIAS_TILES ? QUERY_STAGES * BIAS_TILE_BYTES : 1];
};

// bias_panel() is the address of the panel of a warpgroup's keys.
DEVICE u32 bias_panel(const GradientBias& bias, u32 stage, int warpgroup) {
  return ptx::shared_address(bias.tiles) + stage * BIAS_TILE_BYTES + warpgroup * BIAS_PANEL_BYTES;
}

// NothingElse is the default of what is loaded together with a tile.
struct NothingElse {
  static constexpr u32 BYTES = 0;
  DEVICE void load(u32) const {}
};

// BiasToLoad is a tile of a bias, which is loaded with the queries.
struct BiasToLoad {
  static constexpr u32 BYTES = PANELS_BIAS * BIAS_PANEL_BYTES;
  const AttentionParams& p;
  const ptx::TensorMap* map;
  u32 target;
  int batch, head, row, key;

  DEVICE void load(u32 landed) const {
    const int own_head = p.bias.head_stride == 0 ? 0 : head, own_batch = p.bias.batch_stride == 0 ? 0 : batch;
#pragma unroll
    for (int panel = 0; panel < PANELS_BIAS; panel++) {
      ptx::tma_load(target + panel * BIAS_PANEL_BYTES, map, landed, key + panel * BIAS_PANEL, row, own_head, own_batch);
    }
  }
};

// bias_to_load() is what is loaded with a tile of queries: the bias where TMA loads it.
template <class SharedStorage>
DEVICE auto bias_to_load(const AttentionParams& p, const SharedStorage& shared, u32 stage, const ptx::TensorMap* map,
                         int batch, int head, int row, int key) {
  if constexpr (HAS_BIAS_TILES) {
    return BiasToLoad{p, map, bias_panel(shared.bias, stage, 0), batch, head, row, key};
  } else {
    return NothingElse{};
  }
}

// add_bias() turns products, or what FewDerivatives has made of them, into scores, -inf where the bias is; it returns
// whether the bias is -inf somewhere.
template <class Bias = BiasElement>
DEVICE bool add_bias(float (&x)[FRAGMENT], const GradientFragment& scores, u32 panel) {
  const float scale = unit_of(scores);
  u32 thread = threadIdx.x;
  ptx::forget(thread);
  const u32 source = transposed_address(panel, thread);
  float lowest = 0;
#pragma unroll
  for (int i = 0; i < FRAGMENT; i += 8) {
    u32 pairs[4];
    ptx::ldmatrix_x4_trans(pairs, source + i / 8 * 16 * ROW_BYTES);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float2 bias = unpacked(Bias(), pairs[e / 2]);
      x[i + e] = x[i + e] * scale + bias.x;
      x[i + e + 1] = x[i + e + 1] * scale + bias.y;
      lowest = fminf(lowest, fminf(bias.x, bias.y));
    }
  }
  if (!__any_sync(ALL_LANES, lowest == -infinity())) return false;
#pragma unroll
  for (int i = 0; i < FRAGMENT; i += 8) {
    u32 pairs[4];
    ptx::ldmatrix_x4_trans(pairs, source + i / 8 * 16 * ROW_BYTES);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float2 bias = unpacked(Bias(), pairs[e / 2]);
      if (bias.x == -infinity()) x[i + e] = bias.x;
      if (bias.y == -infinity()) x[i + e + 1] = bias.y;
    }
  }
  return true;
}
