// This header chooses the softmax of Hopper's forward kernel: FragmentSoftmax, or BoundedSoftmax for scores that have a
// bound. Its functions do for either kind what only the other needs, or nothing.
#include "bounded_softmax.cuh"
#include "scores.cuh"

// softmax_of() begins the softmax of a tile of queries.
DEVICE auto softmax_of(const UnitFragment& scores) {
  if constexpr (BOUNDED_SCORES) {
    return BoundedSoftmax(scores.p);
  } else {
    return FragmentSoftmax::in_units(scores.units.unit);
  }
}
using RowSoftmax = decltype(softmax_of(*static_cast<const UnitFragment*>(nullptr)));

// to_exponents() turns products that BoundedSoftmax was left into exponents, before their tile is masked.
DEVICE void to_exponents(const FragmentSoftmax&, float (&)[BLOCK_N / 2]) {}
DEVICE void to_exponents(const BoundedSoftmax& softmax, float (&x)[BLOCK_N / 2]) { softmax.to_exponents(x); }

// find_slack() finds how far a row's maximum may grow before the row follows it.
DEVICE void find_slack(FragmentSoftmax& softmax, int tiles) { softmax.settle(tiles); }
DEVICE void find_slack(const BoundedSoftmax&, int) {}

// SlackDelay puts that off where keys come in reverse. A tile under the diagonal comes first then; some of its rows see
// too little to predict anything, so the slack is found after the second tile.
template <bool REVERSE>
struct SlackDelay {
  int steps = 0;

  // begin() tells whether a first tile that is `masked` leaves the slack to a later one, before whose scores is_over()
  // is true.
  DEVICE bool begin(bool masked) {
    if (masked) steps = 2;
    return masked;
  }
  DEVICE bool is_over() { return steps > 0 && --steps == 0; }
};
template <>
struct SlackDelay<false> {
  DEVICE bool begin(bool) const { return false; }
  DEVICE bool is_over() const { return false; }
};
