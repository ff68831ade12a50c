// This header says which options a kernel has, and what follows from them for the kernel as a whole. The options
// themselves are score.cuh, mask.cuh, dropout.cuh and user.cuh.
#include "../params.cuh"

// HIDES_ANYWHERE: keys may be hidden one by one, so that only the scores tell which keys of a tile are seen.
constexpr bool HIDES_ANYWHERE = HAS_MASK || HAS_BIAS || HAS_BLOCK_MASK || HAS_SCORE_MOD || HAS_MASK_MOD;
// ASKS_ELEMENTS: a rule that is asked element by element may hide some: the user's own (Mask::in_rules).
constexpr bool ASKS_ELEMENTS = HAS_MASK_MOD;
// ASKS_EVERYWHERE: the user's own rule may hide elements of any tile, as no block mask says of which.
constexpr bool ASKS_EVERYWHERE = HAS_MASK_MOD && !RULE_IN_BLOCKS;
static_assert(!RULE_IN_BLOCKS || HAS_BLOCK_MASK, "the block mask says it");
// HIDES_BY_RULE: any tile may have elements that the user's own rules hide.
constexpr bool HIDES_BY_RULE = HAS_SCORE_MOD || ASKS_EVERYWHERE;
// HIDES_IN_ANY_TILE: every tile takes the test of its elements. A bias and a score rule may hide by -inf.
constexpr bool HIDES_IN_ANY_TILE = HAS_MASK || HAS_BIAS || HIDES_BY_RULE;
// NUM_OPTIONS counts the options in use; a window is not counted.
constexpr int NUM_OPTIONS =
    HAS_SOFTCAP + HAS_BIAS + HAS_MASK + HAS_ALIBI + HAS_DROPOUT + HAS_BLOCK_MASK + HAS_SCORE_MOD + HAS_MASK_MOD;
constexpr bool HAS_OPTIONS = NUM_OPTIONS > 0;
// TAKES_REGISTERS: an option in use takes many registers in each step of a gradient kernel.
constexpr bool TAKES_REGISTERS = HAS_SOFTCAP || HAS_BIAS || HAS_MASK || HAS_DROPOUT || HIDES_BY_RULE;
// ANY_SCORES: a bias and the user's own rule make scores of any finite size. That of finfo.min overflows in units of
// base 2, so that scores are subtracted first.
constexpr bool ANY_SCORES = HAS_BIAS || HAS_SCORE_MOD;
