// The elementwise and row-wise work between the matrix products of a step.

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

// sum_columns() sums what the threads of a column have, in one order: it becomes the row, or is added to it.
__device__ void sum_columns(float* row, bool is_added, const Vector& sum) {
  __shared__ float of_thread[ROWS_AT_ONCE][WIDTH];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) of_thread[threadIdx.y][threadIdx.x * VECTOR + i] = sum.x[i];
  __syncthreads();
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < WIDTH; i += blockDim.y * blockDim.x) {
    float total = is_added ? row[i] : 0;
#pragma unroll
    for (int y = 0; y < ROWS_AT_ONCE; ++y) total += of_thread[y][i];
    row[i] = total;
  }
}

// Adds rows to those of a table; sorted tells of each place in `order` to which. The block at the first place of a
// token adds that token's rows up to the next multiple of RUN; one at such a multiple leaves the sum of its rows in
// shares[multiple], since a token may have a fifth of all rows. The others have nothing to do.
extern "C" __global__ void add_rows(float* table, float* shares, const Element* rows, const int* sorted,
                                    const Index* order, int count) {
  const int first = blockIdx.x, token = sorted[first], column = threadIdx.x * VECTOR;
  const bool goes_on = first > 0 && sorted[first - 1] == token;
  if (goes_on && first % RUN > 0) return;
  count = min(count, (first / RUN + 1) * RUN);
  Vector sum = {};
  for (int place = first + threadIdx.y; place < count && sorted[place] == token; place += AHEAD * ROWS_AT_ONCE) {
    uint4 raw[AHEAD] = {};  // zeros behind the token's last place
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      const int at = place + ahead * ROWS_AT_ONCE;
      if (at < count && sorted[at] == token)
        raw[ahead] = *reinterpret_cast<const uint4*>(rows + order[at] * WIDTH + column);
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      const Vector v = unpack(raw[ahead]);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sum.x[i] += v.x[i];
    }
  }
  sum_columns(goes_on ? shares + Index(first / RUN) * WIDTH : table + Index(token) * WIDTH, !goes_on, sum);
}

// Adds the shares that add_rows left: the block at the first of a token's multiples of RUN adds those of all.
extern "C" __global__ void add_runs(float* table, const float* shares, const int* sorted, int count) {
  const int first = blockIdx.x * RUN, token = sorted[first], column = threadIdx.x * VECTOR;
  const auto goes_on = [=](int place) {
    return place > 0 && place < count && sorted[place - 1] == token && sorted[place] == token;
  };
  if (!goes_on(first) || goes_on(first - RUN)) return;
  Vector sum = {};
  for (int place = first + threadIdx.y * RUN; goes_on(place); place += ROWS_AT_ONCE * RUN) {
    const float* share = shares + Index(place / RUN) * WIDTH + column;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum.x[i] += share[i];
  }
  sum_columns(table + Index(token) * WIDTH, true, sum);
}

// The layer norm of x, perhaps in 8 bits too. One warp a row.
extern "C" __global__ void layer_norm(Element* y, Eight* eight, float scale, float2* statistics, const Element* x,
                                      const Element* gain, const Element* shift, int rows) {
  const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  Vector v[ROW_VECTORS];
  float total = 0;
#pragma unroll
  for (int n = 0; n < ROW_VECTORS; ++n) {
    v[n] = load(x + row * WIDTH + lane_column(n));
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
    store_eight<__NV_E4M3>(eight, row * WIDTH + lane_column(n), v[n], scale);
  }
}

// Piece is what a thread of layer_norm_backward reads of a row, as it comes: nothing of rows that are none.
struct Piece {
  uint4 x, dy, dsum;
  float2 mean_inverse;

  __device__ void load(const Element* all_x, const Element* all_dy, const Element* all_dsum, const float2* statistics,
                       Index row, int rows) {
    x = dy = dsum = uint4{};
    mean_inverse = float2{};
    if (row >= rows) return;
    const Index at = row * WIDTH + threadIdx.x * VECTOR;
    mean_inverse = statistics[row];
    x = *reinterpret_cast<const uint4*>(all_x + at);
    dy = *reinterpret_cast<const uint4*>(all_dy + at);
    if (all_dsum != nullptr) dsum = *reinterpret_cast<const uint4*>(all_dsum + at);
  }
};

// dx = dsum + the gradient through the layer norm of x. Each block leaves its share of the gradients of gain and shift
// and, if wanted, of the bias that was added to x before, which is that of x summed over rows; the shares of block b
// are b * stride behind those of the first. A thread has a vector of a row, and that of its next row under way; dx may
// be dy, of which each element is read before it is written.
extern "C" __global__ void __launch_bounds__(ROW_THREADS* GRADIENT_ROWS, GRADIENT_BLOCKS)
    layer_norm_backward(Element* dx, Eight* eight, float scale, float* of_gain, float* of_shift, float* of_bias,
                        Index stride, const Element* dy, const Element* x, const float2* statistics,
                        const Element* gain, const Element* dsum, int rows) {
  __shared__ float2 of_warp[2][GRADIENT_ROWS][ROW_THREADS / WARP];
  const int column = threadIdx.x * VECTOR;
  const uint4 gains = *reinterpret_cast<const uint4*>(gain + column);  // fewer registers as it comes
  Vector to_gain = {}, to_shift = {}, to_bias = {};
  const Index step = Index(gridDim.x) * GRADIENT_ROWS;
  Index row = Index(blockIdx.x) * GRADIENT_ROWS + threadIdx.y;
  Piece next;
  next.load(x, dy, dsum, statistics, row, rows);
  for (int turn = 0; row - threadIdx.y < rows; turn ^= 1, row += step) {
    const Piece own = next;
    next.load(x, dy, dsum, statistics, row + step, rows);
    const Vector d = unpack(own.dy), g = unpack(gains);
    Vector normal = unpack(own.x);
    float sum = 0, product = 0;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      normal.x[i] = (normal.x[i] - own.mean_inverse.x) * own.mean_inverse.y;
      to_shift.x[i] += d.x[i];
      to_gain.x[i] += d.x[i] * normal.x[i];
      sum += d.x[i] * g.x[i];
      product += d.x[i] * g.x[i] * normal.x[i];
    }
    sum = over_warp<Sum>(sum);
    product = over_warp<Sum>(product);
    if (threadIdx.x % WARP == 0) of_warp[turn][threadIdx.y][threadIdx.x / WARP] = make_float2(sum, product);
    __syncthreads();  // one a row is enough, as the shares of two rows have room
    sum = product = 0;
#pragma unroll
    for (int warp = 0; warp < ROW_THREADS / WARP; ++warp) {
      sum += of_warp[turn][threadIdx.y][warp].x / WIDTH;
      product += of_warp[turn][threadIdx.y][warp].y / WIDTH;
    }
    Vector out = unpack(own.dsum);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      out.x[i] += (d.x[i] * g.x[i] - sum - normal.x[i] * product) * own.mean_inverse.y;
      to_bias.x[i] += out.x[i];
    }
    if (row >= rows) continue;
    store(dx + row * WIDTH + column, out);
    store_eight<__NV_E5M2>(eight, row * WIDTH + column, out, scale);
  }
  // One row of threads after the other adds its share, so that the sum has one order.
  __shared__ float shares[3][WIDTH];
  for (int y = 0; y < GRADIENT_ROWS; ++y) {
    if (threadIdx.y == y)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        shares[0][column + i] = to_gain.x[i] + (y == 0 ? 0 : shares[0][column + i]);
        shares[1][column + i] = to_shift.x[i] + (y == 0 ? 0 : shares[1][column + i]);
        shares[2][column + i] = to_bias.x[i] + (y == 0 ? 0 : shares[2][column + i]);
      }
    __syncthreads();
  }
  for (int i = threadIdx.y * ROW_THREADS + threadIdx.x; i < WIDTH; i += ROW_THREADS * GRADIENT_ROWS) {
    of_gain[blockIdx.x * stride + i] = shares[0][i];
    of_shift[blockIdx.x * stride + i] = shares[1][i];
    if (of_bias != nullptr) of_bias[blockIdx.x * stride + i] = shares[2][i];
  }
}

constexpr float GELU_SCALE = 0.7978845608f;  // sqrt(2 / pi)
constexpr float GELU_CUBE = 0.044715f;

// GELU by tanh, as in GPT-2: x * (1 + tanh(u)) / 2 = x * sigmoid(2 u).
__device__ float gelu_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-2.0f * GELU_SCALE * (x + GELU_CUBE * x * x * x)));
}

// Sums over rows. A warp has WARP * VECTOR columns, the warps of a block every blockDim.y-th row of its part of all
// rows, whose sums are at partial[part * stride + column]. With GELU's argument z, dy is the gradient of its result and
// becomes that of z.
template <bool GELU>
__device__ void sum_rows(float* partial, Index stride, Element* dy, Eight* eight, float scale, const Element* z,
                         int rows, int columns) {
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
        store_eight<__NV_E5M2>(eight, row * columns + column, d, scale);
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
    if (to < columns) partial[blockIdx.y * stride + to] = total;
  }
}

extern "C" __global__ void bias_gradient(float* partial, Index stride, Element* dy, Eight* eight, float scale, int rows,
                                         int columns) {
  sum_rows<false>(partial, stride, dy, eight, scale, nullptr, rows, columns);
}

extern "C" __global__ void gelu_backward(float* partial, Index stride, Element* dy, Eight* eight, float scale,
                                         const Element* z, int rows, int columns) {
  sum_rows<true>(partial, stride, dy, eight, scale, z, rows, columns);
}

// The sums of partial[part][column] over the parts. A lane has a column, the warps of a block every blockDim.y-th part.
extern "C" __global__ void sum_partials(float* out, const float* partial, int parts, Index columns) {
  __shared__ float shares[PARTIAL_WARPS][WARP];
  const Index column = Index(blockIdx.x) * WARP + threadIdx.x;
  float total = 0;
  if (column < columns)
#pragma unroll 4
    for (int part = threadIdx.y; part < parts; part += PARTIAL_WARPS) total += partial[part * columns + column];
  shares[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns) return;
  for (int warp = 1; warp < PARTIAL_WARPS; ++warp) total += shares[warp][threadIdx.x];
  out[column] = total;
}
