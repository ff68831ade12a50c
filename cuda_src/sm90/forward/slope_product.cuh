// This header has ALiBi by tensor cores, in Hopper's forward kernel. The term is slope * column on one side of the
// diagonal, up to a part that depends on the row alone. One more step of 16 in the product of queries and keys adds it,
// in place of one and a half instructions a score.
#include "../wgmma.cuh"
#include "rows.cuh"

constexpr bool SLOPE_BY_PRODUCT = HAS_ALIBI && PLAIN_SCORES && NUM_OPTIONS == 1 && !PACKS_HEADS;

// ColumnNumbers are the right factors: a column's number in three places of a row, for three parts of the slope. They
// lie as atoms of wgmma without a swizzle. The second 8 places are the next atom: their left factors are 0, so they may
// hold any finite numbers.
template <bool ANY>
struct ColumnNumbers {
  static constexpr int ROWS = BLOCK_N + 8, PLACES = 8, PARTS = 3;
  static_assert(BLOCK_N <= 256, "bfloat16 holds numbers of columns exactly");
  static_assert(ROWS <= (CONSUMERS + 1) * WARPGROUP, "a thread fills one row at most");
  alignas(ATOM_BYTES / 8) Element rows[ROWS][PLACES];

  // fill() is called by all threads, before a barrier of the block.
  DEVICE void fill() {
    const int row = threadIdx.x;
    if (row >= ROWS) return;
#pragma unroll
    for (int k = 0; k < PLACES; k++) rows[row][k] = from_accum<Element>(k < PARTS ? static_cast<float>(row) : 0);
    ptx::fence_async_shared();
  }
  DEVICE u64 descriptor() const {
    return ptx::wgmma_atoms_descriptor(ptx::shared_address(rows), 8 * sizeof(rows[0]), 8 * sizeof(rows[0]));
  }
};
template <>
struct ColumnNumbers<false> {
  DEVICE void fill() {}
};

// SlopeProduct has the left factors, which a warpgroup computes from the slope for a tile of queries.
template <bool ANY>
struct SlopeProduct {
  // LARGEST is the slope, in units, from which on float16 cannot hold its parts.
  static constexpr float LARGEST = 32768;
  float slope;
  int first_distance;  // distance of the warpgroup's first row from key 0
  u32 parts;           // the parts of the slope: the thread's left factors for keys before the diagonal

  template <class Units>
  DEVICE SlopeProduct(const Units& units, const Sequence& s, int first_row)
      : slope(units.slope), first_distance(first_row + s.diagonal()) {
    const float high = to_accum(from_accum<Element>(slope)), rest = slope - high;
    const float middle = to_accum(from_accum<Element>(rest));
    const int place = fragment_column();
    parts = place == 0 ? packed(Element(), high, middle) : place == 2 ? packed(Element(), rest - middle, 0) : 0;
  }

  // has_parts() is false where the slope is too large; then tiles are masked, which adds ALiBi element by element.
  DEVICE bool has_parts() const { return fabsf(slope) < LARGEST; }

  // find_left() finds the thread's left factors for a tile of keys: 0 if it is masked. They are ready before the
  // products start.
  DEVICE void find_left(u32 (&left)[4], int first_key, bool masked) const {
    left[0] = left[1] = masked ? 0 : parts ^ (first_distance > first_key ? 0 : 0x80008000u);
    left[2] = left[3] = 0;
#pragma unroll
    for (u32& word : left) ptx::keep(word);
  }

  // multiply() starts to add the columns' part of ALiBi to the products.
  DEVICE void multiply(float (&x)[BLOCK_N / 2], const u32 (&left)[4], const ColumnNumbers<true>& numbers) const {
    ptx::wgmma_rs<Element, 0>(x, left[0], left[1], left[2], left[3], numbers.descriptor(), true);
  }

  // leave_out() finds the part of ALiBi that the product leaves out in the thread's two rows: it depends on the row
  // alone.
  DEVICE void leave_out(float (&shift)[2], int first_key, bool masked) const {
    const int first = first_distance - first_key;
    const float side = first > 0 ? -slope : slope, distance = static_cast<float>(first + warp_row() + fragment_row());
#pragma unroll
    for (int r = 0; r < 2; r++) shift[r] = masked ? 0 : side * (distance + static_cast<float>(8 * r));
  }
};
template <>
struct SlopeProduct<false> {
  template <class Units>
  DEVICE SlopeProduct(const Units&, const Sequence&, int) {}
  DEVICE bool has_parts() const { return true; }
  DEVICE void find_left(u32 (&)[4], int, bool) const {}
  DEVICE void multiply(float (&)[BLOCK_N / 2], const u32 (&)[4], const ColumnNumbers<false>&) const {}
  DEVICE void leave_out(float (&)[2], int, bool) const {}
};
