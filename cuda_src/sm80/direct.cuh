// Operands as they lie in their arrays.
#include "tile.cuh"

enum class Operand { Q, K, V, DOUT };

template <int ROWS, int COLUMNS>
using KeyedTile = Tile<ROWS, COLUMNS>;  // of queries or keys
template <int ROWS, int COLUMNS>
using ValuedTile = Tile<ROWS, COLUMNS>;  // of values or dout

using OperandRows = Rows;
DEVICE Rows rows_of(const AttentionParams& p, const Sequence& s, Operand operand, int head) {
  const bool of_keys = operand == Operand::K || operand == Operand::V;
  const bool keyed = operand == Operand::Q || operand == Operand::K;
  const Tensor<const Element>& x = of_keys ? (keyed ? p.k : p.v) : keyed ? p.q : p.dout;
  return Rows(x.at(batch_of(p, s), of_keys ? s.row_k : s.row_q, head), x.row_stride, of_keys ? s.len_k : s.len_q,
              keyed ? p.head_dim : p.head_dim_v);
}

template <int COLUMNS>
DEVICE Rows chunk_of(Rows rows, int number) {
  rows.data += number * CHUNK;
  rows.num_columns = smaller(rows.num_columns - number * CHUNK, CHUNK);
  return rows;
}

// Nothing has factors.
template <int, int>
struct Factors {
  DEVICE void load(u32, const Rows&, const Rows&, int) {}
  DEVICE const float* of_keyed(u32) const { return nullptr; }
  DEVICE const float* of_valued(u32) const { return nullptr; }
};
template <class... Arguments>
DEVICE void take_scores(Arguments&&...) {}
template <class... Arguments>
DEVICE void take_values(Arguments&&...) {}
struct Units {
  template <class X>
  DEVICE bool fold(X&, const float*, Accum (&)[2]) {
    return false;
  }
  DEVICE Accum at(int) const { return 1; }
};
