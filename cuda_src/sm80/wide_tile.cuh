// Tiles of float32 and float64 elements as the factors of a warp's products. Float32 is multiplied as TF32, whose units
// cut sums off instead of rounding them: sums over keys leave them at every tile.
#pragma once
#include "tile.cuh"

constexpr int DEPTH = 8;  // of a product
constexpr int WIDTH = 8;  // of a right factor
constexpr int BLOCK_VECTORS = WIDTH / VECTOR, SPAN_BLOCKS = 8 / BLOCK_VECTORS;

__device__ __forceinline__ void copy_number(float* to, const float* from) { copy_float(to, from); }
__device__ __forceinline__ void copy_number(double* to, const double* from) {
  ptx::cp_async_8(ptx::shared_address(to), from, sizeof(double));
}

// N registers of a factor.
template <class T, int N>
struct Factor;
template <int N>
struct Factor<float, N> {
  u32 x[N];

  __device__ __forceinline__ void set(int i, float value) { x[i] = ptx::round_to_tf32(value); }
};
template <int N>
struct Factor<double, N> {
  double x[N];

  __device__ __forceinline__ void set(int i, double value) { x[i] = value; }
};
using Left = Factor<Element, 4>;
using Right = Factor<Element, 2>;

// sum += a b, 16 x 8 times 8 x 8.
__device__ __forceinline__ void multiply(float (&sum)[4], const Factor<float, 4>& a, const Factor<float, 2>& b) {
  ptx::mma_m16n8k8_tf32(sum, a.x, b.x);
}
__device__ __forceinline__ void multiply(double (&sum)[4], const Factor<double, 4>& a, const Factor<double, 2>& b) {
  if constexpr (WHOLE_PRODUCTS) {
    ptx::mma_m16n8k8_f64(sum, a.x, b.x);
  } else {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      double (&half)[2] = *reinterpret_cast<double (*)[2]>(&sum[2 * r]);
      ptx::mma_m8n8k4_f64(half, a.x[r], b.x[0]);
      ptx::mma_m8n8k4_f64(half, a.x[2 + r], b.x[1]);
    }
  }
}

// Four accumulators of block `block` of eight columns.
template <int N>
__device__ __forceinline__ Accum (&block_of(Accum (&x)[N], int block))[4] {
  return *reinterpret_cast<Accum(*)[4]>(&x[4 * block]);
}

// An address in a row of a tile, moved by rows that are a multiple of eight and by blocks of eight columns.
template <class T>
__device__ __forceinline__ u32 moved(u32 address, int row, int block) {
  static_assert(T::SPAN == 8, "spans of 128 bytes");
  return (address ^ (block % SPAN_BLOCKS * BLOCK_VECTORS * VECTOR_BYTES)) + block / SPAN_BLOCKS * 8 * VECTOR_BYTES +
         row * T::ROW_BYTES;
}
template <class V>
__device__ __forceinline__ V read_shared(u32 address) {
  return *static_cast<const V*>(__cvta_shared_to_generic(address));
}

// The factors of scores lie along the columns of both tiles. Float64: a lane's two of eight are neighbours.
template <class T>
__device__ __forceinline__ void read_left(Factor<float, 4>& a, const T& tile, int row, int block) {
  u32 x[4];
  tile.left(x, row, block);
#pragma unroll
  for (int i = 0; i < 4; i++) a.set(i, __uint_as_float(x[i]));
}
template <class T>
__device__ __forceinline__ void read_right(Factor<float, 2> (&b)[2], const T& tile, int row, int block) {
  u32 x[4];
  tile.right_transposed(x, row, block);
#pragma unroll
  for (int i = 0; i < 4; i++) b[i / 2].set(i % 2, __uint_as_float(x[i]));
}
template <class T>
__device__ __forceinline__ u32 own_address(const T& tile) {
  return tile.address + T::offset(lane() / 4, lane() % 4);
}
template <class T>
__device__ __forceinline__ void read_left(Factor<double, 4>& a, const T& tile, int row, int block) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const double2 x = read_shared<double2>(moved<T>(own_address(tile), row + 8 * r, block));
    a.set(r, x.x);
    a.set(2 + r, x.y);
  }
}
template <class T>
__device__ __forceinline__ void read_right(Factor<double, 2> (&b)[2], const T& tile, int row, int block) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const double2 x = read_shared<double2>(moved<T>(own_address(tile), row + 8 * i, block));
    b[i].set(0, x.x);
    b[i].set(1, x.y);
  }
}

// x += a b^T: FRAGMENTS * 16 rows of a, all of b.
template <class A, class B, int FRAGMENTS, int N>
__device__ __forceinline__ void multiply_scores(Accum (&x)[FRAGMENTS][N], const A& a, const B& b) {
#pragma unroll UNROLL
  for (int step = 0; step < A::PER_ROW / BLOCK_VECTORS; step++) {
    Left left[FRAGMENTS];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) read_left(left[f], a, 16 * f, step);
#pragma unroll
    for (int block = 0; block < N / 4; block += 2) {
      Right right[2];
      read_right(right, b, WIDTH * block, step);
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) multiply(block_of(x[f], block + i), left[f], right[i]);
      }
    }
  }
}

// Accumulators as left factors: the columns of a product are rows of the next in the order in which lanes have them.
template <int COLUMNS>
struct LeftFragment {
  Left steps[COLUMNS / DEPTH];
};
template <int N>
__device__ __forceinline__ void pack(LeftFragment<2 * N>& weights, const Accum (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) weights.steps[e / 4].set(e % 2 * 2 + e / 2 % 2, x[e]);
}

// The rows of a tile as a right factor, in that order.
template <class T>
struct ValueReader {
  u32 address[2];

  __device__ __forceinline__ explicit ValueReader(const T& tile) {
    const int column = lane() / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      address[i] = tile.address + T::offset(fragment_column() + i, column / VECTOR) + column % VECTOR * sizeof(Element);
    }
  }
  __device__ __forceinline__ void read(Right& b, int row, int block) const {
#pragma unroll
    for (int i = 0; i < 2; i++) b.set(i, read_shared<Element>(moved<T>(address[i], row, block)));
  }
};

// x += weights b.
template <class B, int FRAGMENTS, int COLUMNS, int N>
__device__ __forceinline__ void multiply_values(Accum (&x)[FRAGMENTS][N],
                                                const LeftFragment<COLUMNS> (&weights)[FRAGMENTS], const B& b) {
  const ValueReader<B> reader(b);
  // Float64 sums are rounded, and stay where they are.
  constexpr bool LEAVES = sizeof(Element) == 4;
  constexpr int CHUNK = SUM_COLUMNS / (FRAGMENTS * WIDTH);
#pragma unroll
  for (int first = 0; first < N / 4; first += CHUNK) {
    Accum sum[FRAGMENTS][LEAVES ? CHUNK * 4 : 4];
#pragma unroll
    for (auto& fragment : sum) clear(fragment);
#pragma unroll
    for (int step = 0; step < COLUMNS / DEPTH; step++) {
#pragma unroll
      for (int block = 0; block < CHUNK; block++) {
        Right right;
        reader.read(right, DEPTH * step, first + block);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          Accum(&target)[4] = LEAVES ? block_of(sum[f], LEAVES ? block : 0) : block_of(x[f], first + block);
          multiply(target, weights[f].steps[step], right);
        }
      }
    }
    if constexpr (LEAVES) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
        for (int e = 0; e < CHUNK * 4; e++) x[f][4 * first + e] += sum[f][e];
      }
    }
  }
}
