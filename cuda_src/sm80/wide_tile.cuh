// This header says how the mma.sync kernels multiply float64 elements (sm_80 and newer; the 16 x 8 x 8 product from
// sm_90 on). It is `products` of forward.cuh, gradients.cuh and bias.cuh in place of half_tile.cuh.
#include "tile.cuh"

using namespace direct;
constexpr int DEPTH = 8;  // depth of one product
constexpr int WIDTH = 8;  // columns of a right factor
constexpr int BLOCK_VECTORS = WIDTH / VECTOR, SPAN_BLOCKS = 8 / BLOCK_VECTORS;

using Left = double[4];
using Right = double[2];

// multiply() computes sum += a b, 16 x 8 times 8 x 8.
DEVICE void multiply(double (&sum)[4], const Left& a, const Right& b) {
  if constexpr (WHOLE_PRODUCTS) {
    ptx::mma_m16n8k8_f64(sum, a, b);
  } else {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      double (&half)[2] = *reinterpret_cast<double (*)[2]>(&sum[2 * r]);
      ptx::mma_m8n8k4_f64(half, a[r], b[0]);
      ptx::mma_m8n8k4_f64(half, a[2 + r], b[1]);
    }
  }
}

// block_of() is the four accumulators of block `block` of eight columns.
template <int N>
DEVICE double (&block_of(double (&x)[N], int block))[4] {
  return *reinterpret_cast<double (*)[4]>(&x[4 * block]);
}

// moved() is an address in a row of a tile, moved by rows that are a multiple of eight and by blocks of eight columns.
template <class T>
DEVICE u32 moved(u32 address, int row, int block) {
  static_assert(T::SPAN == 8, "spans of 128 bytes");
  return (address ^ (block % SPAN_BLOCKS * BLOCK_VECTORS * VECTOR_BYTES)) + block / SPAN_BLOCKS * 8 * VECTOR_BYTES +
         row * T::ROW_BYTES;
}
template <class V>
DEVICE V read_shared(u32 address) {
  return *static_cast<const V*>(__cvta_shared_to_generic(address));
}

// read_pair() reads factors of scores, which lie along the columns of both tiles: a lane's two of eight are neighbours.
template <class T>
DEVICE double2 read_pair(const T& tile, int row, int block) {
  return read_shared<double2>(moved<T>(tile.address + T::offset(lane() / 4, lane() % 4), row, block));
}

// multiply_scores() computes x += a b^T: FRAGMENTS * 16 rows of a, all of b. With eight columns it makes two sums,
// because a product waits for its sum.
template <class A, class B, int FRAGMENTS, int N>
DEVICE void multiply_scores(double (&x)[FRAGMENTS][N], const A& a, const B& b) {
  constexpr int SUMS = N == 4 ? 2 : 1;
  double more[FRAGMENTS][N] = {};
#pragma unroll UNROLL
  for (int first = 0; first < A::PER_ROW / BLOCK_VECTORS; first += SUMS) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      const int step = first + i;
      Left left[FRAGMENTS];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const double2 pair = read_pair(a, 16 * f + 8 * r, step);
          left[f][r] = pair.x;
          left[f][2 + r] = pair.y;
        }
      }
#pragma unroll
      for (int block = 0; block < N / 4; block++) {
        const double2 pair = read_pair(b, WIDTH * block, step);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          multiply(block_of((i == 0 ? x : more)[f], block), left[f], {pair.x, pair.y});
        }
      }
    }
  }
  if constexpr (SUMS == 2) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
#pragma unroll
      for (int e = 0; e < N; e++) x[f][e] += more[f][e];
    }
  }
}

// LeftFragment is an accumulator as a left factor, in the order in which lanes have it.
template <int COLUMNS>
struct LeftFragment {
  Left steps[COLUMNS / DEPTH];
};
constexpr int WARP_KEYS = BLOCK_N;
using Weights = LeftFragment<BLOCK_N>;
template <int N>
DEVICE void pack(LeftFragment<2 * N>& weights, const double (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) weights.steps[e / 4][e % 2 * 2 + e / 2 % 2] = x[e];
}

// multiply_values() computes x += weights b, where the rows of b are read as a right factor in that order.
template <class B, int FRAGMENTS, int COLUMNS, int N>
DEVICE void multiply_values(double (&x)[FRAGMENTS][N], const LeftFragment<COLUMNS> (&weights)[FRAGMENTS], const B& b,
                            int begin = 0) {
  const int column = lane() / 4;
  u32 address[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    address[i] =
        b.address + B::offset(fragment_column() + i, column / VECTOR) + (begin + column % VECTOR) * sizeof(double);
  }
  constexpr int CHUNK = SUM_COLUMNS / WIDTH;
#pragma unroll
  for (int first = 0; first < N / 4; first += CHUNK) {
#pragma unroll
    for (int step = 0; step < COLUMNS / DEPTH; step++) {
#pragma unroll
      for (int block = first; block < first + CHUNK && block < N / 4; block++) {
        Right right;
#pragma unroll
        for (int i = 0; i < 2; i++) right[i] = read_shared<double>(moved<B>(address[i], DEPTH * step, block));
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) multiply(block_of(x[f], block), weights[f].steps[step], right);
      }
    }
  }
}
