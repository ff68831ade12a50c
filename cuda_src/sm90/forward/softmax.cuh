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

// to_exponents() turns products that BoundedSoftmax was left into exponents, before their tile is masked.
DEVICE void to_exponents(const FragmentSoftmax&, float (&)[BLOCK_N / 2]) {}
DEVICE void to_exponents(const BoundedSoftmax& softmax, float (&x)[BLOCK_N / 2]) { softmax.to_exponents(x); }

// find_slack() finds how far a row's maximum may grow before the row follows it.
DEVICE void find_slack(FragmentSoftmax& softmax, int tiles) { softmax.settle(tiles); }
DEVICE void find_slack(const BoundedSoftmax&, int) {}
