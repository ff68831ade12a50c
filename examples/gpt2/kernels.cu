// The elementwise and row-wise work of a GPT-2 training step, between its matrix products; bfloat16 in memory, float32
// in registers. The host compiles it with WIDTH, the model's width: a multiple of 256, and EPSILON, of the layer norm.

#include <cuda_bf16.h>

using Element = __nv_bfloat16;
using Index = long long;

constexpr int WARP = 32;
constexpr int WARPS = 8;                                // in a block that has a row a warp
constexpr int AHEAD = 4;                                // loads of a thread under way
constexpr int PARTIAL_WARPS = 16;                       // of sum_partials
constexpr int GRADIENT_WARPS = 4, GRADIENT_BLOCKS = 2;  // of layer_norm_backward, whose threads hold many sums
constexpr float LOWEST = -1e30f;                        // below every score; e to it is 0
constexpr int VECTOR = 8;                               // elements in 16 bytes
constexpr int ROW_VECTORS = WIDTH / (WARP * VECTOR);    // of a row of the model's width, per lane
static_assert(WIDTH % (WARP * VECTOR) == 0, "a warp reads a row in vectors of 16 bytes");

struct Vector {
  float x[VECTOR];
};

__device__ Vector unpack(const uint4& raw) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
  Vector v;
#pragma unroll
  for (int i = 0; i < VECTOR / 2; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    v.x[2 * i] = pair.x;
    v.x[2 * i + 1] = pair.y;
  }
  return v;
}

__device__ Vector load(const Element* from) { return unpack(*reinterpret_cast<const uint4*>(from)); }

__device__ void store(Element* to, const Vector& v) {
  uint4 raw;
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < VECTOR / 2; ++i) pairs[i] = __floats2bfloat162_rn(v.x[2 * i], v.x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = raw;
}

struct Sum {
  __device__ static float of(float a, float b) { return a + b; }
};
struct Maximum {
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

template <class Operation>
__device__ float over_warp(float x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) x = Operation::of(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Over the threads of a block that share threadIdx.y; with several warps a row there is one row in a block.
template <class Operation>
__device__ float over_row(float x) {
  __shared__ float parts[WARP];
  x = over_warp<Operation>(x);
  if (blockDim.x <= WARP) return x;
  __syncthreads();  // the parts of the reduction before have been read
  if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
  __syncthreads();
  x = parts[0];
  for (int i = 1; i < blockDim.x / WARP; ++i) x = Operation::of(x, parts[i]);
  return x;
}

__device__ int lane_column(int i) { return (i * WARP + threadIdx.x) * VECTOR; }

extern "C" __global__ void embed(Element* x, const int* tokens, const Element* of_token, const Element* of_position,
                                 int seqlen) {
  const Index row = blockIdx.x;
  const Element* token = of_token + Index(tokens[row]) * WIDTH;
  const Element* position = of_position + row % seqlen * WIDTH;
  for (int column = threadIdx.x * VECTOR; column < WIDTH; column += blockDim.x * VECTOR) {
    Vector a = load(token + column);
    const Vector b = load(position + column);
    for (int i = 0; i < VECTOR; ++i) a.x[i] += b.x[i];
    store(x + row * WIDTH + column, a);
  }
}

// x + branch + bias, which replaces x, and its layer norm. Without a branch x stays. One warp a row.
extern "C" __global__ void add_layer_norm(Element* y, float2* statistics, Element* sum, const Element* x,
                                          const Element* branch, const Element* bias, const Element* gain,
                                          const Element* shift, int rows) {
  const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  Vector v[ROW_VECTORS];
  float total = 0;
#pragma unroll
  for (int n = 0; n < ROW_VECTORS; ++n) {
    const int column = lane_column(n);
    v[n] = load(x + row * WIDTH + column);
    if (branch != nullptr) {
      const Vector b = load(branch + row * WIDTH + column), c = load(bias + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) v[n].x[i] += b.x[i] + c.x[i];
      store(sum + row * WIDTH + column, v[n]);
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) total += v[n].x[i];
  }
  const float mean = over_warp<Sum>(total) / WIDTH;
  float squares = 0;
#pragma unroll
  for (int n = 0; n < ROW_VECTORS; ++n)
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) squares += (v[n].x[i] - mean) * (v[n].x[i] - mean);
  const float inverse = rsqrtf(over_warp<Sum>(squares) / WIDTH + EPSILON);
  if (threadIdx.x == 0) statistics[row] = make_float2(mean, inverse);
#pragma unroll
  for (int n = 0; n < ROW_VECTORS; ++n) {
    const Vector g = load(gain + lane_column(n)), s = load(shift + lane_column(n));
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[n].x[i] = (v[n].x[i] - mean) * inverse * g.x[i] + s.x[i];
    store(y + row * WIDTH + lane_column(n), v[n]);
  }
}

// What layer_norm_backward reads of a row, as it comes.
struct Row {
  uint4 x[ROW_VECTORS], dy[ROW_VECTORS], dsum[ROW_VECTORS];
  float2 mean_inverse;

  __device__ void load(const Element* all_x, const Element* all_dy, const Element* all_dsum, const float2* statistics,
                       Index row) {
    mean_inverse = statistics[row];
#pragma unroll
    for (int n = 0; n < ROW_VECTORS; ++n) {
      const Index at = row * WIDTH + lane_column(n);
      x[n] = *reinterpret_cast<const uint4*>(all_x + at);
      dy[n] = *reinterpret_cast<const uint4*>(all_dy + at);
      dsum[n] = all_dsum == nullptr ? uint4{} : *reinterpret_cast<const uint4*>(all_dsum + at);
    }
  }

  __device__ Vector normal(int n) const {
    Vector v = unpack(x[n]);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v.x[i] = (v.x[i] - mean_inverse.x) * mean_inverse.y;
    return v;
  }
};

// dx = dsum + the gradient through the layer norm of x. Each block leaves its share of the gradients of gain and shift
// and of the branch's bias, which is that of x summed over rows, in partial[block][3][WIDTH]. A warp has a row at a
// time, and the next one under way; dx may be dy, of which each element is read before it is written.
extern "C" __global__ void __launch_bounds__(WARP* GRADIENT_WARPS, GRADIENT_BLOCKS)
    layer_norm_backward(Element* dx, float* partial, const Element* dy, const Element* x, const float2* statistics,
                        const Element* gain, const Element* dsum, int rows) {
  Vector of_gain[ROW_VECTORS] = {}, of_shift[ROW_VECTORS] = {}, of_bias[ROW_VECTORS] = {};
  const Index step = Index(gridDim.x) * blockDim.y;
  Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
  Row next;
  if (row < rows) next.load(x, dy, dsum, statistics, row);
  for (; row < rows; row += step) {
    const Row own = next;
    if (row + step < rows) next.load(x, dy, dsum, statistics, row + step);
    float sum = 0, product = 0;
#pragma unroll
    for (int n = 0; n < ROW_VECTORS; ++n) {
      const Vector g = load(gain + lane_column(n)), normal = own.normal(n), d = unpack(own.dy[n]);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        of_shift[n].x[i] += d.x[i];
        of_gain[n].x[i] += d.x[i] * normal.x[i];
        sum += d.x[i] * g.x[i];
        product += d.x[i] * g.x[i] * normal.x[i];
      }
    }
    sum = over_warp<Sum>(sum) / WIDTH;
    product = over_warp<Sum>(product) / WIDTH;
#pragma unroll
    for (int n = 0; n < ROW_VECTORS; ++n) {
      const Vector g = load(gain + lane_column(n)), normal = own.normal(n), d = unpack(own.dy[n]);
      Vector out = unpack(own.dsum[n]);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        out.x[i] += (d.x[i] * g.x[i] - sum - normal.x[i] * product) * own.mean_inverse.y;
        of_bias[n].x[i] += out.x[i];
      }
      store(dx + row * WIDTH + lane_column(n), out);
    }
  }
  // One warp after the other adds its share, so that the sum has one order.
  __shared__ float shares[3][WIDTH];
  for (int warp = 0; warp < blockDim.y; ++warp) {
    if (threadIdx.y == warp)
#pragma unroll
      for (int n = 0; n < ROW_VECTORS; ++n)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          const int column = lane_column(n) + i;
          shares[0][column] = of_gain[n].x[i] + (warp == 0 ? 0 : shares[0][column]);
          shares[1][column] = of_shift[n].x[i] + (warp == 0 ? 0 : shares[1][column]);
          shares[2][column] = of_bias[n].x[i] + (warp == 0 ? 0 : shares[2][column]);
        }
    __syncthreads();
  }
  for (int i = threadIdx.y * WARP + threadIdx.x; i < 3 * WIDTH; i += blockDim.y * WARP)
    partial[Index(blockIdx.x) * 3 * WIDTH + i] = shares[0][i];
}

constexpr float GELU_SCALE = 0.7978845608f;  // sqrt(2 / pi)
constexpr float GELU_CUBE = 0.044715f;

// GELU by tanh, as in GPT-2: x * (1 + tanh(u)) / 2 = x * sigmoid(2 u).
__device__ float gelu_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-2.0f * GELU_SCALE * (x + GELU_CUBE * x * x * x)));
}

// Sums over rows. A warp has WARP * VECTOR columns, the warps of a block every blockDim.y-th row of its part of all
// rows; partial[part][column]. With GELU's argument z, dy is the gradient of its result and becomes that of z.
template <bool GELU>
__device__ void sum_rows(float* partial, Element* dy, const Element* z, int rows, int columns) {
  __shared__ float shares[WARPS][WARP * VECTOR + 1];
  const int column = (blockIdx.x * WARP + threadIdx.x) * VECTOR;
  Vector sum = {};
  if (column < columns) {
    const Index step = Index(gridDim.y) * blockDim.y;
    for (Index first = Index(blockIdx.y) * blockDim.y + threadIdx.y; first < rows; first += AHEAD * step) {
      uint4 raw_d[AHEAD], raw_z[AHEAD];
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        const Index row = first + ahead * step;
        if (row >= rows) break;
        raw_d[ahead] = *reinterpret_cast<const uint4*>(dy + row * columns + column);
        if (GELU) raw_z[ahead] = *reinterpret_cast<const uint4*>(z + row * columns + column);
      }
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        const Index row = first + ahead * step;
        if (row >= rows) break;
        Vector d = unpack(raw_d[ahead]);
        if (GELU) {
          const Vector v = unpack(raw_z[ahead]);
#pragma unroll
          for (int i = 0; i < VECTOR; ++i) {
            const float sigmoid = gelu_sigmoid(v.x[i]);
            const float du = 2 * GELU_SCALE * (1 + 3 * GELU_CUBE * v.x[i] * v.x[i]);
            d.x[i] *= sigmoid + v.x[i] * sigmoid * (1 - sigmoid) * du;
          }
          store(dy + row * columns + column, d);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum.x[i] += d.x[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) shares[threadIdx.y][threadIdx.x * VECTOR + i] = sum.x[i];
  __syncthreads();
  const int own = threadIdx.y * WARP + threadIdx.x;
  for (int i = own; i < WARP * VECTOR; i += blockDim.y * WARP) {
    const int to = blockIdx.x * WARP * VECTOR + i;
    float total = 0;
    for (int warp = 0; warp < blockDim.y; ++warp) total += shares[warp][i];
    if (to < columns) partial[Index(blockIdx.y) * columns + to] = total;
  }
}

extern "C" __global__ void bias_gradient(float* partial, Element* dy, int rows, int columns) {
  sum_rows<false>(partial, dy, nullptr, rows, columns);
}

extern "C" __global__ void gelu_backward(float* partial, Element* dy, const Element* z, int rows, int columns) {
  sum_rows<true>(partial, dy, z, rows, columns);
}

// The sums of partial[part][target][column] over the parts, for up to three targets: blockIdx.y, those that are null
// are not wanted. A lane has a column, the warps of a block every blockDim.y-th part.
extern "C" __global__ void sum_partials(float* out0, float* out1, float* out2, const float* partial, int parts,
                                        int columns) {
  __shared__ float shares[PARTIAL_WARPS][WARP];
  float* out = blockIdx.y == 0 ? out0 : blockIdx.y == 1 ? out1 : out2;
  if (out == nullptr) return;
  const int column = blockIdx.x * WARP + threadIdx.x;
  float total = 0;
  if (column < columns)
    for (int part = threadIdx.y; part < parts; part += blockDim.y)
      total += partial[(Index(part) * gridDim.y + blockIdx.y) * columns + column];
  shares[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns) return;
  for (int warp = 1; warp < blockDim.y; ++warp) total += shares[warp][threadIdx.x];
  out[column] = total;
}

// -log softmax(logits)[target]; the logits become the gradient of the mean loss. One block a row, which waits in shared
// memory for the sum of its exponentials, so that the logits are read once.
extern "C" __global__ void cross_entropy(float* loss, Element* logits, const int* targets, int columns, float weight) {
  extern __shared__ uint4 kept[];
  Element* row = logits + Index(blockIdx.x) * columns;
  const uint4* vectors = reinterpret_cast<const uint4*>(row);
  const int target = targets[blockIdx.x], count = columns / VECTOR;
  float maximum = LOWEST, sum = 0;
  for (int first = threadIdx.x; first < count; first += AHEAD * blockDim.x) {
    uint4 raw[AHEAD];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      const int n = first + ahead * blockDim.x;
      if (n < count) raw[ahead] = vectors[n];
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      const int n = first + ahead * blockDim.x;
      if (n >= count) break;
      kept[n] = raw[ahead];
      const Vector v = unpack(raw[ahead]);
      float most = maximum;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) most = fmaxf(most, v.x[i]);
      sum *= __expf(maximum - most);
      maximum = most;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sum += __expf(v.x[i] - maximum);
    }
  }
  const float most = over_row<Maximum>(maximum);
  const float total = over_row<Sum>(sum * __expf(maximum - most));
  const float lse = most + __logf(total);
  if (threadIdx.x == 0) loss[blockIdx.x] = lse - float(reinterpret_cast<const Element*>(kept)[target]);
  for (int n = threadIdx.x; n < count; n += blockDim.x) {
    Vector v = unpack(kept[n]);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
      v.x[i] = weight * (__expf(v.x[i] - lse) - (n * VECTOR + i == target ? 1.0f : 0.0f));
    store(row + n * VECTOR, v);
  }
}

constexpr int SCORE_VECTORS = 4;  // of a row of scores, per thread

__device__ int score_column(int n) { return (n * blockDim.x + threadIdx.x) * VECTOR; }

// The baseline's softmax of causal scores in place; the row of query i has seqlen keys, those beyond i are hidden.
extern "C" __global__ void causal_softmax(Element* scores, int seqlen, float scale) {
  const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
  const int query = row % seqlen;
  scores += row * seqlen;
  Vector v[SCORE_VECTORS];
  float maximum = LOWEST, sum = 0;
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
    if (column > query) continue;
    v[n] = load(scores + column);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      v[n].x[i] = column + i > query ? LOWEST : scale * v[n].x[i];
      maximum = fmaxf(maximum, v[n].x[i]);
    }
  }
  maximum = over_row<Maximum>(maximum);
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    if (score_column(n) > query) continue;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += v[n].x[i] = __expf(v[n].x[i] - maximum);
  }
  const float inverse = 1.0f / over_row<Sum>(sum);
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[n].x[i] = column > query ? 0.0f : v[n].x[i] * inverse;
    if (column < seqlen) store(scores + column, v[n]);
  }
}

// Its gradient: scale * weights * (dweights - sum(weights * dweights)), in place of dweights.
extern "C" __global__ void causal_softmax_backward(Element* dweights, const Element* weights, int seqlen, float scale) {
  const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
  const int query = row % seqlen;
  dweights += row * seqlen;
  weights += row * seqlen;
  Vector w[SCORE_VECTORS], d[SCORE_VECTORS];
  float sum = 0;
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
    if (column > query) continue;
    w[n] = load(weights + column);  // 0 beyond the query
    d[n] = load(dweights + column);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += w[n].x[i] * d[n].x[i];
  }
  sum = over_row<Sum>(sum);
#pragma unroll
  for (int n = 0; n < SCORE_VECTORS; ++n) {
    const int column = score_column(n);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) d[n].x[i] = column > query ? 0.0f : scale * w[n].x[i] * (d[n].x[i] - sum);
    if (column < seqlen) store(dweights + column, d[n]);
  }
}

// Each block's share of the sum of squares, in an order that does not change.
extern "C" __global__ void square_sums(float* partial, const float4* x, Index vectors) {
  float sum = 0;
#pragma unroll 4
  for (Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += Index(gridDim.x) * blockDim.x) {
    const float4 v = x[i];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  sum = over_row<Sum>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// AdamW (Loshchilov and Hutter, 2019) on all parameters at once; the first `decayed` are matrices. The gradient's norm
// is brought down to at most `clip`; its square comes from the device, so that nobody waits.
extern "C" __global__ void adamw(Element* weights, float4* master, float4* first, float4* second,
                                 const float4* gradient, const float* squared_norm, Index size, Index decayed,
                                 float clip, float rate, float beta1, float beta2, float correction1, float correction2,
                                 float epsilon, float decay) {
  const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;  // of four parameters
  if (4 * i >= size) return;
  const float factor = fminf(1.0f, clip * rsqrtf(*squared_norm));
  float4 gs = gradient[i], ms = first[i], vs = second[i], ws = master[i];
  float *g = &gs.x, *m = &ms.x, *v = &vs.x, *w = &ws.x;
  const float kept = 4 * i < decayed ? 1 - rate * decay : 1.0f;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    g[n] *= factor;
    m[n] += (1 - beta1) * (g[n] - m[n]);
    v[n] += (1 - beta2) * (g[n] * g[n] - v[n]);
    w[n] = w[n] * kept - rate * (m[n] * correction1) / (sqrtf(v[n] * correction2) + epsilon);
  }
  first[i] = ms;
  second[i] = vs;
  master[i] = ws;
  __nv_bfloat162* rounded = reinterpret_cast<__nv_bfloat162*>(weights) + 2 * i;
  rounded[0] = __floats2bfloat162_rn(w[0], w[1]);
  rounded[1] = __floats2bfloat162_rn(w[2], w[3]);
}
