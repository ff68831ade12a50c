// This kernel converts an array (three axes of rows, columns) to another type; e4m3 codes become their numbers times
// their rows' scales. Rows beyond a length are left as they are, as nobody reads them. It serves problems of mixed
// types, whose attention is computed by kernels that know one type. The host writes the types `Source` and `Target` in
// front of this text.
#include "../offset_of.cuh"
#include "e4m3.cuh"
#include "four.cuh"

struct Conversion {
#include "Conversion.members"
};

#include "Conversion.layout"

DEVICE float number(unsigned char code) { return decoded(code); }
DEVICE float number(float x) { return x; }
DEVICE float number(__half x) { return __half2float(x); }
DEVICE float number(__nv_bfloat16 x) { return __bfloat162float(x); }

// Neighbours are columns of a row that one access moves, or two do.
template <class T>
struct alignas(sizeof(T) * COLUMNS < 16 ? sizeof(T) * COLUMNS : 16) Neighbours {
  T of[COLUMNS];
};
template <class T>
DEVICE bool are_neighbours(const T* x, i64 stride) {
  return stride == 1 && reinterpret_cast<u64>(x) % alignof(Neighbours<T>) == 0;
}

// convert gives each thread some neighbouring columns of a row.
extern "C" __global__ void __launch_bounds__(THREADS) convert(const Conversion p) {
  const i64 chunks = (p.extents.n[3] + COLUMNS - 1) / COLUMNS;
  const i64 index = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  const i64 row = index / chunks;
  const RowPlace place(row, p.extents, p.source_strides, p.target_strides);
  if (!place.exists) return;
  const i64 token = row / p.extents.n[2];
  if (p.lengths != nullptr && token % p.extents.n[1] >= p.lengths[token / p.extents.n[1]]) return;
  const RowPlace of_scale(row, p.extents, p.scale_strides, p.scale_strides);
  const float scale = p.scale == nullptr ? 1.0f : p.scale[of_scale.first];
  const i64 first = index % chunks * COLUMNS, end = first + COLUMNS;
  const Source* from = p.source + place.first + first * p.source_strides.n[3];
  Target* to = p.target + place.second + first * p.target_strides.n[3];
  if (end <= p.extents.n[3] && are_neighbours(from, p.source_strides.n[3]) &&
      are_neighbours(to, p.target_strides.n[3])) {
    const auto own = *reinterpret_cast<const Neighbours<Source>*>(from);
    Neighbours<Target> converted;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) converted.of[i] = static_cast<Target>(number(own.of[i]) * scale);
    *reinterpret_cast<Neighbours<Target>*>(to) = converted;
    return;
  }
  for (i64 column = first; column < end && column < p.extents.n[3]; ++column) {
    *to = static_cast<Target>(number(*from) * scale);
    from += p.source_strides.n[3];
    to += p.target_strides.n[3];
  }
}
