// These kernels quantise an array (three axes of rows, columns) to e4m3 codes, as cuflash/fp8.py says. The order of
// launches is find_largest, which wants zeros in `largest`, then quantize. The host writes the types `Source` and
// `Wide`, in which it is computed, in front of this text.
#include "../offset_of.cuh"
#include "e4m3.cuh"
#include "four.cuh"

struct Quantization {
#include "Quantization.members"
};

#include "Quantization.layout"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LARGEST_FLOAT = 3.402823466e38f, LEAST_NORMAL_FLOAT = 1.175494351e-38f;

// size_of() gives bits whose order is that of magnitudes, and 0 for what is not finite.
DEVICE u64 size_of(float x) {
  const unsigned size = __float_as_uint(x) & 0x7fffffffu;
  return size < 0x7f800000u ? size : 0;
}
DEVICE u64 size_of(double x) {
  const u64 size = static_cast<u64>(__double_as_longlong(x)) & 0x7fffffffffffffffull;
  return size < 0x7ff0000000000000ull ? size : 0;
}
DEVICE void from_bits(u64 bits, float& size) { size = __uint_as_float(static_cast<unsigned>(bits)); }
DEVICE void from_bits(u64 bits, double& size) { size = __longlong_as_double(static_cast<long long>(bits)); }

// find_largest raises each group's entry of `largest` to the bits of its largest finite size. A warp reads a row.
extern "C" __global__ void __launch_bounds__(THREADS) find_largest(const Quantization p) {
  const i64 row = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / WARP;
  const RowPlace place(row, p.extents, p.source_strides, p.group_strides);
  if (!place.exists) return;
  u64 largest = 0;
  for (i64 column = threadIdx.x % WARP; column < p.extents.n[3]; column += WARP) {
    const u64 size = size_of(static_cast<Wide>(p.source[place.first + column * p.source_strides.n[3]]));
    largest = size > largest ? size : largest;
  }
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
    const u64 other = __shfl_xor_sync(ALL_LANES, largest, lanes);
    largest = other > largest ? other : largest;
  }
  // Most rows of a large group do not raise its entry, and a read is cheaper than an atomic.
  u64* entry = p.largest + place.second;
  if (threadIdx.x % WARP == 0 && largest > *static_cast<volatile u64*>(entry)) atomicMax(entry, largest);
}

// quantize writes the codes, contiguous, and the scales. A thread has some neighbouring columns of a row.
extern "C" __global__ void __launch_bounds__(THREADS) quantize(const Quantization p) {
  const i64 chunks = (p.extents.n[3] + COLUMNS - 1) / COLUMNS;
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, row = index / chunks;
  const RowPlace place(row, p.extents, p.source_strides, p.group_strides);
  if (!place.exists) return;
  Wide largest;
  from_bits(p.largest[place.second], largest);
  const Wide exact = largest / static_cast<Wide>(E4M3_MAX);
  const float rounded = exact < static_cast<Wide>(LARGEST_FLOAT) ? static_cast<float>(exact) : LARGEST_FLOAT;
  const float scale = rounded < LEAST_NORMAL_FLOAT ? 1.0f : rounded;
  const i64 first = index % chunks * COLUMNS;
  if (place.is_first_of_second && first == 0) p.scale[place.second] = scale;
  for (i64 column = first; column < first + COLUMNS && column < p.extents.n[3]; ++column) {
    const Wide x = static_cast<Wide>(p.source[place.first + column * p.source_strides.n[3]]);
    p.codes[row * p.extents.n[3] + column] = encoded(x / static_cast<Wide>(scale));
  }
}
