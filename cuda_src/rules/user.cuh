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

  DEVICE UserRule(const AttentionParams& p, const Sequence& s, int head)
      : p(p), b(s.batch + p.place_first_batch), h(head + p.place_first_head) {}

#include "UserRule.functions"
};

// RuleIf is the rule where it is compiled in. It is asked by the indices of a part, and answers by those of the whole.
template <bool ON>
struct RuleIf {
  UserRule user;

  DEVICE RuleIf(const AttentionParams& p, const Sequence& s, int head) : user(p, s, head) {}
  DEVICE int query(int i) const { return user.p.place_first_q + i * user.p.place_stride; }
  DEVICE int key(int j) const { return user.p.place_first_k + j * user.p.place_stride; }
  DEVICE Accum value(Accum s, int i, int j) const { return user.value(s, query(i), key(j)); }
  DEVICE Accum derivative(Accum s, int i, int j) const { return user.derivative(s, query(i), key(j)); }
  DEVICE bool visible(int i, int j) const { return user.visible(query(i), key(j)); }
  template <class Add>
  DEVICE void differentiate(Accum s, Accum ds, int i, int j, Add add) const {
    user.differentiate(s, ds, query(i), key(j), add);
  }
};

template <>
struct RuleIf<false> {
  DEVICE RuleIf(const AttentionParams& p, const Sequence& s, int head) {}
  DEVICE Accum value(Accum s, int i, int j) const { return s; }
  DEVICE Accum derivative(Accum s, int i, int j) const { return 1; }
  DEVICE bool visible(int i, int j) const { return true; }
};
