// Keys and values in e4m3 that lie in arrays of their own. forward.cuh includes it as `keys`;
// paged_codes.cuh is its counterpart for pools of pages.
#include "products"

using KeyRows = CodeRows;

DEVICE KeyRows rows_of_keys(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  return rows_of_codes(p, s, operand, head);
}
