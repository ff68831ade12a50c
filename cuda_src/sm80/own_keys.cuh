// This header has keys and values that lie in arrays of their own. It stands between the header that says how to
// multiply and forward.cuh; paged_keys.cuh is its counterpart for pools of pages.

using KeyRows = OperandRows;

DEVICE KeyRows rows_of_keys(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  return rows_of(p, s, operand, head);
}
