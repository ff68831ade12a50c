// This header has the user's own rule: score_mod, mask_mod, and their derivatives, whose text the host writes
// (cuflash/rules/to_cuda.py). A kernel without one has the same functions, which leave everything alone.
#include "../params.cuh"
#include "functions.cuh"

// UserRule serves one (sequence, query head). value() is the new score of element (i, j) whose score is s, derivative()
// its derivative by s, visible() whether j may be seen, and differentiate() tells `add` what a gradient ds of the new
// score adds to that of each element of an operand that the score reads: the number of the reading, the element's place
// in the sums of all operands, and the term.
struct UserRule {
  const AttentionParams& p;
  int b, h;

  DEVICE UserRule(const AttentionParams& p, const Sequence& s, int head) : p(p), b(s.batch), h(head) {}

#include "UserRule.functions"
};

// RuleIf is the rule where it is compiled in.
template <bool ON>
struct RuleIf : UserRule {
  using UserRule::UserRule;
};

template <>
struct RuleIf<false> {
  DEVICE RuleIf(const AttentionParams& p, const Sequence& s, int head) {}
  DEVICE Accum value(Accum s, int i, int j) const { return s; }
  DEVICE Accum derivative(Accum s, int i, int j) const { return 1; }
  DEVICE bool visible(int i, int j) const { return true; }
};
