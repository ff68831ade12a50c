// This header applies options in Hopper's backward kernels with few registers: masks as bits, a bias in tiles that TMA
// loads with the queries, and softcap's derivative found from a weight. It is the counterpart of forward/scores.cuh for
// fragments of 64 keys x BLOCK_M queries.
#include "../../fragment/gradient_fragment.cuh"
#include "../wgmma.cuh"
#include "schedule.cuh"

// ---- A block mask. For a tile of queries a warpgroup has the blocks of its 64 keys; of a partial block each thread
// reads the bits of its own fragment in one word.

constexpr int BLOCKS_M = (BLOCK_M + CANONICAL - 1) / CANONICAL, BLOCKS_N = BLOCK_N / CANONICAL;
constexpr int BLOCKS = HAS_BLOCK_MASK ? BLOCKS_M * BLOCKS_N : 0;  // blocks of a tile, (BLOCKS_N, BLOCKS_M)

// BlockSlots has the slots of a tile's blocks; the loading warp hands them on with the queries.
struct BlockSlots {
  int slots[BLOCKS + 1];  // (BLOCKS_N, BLOCKS_M), then `ranged`

  // put() is called by a warp. `ranged` has a bit for each warpgroup from which lengths or window hide something.
  DEVICE void put(int slot, u32 ranged) {
    if (HAS_BLOCK_MASK && lane() <= BLOCKS) slots[lane()] = lane() < BLOCKS ? slot : static_cast<int>(ranged);
    if (HAS_BLOCK_MASK) __syncwarp();
  }
};

// own_slot() is the slot of the lane's block of a tile.
DEVICE int own_slot(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key) {
  if (!HAS_BLOCK_MASK || lane() >= BLOCKS) return VISIBLE_SLOT;
  const Mask mask(p, s, head);
  return mask.slot_at(first_row + static_cast<int>(lane()) % BLOCKS_M * CANONICAL,
                      first_key + static_cast<int>(lane()) / BLOCKS_M * CANONICAL);
}

// partial_warpgroups() has bit w set where some block of warpgroup w is not visible. A warp calls it.
DEVICE u32 partial_warpgroups(int slot) {
  u32 warpgroups = 0;
  if constexpr (HAS_BLOCK_MASK) {
    const u32 blocks = __ballot_sync(ALL_LANES, slot != VISIBLE_SLOT);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) warpgroups |= (blocks >> i & 1) << i / BLOCKS_M;
  }
  return warpgroups;
}

// masked_warpgroups() has bit w set where some query of a tile does not see some key of warpgroup w. Queries beyond the
// sequence do not count.
DEVICE u32 masked_warpgroups(const AttentionParams& p, const Sequence& s, int head, int first_row, int first_key) {
  const Mask mask(p, s, head);
  u32 masked = 0;
#pragma unroll
  for (int warpgroup = 0; warpgroup < BLOCK_N / ROWS_OF_WARPGROUP; warpgroup++) {
    const int key = first_key + warpgroup * ROWS_OF_WARPGROUP;
    if ((HAS_MASK && !HAS_MASK_VECTORS) || (HAS_BIAS && !HAS_BIAS_TILES) ||
        !mask.columns_inside(first_row, BLOCK_M, key, ROWS_OF_WARPGROUP))
      masked |= 1u << warpgroup;
  }
  return masked;
}

// SKIPS_STEPS: a warpgroup may skip a step of which it sees nothing (KeyWork::skips). It is then a step behind the
// other: with two stages of queries both would wait for loads, so there must be three. With a block mask it would take
// long to compile.
constexpr bool SKIPS_STEPS =
    BLOCK_N == 2 * BLOCK_M && BLOCK_M == ROWS_OF_WARPGROUP && !HAS_BLOCK_MASK && QUERY_STAGES > 2;
// skipped_steps() finds KeyWork::skips for a tile of keys.
template <class Iterator>
DEVICE u32 skipped_steps(const AttentionParams& p, const Sequence& s, const Iterator& iterator, int first_key) {
  const Mask mask(p, s, iterator.head);
  const auto hidden = [&](int block, int key) {
    return mask.wholly_outside(block * BLOCK_M, BLOCK_M, key, ROWS_OF_WARPGROUP);
  };
  if (p.num_heads_q > p.num_heads_kv || iterator.done()) return 0;
  const int last = iterator.last_block();
  if (iterator.block() == last) return 0;
  return (hidden(last, first_key) ? 1 : 0) | (hidden(iterator.block(), first_key + ROWS_OF_WARPGROUP) ? 2 : 0);
}

// some_query_sees_all() tells whether the list of tiles shows at once that each of a tile's keys is seen, because some
// query sees all of them. A warp calls it.
template <class Iterator>
DEVICE bool some_query_sees_all(const AttentionParams& p, const Sequence& s, const Iterator& iterator, int first_key) {
  bool sees = false;
  if constexpr (HAS_BLOCK_MASK && !HAS_MASK && !HAS_BIAS && !HIDES_BY_RULE) {
    const int* entry = iterator.blocks.list + lane();
    if (!iterator.done() && lane() < iterator.blocks.left && (*entry & 1) == 0 && *entry >> 1 < iterator.blocks.end) {
      const Mask::Range range = Mask(p, s, iterator.head).columns((*entry >> 1) * BLOCK_M);
      sees = range.begin <= first_key && range.end >= smaller(first_key + BLOCK_N, s.len_k);
    }
    sees = __any_sync(ALL_LANES, sees);
  }
  return sees;
}

// BlockBits is a thread's part of its warpgroup's bits, for a tile of queries.
struct BlockBits {
  static constexpr bool HIDES = HAS_BLOCK_MASK;
  const BlockSlots& slots;
  int warpgroup;
  u32 words[HAS_BLOCK_MASK ? BLOCKS_M : 1];

  DEVICE BlockBits(const AttentionParams& p, const BlockSlots& slots, int warpgroup, bool masked)
      : slots(slots), warpgroup(warpgroup) {
    if (HAS_BLOCK_MASK && (masked || HAS_BIAS_TILES)) {  // a bias may hide elements, too
#pragma unroll
      for (int i = 0; i < BLOCKS_M; i++) {
        const int slot = slots.slots[warpgroup * BLOCKS_M + i];
        words[i] = slot == VISIBLE_SLOT ? 0xffffffffu : 0;
        if (slot >= 0) words[i] = p.fragment_bits[static_cast<i64>(slot) * WARPGROUP + threadIdx.x % WARPGROUP];
      }
    }
  }

  // ranged() tells whether lengths and window may hide something of the tile. With 128 queries registers are too scarce
  // to ask.
  DEVICE bool ranged() const { return BLOCKS_M > 1 || (slots.slots[BLOCKS] >> warpgroup & 1); }

  DEVICE void hide(float (&x)[FRAGMENT]) const {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) x[e] = words[e / 32] >> e % 32 & 1 ? x[e] : -infinity();
  }
};

// ---- A bias, which is loaded together with the queries that it is added to.

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

// add_bias() turns products into scores, -inf where the bias is; it returns whether the bias is -inf somewhere.
template <class Bias = BiasElement>
DEVICE bool add_bias(float (&x)[FRAGMENT], const GradientFragment& scores, u32 panel) {
  const float scale = HAS_SOFTCAP ? static_cast<float>(scores.p.softcap) : scores.scale;
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

// BiasPlace is where a tile of queries, given by its query_tile(), lies in the gradient of the bias.
struct BiasPlace {
  int row, head, batch;

  DEVICE BiasPlace(const AttentionParams& p, i64 number) {
    const u32 batch_head = number / p.num_query_tiles;
    row = static_cast<int>(number % p.num_query_tiles) * BLOCK_M;
    head = batch_head % p.num_heads_q;
    batch = batch_head / p.num_heads_q;
  }
};

// ---- Softcap. A score's weight tells its tanh again, so nothing has to be kept for the derivative. A bias may swallow
// the score in the sum; there the derivative is kept.

// TAKES_SOFTCAP: softcap is applied here. Beside the user's own rule, whose derivative no weight tells, to_weights()
// does it, and RuleFragment keeps both derivatives.
constexpr bool TAKES_SOFTCAP = HAS_SOFTCAP && !HAS_SCORE_MOD;
constexpr bool KEEPS_DERIVATIVE = TAKES_SOFTCAP && HAS_BIAS;
static_assert(!(HAS_SCORE_MOD && HAS_BIAS_TILES), "the rule is given scores with their bias, element by element");

// quotient() is within two units in the last place where dk or dv leave few registers: a division's slow path takes
// some.
DEVICE float quotient(float a, float b) {
  if constexpr (HEAD_DIM > 128) return __fdividef(a, b);
  return a / b;
}

// CappedAlibi is what ALiBi subtracts from scores whose unit is softcap.
struct CappedAlibi {
  float slope, distance;  // the distance is that of the thread's first element

  DEVICE explicit CappedAlibi(const GradientFragment& scores) : slope(0), distance(0) {
    if constexpr (HAS_ALIBI) {
      const Score score = scores.score();
      slope = quotient(score.slope, score.softcap);
      distance = static_cast<float>(scores.row + score.diagonal - scores.key);
    }
  }
  DEVICE float operator[](int e) const {
    return slope * fabsf(distance + static_cast<float>(column_offset(e) - row_offset(e)));
  }
};

// SoftcapFactors holds the derivatives of a thread's elements in 16 bits each: in registers or, for the widest heads,
// in vectors of the thread's own in shared memory.
constexpr bool SHARED_FACTORS = KEEPS_DERIVATIVE && HEAD_DIM_V > 192;
template <bool SHARED = SHARED_FACTORS>
struct SoftcapFactors {
  u32 words[KEEPS_DERIVATIVE ? FRAGMENT / 2 : 1];

  DEVICE explicit SoftcapFactors(void*) {}
  DEVICE u32& operator[](int i) { return words[i]; }
};
template <>
struct SoftcapFactors<true> {
  u32* words;  // the thread's first vector; a warp's vectors lie side by side

  DEVICE explicit SoftcapFactors(void* first) : words(static_cast<u32*>(first)) {}
  DEVICE u32& operator[](int i) { return words[i / 4 * WARP * 4 + i % 4]; }
};

// apply_softcap() turns products into scores whose unit is softcap, with the error of the forward pass
// (forward/scores.cuh). A bias that is read element by element is added here, too, and ALiBi is left for later.
template <class Factors>
DEVICE void apply_softcap(float (&x)[FRAGMENT], const GradientFragment& scores, Factors& factors) {
  if constexpr (KEEPS_DERIVATIVE) {
    const Score score = scores.score();
    const float factor = quotient(scores.scale, score.softcap);
    u32 row = scores.row, key = scores.key;
    ptx::forget(row);  // the compiler would otherwise hold what follows from row and key
    ptx::forget(key);
#pragma unroll
    for (int e = 0; e < FRAGMENT; e += 2) {
      float derivative[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float& own = x[e + i];
        own = ptx::tanh(own * factor);
        derivative[i] = 1 - fminf(own * own, 1);
        if constexpr (!HAS_BIAS_TILES) {
          const float bias =
              score.bias_at(static_cast<int>(row) + column_offset(e + i), static_cast<int>(key) + row_offset(e + i));
          own = bias == -infinity() ? bias : own * score.softcap + bias;
        }
      }
      factors[e / 2] = packed(Element(), derivative[0], derivative[1]);
    }
  } else if constexpr (TAKES_SOFTCAP) {
    const CappedAlibi alibi(scores);
    const float factor = quotient(scores.scale, static_cast<float>(scores.p.softcap));
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) {
      x[e] = ptx::tanh(x[e] * factor);
      if constexpr (HAS_ALIBI) x[e] -= alibi[e];
    }
  }
}

// cap_gradient() multiplies N gradients, those from element `first` on, by softcap's derivative, which their weights
// tell.
template <class Values, int N>
DEVICE void cap_gradient(float (&ds)[FRAGMENT], const float (&weights)[N], int first, const Values& lse,
                         const GradientFragment& scores) {
  const CappedAlibi alibi(scores);
  const float unit = quotient(1, static_cast<float>(scores.p.softcap) * LOG2_E);
#pragma unroll
  for (int e = 0; e < N; e++) {
    float tanh = (ptx::lg2(fabsf(weights[e])) + lse[first + e]) * unit;
    if constexpr (HAS_ALIBI) tanh += alibi[first + e];
    ds[first + e] *= 1 - fminf(tanh * tanh, 1);
  }
}

// apply_softcap_gradient() turns gradients of scores into those of products. A weight of 0 has no gradient.
template <class Values, class Factors>
DEVICE void apply_softcap_gradient(float (&ds)[FRAGMENT], const float (&weights)[FRAGMENT], const Values& lse,
                                   const GradientFragment& scores, Factors& factors) {
  if constexpr (KEEPS_DERIVATIVE) {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e += 2) {
      const float2 factor = unpacked(Element(), factors[e / 2]);
      ds[e] *= factor.x;
      ds[e + 1] *= factor.y;
    }
  } else if constexpr (TAKES_SOFTCAP) {
    cap_gradient(ds, weights, 0, lse, scores);
  }
}

// ---- The rest serves the kernels whose warpgroups have 64 keys each.

// LseValues reads lse from shared memory each time where options take many registers, and holds it in registers
// elsewhere.
template <bool IN_PLACE =
              HAS_BIAS || HAS_SOFTCAP || HAS_MASK || HAS_DROPOUT || HIDES_BY_RULE || (HAS_BLOCK_MASK && BLOCKS_M > 1)>
struct LseValues : QueryValues {
  using QueryValues::QueryValues;
};
template <>
struct LseValues<true> : QueryValuesInPlace {
  using QueryValuesInPlace::QueryValuesInPlace;
};

// MASK_IN_BITS: the mask of a tile is read as bits while a product is computed. For wide heads, and together with other
// options, this holds even for a mask that is read element by element, because registers are scarce behind the product.
constexpr bool MASK_IN_BITS = HAS_MASK_VECTORS || (HAS_MASK && (HEAD_DIM > 128 || NUM_OPTIONS > 1));

// to_weights() turns products, or the scores that softcap and a bias have made of them, into weights.
template <class Values>
DEVICE void to_weights(float (&x)[FRAGMENT], const GradientFragment& scores, const Values& lse, bool masked,
                       const BlockBits& bits) {
  scores.to_weights<HAS_BIAS_TILES || TAKES_SOFTCAP, HAS_BLOCK_MASK || MASK_IN_BITS>(
      x, lse, masked, static_cast<float>(scores.p.softcap), bits);
}

// MaskBits has the bits of a mask whose rows are vectors. Each lane reads the warp's 16 keys for two of 64 queries, and
// takes its own elements from the other lanes.
struct MaskBits {
  static_assert(!HAS_MASK_VECTORS || BLOCK_M == 2 * WARP, "two queries a lane");
  static constexpr int KEYS = sizeof(uint4);
  u32 word = 0;  // bit 16 h + 8 k + i belongs to the element in half h of the queries, query i of 8 and key k of 2

  DEVICE MaskBits(const AttentionParams& p, const Sequence& s, int head, int first_row, int key) {
    if constexpr (HAS_MASK_VECTORS) {
      const Mask mask(p, s, head);
      const int column = smaller(key, mask.mask_last_column - (KEYS - 1));  // keys beyond the end are hidden anyway
      u32 own = 0;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u8* from = mask.mask_row(first_row + lane() + r * WARP) + column;
        own |= bits_of(*reinterpret_cast<const uint4*>(from)) << KEYS * r;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32 keys = __shfl_sync(ALL_LANES, own, fragment_column() + i / 2 * 8 + i % 2) >> fragment_row();
        word |= (keys & 0x01010101u) << i;
      }
    } else if constexpr (MASK_IN_BITS) {
      const Mask mask(p, s, head);
#pragma unroll 4
      for (int e = 0; e < FRAGMENT; e++) {
        const int i = first_row + fragment_column() + column_offset(e), j = key + fragment_row() + row_offset(e);
        word |= static_cast<u32>(mask.in_mask(i, j)) << bit_of(e);
      }
    }
  }
  static DEVICE int bit_of(int e) { return e / 16 * 16 + e / 2 % 2 * 8 + e / 4 % 4 * 2 + e % 2; }

  DEVICE void clear_hidden(float (&weights)[FRAGMENT]) const {
    if constexpr (MASK_IN_BITS) {
#pragma unroll
      for (int e = 0; e < FRAGMENT; e++) weights[e] = word >> bit_of(e) & 1 ? weights[e] : 0;
    }
  }
};
