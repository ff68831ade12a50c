// FlashAttention's forward pass: out = softmax(scale * Q K^T) V, without the matrix of scores.
//
// Arrays are (batch * heads, seqlen, head_dim), contiguous, of type ELEMENT: -DELEMENT=float or -DELEMENT=__half. Sums
// are float. A thread block computes BLOCK_M rows of one head. Four lanes of a warp share a row: each of them computes
// every fourth score of a tile, and every fourth column of the result.

#include <cuda_fp16.h>

constexpr int BLOCK_M = 32, BLOCK_N = 16;  // queries and keys of a tile
constexpr int LANES = 4, THREADS = BLOCK_M * LANES;
constexpr int MAX_HEAD_DIM = 128, COLUMNS = MAX_HEAD_DIM / LANES;  // columns of the result that a thread keeps
constexpr int STRIDE = MAX_HEAD_DIM + 1;                           // odd, so that rows begin in different banks

// There is no header with INFINITY when a kernel is compiled at run time.
__device__ float minus_infinity() { return -__int_as_float(0x7f800000); }

// Copies `count` rows to shared memory as floats; rows from num_rows on become zeros.
__device__ void load(float (*tile)[STRIDE], const ELEMENT* rows, int count, int num_rows, int head_dim) {
  for (int n = threadIdx.x; n < count * head_dim; n += THREADS) {
    const int row = n / head_dim, column = n % head_dim;
    tile[row][column] = row < num_rows ? float(rows[row * head_dim + column]) : 0.0f;
  }
}

__device__ float dot(const float* a, const float* b, int head_dim) {
  float sum = 0.0f;
  for (int c = 0; c < head_dim; ++c) sum += a[c] * b[c];
  return sum;
}

// The maximum, or the sum, of the four lanes that share a row.
__device__ float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Grid: (tiles of queries, batch * heads). Block: THREADS.
extern "C" __global__ void __launch_bounds__(THREADS)
    forward(const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, ELEMENT* out, float* lse, int seqlen_q, int seqlen_k,
            int head_dim, float scale, int causal) {
  __shared__ float q_tile[BLOCK_M][STRIDE];
  __shared__ float k_tile[BLOCK_N][STRIDE];
  __shared__ float v_tile[BLOCK_N][STRIDE];
  __shared__ float weights[BLOCK_M][BLOCK_N + 1];

  const size_t head = blockIdx.y;
  const int first = blockIdx.x * BLOCK_M;
  const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int i = first + row;
  const int diagonal = seqlen_k - seqlen_q;  // query i is aligned to key i + diagonal
  q += (head * seqlen_q + first) * head_dim;
  k += head * seqlen_k * head_dim;
  v += head * seqlen_k * head_dim;
  load(q_tile, q, BLOCK_M, seqlen_q - first, head_dim);

  float m = minus_infinity();  // the row's largest score so far
  float l = 0.0f;              // the sum of exp(score - m) so far
  float o[COLUMNS] = {0.0f};   // the sum of exp(score - m) * v so far, columns lane, lane + 4, ...
  // Causal: no row of the tile sees a key behind its last row's own.
  const int stop = causal ? min(seqlen_k, first + BLOCK_M + diagonal) : seqlen_k;
  for (int key = 0; key < stop; key += BLOCK_N) {
    __syncthreads();  // all threads are done with the last tile
    load(k_tile, k + size_t(key) * head_dim, BLOCK_N, seqlen_k - key, head_dim);
    load(v_tile, v + size_t(key) * head_dim, BLOCK_N, seqlen_k - key, head_dim);
    __syncthreads();

    float s[BLOCK_N / LANES], larger = m;
    for (int n = 0; n < BLOCK_N / LANES; ++n) {
      const int j = key + n * LANES + lane;
      const bool visible = j < seqlen_k && (!causal || j <= i + diagonal);
      s[n] = visible ? scale * dot(q_tile[row], k_tile[n * LANES + lane], head_dim) : minus_infinity();
      larger = fmaxf(larger, s[n]);
    }
    larger = max_of_row(larger);
    const float shift = larger == minus_infinity() ? 0.0f : larger;  // -inf - -inf would be no number
    const float rescale = expf(m - shift);
    m = larger;

    float sum = 0.0f;
    for (int n = 0; n < BLOCK_N / LANES; ++n) {
      const float p = expf(s[n] - shift);
      weights[row][n * LANES + lane] = p;
      sum += p;
    }
    l = rescale * l + sum_of_row(sum);
    __syncwarp();  // the row's weights are in shared memory
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = c * LANES + lane;
      if (column >= head_dim) break;
      o[c] *= rescale;
      for (int n = 0; n < BLOCK_N; ++n) o[c] += weights[row][n] * v_tile[n][column];
    }
  }

  if (i >= seqlen_q) return;
  for (int c = 0; c < COLUMNS; ++c) {
    const int column = c * LANES + lane;
    if (column < head_dim) out[(head * seqlen_q + i) * head_dim + column] = ELEMENT(l > 0.0f ? o[c] / l : 0.0f);
  }
  if (lane == 0) lse[head * seqlen_q + i] = m + logf(l);  // -inf for a row that sees nothing
}
