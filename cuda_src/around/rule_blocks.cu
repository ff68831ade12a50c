// This kernel finds which 64 x 64 blocks of scores the user's own mask_mod hides wholly, shows wholly, or in part, on
// the device and without an array of all scores. The slots are those of a BlockMask's store (cuflash/masks/store.py),
// so that around/block_sparse.cu makes the lists of tiles that attention kernels visit, and these skip what is hidden.
// Where a block is shown in part, the kernels ask the rule, element by element.
#include "../rules/user.cuh"

constexpr int COLUMNS = CANONICAL / WARP;  // columns of a block that a lane has
constexpr int ROWS_PER_VOTE = 8;           // rows that a warp asks between two votes on whether it may stop
constexpr int PARTIAL = 0;                 // the slot of all blocks that are shown in part
constexpr u32 EVERY_OTHER = 0x55555555u;

// find_rule_blocks sets each slot (batch | 1, heads | 1, blocks_q, blocks_k) to HIDDEN, VISIBLE or PARTIAL. One warp
// asks for one block. Block PARTIAL of the store `shown` (64, 2), and of `fragments` (128), shows everything, as the
// rule is asked anyway; that of `mixed`, from which the lists are made, every other column, so that they call it
// partial.
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    find_rule_blocks(const __grid_constant__ AttentionParams p, int* slots, u32* shown, u32* mixed, u32* fragments,
                     int num_heads, int blocks_q, int blocks_k, i64 num_blocks) {
  const u32 lane = threadIdx.x % WARP;
  const i64 block = (static_cast<i64>(blockIdx.x) * NUM_THREADS + threadIdx.x) / WARP;
  if (block == 0) {
    for (int i = static_cast<int>(lane); i < CANONICAL * CANONICAL / 32; i += WARP) {
      shown[i] = fragments[i] = 0xffffffffu;
      mixed[i] = EVERY_OTHER;
    }
  }
  if (block >= num_blocks) return;
  const i64 batch_head = block / blocks_k / blocks_q;
  Sequence s{};
  s.batch = static_cast<int>(batch_head / num_heads);
  const RuleIf<true> rule(p, s, static_cast<int>(batch_head % num_heads));
  const int first_row = static_cast<int>(block / blocks_k % blocks_q) * CANONICAL;
  const int first_column = static_cast<int>(block % blocks_k) * CANONICAL + static_cast<int>(lane);
  bool visible = false, hidden = false, any_visible = false, any_hidden = false;
#pragma unroll 1
  for (int first = first_row; first < first_row + CANONICAL && !(any_visible && any_hidden); first += ROWS_PER_VOTE) {
#pragma unroll
    for (int row = 0; row < ROWS_PER_VOTE; row++) {
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) {
        const int i = first + row, j = first_column + column * WARP;
        const bool inside = i < p.seqlen_q && j < p.seqlen_k, shows = rule.visible(i, j);
        visible |= inside && shows;
        hidden |= inside && !shows;
      }
    }
    any_visible = __any_sync(0xffffffffu, visible);
    any_hidden = __any_sync(0xffffffffu, hidden);
  }
  if (lane == 0) slots[block] = any_visible && any_hidden ? PARTIAL : any_visible ? VISIBLE : HIDDEN;
}
