// The kernels of a GPT-2 training step share this: bfloat16 in memory, float32 in registers, 16 bytes at a time. The
// host compiles cuflash's instructions (ptx), this file and those of the kernels as one text, behind the numbers that
// launches need, too (gpu_ops.py), and with WIDTH, the model's width: a multiple of 256, and EPSILON, of the layer
// norm.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

using Element = __nv_bfloat16;
using Eight = unsigned char;  // a number in 8 bits, E4M3 or E5M2
using Index = long long;

constexpr float LOWEST = -1e30f;                      // below every score; e to it is 0
constexpr int ROW_VECTORS = WIDTH / (WARP * VECTOR);  // of a row of the model's width, per lane
constexpr int ROW_THREADS = WIDTH / VECTOR;           // that have a vector of a row each
// GRADIENT_ROWS are the rows of a block of layer_norm_backward.
constexpr int GRADIENT_ROWS = ROW_THREADS < GRADIENT_THREADS ? GRADIENT_THREADS / ROW_THREADS : 1;
static_assert(WIDTH % (WARP * VECTOR) == 0, "a warp reads a row in vectors of 16 bytes");

struct Vector {
  float x[VECTOR];
};

// By value: through a reference ptxas would load two elements at a time.
__device__ Vector unpack(uint4 raw) {
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

// Numbers of 8 bits: activations and weights in E4M3, gradients in E5M2, each times a power of two that the host knows.
// A number that is too large becomes the largest. Nothing is written through a null pointer.
template <__nv_fp8_interpretation_t KIND>
__device__ void store_eight(Eight* to, Index at, const Vector& v, float scale) {
  if (to == nullptr) return;
  uint2 raw;
  __nv_fp8x2_storage_t* pairs = reinterpret_cast<__nv_fp8x2_storage_t*>(&raw);
#pragma unroll
  for (int i = 0; i < VECTOR / 2; ++i) {
    const float2 pair = make_float2(scale * v.x[2 * i], scale * v.x[2 * i + 1]);
    pairs[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, KIND);
  }
  *reinterpret_cast<uint2*>(to + at) = raw;
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
