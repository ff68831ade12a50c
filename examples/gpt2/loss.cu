// -log softmax(logits)[target] of each row; the logits become the gradient of the mean loss. A row waits in shared
// memory for the sum of its exponentials, so that it is read once and written once.

// Exponentials are the largest of a thread's logits, and the sum of e to each of them less the largest.
struct Exponentials {
  float maximum = LOWEST, sum = 0;

  __device__ void add(const Vector& v) {
    float most = maximum;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) most = fmaxf(most, v.x[i]);
    sum *= __expf(maximum - most);
    maximum = most;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += __expf(v.x[i] - maximum);
  }
};

// weight * (softmax(row) - 1 at the target), of the row's n-th vector.
__device__ Vector loss_gradient(const uint4* row, int n, int target, float lse, float weight) {
  Vector v = unpack(row[n]);
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v.x[i] = __expf(v.x[i] - lse);
  if (n == target / VECTOR) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v.x[i] -= i == target % VECTOR ? 1.0f : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v.x[i] *= weight;
  return v;
}

// One block a row.
extern "C" __global__ void cross_entropy(float* loss, Element* logits, Eight* eight, float scale, const int* targets,
                                         int rows, int columns, float weight) {
  extern __shared__ uint4 kept[];
  const Index row = blockIdx.x;
  const uint4* vectors = reinterpret_cast<const uint4*>(logits + row * columns);
  const int target = targets[row], count = columns / VECTOR;
  Exponentials own;
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
      own.add(unpack(raw[ahead]));
    }
  }
  const float most = over_row<Maximum>(own.maximum);
  const float lse = most + __logf(over_row<Sum>(own.sum * __expf(own.maximum - most)));
  if (threadIdx.x == 0) loss[row] = lse - float(reinterpret_cast<const Element*>(kept)[target]);
  for (int n = threadIdx.x; n < count; n += blockDim.x) {
    const Vector v = loss_gradient(kept, n, target, lse, weight);
    store(logits + row * columns + n * VECTOR, v);
    store_eight<__NV_E5M2>(eight, row * columns + n * VECTOR, v, scale);
  }
}

#if __CUDA_ARCH__ >= 900 || defined(CUFLASH_CPU_DEVICE)

// over_workers() is over_row() for the first threads of a block. Each operation has a table of its own and they come by
// turns: between two that use a table lies the barrier of another.
template <class Operation>
__device__ float over_workers(float x, int workers) {
  __shared__ float of_warps[WARP];
  x = over_warp<Operation>(x);
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
  ptx::barrier_sync(1, workers);
  x = of_warps[0];
  for (int i = 1; i < workers / WARP; ++i) x = Operation::of(x, of_warps[i]);
  return x;
}

// The same from Hopper on, to the bit: a block has one row after the other, and while it computes with one, a warp of
// its own, the last one, writes the row before and brings the next.
extern "C" __global__ void cross_entropy_sm90(float* loss, Element* logits, Eight* eight, float scale,
                                              const int* targets, int rows, int columns, float weight) {
  extern __shared__ __align__(16) uint4 kept[];
  __shared__ unsigned long long full[LOSS_ROWS];  // is brought
  __shared__ unsigned long long done[LOSS_ROWS];  // is the gradient
  const int count = columns / VECTOR, workers = blockDim.x - WARP;
  const auto wait = [](const unsigned long long& barrier, unsigned parity) {
    while (!ptx::mbarrier_try_wait(ptx::shared_address(&barrier), parity)) {
    }
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < LOSS_ROWS; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&done[i]), workers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x > workers) return;
  unsigned turn = 0;
  if (threadIdx.x == workers) {
    const unsigned bytes = columns * sizeof(Element);
    const auto bring = [&](Index row, int place) {
      if (row >= rows) return;
      const unsigned barrier = ptx::shared_address(&full[place]);
      ptx::mbarrier_arrive_expect(barrier, bytes);
      ptx::bulk_load(ptx::shared_address(kept + place * count), logits + row * columns, bytes, barrier);
    };
    for (int i = 0; i < LOSS_ROWS; ++i) bring(blockIdx.x + Index(i) * gridDim.x, i);
    for (Index row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
      const int place = turn % LOSS_ROWS;
      wait(done[place], turn / LOSS_ROWS % 2);
      ptx::bulk_store(logits + row * columns, ptx::shared_address(kept + place * count), bytes);
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
      bring(row + Index(LOSS_ROWS) * gridDim.x, place);
    }
    ptx::bulk_wait_group<0>();
    return;
  }
  for (Index row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    const int place = turn % LOSS_ROWS, target = targets[row];
    uint4* own_row = kept + place * count;
    wait(full[place], turn / LOSS_ROWS % 2);
    Exponentials own;
    for (int n = threadIdx.x; n < count; n += workers) own.add(unpack(own_row[n]));
    const float hit = reinterpret_cast<const Element*>(own_row)[target];  // behind the barriers it is overwritten
    const float most = over_workers<Maximum>(own.maximum, workers);
    const float lse = most + __logf(over_workers<Sum>(own.sum * __expf(own.maximum - most), workers));
    if (threadIdx.x == 0) loss[row] = lse - hit;
    for (int n = threadIdx.x; n < count; n += workers) {
      const Vector v = loss_gradient(own_row, n, target, lse, weight);
      store(reinterpret_cast<Element*>(own_row + n), v);
      store_eight<__NV_E5M2>(eight, row * columns + n * VECTOR, v, scale);
    }
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(ptx::shared_address(&done[place]));
  }
}

#endif
