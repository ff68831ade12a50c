// This header has keys and values that lie in arrays of their own. forward.cuh includes it as `keys`; paged_keys.cuh is
// its counterpart for pools of pages.
#include "products"

using KeyRows = OperandRows;

DEVICE KeyRows rows_of_keys(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  return rows_of(p, s, operand, head);
}
