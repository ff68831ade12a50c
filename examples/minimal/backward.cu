// FlashAttention's backward pass: the gradients of q, k and v from those of out.
//
// Arrays are as in forward.cu. Nothing of the forward pass was kept but out and lse: the weights of a tile are computed
// again, P = exp(S - lse). With delta = rowsum(dO * O), one number a row,
//
//     dV = P^T dO,   dP = dO V^T,   dS = P * (dP - delta),   dQ = scale * dS K,   dK = scale * dS^T Q.
//
// dQ is a sum over keys, dK and dV are sums over queries. So there are two kernels: a thread block of backward_dq owns
// a tile of queries and visits the keys, one of backward_dkv owns a tile of keys and visits the queries. Nothing is
// added by two thread blocks, and results repeat to the bit. backward_dq also writes delta and so has to run first.

#include <cuda_fp16.h>

constexpr int BLOCK = 16;  // queries and keys of a tile
constexpr int LANES = 4, THREADS = BLOCK * LANES;
constexpr int MAX_HEAD_DIM = 128, COLUMNS = MAX_HEAD_DIM / LANES;  // columns of a gradient that a thread keeps
constexpr int STRIDE = MAX_HEAD_DIM + 1;                           // odd, so that rows begin in different banks

// Copies BLOCK rows to shared memory as floats; rows from num_rows on become zeros.
__device__ void load(float (*tile)[STRIDE], const ELEMENT* rows, int num_rows, int head_dim) {
  for (int n = threadIdx.x; n < BLOCK * head_dim; n += THREADS) {
    const int row = n / head_dim, column = n % head_dim;
    tile[row][column] = row < num_rows ? float(rows[row * head_dim + column]) : 0.0f;
  }
}

// Writes a row's columns lane, lane + 4, ...
__device__ void store(ELEMENT* row, const float* columns, float factor, int lane, int head_dim) {
  for (int c = 0; c < COLUMNS; ++c) {
    const int column = c * LANES + lane;
    if (column < head_dim) row[column] = ELEMENT(factor * columns[c]);
  }
}

__device__ float dot(const float* a, const float* b, int head_dim) {
  float sum = 0.0f;
  for (int c = 0; c < head_dim; ++c) sum += a[c] * b[c];
  return sum;
}

// Adds the product of a row of BLOCK factors and a tile to the columns lane, lane + 4, ...
__device__ void accumulate(float* columns, const float* factors, float (*tile)[STRIDE], int lane, int head_dim) {
  for (int c = 0; c < COLUMNS; ++c) {
    const int column = c * LANES + lane;
    if (column >= head_dim) break;
    for (int n = 0; n < BLOCK; ++n) columns[c] += factors[n] * tile[n][column];
  }
}

// The weight of a key for a query, 0 where the query does not see it: also beyond the arrays.
__device__ float weight(float product, float lse, int i, int j, int seqlen_q, int seqlen_k, float scale, int causal) {
  const bool visible = i < seqlen_q && j < seqlen_k && (!causal || j <= i + seqlen_k - seqlen_q);
  return visible ? expf(scale * product - lse) : 0.0f;
}

// Grid: (tiles of queries, batch * heads). Block: THREADS.
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_dq(const ELEMENT* dout, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const ELEMENT* out,
                const float* lse, float* delta, ELEMENT* dq, int seqlen_q, int seqlen_k, int head_dim, float scale,
                int causal) {
  __shared__ float q_tile[BLOCK][STRIDE];
  __shared__ float dout_tile[BLOCK][STRIDE];
  __shared__ float k_tile[BLOCK][STRIDE];
  __shared__ float v_tile[BLOCK][STRIDE];
  __shared__ float ds[BLOCK][BLOCK + 1];

  const size_t head = blockIdx.y, first = blockIdx.x * BLOCK;
  const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int i = first + row;
  const size_t begin = (head * seqlen_q + first) * head_dim;  // of the tile's rows in q, out, dout and dq
  load(q_tile, q + begin, seqlen_q - first, head_dim);
  load(dout_tile, dout + begin, seqlen_q - first, head_dim);
  load(k_tile, out + begin, seqlen_q - first, head_dim);  // out is needed once: a tile of keys has its place later
  __syncthreads();
  const float own_delta = dot(dout_tile[row], k_tile[row], head_dim);
  const float own_lse = i < seqlen_q ? lse[head * seqlen_q + i] : 0.0f;
  if (i < seqlen_q && lane == 0) delta[head * seqlen_q + i] = own_delta;

  float sums[COLUMNS] = {0.0f};
  // Causal: no row of the tile sees a key behind its last row's own.
  const int stop = causal ? min(seqlen_k, int(first) + BLOCK + seqlen_k - seqlen_q) : seqlen_k;
  for (int key = 0; key < stop; key += BLOCK) {
    __syncthreads();  // all threads are done with the last tile
    load(k_tile, k + (head * seqlen_k + key) * head_dim, seqlen_k - key, head_dim);
    load(v_tile, v + (head * seqlen_k + key) * head_dim, seqlen_k - key, head_dim);
    __syncthreads();
    for (int n = lane; n < BLOCK; n += LANES) {
      const float product = dot(q_tile[row], k_tile[n], head_dim);
      const float p = weight(product, own_lse, i, key + n, seqlen_q, seqlen_k, scale, causal);
      ds[row][n] = p * (dot(dout_tile[row], v_tile[n], head_dim) - own_delta);
    }
    __syncwarp();  // the row's four lanes are in one warp
    accumulate(sums, ds[row], k_tile, lane, head_dim);
  }
  if (i < seqlen_q) store(dq + begin + row * head_dim, sums, scale, lane, head_dim);
}

// Grid: (tiles of keys, batch * heads). Block: THREADS. Rows are keys here.
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_dkv(const ELEMENT* dout, const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const float* lse,
                 const float* delta, ELEMENT* dk, ELEMENT* dv, int seqlen_q, int seqlen_k, int head_dim, float scale,
                 int causal) {
  __shared__ float k_tile[BLOCK][STRIDE];
  __shared__ float v_tile[BLOCK][STRIDE];
  __shared__ float q_tile[BLOCK][STRIDE];
  __shared__ float dout_tile[BLOCK][STRIDE];
  __shared__ float p[BLOCK][BLOCK + 1];
  __shared__ float ds[BLOCK][BLOCK + 1];

  const size_t head = blockIdx.y, first = blockIdx.x * BLOCK;
  const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int j = first + row;
  const size_t begin = (head * seqlen_k + first) * head_dim;  // of the tile's rows in k, v, dk and dv
  load(k_tile, k + begin, seqlen_k - first, head_dim);
  load(v_tile, v + begin, seqlen_k - first, head_dim);

  float dk_sums[COLUMNS] = {0.0f}, dv_sums[COLUMNS] = {0.0f};
  // Causal: no query before the one that is aligned to the tile's first key sees any of its keys.
  const int start = causal ? max(0, int(first) - (seqlen_k - seqlen_q)) / BLOCK * BLOCK : 0;
  for (int query = start; query < seqlen_q; query += BLOCK) {
    __syncthreads();
    load(q_tile, q + (head * seqlen_q + query) * head_dim, seqlen_q - query, head_dim);
    load(dout_tile, dout + (head * seqlen_q + query) * head_dim, seqlen_q - query, head_dim);
    __syncthreads();
    for (int n = lane; n < BLOCK; n += LANES) {
      const int i = min(query + n, seqlen_q - 1);  // rows beyond the array have the weight 0
      const float product = dot(k_tile[row], q_tile[n], head_dim);
      const float own = weight(product, lse[head * seqlen_q + i], query + n, j, seqlen_q, seqlen_k, scale, causal);
      p[row][n] = own;
      ds[row][n] = own * (dot(v_tile[row], dout_tile[n], head_dim) - delta[head * seqlen_q + i]);
    }
    __syncwarp();
    accumulate(dv_sums, p[row], dout_tile, lane, head_dim);
    accumulate(dk_sums, ds[row], q_tile, lane, head_dim);
  }
  if (j >= seqlen_k) return;
  store(dk + begin + row * head_dim, dk_sums, scale, lane, head_dim);
  store(dv + begin + row * head_dim, dv_sums, 1.0f, lane, head_dim);
}
