// Alibi by tensor cores. On one side of the diagonal it is slope * column but for what depends on the row alone, and
// that is one more step of 16 in the product of queries and keys, in place of one and a half instructions for each
// score.
#pragma once
#include "products.cuh"

constexpr bool SLOPE_BY_PRODUCT = HAS_ALIBI && PLAIN_SCORES && NUM_OPTIONS == 1;

// The right factors: a column's number in three places of a row, for three parts of the slope. Atoms of wgmma without a
// swizzle; the second 8 places, whose left factors are 0, may be whatever is finite: they are the next atom.
template <bool ANY>
struct ColumnNumbers {
  static constexpr int ROWS = BLOCK_N + 8, PLACES = 8, PARTS = 3;
  static_assert(BLOCK_N <= 256, "bfloat16 holds numbers of columns exactly");
  static_assert(ROWS <= (CONSUMERS + 1) * WARPGROUP, "a thread fills one row at most");
  alignas(ATOM_BYTES / 8) Element rows[ROWS][PLACES];

  // By all threads, before a barrier of the block.
  __device__ __forceinline__ void fill() {
    const int row = threadIdx.x;
    if (row >= ROWS) return;
#pragma unroll
    for (int k = 0; k < PLACES; k++) rows[row][k] = from_accum<Element>(k < PARTS ? static_cast<float>(row) : 0);
    ptx::fence_async_shared();
  }
  __device__ __forceinline__ u64 descriptor() const {
    return ptx::wgmma_atoms_descriptor(ptx::shared_address(rows), 8 * sizeof(rows[0]), 8 * sizeof(rows[0]));
  }
};
template <>
struct ColumnNumbers<false> {
  __device__ __forceinline__ void fill() {}
};

// A warpgroup's side of it, for a tile of queries.
template <bool ANY>
struct SlopeProduct {
  // Beyond it float16 has no parts of a slope in units.
  static constexpr float LARGEST = 32768;
  float slope;
  int first_distance;  // of the warpgroup's first row from key 0
  u32 parts;           // of the slope: the thread's left factors for keys before the diagonal

  template <class Units>
  __device__ __forceinline__ SlopeProduct(const Units& units, const Sequence& s, int first_row)
      : slope(units.slope), first_distance(first_row + s.diagonal()) {
    const float high = to_accum(from_accum<Element>(slope)), rest = slope - high;
    const float middle = to_accum(from_accum<Element>(rest));
    const int place = fragment_column();
    parts = place == 0 ? packed(Element(), high, middle) : place == 2 ? packed(Element(), rest - middle, 0) : 0;
  }

  // Else tiles are to be masked, which adds alibi element by element.
  __device__ __forceinline__ bool has_parts() const { return fabsf(slope) < LARGEST; }

  // The thread's left factors for a tile of keys: 0 if it is masked. Ready before products start.
  __device__ __forceinline__ void find_left(u32 (&left)[4], int first_key, bool masked) const {
    left[0] = left[1] = masked ? 0 : parts ^ (first_distance > first_key ? 0 : 0x80008000u);
    left[2] = left[3] = 0;
#pragma unroll
    for (u32& word : left) ptx::keep(word);
  }

  // Starts to add the columns' part to products.
  __device__ __forceinline__ void multiply(float (&x)[BLOCK_N / 2], const u32 (&left)[4],
                                           const ColumnNumbers<true>& numbers) const {
    ptx::wgmma_rs<Element, 0>(x, left[0], left[1], left[2], left[3], numbers.descriptor(), true);
  }

  // What is left out of the thread's two rows there.
  __device__ __forceinline__ void leave_out(float (&shift)[2], int first_key, bool masked) const {
    const int first = first_distance - first_key;
    const float side = first > 0 ? -slope : slope, distance = static_cast<float>(first + warp_row() + fragment_row());
#pragma unroll
    for (int r = 0; r < 2; r++) shift[r] = masked ? 0 : side * (distance + static_cast<float>(8 * r));
  }
};
template <>
struct SlopeProduct<false> {
  template <class Units>
  __device__ __forceinline__ SlopeProduct(const Units&, const Sequence&, int) {}
  __device__ __forceinline__ bool has_parts() const { return true; }
  __device__ __forceinline__ void find_left(u32 (&)[4], int, bool) const {}
  __device__ __forceinline__ void multiply(float (&)[BLOCK_N / 2], const u32 (&)[4],
                                           const ColumnNumbers<false>&) const {}
  __device__ __forceinline__ void leave_out(float (&)[2], int, bool) const {}
};
