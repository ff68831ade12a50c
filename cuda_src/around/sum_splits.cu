// sum_splits adds up the float32 shares of dk and dv that splits of the queries wrote, in a fixed order, so that
// results repeat their bits, and rounds the sums once. One launch serves both gradients: thread blocks differ in y by
// which of the two they have. The host writes `Target` in front of this text. The kernel begins while the one before it
// ends (programmatic dependent launch).
#include "../offset_of.cuh"
#include "../ptx/sm90.cuh"
#include "four.cuh"

// SplitSum is one gradient.
struct SplitSum {
  const float4* shares;  // (splits, rows, columns), contiguous; the extents' first three axes are the rows
  Target* target;        // (batch, seqlen_k, num_heads_kv, columns), any strides, or null
  Four extents, strides;
};

struct SplitSumParams {
#include "SplitSumParams.members"
};

#include "SplitSumParams.layout"

constexpr unsigned ALL_LANES = 0xffffffffu;
// AT_ONCE loads of a thread are under way together; without BLOCKS of a multiprocessor to fit registers to, the
// compiler takes fewer registers, and waits for half of the loads before it begins the others.
constexpr int AT_ONCE = 8, BLOCKS = 4;

// Word has four columns of a target.
template <int BYTES>
struct WordOf {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
using Word = WordOf<4 * sizeof(Target)>::Type;

// TargetVector is four neighbouring columns of a target, and the word in which they are stored.
union TargetVector {
  Target n[4];
  Word word;
};

DEVICE void add(float4& sum, const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// sum_of() adds up every step-th share of a vector from the first on; the next share lies `apart` vectors behind.
DEVICE float4 sum_of(const float4* shares, i64 apart, int first, int splits, int step) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
  for (int split = first; split < splits; split += AT_ONCE * step) {
    float4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int own = split + i * step;
      x[i] = make_float4(0, 0, 0, 0);
      if (own < splits) x[i] = shares[own * apart];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) add(sum, x[i]);
  }
  return sum;
}

// sum_splits computes four neighbouring columns of a row with p.lanes lanes of a warp, each of which adds up every
// p.lanes-th share. Lanes with the same share of neighbouring vectors are neighbours, so that they read whole lines.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sum_splits(const __grid_constant__ SplitSumParams p) {
  const SplitSum& of = blockIdx.y == 0 ? p.dk : p.dv;
  if (of.target == nullptr) return;
  const int lanes = static_cast<int>(p.lanes), vectors_of_warp = WARP / lanes, lane = threadIdx.x % WARP;
  const i64 warp = static_cast<i64>(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
  const i64 index = warp * vectors_of_warp + lane % vectors_of_warp;
  const i64 vectors_of_row = of.extents.n[3] / 4;
  const RowPlace place(index / vectors_of_row, of.extents, of.strides, of.strides);
  const i64 apart = of.extents.n[0] * of.extents.n[1] * of.extents.n[2] * vectors_of_row;
  Target* target = of.target + place.first + index % vectors_of_row * 4 * of.strides.n[3];
  ptx::wait_for_kernel_before();
  float4 sum = make_float4(0, 0, 0, 0);
  if (place.exists) {
    sum = sum_of(of.shares + index, apart, lane / vectors_of_warp, static_cast<int>(p.splits), lanes);
  }
#pragma unroll 1
  for (int away = vectors_of_warp; away < WARP; away *= 2) {
    add(sum, make_float4(__shfl_xor_sync(ALL_LANES, sum.x, away), __shfl_xor_sync(ALL_LANES, sum.y, away),
                         __shfl_xor_sync(ALL_LANES, sum.z, away), __shfl_xor_sync(ALL_LANES, sum.w, away)));
  }
  if (!place.exists || lane >= vectors_of_warp) return;
  TargetVector rounded = {
      {static_cast<Target>(sum.x), static_cast<Target>(sum.y), static_cast<Target>(sum.z), static_cast<Target>(sum.w)}};
  const i64 step = of.strides.n[3];
  if (step == 1 && reinterpret_cast<u64>(target) % sizeof(TargetVector) == 0) {
    // One intrinsic makes one store; the compiler would make four of an assignment.
    __stcs(reinterpret_cast<Word*>(target), rounded.word);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) target[i * step] = rounded.n[i];
  }
}
