// This header has the sizes and the shared memory of the forward kernels by mma.sync (sm80/forward.cuh), and the tiles
// of keys that a thread block visits.
#include "products"
#include "keys"
#include "../fragment/score_fragment.cuh"
#include "../fragment/softmax_fragment.cuh"
#include "warp_splits.cuh"

constexpr int QUERY_WARPS = SPLITS_WARPS ? 1 : NUM_WARPS / KEY_WARPS, FRAGMENTS = BLOCK_M / (QUERY_WARPS * 16);
constexpr int WARP_COLUMNS = HEAD_DIM_V / KEY_WARPS;
constexpr bool SHARES_QUERIES = KEY_WARPS > 1;
using QueryTile = QueriedTile<BLOCK_M, HEAD_DIM>;
using KeyTile = KeyedTile<BLOCK_N, HEAD_DIM, true>;
using ValueTile = ValuedTile<BLOCK_N, HEAD_DIM_V, true>;
using WeightTile = SharedTile<BLOCK_M, BLOCK_N>;
constexpr bool HAS_WEIGHT_TILE = SHARES_QUERIES || HAS_BIAS_TILES;
constexpr int LISTED_N = BLOCK_N / LISTED;
// Tiles that are decoded between loading and products are loaded a step ahead into one buffer, as the products read
// another.
constexpr bool DECODES = KeyTile::DECODES;
constexpr int BUFFERS = DECODES ? 1 : STAGES;
DEVICE u32 next_buffer(u32 stage) { return BUFFERS == 2 ? stage ^ 1 : 0; }

// Where tiles of queries alone would leave some of the GPU idle, their keys are split (split-KV, as in Flash-Decoding):
// neighbouring thread blocks have the splits of one tile. Each split is an attention of its own, and
// around/merge_splits.cu merges them.
DEVICE u32 num_splits_of(const AttentionParams& p) { return SPLITS_KEYS ? p.splits : 1; }
DEVICE int own_split(const AttentionParams& p) { return SPLITS_KEYS ? blockIdx.x % p.splits : 0; }

// OwnBlocks iterates over the tiles of keys of a split: an even share of those that the tile of queries sees.
struct OwnBlocks : Blocks {
  DEVICE OwnBlocks(const AttentionParams& p, const Work& work)
      : Blocks(blocks_of_keys(p, work.sequence, work.head, work.tile, BLOCK_M, LISTED_N)) {
    if constexpr (SPLITS_KEYS) take_share(p);
  }

 private:
  // take_share() leaves an even share of the tiles; where a step takes two of them, a share begins with a step.
  DEVICE void take_share(const AttentionParams& p) {
    const int number = larger(Blocks::count(), 0), split = own_split(p);
    const int begin = static_cast<int>(static_cast<i64>(number) * split / p.splits) / LISTED * LISTED;
    const int last = static_cast<int>(static_cast<i64>(number) * (split + 1) / p.splits);
    const int share_end = split + 1 == p.splits ? number : last / LISTED * LISTED;
    if constexpr (HAS_BLOCK_MASK) {
      list += begin;
      left = share_end - begin;
      take();
    } else {
      end = block + share_end;
      block += begin;
    }
  }
};

struct SharedStorage {
  alignas(128) unsigned char q[QueryTile::BYTES];            // (BLOCK_M, HEAD_DIM)
  alignas(128) unsigned char k[BUFFERS * KeyTile::BYTES];    // (BUFFERS, BLOCK_N, HEAD_DIM)
  alignas(128) unsigned char v[BUFFERS * ValueTile::BYTES];  // (BUFFERS, BLOCK_N, HEAD_DIM_V)
  // (BLOCK_M, BLOCK_N): weights that warps exchange, or biases.
  alignas(HAS_WEIGHT_TILE ? 128 : 4) unsigned char weights[HAS_WEIGHT_TILE ? WeightTile::BYTES : 4];
  Accum of_rows[KEY_WARPS][SHARES_QUERIES ? BLOCK_M : 1];  // (KEY_WARPS, BLOCK_M): maxima or sums that warps exchange
  Work work;  // from here on members are read again and again, because registers are scarce
  KeyRows k_rows, v_rows;
  FragmentSoftmax softmax;  // only its factors are used
  Factors<BLOCK_M, 1> query_factors;
  Factors<BLOCK_N, 2> factors;
  u8 seen[HIDES_ANYWHERE ? BLOCK_N : 1];
};
static_assert(BLOCK_M == FRAGMENTS * QUERY_WARPS * 16 && WARP_KEYS % 16 == 0, "whole fragments");
static_assert(LISTED == 1 || (LISTED == 2 && STAGES == 2 && HAS_BLOCK_MASK && NUM_OPTIONS == 1 && !HAS_WINDOW));
static_assert(!SPLITS_WARPS || (!SHARES_QUERIES && FRAGMENTS == 1 && !HAS_BIAS_TILES && LISTED == 1));
static_assert(!SPLITS_WARPS || sizeof(OwnResults) <= BUFFERS * (KeyTile::BYTES + ValueTile::BYTES), "there is room");
static_assert(!SHARES_QUERIES || (STAGES == 1 && !(HAS_MASK || HAS_BIAS || HAS_DROPOUT)),
              "one buffer of keys; plain, with a window or a block mask");
// WAITS_FOR_KEYS_FIRST: the first scores do not wait for values. With a block mask that takes registers, so it is left
// out.
constexpr bool WAITS_FOR_KEYS_FIRST = BUFFERS == 2 && sizeof(Element) == 2 && !HAS_BLOCK_MASK;
// RECHECKS: keys that are hidden one by one are looked for only where the result is not finite, in a recheck of the
// tile.
constexpr bool RECHECKS = (HAS_MASK || HAS_BIAS) && sizeof(Element) == 2 && !(FRAGMENTS > 1 && HEAD_DIM_V > 64);
// FETCHES_AHEAD: a mask and a bias are read while scores are computed, where registers hold them.
constexpr bool FETCHES_AHEAD = sizeof(Element) == 2 && FRAGMENTS == 1 && !HAS_BIAS_TILES;
// HOLDS_SCORES: what scores need is held in registers, or made anew for every tile.
constexpr bool HOLDS_SCORES = sizeof(Element) == 2 && !(HIDES_ANYWHERE && (FRAGMENTS > 1 || NUM_OPTIONS == 1)) &&
                              !(HAS_WINDOW && (HEAD_DIM_V > 192 || BLOCK_N > 64));
