// These kernels prepare the products in 8 bits, beside what other kernels write for them.

// Numbers as they are in 8 bits; one vector a thread.
extern "C" __global__ void to_eight(Eight* eight, float scale, const Element* x, Index vectors) {
  const Index at = (Index(blockIdx.x) * blockDim.x + threadIdx.x) * VECTOR;
  if (at < vectors * VECTOR) store_eight<__NV_E4M3>(eight, at, load(x + at), scale);
}

// GELU of z, in both sizes.
extern "C" __global__ void gelu(Element* active, Eight* eight, float scale, const Element* z, Index vectors) {
  const Index at = (Index(blockIdx.x) * blockDim.x + threadIdx.x) * VECTOR;
  if (at >= vectors * VECTOR) return;
  Vector v = load(z + at);
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v.x[i] *= gelu_sigmoid(v.x[i]);
  store(active + at, v);
  store_eight<__NV_E4M3>(eight, at, v, scale);
}

// A matrix in 8 bits, by rows and by columns: a product's factors have to be contiguous along the axis that is summed.
extern "C" __global__ void weights_to_eight(Eight* by_row, Eight* by_column, float scale, const Element* x, int rows,
                                            int columns) {
  __shared__ alignas(sizeof(unsigned)) Eight tile[TILE][TILE + 4];  // by columns, read as words
  const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
  for (int i = threadIdx.y; i < TILE; i += blockDim.y) {
    const Index at = Index(first_row + i) * columns + first_column + threadIdx.x * VECTOR;
    const Vector v = load(x + at);
    store_eight<__NV_E4M3>(by_row, at, v, scale);
#pragma unroll
    for (int n = 0; n < VECTOR; ++n)
      tile[threadIdx.x * VECTOR + n][i] = __nv_cvt_float_to_fp8(scale * v.x[n], __NV_SATFINITE, __NV_E4M3);
  }
  __syncthreads();
  for (int i = threadIdx.y; i < TILE; i += blockDim.y) {
    const unsigned* words = reinterpret_cast<const unsigned*>(&tile[i][threadIdx.x * VECTOR]);
    *reinterpret_cast<uint2*>(by_column + Index(first_column + i) * rows + first_row + threadIdx.x * VECTOR) =
        make_uint2(words[0], words[1]);
  }
}
