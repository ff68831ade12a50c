// This header says which query and which key an element of a warp's fragment is, and hides those of its elements that
// lengths and window hide. Every kernel for tensor cores uses it, with fragments of queries x keys or keys x queries.
#include "fragment.cuh"
#include "../rules/hook.cuh"

// Place is where a thread's elements stand: rows are queries and columns keys or, if OF_KEYS, the other way round.
template <bool OF_KEYS>
struct Place {
  int row, column;  // of the thread's first element

  DEVICE int query(int e) const { return OF_KEYS ? column + column_offset(e) : row + row_offset(e); }
  DEVICE int key(int e) const { return OF_KEYS ? row + row_offset(e) : column + column_offset(e); }

  // columns() is the range of columns that lengths and window leave to row r of the thread's two, counted from its
  // first column.
  DEVICE Mask::Range columns(const Mask& mask, int r) const {
    const int own = row + 8 * r;
    const Mask::Range range = OF_KEYS ? mask.rows(own) : mask.columns(own);
    return {range.begin - column, OF_KEYS || own < mask.len_q ? range.end - column : 0};
  }
};

// is_outside() tells whether element e lies outside its row's range.
DEVICE bool is_outside(const Mask::Range& range, int e) {
  return (HAS_WINDOW && column_offset(e) < range.begin) || column_offset(e) >= range.end;
}

// hide_by_rows() makes scores -inf, one of the thread's two rows after the other: is_hidden(e, range) tells whether
// element e is hidden, whose row has the range range_of(r).
template <int N, class RangeOf, class IsHidden>
DEVICE void hide_by_rows(Accum (&x)[N], RangeOf range_of, IsHidden is_hidden) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const Mask::Range range = range_of(r);
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
#pragma unroll
      for (int side = 0; side < 2; side++) x[e + side] = is_hidden(e + side, range) ? -infinity() : x[e + side];
    }
  }
}

// hide_outside() makes the scores -inf that lengths and window hide, and those of which is_hidden(e) is true.
template <int N, bool OF_KEYS, class IsHidden>
DEVICE void hide_outside(Accum (&x)[N], const Mask& mask, const Place<OF_KEYS>& place, IsHidden is_hidden) {
  hide_by_rows(
      x, [&](int r) { return place.columns(mask, r); },
      [&](int e, const Mask::Range& range) {
        bool hidden = is_outside(range, e);
        hidden |= is_hidden(e);  // without a branch
        return hidden;
      });
}
// The loop over what lengths and window alone hide is written out, because the compiler makes longer forward kernels of
// hide_by_rows() together with a block mask.
template <int N, bool OF_KEYS>
DEVICE void hide_outside(Accum (&x)[N], const Mask& mask, const Place<OF_KEYS>& place) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const Mask::Range range = place.columns(mask, r);
#pragma unroll
    for (int e = 2 * r; e < N; e += 4) {
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int column = column_offset(e + side);
        const bool hidden = (HAS_WINDOW && column < range.begin) || column >= range.end;
        x[e + side] = hidden ? -infinity() : x[e + side];
      }
    }
  }
}
